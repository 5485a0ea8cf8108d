"""Interpreters of engines: what a Python holds, asked of it before a replica is started in it.

Ray tells little of a wrong one: with another Python minor or another Ray the replica's process dies at its first
import, and where the file is missing it waits for ever (Ray 2.60).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import msgspec

from placements.facts import engines
from workers.messages.status import Failure

PROBE_S = 10.0  # an interpreter on a network disk may need seconds; below the deadline of a call to a host
FOLDERS = ("placements", "workers", "orchestrator")
NEURON_INDEX = "--extra-index-url https://pip.repos.neuron.amazonaws.com"  # PyPI holds placeholders of these names
# The package of a Neuron engine, and then what must be there, by engine.
PACKAGES: Mapping[str, str] = MappingProxyType({engine: engines.distribution(engine) for engine in engines.PACKAGES})
NEEDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"cpu": ("torch", "safetensors", "numpy"), **{engine: (name,) for engine, name in PACKAGES.items()}}
)
PROVIDED_BY: Mapping[str, str] = MappingProxyType(
    {
        "transformers-neuronx": "AWS's images of Neuron SDK 2.25 and before hold it; else pip install "
        f"transformers-neuronx {NEURON_INDEX}",
        "nxd-inference": "AWS's Deep Learning AMI Neuron has it under /opt/aws_neuronx_venv_pytorch_*_nxd_inference; "
        f"else pip install neuronx-distributed-inference {NEURON_INDEX}",
    }
)
_ASKED = (
    "transformers",
    "torch",
    "safetensors",
    "numpy",
    "torch-neuronx",
    *PACKAGES.values(),
    "neuronx-cc",
    "libneuronxla",
)

# Imports nothing but the standard library: importing torch takes seconds, and a Neuron package could claim cores.
_PROBE = """
import importlib.metadata as metadata, importlib.util, json, sys, sysconfig
def version(name):
    try:
        return metadata.version(name)
    except Exception:
        return None
def folder(name):
    try:
        found = importlib.util.find_spec(name)
        return list(found.submodule_search_locations)[0]
    except Exception:
        return None
print(json.dumps({
    "version": ".".join(map(str, sys.version_info[:3])),
    "executable": sys.executable,
    "ray": version("ray"),
    "corewright": version("corewright"),
    "folders": {name: folder(name) for name in %r},
    "packages": {name: found for name in %r if (found := version(name)) is not None},
    "libraries": sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}),
}))
"""

Trouble = Literal["missing", "no-python", "hangs"]


class Interpreter(msgspec.Struct, frozen=True, kw_only=True):
    """What a Python was found to hold. None is what it does not have."""

    python: str  # the path that was asked
    trouble: Trouble | None = None  # why it could not be asked; the rest is empty then
    error: str = ""  # the same in words
    version: str = ""  # "3.10.12"
    executable: str = ""
    ray: str | None = None
    corewright: str | None = None
    folders: dict[str, str | None] = {}  # where each of corewright's packages comes from
    packages: dict[str, str] = {}  # the version of each distribution that concerns engines, as far as it is there
    libraries: tuple[str, ...] = ()  # the folders where its packages are installed

    @property
    def minor(self) -> str:
        """ "3.10"."""
        return ".".join(self.version.split(".")[:2])

    @property
    def engines(self) -> dict[str, str]:
        """The engines whose package it holds, each with the package's version."""
        return {engine: self.packages[name] for engine, name in PACKAGES.items() if name in self.packages}


