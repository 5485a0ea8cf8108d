"""Compiling with NxD Inference: what the artifacts depend on, and the process that makes them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workers.engines.file_digests import digest_of, unread_of
from workers.engines.nxd_inference.config import Settings, lengths, neuron_options
from workers.engines.nxd_inference.package import (
    DISTRIBUTION,
    Package,
    build_config,
    import_package,
    installed_versions,
)
from workers.host.process_tree import end_with
from workers.messages.engine_protocol import EngineLoadError
from workers.neff_cache import neuron_target
from workers.neff_cache.compile_session import CompileSession
from workers.neff_cache.compiled_artifacts import Entry, compiling
from workers.neff_cache.compiler_cache import WRAPPER_FLAGS

MODEL, QUANTIZED, WORK, LOG = "model", "quantized", "work", "compile.log"  # in an entry
TAIL = 40  # lines of the compiler's output that an error repeats
PACKAGES = ("neuronx-distributed", "neuronx-cc", "torch-neuronx", "libneuronxla", "torch", "transformers")
# Of the environment, what the compiler (through ``with_flags``) and torch-xla read.
READ = ("NEURON_CC_FLAGS", "XLA_HANDLE_SPECIAL_SCALAR", "UNSAFE_FP8FNCAST")


def manifest(settings: Settings, package: Package, root: Path | None) -> dict[str, Any]:
    """All that the artifacts depend on, as JSON. The sharded weights are among them, so the checkpoint's files too.

    ``root`` is where they are kept; None: they are not, so that no other start could take them for its own.
    """
    return foretold(settings, package, root, read=True)[0]


def foretold(
    settings: Settings, package: Package, root: Path | None, read: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The manifest, and the files that it lacks the digests of: with ``read`` False only digests that are kept in
    ``root`` are used. The place of an unknown one is empty."""
    target = neuron_target.current()
    sources = [one for one in (settings.source, settings.draft_source, settings.quantized_source) if one is not None]
    digests, unread = [], []
    for source in sources if root is not None else []:
        assert root is not None
        unknown = [] if read else [str(path) for path in unread_of(Path(source), root)]
        digests.append("" if unknown else digest_of(Path(source), root))
        unread += unknown
    told = {
        "engine": "nxd-inference",
        "versions": {DISTRIBUTION: package.version, **installed_versions(*PACKAGES)},
        "environment": {name: os.environ[name] for name in READ if os.environ.get(name)},
        "target": target.name,
        "lnc": target.lnc,
        "options": neuron_options(settings, lengths(settings), package.release, QUANTIZED),
        "checkpoints": digests,
    }
    return told, tuple(unread)


def compile_apart(settings: Settings, entry: Entry) -> None:
    """Compile into ``entry`` in a process of its own, which does not hold the cores that this one will have.

    Raises EngineLoadError with the last lines of its output, all of which is in the entry's compile.log.
    """
    log = entry.path / LOG
    command = [sys.executable, "-m", "workers.engines.nxd_inference.engine", "compile"]
    asked = json.dumps({"settings": asdict(settings), "folder": str(entry.path), "parent": os.getpid()})
    what = f"{settings.source} with NxD Inference"
    with visit(settings, entry).compiling(), compiling(what, f"the compilers write to {log}"):
        with log.open("wb") as output:
            done = subprocess.run(command, input=asked.encode(), stdout=output, stderr=subprocess.STDOUT, check=False)
        if done.returncode != 0:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL:])
            kept = entry.path.with_suffix(".log")  # the entry is removed when it is tried again
            shutil.copyfile(log, kept)
            what = f"compiling {settings.source} ended with exit code {done.returncode}"
            raise EngineLoadError("compile-failed", what, f"{kept} has all that it said") from RuntimeError(tail)


def visit(settings: Settings, entry: Entry) -> CompileSession:
    """From 0.3 on (SDK 2.23) neuronx-distributed compiles through the persistent cache, failures included."""
    return CompileSession(entry.manifest, Path(settings.source), entry.path.parent, shared=False)


def compile_here(settings: Settings, folder: Path) -> None:
    """Compile into ``folder``. Computes on the host, and touches no device."""
    # By default all compiles of a host share one folder and overwrite each other's files.
    os.environ["BASE_COMPILE_WORK_DIR"] = str(folder / WORK) + "/"
    package = import_package()
    kind, config = build_config(package, settings, settings.quantized_source or str(folder / QUANTIZED))
    if settings.quantize is not None and settings.quantized_source is None and not settings.presharded:
        (folder / QUANTIZED).mkdir(exist_ok=True)
        kind.save_quantized_state_dict(settings.source, config)
    model = kind(settings.source, config)
    for graphs in model.models:
        graphs.compiler_args = with_flags(graphs.compiler_args, os.environ.get("NEURON_CC_FLAGS", ""))
    model.compile(str(folder / MODEL))
    shutil.rmtree(folder / WORK, ignore_errors=True)


_LEVEL = re.compile(r"(?<!\S)(?:-O|--optlevel[ =])(\d)(?!\S)")


def with_flags(own: str, given: str) -> str:
    """The package's flags for one kind of graph, and those of NEURON_CC_FLAGS, which it does not read itself.

    An optimization level replaces the package's. neuronx-distributed adds ``-O1`` where it finds no ``-O``.
    """
    flags = _LEVEL.sub(r"-O\1", " ".join(flag for flag in given.split() if flag.partition("=")[0] not in WRAPPER_FLAGS))
    return " ".join(filter(None, (_LEVEL.sub("", own) if _LEVEL.search(flags) else own, flags)))


def main(arguments: list[str]) -> int:
    """``compile``, with {"settings", "folder", "parent"} on standard input; the parent is the pid of who waits."""
    if arguments != ["compile"]:
        sys.stderr.write("usage: python -m workers.engines.nxd_inference.engine compile < JSON\n")
        return 2
    asked = json.load(sys.stdin)
    # It holds the lock of the entry: whoever comes next would find two compilers at work in one folder.
    end_with(asked["parent"])
    compile_here(Settings(**asked["settings"]), Path(asked["folder"]))
    return 0
