"""The registry of engines: one line for each, in the order in which texts list them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Literal, NamedTuple

from placements.engines.capabilities import Capabilities
from placements.facts.neuron_releases import SDKS, Sdk, environments_on
from placements.facts.topology import TOPOLOGIES, Host

NAMES = (
    "cpu",
    "echo",
    "transformers-neuronx",
    "nxd-inference",
    "vllm",
    "server",
    "optimum-neuron",
    "torch-neuronx",
)
"""The engines that a spec can name besides ``auto``. Each has a folder here and one in `workers.engines`."""

AUTO_ENGINES = ("nxd-inference", "transformers-neuronx")
"""The candidates of ``auto`` for text on Neuron devices, the preferred (newer) one first."""
AUTO_ENCODER = "torch-neuronx"
"""What ``auto`` is for other kinds there."""
AUTO_WITHOUT_DEVICES = "cpu"

CHOICES = ("auto", *NAMES)
if TYPE_CHECKING:
    Engine = str
else:
    Engine = Literal[CHOICES]
"""The type of an engine's name in a spec."""


def _capabilities(name: str) -> Capabilities:
    folder = name.replace("-", "_")
    record: Capabilities = import_module(f"placements.engines.{folder}.capabilities").CAPABILITIES
    return record


ENGINES: Mapping[str, Capabilities] = MappingProxyType({name: _capabilities(name) for name in NAMES})

_AUTO = Capabilities("auto", "neuron", quantize=("int8", "fp8"), runs_code=True, imports_long=False)  # it may be cpu

HOST_ENGINES = frozenset(name for name, engine in ENGINES.items() if engine.runs_on == "cpus")
SERVER_ENGINES = frozenset(name for name, engine in ENGINES.items() if engine.runs_on == "server")


def capabilities(engine: Engine) -> Capabilities:
    """Returns what an engine can do; ``auto``, as long as it is not resolved, has the defaults of Neuron engines."""
    return ENGINES.get(engine, _AUTO)


@cache
def part(engine: Engine, name: str) -> ModuleType | None:
    """Returns a module of an engine's folder, ``memory`` or ``rules``; None if it has none."""
    module = f"placements.engines.{capabilities(engine).module}.{name}"
    return import_module(module) if engine in ENGINES and find_spec(module) else None


def candidates_of(engine: Engine) -> tuple[Engine, ...]:
    """Returns the engines that a name may stand for on Neuron devices."""
    return AUTO_ENGINES if engine == "auto" else (engine,)


def resolve(engine: Engine, host: Host, kind: str) -> Engine:
    """Resolves ``auto`` on a host for a model's kind: cpu without an accelerator. On Neuron hosts it is torch-neuronx
    for a kind other than generate, else it stays ``auto``.

    The Neuron engine of an image is known only on the host itself, and does not affect placement.
    """
    if engine != "auto":
        return engine
    if host.emulated or host.topology is None:
        return AUTO_WITHOUT_DEVICES
    return "auto" if kind == "generate" else AUTO_ENCODER


def takes_cores(engine: Engine, host: Host) -> bool:
    """Returns whether a replica holds NeuronCores there: on emulated hosts always, on real ones with Neuron engines."""
    return host.topology is not None and (host.emulated or engine not in HOST_ENGINES)


def needs_neuron(engine: Engine) -> bool:
    """Returns whether the engine requires real Neuron devices."""
    return engine in ENGINES and ENGINES[engine].runs_on == "neuron"


def serves(engine: Engine, model_type: str, machines: str | None = None, version: str | None = None) -> bool:
    """Returns whether the engine serves the family, as `Capabilities.serves`; ``auto``: any of its candidates."""
    return any(ENGINES[name].serves(model_type, machines, version) for name in candidates_of(engine))


def may_run(engine: Engine, host: Host, model_type: str | None) -> bool:
    """Returns whether the engine, resolved there, can run a model of the family (None: unknown) on such a host."""
    topology = host.topology
    if topology is None or engine in HOST_ENGINES:
        return True
    runs = capabilities(engine).runs_in(topology.family)
    return runs and (model_type is None or serves(engine, model_type, topology.family))


@cache
def sdks_with(engine: Engine, machines: str) -> tuple[Sdk, ...]:
    """Returns the releases whose images have an environment with an engine that is supported on a family of machines,
    without those where it is in maintenance."""
    able = ENGINES[engine]
    return tuple(
        sdk
        for sdk in SDKS
        if any(
            item.engine == engine
            and not able.unsupported(version := item.version_in(sdk), machines)
            and not able.maintenance(version, machines)
            for item in environments_on(sdk)
        )
    )


# The choice of ``auto``


class NoEngine(NamedTuple):
    """Why no engine can be chosen: a problem's id, text and hint."""

    id: str
    what: str
    hint: str


def choose_engine(model_type: str | None, instance: str | None, versions: Mapping[Engine, str]) -> Engine | NoEngine:
    """Returns the engine that ``auto`` selects on a real host with the installed engines, ``versions``.

    1. The first of AUTO_ENGINES whose version runs on the machine and serves the family, one in maintenance last.
    2. Otherwise a NoEngine with the reason.

    ``model_type`` None: config.json was not read, so that every family is accepted. ``instance`` is the type of the
    machine; an unknown type is not judged.
    """
    topology = TOPOLOGIES.get(instance or "")
    machines = None if topology is None else topology.family
    installed = [candidate for candidate in AUTO_ENGINES if candidate in versions]
    if not installed:
        return NoEngine(
            "engine-not-installed",
            f"engine auto: neither {' nor '.join(AUTO_ENGINES)} is installed on this host",
            "use a Neuron SDK image with one of them, or set its interpreter under engines",
        )
    running = [
        candidate
        for candidate in installed
        if machines is None or ENGINES[candidate].runs_in(machines, versions[candidate])
    ]
    listing = " and ".join(f"{candidate} {versions[candidate]}" for candidate in running or installed)
    if not running:
        verb = "does" if len(installed) == 1 else "do"
        fact = f"engine auto: {listing} {verb} not run on {machines}"
        return NoEngine("engine-unsupported-here", fact, _supported_here(str(machines)))
    for engine in sorted(
        running, key=lambda name: bool(ENGINES[name].maintenance(versions[name], machines or ""))
    ):  # 1
        if model_type is None or serves(engine, model_type, machines, versions[engine]):
            return engine
    servable = [
        candidate
        for candidate in AUTO_ENGINES
        if candidate not in running and serves(candidate, str(model_type), machines)
    ]
    verb = "does" if len(running) == 1 else "do"
    hint = f"install {servable[0]}" if servable else f"no engine serves {model_type} here; use another machine or model"
    return NoEngine("family-unsupported", f"engine auto: {listing} {verb} not serve {model_type}", hint)  # 2


def _supported_here(machines: str) -> str:
    """Returns which candidates run on a family of machines, as a hint."""
    ways = []
    for candidate in (ENGINES[name] for name in AUTO_ENGINES):
        if candidate.runs_in(machines):
            last = candidate.newest(machines)
            is_limited = bool(candidate.versions) and last != candidate.versions[-1]
            ways.append(f"{candidate.engine} up to {last}" if is_limited else candidate.engine)
    return f"use {', or '.join(ways)}"
