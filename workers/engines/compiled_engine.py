"""What engines share that compile a model in a process of its own and load it from a folder.

That process does not hold cores when the caller claims them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from workers.compiled.compile_session import CompileSession
from workers.compiled.host_sets import Buildable, LockedEntry, compiling, entry
from workers.engines.engine_setup import LoadableEngine
from workers.host.json_process import ChildRequest, encoded, read_request
from workers.messages.engine_protocol import DeviceSampling, EngineLoadError, EngineSpec


class CompiledEngine(LoadableEngine[EngineSpec]):
    """Its model is released on ``close``."""

    _model: Any = None
    _slot_sampling: list[DeviceSampling]

    def load(self) -> None:
        """Compile unless compiled before, load, and run every bucket once.

        Raises ``EngineLoadError``, and exceptions of the package and the runtime.
        """
        with tempfile.TemporaryDirectory(prefix="corewright-compiled-") as scratch:
            self._load(Path(scratch))

    @abstractmethod
    def _load(self, scratch: Path) -> None:
        """Loads as ``load``. ``scratch`` is for what is not kept: a replica is killed later, and removes nothing."""

    def sample_by(self, slots: Sequence[int], sampling: Sequence[DeviceSampling]) -> None:
        """See ``SamplingEngine.sample_by``."""
        for slot, parameters in zip(slots, sampling, strict=True):
            self._slot_sampling[slot] = parameters

    def close(self) -> None:
        """Release the model. The cores are free when the process exits."""
        self._spec = None
        self._model = None

    def _sampling_params(self, slots: Sequence[int]) -> Any:
        """Returns ``[len(slots), 3]`` float32: top_k, top_p, temperature."""
        import torch

        rows = [self._slot_sampling[slot] for slot in slots]
        return torch.tensor([[float(row.top_k), float(row.top_p), float(row.temperature)] for row in rows])


def compiled_folder(unit: Buildable, root: Path) -> Path:
    """Returns the entry of ``unit`` in ``root``, compiled if needed. A complete entry stays, so others may load it as
    well."""
    assert unit.make is not None
    with entry(root, unit.manifest) as held:
        if not held.complete:
            unit.make(held, lambda done, total: None)
    return held.path


S = TypeVar("S", bound=msgspec.Struct)
LOG = "compile.log"  # in an entry
TAIL = 40  # lines of the compiler's output in an error


class CompileJob(ChildRequest, frozen=True, kw_only=True):
    """The compile of one set of artifacts."""

    settings: dict[str, Any]
    folder: str


def run_compile(module: str, settings: msgspec.Struct, label: str, entry: LockedEntry, session: CompileSession) -> None:
    """Run ``python -m MODULE compile`` for ``entry``; ``label``: what is compiled, with which package.

    Raises EngineLoadError with the last lines of its output, all of which is in the entry's compile.log.
    """
    log = entry.path / LOG
    job = CompileJob(settings=msgspec.to_builtins(settings), folder=str(entry.path))
    with session.compiling(), compiling(label, f"the compilers write to {log}"):
        with log.open("wb") as output:
            process = subprocess.run(
                [sys.executable, "-m", module, "compile"],
                input=encoded(job),
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if process.returncode != 0:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL:])
            kept_log = entry.path.with_suffix(".log")  # a retry removes the entry
            shutil.copyfile(log, kept_log)
            fact = f"compiling {label} ended with exit code {process.returncode}"
            raise EngineLoadError("compile-failed", fact, f"its output is in {kept_log}") from RuntimeError(tail)


def compile_main(arguments: list[str], module: str, kind: type[S], compile_here: Callable[[S, Path], None]) -> int:
    """Runs that process, with a job on standard input; ``kind``: of its settings. Returns its exit code."""
    if arguments != ["compile"]:
        sys.stderr.write(f"usage: python -m {module} compile < JSON\n")
        return 2
    # It ends with its parent, which holds the lock of the entry: else the next process would find two compilers there.
    job = read_request(CompileJob)
    compile_here(msgspec.convert(job.settings, kind), Path(job.folder))
    return 0
