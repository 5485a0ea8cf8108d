"""Compiling with NxD Inference: what the artifacts depend on, and the process that makes them."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from hashlib import blake2s
from pathlib import Path
from typing import Any

from workers.compiled import Entry
from workers.engine import EngineLoadError
from workers.engines.nxd_config import Settings, lengths, neuron_options
from workers.engines.nxd_package import DISTRIBUTION, Package, build_config, import_package, installed_versions

MODEL, QUANTIZED, WORK, LOG = "model", "quantized", "work", "compile.log"  # in an entry
SAMPLES, SAMPLE = 64, 4096  # of each file of weights, and the bytes of one
PR_SET_PDEATHSIG = 1  # linux/prctl.h
TAIL = 40  # lines of the compiler's output that an error repeats
# Of the environment, what the compiler reads.
READ = ("NEURON_CC_FLAGS", "NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE", "NEURON_PLATFORM_TARGET_OVERRIDE")


def manifest(settings: Settings, package: Package) -> dict[str, Any]:
    """All that the artifacts depend on, as JSON. The sharded weights are among them, so the checkpoint's files too."""
    sources = [settings.source, *([settings.draft_source] if settings.draft_source is not None else [])]
    return {
        "engine": "nxd-inference",
        "versions": {
            DISTRIBUTION: package.version,
            **installed_versions("neuronx-distributed", "neuronx-cc", "torch-neuronx", "libneuronxla"),
        },
        "environment": {name: os.environ[name] for name in READ if os.environ.get(name)},
        "options": neuron_options(settings, lengths(settings), package.release, QUANTIZED),
        "checkpoints": [_digest(Path(source)) for source in sources],
    }


def _digest(source: Path) -> str:
    """Of the whole configuration, and of the names, sizes and samples of the other files.

    Not of their times: a checkpoint that was fetched again is the same. One trained further differs everywhere.
    """
    found = blake2s(digest_size=16)
    for path in sorted(path for path in source.iterdir() if path.is_file()):
        size = path.stat().st_size
        found.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if path.suffix == ".json":
                found.update(file.read())
                continue
            for sample in range(SAMPLES):
                file.seek(size * sample // SAMPLES)
                found.update(file.read(SAMPLE))
    return found.hexdigest()


def compile_apart(settings: Settings, entry: Entry) -> None:
    """Compile into ``entry`` in a process of its own, which does not hold the cores that this one will have.

    Raises EngineLoadError with the last lines of its output, all of which is in the entry's compile.log.
    """
    log = entry.path / LOG
    command = [sys.executable, "-m", "workers.engines.neuronx_distributed", "compile"]
    asked = json.dumps({"settings": asdict(settings), "folder": str(entry.path), "parent": os.getpid()})
    with log.open("wb") as output:
        done = subprocess.run(command, input=asked.encode(), stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL:])
        kept = entry.path.with_suffix(".log")  # the entry is removed when it is tried again
        shutil.copyfile(log, kept)
        what = f"compiling {settings.source} ended with exit code {done.returncode}"
        raise EngineLoadError("compile-failed", what, f"{kept} has all that it said") from RuntimeError(tail)


def compile_here(settings: Settings, folder: Path) -> None:
    """Compile into ``folder``. Computes on the host, and touches no device."""
    # By default all compiles of a host share one folder and overwrite each other's files.
    os.environ["BASE_COMPILE_WORK_DIR"] = str(folder / WORK) + "/"
    package = import_package(settings)
    kind, config = build_config(package, settings, str(folder / QUANTIZED))
    if settings.quantize is not None:
        (folder / QUANTIZED).mkdir(exist_ok=True)
        kind.save_quantized_state_dict(settings.source, config)
    kind(settings.source, config).compile(str(folder / MODEL))
    shutil.rmtree(folder / WORK, ignore_errors=True)


def main(arguments: list[str]) -> int:
    """``compile``, with {"settings", "folder"} on standard input."""
    if arguments != ["compile"]:
        sys.stderr.write("usage: python -m workers.engines.neuronx_distributed compile < JSON\n")
        return 2
    asked = json.load(sys.stdin)
    _end_with(asked["parent"])
    compile_here(Settings(**asked["settings"]), Path(asked["folder"]))
    return 0


def _end_with(parent: int) -> None:
    """Die with the process that waits for this one: it holds the entry's lock, and whoever comes next would find two
    compilers at work in one folder."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        sys.exit(1)
