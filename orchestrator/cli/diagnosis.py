"""The checks of `corewright doctor`: problems of a machine, derived from readings of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.cli.bootstrap import EngineEntry, on_machine
from orchestrator.cli.output import fields_of
from orchestrator.messages.fleet_status import ReplicaInFleet
from placements.engines.registry import AUTO_ENGINES, ENGINES, candidates_of, capabilities
from placements.engines.transformers_neuronx.capabilities import MISREAD_HINT
from placements.engines.vllm.capabilities import VllmNeuron
from placements.facts.core_range import runs
from placements.facts.known_failures import failures_of
from placements.facts.neuron_releases import sdk_of
from placements.facts.plural import plural
from placements.facts.topology import TOPOLOGIES, Topology
from placements.spec.problems import Problem, in_order
from workers.compiled import neuron_target
from workers.engines.package_contract import Drift
from workers.host.facts.machine import HostFacts, Owner, owners
from workers.host.interpreter import FleetVersions, Interpreter, refusal, vllm_refusal

HOLDING = ("ready", "draining")  # states in which a replica certainly holds its cores
MOST_LINES = 3  # differences of one engine in a problem


@dataclass(frozen=True)
class FleetReading:
    """The running fleet, as `status` reports it."""

    name: str
    url: str
    emulated: bool  # its cores are locks, which no Neuron tool shows
    replicas: tuple[ReplicaInFleet, ...]


@dataclass(frozen=True)
class InterpreterReading:
    """A Python interpreter, the engines that a spec runs in it, and the drift of its Neuron packages."""

    interpreter: Interpreter
    needed_for: tuple[str, ...] = ()
    where: str = ""  # file:line:column of the spec that names it; "" for this command's own
    release: VllmNeuron | None = None  # of vLLM's plugin, for the engine vllm on Neuron devices
    drifts: tuple[Drift, ...] = ()


@dataclass(frozen=True)
class Readings:
    """All readings of a machine."""

    versions: FleetVersions  # of this command
    package_folder: str  # the folder of this command's own packages
    dev: tuple[int, ...]  # the indexes of the devices in /dev
    facts: HostFacts
    interpreters: tuple[InterpreterReading, ...]  # this command's own first
    fleet: FleetReading | None = None
    spec: str | None = None  # the name of the spec's file
    environments: tuple[Interpreter, ...] = ()  # those of AWS's image
    emulates: bool = False  # the spec has emulated hosts, which do not use this machine's cores
    problems: tuple[Problem, ...] = ()  # of the spec and of the readings themselves

    @property
    def all_interpreters(self) -> tuple[Interpreter, ...]:
        """This command's own, those of the spec, and those of AWS's image, each once."""
        by_path: dict[str, Interpreter] = {}
        for item in (*(reading.interpreter for reading in self.interpreters), *self.environments):
            by_path.setdefault(item.python, item)
        return tuple(by_path.values())


@dataclass(frozen=True)
class Report:
    """The readings of a machine and their problems."""

    readings: Readings
    problems: tuple[Problem, ...]
    held: Mapping[int, Owner] = field(default_factory=dict)  # NeuronCores that a process holds
    engines: tuple[EngineEntry, ...] = ()  # empty on a machine without devices and without AWS's image

    @property
    def sdks(self) -> tuple[str, ...]:
        """The series of the Neuron SDK that packages in the interpreters are of."""
        return tuple(sorted({sdk for item in self.readings.all_interpreters if (sdk := sdk_of(item.packages))}))

    def as_dict(self) -> dict[str, Any]:
        """Returns the JSON of `doctor -o json`."""
        readings, facts = self.readings, self.readings.facts
        replica_of = _replica_ids(readings)
        return {
            "versions": readings.versions._asdict(),
            "packages": readings.interpreters[0].interpreter.folders,
            "machine": {
                "instance": facts.instance_type,
                "devices": readings.dev,
                "cores": len(facts.cores),
                "versions": facts.versions,
            },
            "sdk": self.sdks,
            "environments": [
                {**fields_of(item, "python version"), "sdk": sdk_of(item.packages), "packages": item.packages}
                for item in readings.environments
            ],
            "engines": self.engines,
            "fleet": None if readings.fleet is None else fields_of(readings.fleet, "name url"),
            "held": [
                {"cores": str(cores), **fields_of(owner, "pid command"), "replica": replica_of.get(owner.pid)}
                for cores, owner in runs(self.held)
            ],
            "interpreters": [
                {
                    **fields_of(reading.interpreter, "python version ray corewright packages"),
                    "engines": [_drift_fields(drift) for drift in reading.drifts],
                }
                for reading in readings.interpreters
            ],
            "problems": self.problems,
        }


def _drift_fields(drift: Drift) -> dict[str, Any]:
    names = {"engine": drift.engine, "version": drift.installed, "compared_with": drift.recorded}
    return {**names, "drift": drift.lines()}


def report(readings: Readings) -> Report:
    """Check the packages, the devices, the processes on the cores, the interpreters and their engines."""
    held = owners(readings.facts)
    problems = [
        *readings.problems,
        *_package_problems(readings),
        *_device_problems(readings),
        *_core_problems(readings, held),
        *interpreter_problems(readings.interpreters, readings.versions),
        *_engine_problems(readings),
    ]
    engines: tuple[EngineEntry, ...] = ()
    if readings.dev or readings.environments:
        topology = TOPOLOGIES.get(readings.facts.instance_type or "")
        machines = None if topology is None else topology.family
        engines = on_machine(readings.all_interpreters, machines, readings.versions)
    return Report(readings, tuple(in_order(problems)), held, engines)


def _replica_ids(readings: Readings) -> dict[int, str]:
    """Returns the ids of the fleet's replicas by pid."""
    replicas = () if readings.fleet is None else readings.fleet.replicas
    return {replica.pid: replica.id for replica in replicas if replica.pid is not None}


