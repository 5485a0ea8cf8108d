"""Compiled artifacts of torch-neuronx: a trace for each length, which all versions of one shape share.

A trace is compiled without a device and without the weights of a version, which each start puts in their place.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from placements.engines.cpu.capabilities import FIRST_TRANSFORMERS
from placements.engines.registry import ENGINES
from placements.facts.topology import LNC_FAMILIES
from placements.facts.versions import reaches
from workers.compiled import neuron_target
from workers.compiled.host_sets import Buildable, LockedEntry, Tell, compiling, entry
from workers.compiled.neuron_cache import WRAPPER_FLAGS
from workers.engines import encoder_graph as graph
from workers.engines.encoder_layout import Normalize
from workers.engines.engine_setup import not_installed
from workers.engines.manifest_parts import neuron_build, version_of
from workers.engines.torch_neuronx import tracing as traced
from workers.engines.torch_neuronx.tracing import Tracing
from workers.host.json_process import ChildRequest, answering, encoded, read_request
from workers.host.memory_limits import is_out_of_memory, out_of_memory
from workers.host.neuron_faults import fault_of
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure

NAME, DISTRIBUTION = "torch_neuronx", "torch-neuronx"
CALLS: Mapping[str, tuple[str, ...]] = {
    "trace": ("compiler_workdir", "compiler_args", "inline_weights_to_neff", "cpu_backend"),
    "dynamic_batch": (),
    "replace_weights": (),
    "move_trace_to_device": (),
}
"""The functions that the engine calls -> the keywords that it passes."""


def import_package() -> Any:
    """Returns the package. torch then loads traces, each to a core at once. Raises EngineLoadError."""
    if importlib.util.find_spec(NAME) is None:
        raise not_installed(DISTRIBUTION, NAME)
    try:
        package = importlib.import_module(NAME)
        version = str(importlib.import_module("transformers").__version__)
    except ImportError as error:
        raise not_installed(DISTRIBUTION, error.name or NAME) from error
    if lacking := [call for call, keywords in CALLS.items() if not _has(package, call, keywords)]:
        keywords = ", ".join(CALLS[lacking[0]])
        fact = f"torch-neuronx {version_of(DISTRIBUTION)} has no {lacking[0]}({keywords})"
        raise EngineLoadError("engine-not-installed", fact, f"install a later release; {ENGINES[DISTRIBUTION].install}")
    if not reaches(version, FIRST_TRANSFORMERS):
        fact = f"the torch-neuronx engine needs transformers {FIRST_TRANSFORMERS} or later, not {version}"
        hint = f"run python -m pip install 'transformers>={FIRST_TRANSFORMERS}' in the replica's Python"
        raise EngineLoadError("engine-not-installed", fact, hint)
    return package


def _has(package: Any, call: str, keywords: tuple[str, ...]) -> bool:
    function = getattr(package, call, None)
    if function is None:
        return False
    try:
        return {*keywords} <= inspect.signature(function).parameters.keys()
    except (TypeError, ValueError):  # it does not say
        return True


TRACE, WORK = "trace.pt", "work"  # in an entry
PACKAGES = (DISTRIBUTION, "neuronx-cc", "libneuronxla", "torch", "transformers")
DEFAULT_FLAGS = ("--model-type=transformer", "--auto-cast=none")
_OF_A_VERSION = frozenset(
    {"_name_or_path", "architectures", "dtype", "id2label", "label2id", "torch_dtype", "transformers_version"}
)
"""Keys of config.json that differ between versions of one shape; the number of labels counts."""


def manifest(tracing: Tracing, length: int) -> dict[str, Any]:
    """Returns everything that the trace of a length depends on, as JSON: not the weights."""
    settings: dict[str, Any] = tracing.config.to_dict()
    shape = {name: value for name, value in settings.items() if name not in _OF_A_VERSION}
    layout = tracing.layout
    after = [
        "normalize" if isinstance(part, Normalize) else [part.inputs, part.outputs, part.bias, part.activation]
        for part in layout.after
    ]
    return {
        "engine": "torch-neuronx",
        "versions": {name: version_of(name) for name in PACKAGES},
        **neuron_build(),
        "model": _digest(json.dumps([shape, tracing.config.num_labels], sort_keys=True, default=str)),
        "code": _digest(inspect.getsource(graph) + inspect.getsource(traced)),
        "kind": tracing.kind,
        "options": {"flags": list(DEFAULT_FLAGS), "activation": tracing.activation}
        if tracing.kind != "embedding"
        else {"flags": list(DEFAULT_FLAGS), "pooling": list(layout.pooling), "after": after},
        "dtype": tracing.dtype,
        "shapes": {"batch": tracing.batch, "length": length},
    }


def _digest(text: str) -> str:
    return hashlib.blake2s(text.encode()).hexdigest()


def unit(tracing: Tracing, length: int) -> Buildable:
    """Returns the compile unit of a length."""

    def make(artifacts: LockedEntry, tell: Tell) -> None:
        compile_trace(tracing, length, artifacts)

    return Buildable(source=tracing.source, manifest=manifest(tracing, length), is_whole=is_whole, make=make)


def is_whole(folder: Path) -> bool:
    """Returns whether the trace is there; the entry's record verifies its content."""
    return (folder / TRACE).is_file()


