"""Reads and parses a spec file, and checks it against the machine and the checkpoints."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from orchestrator.access.source_policy import SourcePolicy
from orchestrator.control.resolve.checkpoint_reader import CheckpointFacts, is_hub_source, read_facts, source_parts
from orchestrator.control.resolve.precompiled_checkpoint import precompiled_problems
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from orchestrator.process.spec_text import MAX_SPEC_BYTES, decoded, read_text
from orchestrator.process.speed_record import record_of
from placements.engines.registry import resolve
from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import Host, Machine
from placements.planner.spec_hosts import hosts_for
from placements.rules.checks import check
from placements.spec.notation import unusable_path
from placements.spec.parse import Parsed, parse
from placements.spec.problems import Problem, in_order
from placements.spec.schema import Spec
from workers.host import host_facts as this_host
from workers.host.facts.reading import read_cpu_layout

ANYTHING = SourcePolicy()
STANDARD_INPUT = "-"
MAX_EMULATED = 256  # hosts of one fleet; a Ray node takes about 150 MB
Folders = Literal["load", "plan", "ignore"]
"""How local folders are checked. load: an unloadable one is an error if this machine loads it, else a warning; plan: it
is a warning; ignore: only config.json is read."""


@dataclass(frozen=True)
class SpecFile:
    """A spec file and everything derived from it before a fleet starts."""

    text: str
    name: str
    base_dir: str
    spec: Spec | None  # None when it could not be read as a spec
    machine: Machine
    hosts: tuple[Host, ...]
    checkpoints: Mapping[str, Checkpoint]
    problems: tuple[Problem, ...]  # of the file, the spec and its checkpoints
    drafts: Mapping[str, Checkpoint] = field(default_factory=lambda: MappingProxyType({}))  # those of drafts, by model

    @property
    def warm_engines(self) -> dict[str, str | None]:
        """The engines that have a warm process on the first host, with the Python of each."""
        if self.spec is None:
            return {}
        return self.spec.warm_engines({resolve(model.engine, self.hosts[0], model.kind) for model in self.spec.models})


def this_machine() -> Machine:
    """Returns the usable CPUs with their layout, the instance type if there are Neuron devices, and what was measured
    in this home."""
    cpus, instance = this_host.usable_cpus(), this_host.instance_type()
    measured = {}
    with contextlib.suppress(Failed):  # a home that others can write to is not read
        home = Home.from_environment()
        measured = record_of(home).constants() if home.speeds.exists() else {}  # without the cost of the version
    devices, layout = this_host.devices() or None, read_cpu_layout(instance)
    return Machine(cpus, instance, devices=devices, layout=layout, measured=measured)


def load(path: str, allowed: SourcePolicy = ANYTHING, *, folders: Folders = "load") -> SpecFile:
    """Returns a spec file (`-`: standard input) with all its problems, also if it cannot be read.

    ``folders``: see `Folders`."""
    from_input = path == STANDARD_INPUT
    name, base_dir = ("<stdin>", str(Path.cwd())) if from_input else (path, str(Path(path).absolute().parent))
    try:
        text = decoded(sys.stdin.buffer.read(MAX_SPEC_BYTES + 1), name) if from_input else read_text(path)
    except Failed as failed:
        return _unreadable(name, base_dir, failed.problem)
    return examine(text, name, base_dir, this_machine(), allowed, folders=folders)


def _unreadable(name: str, base_dir: str, problem: Problem) -> SpecFile:
    return SpecFile("", name, base_dir, None, this_machine(), (), {}, (problem,))


def examine(
    text: str,
    name: str,
    base_dir: str,
    machine: Machine,
    allowed: SourcePolicy = ANYTHING,
    *,
    folders: Folders = "load",
) -> SpecFile:
    """Returns a spec text with all problems of the parser and the rules. If it names a source that is not ``allowed``,
    no source is read. ``folders``: see `Folders`."""
    if reason := unusable_path(base_dir):
        fact = f"the folder of {name} {reason}"
        return _unreadable(name, base_dir, Problem("spec-unreadable", "error", "", fact, "check the path"))
    parsed = parse(text, name, base_dir)
    if parsed.spec is None:
        return SpecFile(text, name, base_dir, None, machine, (), {}, parsed.problems)
    spec, hosts = parsed.spec, hosts_for(parsed.spec, machine)
    barred = tuple(allowed.problems(spec)) or tuple(_ambiguous_sources(spec, allowed))
    if barred:  # read nothing, and do not query the hub
        problems = in_order((*parsed.problems, *barred))
        return SpecFile(text, name, base_dir, spec, machine, hosts, {}, problems)
    facts = read_facts(spec, here=None if folders == "ignore" else folders == "load" and _loads(machine, hosts))
    return judge(parsed, text, name, base_dir, machine, facts)


def judge(parsed: Parsed, text: str, name: str, base_dir: str, machine: Machine, facts: CheckpointFacts) -> SpecFile:
    """Returns a parsed spec with all problems of the parser and the rules, by facts that were read before."""
    spec = parsed.spec
    assert spec is not None
    hosts = hosts_for(spec, machine)
    rule_problems = check(spec, hosts, facts.checkpoints, facts.drafts, facts.adapters)
    precompiled = precompiled_problems(spec, facts)
    problems = in_order((*parsed.problems, *facts.problems, *rule_problems, *precompiled))
    return SpecFile(text, name, base_dir, spec, machine, hosts, facts.checkpoints, problems, facts.drafts)


def start_problems(file: SpecFile, *, joined: bool = False) -> tuple[Problem, ...]:
    """Returns the problems of a valid spec that prevent `up` of this version from starting it on this machine, or on
    the Ray cluster that is ``joined``."""
    spec = file.spec
    if spec is None:
        return ()
    if joined or file.machine.joined:
        return ()
    problems = []
    if any(entry.most > entry.least for entry in spec.hosts):
        text = "hosts has a max above its min, and only a Ray cluster with an autoscaler starts machines"
        hint = "set count, or join such a cluster with --ray-address"
        problems.append(Problem("hosts-not-served", "error", spec.where("hosts", "max"), text, hint))
    many = spec.where(*(("hosts", 1) if ("hosts", 1) in spec.places.positions else ("hosts", "count")))
    if len(file.hosts) > 1 and not file.hosts[0].emulated:
        text = f"the spec has {len(file.hosts)} machines, and `up` of this version starts one"
        hint = "use one entry with count: 1" if len(spec.hosts) > 1 else "set count: 1"
        problems.append(Problem("hosts-not-served", "error", many, text, hint))
    elif len(file.hosts) > MAX_EMULATED:
        text = f"the spec has {len(file.hosts)} emulated hosts, and `up` starts at most {MAX_EMULATED} Ray nodes"
        problems.append(Problem("hosts-not-served", "error", many, text, f"set count: {MAX_EMULATED} or less"))
    if file.hosts and not file.hosts[0].emulated and _instance(file.hosts[0]) != file.machine.instance:
        text = f"this machine is not an {_instance(file.hosts[0])}: it has " + (
            f"the devices of an {file.machine.instance}" if file.machine.instance else "no Neuron devices"
        )
        hint = f"hosts: {{emulate: {_instance(file.hosts[0])}}} runs the same spec on emulated cores"
        if len(spec.hosts) > 1:
            hint = "emulate in place of instance, in each entry of hosts, runs the same spec on emulated cores"
        problems.append(Problem("host-differs", "error", spec.where("hosts"), text, hint))
    return tuple(problems)


def _ambiguous_sources(spec: Spec, allowed: SourcePolicy) -> Iterator[Problem]:
    """Yields an error for each hub id that is also the relative path of a checkpoint beside the spec. Blocks."""
    for part in source_parts(spec):
        folder = (Path(spec.base_dir) / part.source).resolve()
        if is_hub_source(part) and allowed.allows(str(folder)) and (folder / part.config_file).is_file():
            key = ".".join(part.keys)
            fact = f"{part.model.name}: {key} {part.source} is read as a hub id, and the folder ./{part.source} exists"
            hint = f"write {key}: ./{part.source} to load the folder; to fetch from the hub, rename the folder"
            yield Problem("source-ambiguous", "error", part.where(spec), fact, hint)


def _loads(machine: Machine, hosts: tuple[Host, ...]) -> bool:
    """Returns whether replicas of these hosts run on that machine, as those of emulated hosts do."""
    return all(host.emulated for host in hosts) or [_instance(host) for host in hosts] == [machine.instance]


def _instance(host: Host) -> str | None:
    return None if host.topology is None else host.topology.instance