def _package_problems(readings: Readings) -> list[Problem]:
    """Returns the packages of corewright that another package shadows; processes that `up` starts import them."""
    problems = []
    for name, folder in readings.interpreters[0].interpreter.folders.items():
        if folder is None or folder.rpartition("/")[0] != readings.package_folder:
            origin = folder or "nothing"
            message = f"`import {name}` finds {origin}, but this command runs from {readings.package_folder}"
            hint = "remove the other package, or remove its folder from PYTHONPATH"
            problems.append(Problem("package-elsewhere", "error", "", message, hint))
    return problems


def _device_problems(readings: Readings) -> list[Problem]:
    """Returns the facts that could not be read, and those that disagree."""
    facts = readings.facts
    problems = [Problem("host-unread", "warning", "", *_split(problem)) for problem in facts.problems]
    topology = TOPOLOGIES.get(facts.instance_type or "")
    listed = tuple(device.index for device in facts.devices)
    if not readings.dev:
        return problems
    runtime, driver = facts.versions.runtime, facts.versions.driver
    pair = {"aws-neuronx-runtime-lib": runtime, "aws-neuronx-dkms": driver} if runtime and driver else {}
    for row in failures_of(None, facts.instance_type or "", pair):
        message = f"runtime {runtime} and driver {driver}: {row.what}"
        problems.append(Problem("driver-too-old", row.severity, "", message, row.helps))
    for device, components in facts.unhealthy.items():
        message = f"the driver reports faults of device {device}: {components}"
        hint = "stop and start the instance, which moves it to other hardware, or reserve the cores of the device"
        problems.append(Problem("device-unhealthy", "warning", "", message, hint))
    override = readings.interpreters[0].interpreter.target
    if topology is not None and (refused := neuron_target.refusal(override, topology.instance)) is not None:
        problems.append(Problem(refused.id, "error", "", refused.what, refused.hint))
    if topology is not None and topology.devices != len(readings.dev):
        message = f"{topology.instance} has {topology.devices} Neuron devices, but /dev shows {len(readings.dev)}"
        hint = "check which devices a container has; `dmesg | grep -i neuron` shows devices that failed"
        problems.append(Problem("devices-differ", "warning", "", message, hint))
    elif listed and listed != readings.dev:
        message = f"/dev shows {len(readings.dev)} Neuron devices, but neuron-ls shows {len(listed)}"
        problems.append(Problem("devices-differ", "warning", "", message, "see `sudo dmesg | grep -i neuron`"))
    return problems


def _split(problem: str) -> tuple[str, str]:
    """Splits a problem of the facts at its last semicolon into message and hint."""
    message, _, hint = problem.rpartition("; ")
    return (message, hint) if message else (problem, "")


