"""What `corewright doctor` says of a machine, from readings of it. Pure: the command reads, this judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from placements.facts.core_range import runs
from placements.facts.engines import AUTO_ENGINES, runs_on
from placements.facts.tnx_families import MISREAD_HINT, hides_rope
from placements.facts.topology import TOPOLOGIES
from placements.spec.problems import Problem, in_order
from workers.engines.package_contract import Drift
from workers.host.facts.machine import HostFacts, Owner, owners
from workers.host.interpreter import Interpreter, refusal

HOLDING = ("ready", "draining")  # states in which a replica holds its cores for certain
MOST_LINES = 3  # of one engine's drift, in a finding


@dataclass(frozen=True)
class ReplicaSeen:
    """A replica of the running fleet, as `status` tells of it."""

    id: str
    pid: int | None
    cores: str | None
    state: str
    engine: str | None


@dataclass(frozen=True)
class FleetSeen:
    """The running fleet."""

    name: str
    url: str
    emulated: bool  # its cores are locks, which no Neuron tool shows
    replicas: tuple[ReplicaSeen, ...]


@dataclass(frozen=True)
class InterpreterSeen:
    """One Python, the engines that a spec means it for, and how the Neuron packages in it drift."""

    found: Interpreter
    needed_for: tuple[str, ...] = ()
    where: str = ""  # file:line:column of the spec that names it; "" for this command's own
    drifts: tuple[Drift, ...] = ()


@dataclass(frozen=True)
class Readings:
    """All that was read."""

    corewright: str
    python: str  # "3.11.9"
    ray: str
    package_folder: str  # where this command's own packages lie
    dev: tuple[int, ...]  # the devices that /dev shows
    facts: HostFacts
    interpreters: tuple[InterpreterSeen, ...]  # this command's own first
    fleet: FleetSeen | None = None
    spec: str | None = None  # the name of the file that was given
    emulates: bool = False  # it means emulated cores, and none of this machine's
    problems: tuple[Problem, ...] = ()  # of the spec, and of what could not be asked


@dataclass(frozen=True)
class Report:
    """What is here, and what is wrong with it."""

    readings: Readings
    problems: tuple[Problem, ...]
    held: Mapping[int, Owner] = field(default_factory=dict)  # NeuronCores that a process holds

    def as_dict(self) -> dict[str, Any]:
        """As `doctor -o json` prints it."""
        seen, facts = self.readings, self.readings.facts
        ours = _ours(seen)
        return {
            "versions": {"corewright": seen.corewright, "python": seen.python, "ray": seen.ray},
            "packages": dict(seen.interpreters[0].found.folders),
            "machine": {
                "instance": facts.instance_type,
                "devices": list(seen.dev),
                "cores": len(facts.cores),
                "versions": msgspec.structs.asdict(facts.versions),
            },
            "fleet": None if seen.fleet is None else {"name": seen.fleet.name, "url": seen.fleet.url},
            "held": [
                {"cores": str(cores), "pid": owner.pid, "command": owner.command, "replica": ours.get(owner.pid)}
                for cores, owner in runs(self.held)
            ],
            "interpreters": [
                {
                    "python": one.found.python,
                    "version": one.found.version,
                    "ray": one.found.ray,
                    "corewright": one.found.corewright,
                    "packages": one.found.packages,
                    "engines": [
                        {
                            "engine": drift.engine,
                            "version": drift.installed,
                            "compared_with": drift.recorded,
                            "drift": drift.lines(),
                        }
                        for drift in one.drifts
                    ],
                }
                for one in seen.interpreters
            ],
            "problems": [problem.as_dict() for problem in self.problems],
        }


def report(seen: Readings) -> Report:
    """Judge: the packages, the devices, who is on the cores, the interpreters and their engines."""
    held = owners(seen.facts)
    problems = [
        *seen.problems,
        *_packages(seen),
        *_devices(seen),
        *_holders(seen, held),
        *interpreter_problems(seen.interpreters, seen.python, seen.ray, seen.corewright),
        *_engines(seen),
    ]
    return Report(seen, tuple(in_order(problems)), held)


def _ours(seen: Readings) -> dict[int, str]:
    replicas = () if seen.fleet is None else seen.fleet.replicas
    return {replica.pid: replica.id for replica in replicas if replica.pid is not None}


def _packages(seen: Readings) -> list[Problem]:
    """Each of the three names, whose words are common ones, must be ours: `up` starts processes that import them."""
    problems = []
    for name, folder in seen.interpreters[0].found.folders.items():
        if folder is None or folder.rpartition("/")[0] != seen.package_folder:
            what = f"`import {name}` finds {folder or 'nothing'}, and this command runs from {seen.package_folder}"
            hint = "remove the other one, or take it off PYTHONPATH"
            problems.append(Problem("package-elsewhere", "error", "", what, hint))
    return problems


def _devices(seen: Readings) -> list[Problem]:
    """What the sources of facts could not tell, and where they disagree."""
    facts = seen.facts
    problems = [Problem("host-unread", "warning", "", *_split(told)) for told in facts.problems]
    known = TOPOLOGIES.get(facts.instance_type or "")
    listed = tuple(device.index for device in facts.devices)
    if not seen.dev:
        return problems
    if known is not None and known.devices != len(seen.dev):
        what = f"an {known.instance} has {known.devices} Neuron devices, and /dev shows {len(seen.dev)}"
        hint = "is it a container that was given some of them? dmesg | grep -i neuron names one that failed"
        problems.append(Problem("devices-differ", "warning", "", what, hint))
    elif listed and listed != seen.dev:
        what = f"/dev shows {len(seen.dev)} Neuron devices, and neuron-ls {len(listed)}"
        problems.append(Problem("devices-differ", "warning", "", what, "sudo dmesg | grep -i neuron tells why"))
    return problems


def _split(told: str) -> tuple[str, str]:
    """A problem of the facts: what, and the remedy behind its last semicolon."""
    what, _, hint = told.rpartition("; ")
    return (what, hint) if what else (told, "")


def _holders(seen: Readings, held: Mapping[int, Owner]) -> list[Problem]:
    """Against the fleet, or with none against a spec that means to use this machine: nobody else is on its cores."""
    problems: list[Problem] = []
    ours = _ours(seen)
    if seen.emulates if seen.fleet is None else seen.fleet.emulated:
        return problems
    if seen.fleet is not None or seen.spec is not None:
        for cores, owner in runs(held):
            if owner.pid not in ours:
                s = "s" if len(cores) > 1 else ""
                what = f"core{s} {cores}: held by pid {owner.pid} ({owner.command or 'its command cannot be read'})"
                whose = f"the fleet {seen.fleet.name}" if seen.fleet else "a fleet of corewright"
                hint = f"it is no replica of {whose}: end it, or keep its cores in hosts.reserve.cores"
                problems.append(Problem("cores-foreign", "warning", "", what, hint))
    if seen.fleet is None or not seen.facts.devices:
        return problems
    there = {owner.pid for owner in held.values()} | {process.pid for process in seen.facts.processes}
    for replica in seen.fleet.replicas:
        if replica.state in HOLDING and replica.cores is not None and replica.pid not in there:
            what = f"{replica.id} serves on cores {replica.cores}, and neuron-ls shows pid {replica.pid} on no device"
            hint = "does neuron-ls see this process? In a container it shows only those of the same one"
            problems.append(Problem("cores-unheld", "warning", "", what, hint))
    return problems


def interpreter_problems(
    interpreters: Sequence[InterpreterSeen], python: str, ray: str, corewright: str
) -> list[Problem]:
    """What keeps the interpreters from running the engines that they are needed for. The versions are the fleet's."""
    problems = []
    minor = ".".join(python.split(".")[:2])
    for one in interpreters:
        for engine in one.needed_for or (None,):
            wish = None if engine == "auto" else engine
            refused = refusal(one.found, wish, ray=ray, python_minor=minor, corewright=corewright)
            if refused is not None:
                problems.append(Problem(refused.id, "error", one.where, refused.what, refused.hint))
                break  # what is wrong with an interpreter is wrong for all of its engines
        if {"auto", "transformers-neuronx"} & set(one.needed_for) and hides_rope(one.found.packages):
            beside = one.found.packages["transformers"]
            what = (
                f"{one.found.python} has transformers {beside} beside transformers-neuronx, which reads no rope_theta"
            )
            what += " there: no gpt_neox starts, and no model with another rope_theta than the package's own"
            problems.append(Problem("rotary-misread", "warning", one.where, what, MISREAD_HINT))
        if "auto" in one.needed_for and not any(other.found.engines for other in interpreters):
            what = f"engine auto: there is neither {' nor '.join(AUTO_ENGINES)} on this machine"
            hint = "use a Neuron SDK image with one of them, or set its interpreter under engines"
            problems.append(Problem("engine-not-installed", "error", one.where, what, hint))
    return problems


def _engines(seen: Readings) -> list[Problem]:
    problems = []
    topology = TOPOLOGIES.get(seen.facts.instance_type or "")
    for one in seen.interpreters:
        for drift in one.drifts:
            if seen.spec is not None and not {drift.engine, "auto"} & set(one.needed_for):
                continue  # it is there, and nothing is to run in it
            if lines := drift.lines():
                more = f"; and {len(lines) - MOST_LINES} more" if len(lines) > MOST_LINES else ""
                what = f"{drift.engine} in {one.found.python}: {'; '.join(lines[:MOST_LINES])}{more}"
                hint = "try a model with it before you rely on it; doctor -o json lists every difference"
                problems.append(Problem("engine-drift", "warning", one.where, what, hint))
            engine = next((known for known in AUTO_ENGINES if known == drift.engine), None)
            if topology and engine and drift.installed and not runs_on(engine, topology.family, drift.installed):
                what = f"{engine} {drift.installed} in {one.found.python} does not run on {topology.family}"
                hint = "a model that asks for it here does not load; take another engine or an older SDK"
                problems.append(Problem("engine-unsupported-here", "warning", one.where, what, hint))
    return problems