def probe(python: str, timeout_s: float = PROBE_S) -> Interpreter:
    """Ask the interpreter at that path. Never raises, and ends by ``timeout_s``."""
    if not Path(python).is_file():
        return Interpreter(python=python, trouble="missing", error=f"{python} is not there, or is no file")
    try:
        process = subprocess.Popen(
            [python, "-c", _PROBE % (FOLDERS, _ASKED)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",  # not that of the fleet, whose folders an interpreter would find without having them
            start_new_session=True,
        )
    except OSError as error:
        return Interpreter(python=python, trouble="no-python", error=f"{python} cannot be run: {error.strerror}")
    try:
        told, complaint = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Interpreter(python=python, trouble="hangs", error=f"{python} has not answered within {timeout_s:g} s")
    finally:
        if process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    with contextlib.suppress(ValueError, IndexError, msgspec.ValidationError):
        if process.returncode == 0:
            return msgspec.convert({**json.loads(told.splitlines()[-1]), "python": python}, Interpreter)
    lines = complaint.decode(errors="replace").strip().splitlines()
    said = lines[-1] if lines and "importlib" not in lines[-1] else f"it ended with code {process.returncode}"
    return Interpreter(python=python, trouble="no-python", error=f"{python} is no Python 3: {said[:200]}")


class Interpreters:
    """Answers of ``probe``, kept for as long as the interpreter and the folders of its packages are unchanged."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[object, ...], float, Interpreter]] = {}  # with when they were given
        self._asking: dict[str, threading.Lock] = {}

    def ask(self, python: str | None, timeout_s: float = PROBE_S) -> Interpreter:
        """Of the interpreter at that path; None: of this process's own. Many may ask at once, and wait for one answer.

        One that could not be asked is asked again by the next who comes.
        """
        path = python or sys.executable
        came = time.monotonic()
        with self._asking.setdefault(path, threading.Lock()):
            known = self._known.get(path)
            if known is not None:
                stamp, given, found = known
                if given >= came or (found.trouble is None and stamp == _stamp(found)):
                    return found
            found = probe(path, timeout_s)
            self._known[path] = (_stamp(found), time.monotonic(), found)
            return found


def _stamp(found: Interpreter) -> tuple[object, ...]:
    """Changes with the interpreter, and when a package is installed or removed."""
    times: list[object] = []
    for path in (found.python, *found.libraries):
        try:
            times.append(Path(path).stat().st_mtime_ns)
        except OSError:
            times.append(None)
    return tuple(times)


def refusal(
    found: Interpreter, engine: str | None = None, *, ray: str, python_minor: str, corewright: str
) -> Failure | None:
    """Why a replica with ``engine`` must not be started in that interpreter; None: it may be.

    ``ray``, ``python_minor`` ("3.11") and ``corewright`` are those of the fleet. With ``engine`` None its package is
    not looked for.
    """
    path = found.python
    if found.trouble == "missing":
        return Failure("interpreter-missing", found.error, "engines.ENGINE.python in the spec names it")
    if found.trouble == "hangs":
        return Failure("interpreter-hangs", found.error, f"try `{path} -c 'print(1)'` by hand on that host")
    if found.trouble is not None:
        return Failure("interpreter-broken", found.error, f"try `{path} -c 'print(1)'` by hand on that host")
    if found.minor != python_minor:
        what = f"{path} is Python {found.version}, and the fleet runs on Python {python_minor}"
        return Failure("interpreter-python-differs", what, "Ray needs one minor version of Python in the whole fleet")
    if found.ray != ray:
        has = f"has Ray {found.ray}" if found.ray else "has no Ray"
        hint = f"{path} -m pip install 'ray[serve]=={ray}'"
        return Failure("interpreter-ray-differs", f"{path} {has}, and the fleet runs on Ray {ray}", hint)
    if found.corewright != corewright or None in found.folders.values():
        has = f"corewright {found.corewright}" if found.corewright else "no corewright"
        lost = sorted(name for name, folder in found.folders.items() if folder is None)
        more = f" (not found: {', '.join(lost)})" if found.corewright and lost else ""
        what = f"{path} has {has}{more}, and the fleet runs corewright {corewright}"
        wheel = f"corewright-{corewright}-py3-none-any.whl"
        hint = f"install the fleet's wheel there too, no index has it: {path} -m pip install {wheel}"
        return Failure("interpreter-corewright-differs", what, hint)
    missing = [name for name in NEEDS.get(engine or "", ()) if name not in found.packages]
    if engine is not None and missing:
        what = f"{path} has no {' and no '.join(missing)}, which the engine {engine} needs"
        return Failure(
            "engine-not-installed", what, PROVIDED_BY.get(engine, f"{path} -m pip install {' '.join(missing)}")
        )
    return None