def _core_problems(readings: Readings, held: Mapping[int, Owner]) -> list[Problem]:
    """Returns foreign processes on the cores of the fleet, or of the spec, and replicas that hold no device."""
    problems: list[Problem] = []
    replica_of = _replica_ids(readings)
    if readings.emulates if readings.fleet is None else readings.fleet.emulated:
        return problems
    if readings.fleet is not None or readings.spec is not None:
        for cores, owner in runs(held):
            if owner.pid not in replica_of:
                message = f"{plural(len(cores), 'core')} {cores}: "
                message += f"held by pid {owner.pid} ({owner.command or 'its command cannot be read'})"
                fleet = f"the fleet {readings.fleet.name}" if readings.fleet else "a corewright fleet"
                hint = f"it is not a replica of {fleet}: stop it, or add its cores to hosts.reserve.cores"
                problems.append(Problem("cores-foreign", "warning", "", message, hint))
    if readings.fleet is None or not readings.facts.devices:
        return problems
    pids = {owner.pid for owner in held.values()} | {process.pid for process in readings.facts.processes}
    for replica in readings.fleet.replicas:
        if replica.state in HOLDING and replica.cores is not None and replica.pid not in pids:
            message = f"{replica.id} serves on cores {replica.cores}"
            message += f", but neuron-ls shows no device for pid {replica.pid}"
            hint = "in a container neuron-ls shows only processes of that container"
            problems.append(Problem("cores-unheld", "warning", "", message, hint))
    return problems


def interpreter_problems(readings: Sequence[InterpreterReading], fleet: FleetVersions) -> list[Problem]:
    """Returns why interpreters cannot run the engines that they are needed for."""
    problems = []
    for reading in readings:
        interpreter = reading.interpreter
        for engine in reading.needed_for or (None,):
            required = None if engine == "auto" else engine
            refused = refusal(interpreter, fleet, required)
            if engine is not None and capabilities(engine).launches:
                refused = vllm_refusal(interpreter, reading.release)
            if refused is not None:
                problems.append(Problem(refused.id, "error", reading.where, refused.what, refused.hint))
                break  # a problem of an interpreter concerns all of its engines
        needed = dict.fromkeys(name for engine in reading.needed_for for name in candidates_of(engine))
        for engine in [name for name in needed if ENGINES[name].hides_settings(interpreter.packages)]:
            version = interpreter.packages["transformers"]
            message = f"{interpreter.python}: {engine} does not read rope_theta with transformers {version}"
            message += ": gpt_neox models, and models with another rope_theta than the package's default, do not start"
            problems.append(Problem("rotary-misread", "warning", reading.where, message, MISREAD_HINT))
        if "auto" in reading.needed_for and not any(other.interpreter.engines for other in readings):
            message = f"engine auto: neither {' nor '.join(AUTO_ENGINES)} is installed on this machine"
            hint = "use a Neuron SDK image that contains one, or set its interpreter under `engines`"
            problems.append(Problem("engine-not-installed", "error", reading.where, message, hint))
    return problems


def _version_problems(
    drift: Drift, subject: str, reading: InterpreterReading, topology: Topology | None
) -> Iterator[Problem]:
    """Yields the problems of an installed version with the machine, and if it is newer than the known ones."""
    engine, version = capabilities(drift.engine), drift.installed
    if not version:
        return
    if topology is not None and not engine.runs_in(topology.family, version):
        hint = "models with this engine do not load here; use another engine or an older SDK"
        fact = f"{subject} does not run on {topology.family}"
        yield Problem("engine-unsupported-here", "warning", reading.where, fact, hint)
    elif topology is not None and (why := engine.maintenance(version, topology.family)):
        hint = "test a model with it first; AWS fixes only critical and security problems"
        yield Problem("engine-in-maintenance", "warning", reading.where, f"{subject} {why}", hint)
    if last := engine.planned_as(version):
        fact = f"{subject} is unknown to this version of corewright, and is planned as {last}"
        hint = "options and memory may differ: test a model with it first"
        yield Problem("engine-version-unknown", "warning", reading.where, fact, hint)


def _engine_problems(readings: Readings) -> list[Problem]:
    problems = []
    topology = TOPOLOGIES.get(readings.facts.instance_type or "")
    for reading in readings.interpreters:
        python = reading.interpreter.python
        for drift in reading.drifts:
            if readings.spec is not None and not {drift.engine, "auto"} & set(reading.needed_for):
                continue  # installed, but the spec does not use it
            if lines := drift.lines():
                more = f"; and {len(lines) - MOST_LINES} more" if len(lines) > MOST_LINES else ""
                message = f"{drift.engine} in {python}: {'; '.join(lines[:MOST_LINES])}{more}"
                hint = "test a model with it first; `doctor -o json` lists every difference"
                problems.append(Problem("engine-drift", "warning", reading.where, message, hint))
            problems += _version_problems(drift, f"{drift.engine} {drift.installed} in {python}", reading, topology)
    return problems