def compile_trace(tracing: Tracing, length: int, artifacts: LockedEntry) -> None:
    """Compiles the trace of a length into an entry, which is locked exclusively, without a device.

    Raises EngineLoadError, and exceptions of the host's memory.
    """
    package, work = import_package(), artifacts.path / WORK
    import torch

    options: dict[str, Any] = {
        "compiler_workdir": str(work),
        "compiler_args": compiler_args(),
        "inline_weights_to_neff": False,
        "cpu_backend": True,
    }
    with compiling(f"{tracing.source} for {length} tokens with torch-neuronx", f"neuronx-cc works in {work}"):
        try:
            with torch.no_grad():
                trace = package.dynamic_batch(package.trace(tracing.blank, tracing.example(length), **options))
            torch.jit.save(trace, str(artifacts.path / TRACE))
        except OSError:
            raise
        except Exception as error:
            raise _not_compiled(error, tracing, length) from error
    shutil.rmtree(work, ignore_errors=True)
    artifacts.finish(str(tracing.source))


def _not_compiled(error: Exception, tracing: Tracing, length: int) -> EngineLoadError:
    bucket = f"the bucket of {length} tokens, {tracing.batch} rows, of {tracing.source}"
    if is_out_of_memory(error):
        return out_of_memory(error, f"the compile of {bucket}")
    if (fault := fault_of(error)) is not None:
        return EngineLoadError(fault.id, f"{bucket} is not compiled: {fault.what}", fault.hint)
    fact = f"{bucket} is not compiled: {type(error).__name__}: {error}"
    return EngineLoadError("compile-failed", fact, "use other buckets or another compiled_batch, or engine: cpu")


def compiler_args() -> list[str]:
    """Returns the compiler's arguments: the target, ours, and those of NEURON_CC_FLAGS, which replace ours.

    Raises EngineLoadError where the target is unknown: without a device the compiler cannot find it.
    """
    target = neuron_target.current()
    if target.name is None:
        fact = f"the machine to compile for is unknown: it has no Neuron device, and {neuron_target.OVERRIDE} is unset"
        raise EngineLoadError("compile-failed", fact, f"set {neuron_target.OVERRIDE} to trn1 (inf2, too), trn2 or trn3")
    given = [
        flag for flag in os.environ.get("NEURON_CC_FLAGS", "").split() if flag.partition("=")[0] not in WRAPPER_FLAGS
    ]
    names = {flag.partition("=")[0] for flag in given}
    ours = [flag for flag in DEFAULT_FLAGS if flag.partition("=")[0] not in names]
    lnc = [f"--lnc={target.lnc}"] if target.name in LNC_FAMILIES and target.lnc is not None else []
    return ["--target", target.name, *lnc, *ours, *given]


class _Job(ChildRequest, frozen=True, kw_only=True):
    config: ReplicaConfig


def compile_in_process(config: ReplicaConfig) -> None:
    """Compiles the missing traces of a replica in a process of its own, since the package sets up this one for the CPU
    when it traces without a device. Raises EngineLoadError."""
    command = [sys.executable, "-m", "workers.engines.torch_neuronx.artifacts", "compile"]
    job = encoded(_Job(config=config))
    with compiling(f"{config.source} with torch-neuronx", "the compilers write to this log"):
        process = subprocess.run(command, input=job, stdout=subprocess.PIPE, check=False)
    if process.returncode == 0:
        return
    try:
        failure = msgspec.json.decode(process.stdout, type=Failure)
    except msgspec.DecodeError:
        fact = f"compiling {config.source} ended with exit code {process.returncode}"
        raise EngineLoadError("compile-failed", fact, f"its output is in {config.run.log}") from None
    raise EngineLoadError(failure.id, failure.what, failure.hint)


def compile_missing(config: ReplicaConfig) -> None:
    """Compiles the missing traces of a replica. Raises EngineLoadError."""
    assert config.run.compiled is not None
    tracing = Tracing.of(config)
    for length in tracing.lengths:
        need = unit(tracing, length)
        with entry(Path(config.run.compiled), need.manifest, is_whole) as held:
            if not held.complete:
                compile_trace(tracing, length, held)


def main(arguments: list[str]) -> int:
    """``compile``, with a job on standard input; replies with a Failure where it fails."""
    if arguments != ["compile"]:
        sys.stderr.write("usage: python -m workers.engines.torch_neuronx.artifacts compile < JSON\n")
        return 2
    job = read_request(_Job)  # it ends with its parent, since it holds the locks of entries
    tell = answering()
    try:
        compile_missing(job.config)
    except EngineLoadError as error:
        tell(Failure(error.id, error.what, error.hint))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
