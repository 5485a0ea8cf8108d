"""A spec file as the commands and the daemon see it: read, parsed, checked against the machine and the checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from placements.checks import check

from orchestrator.sources import read_checkpoints
from placements.checkpoints import Checkpoint
from placements.engines import resolve
from placements.hosts import Machine, hosts_for
from placements.parse import parse
from placements.problems import Problem
from placements.spec import Spec
from placements.topology import Host
from workers import host as this_host

STANDARD_INPUT = "-"
MAX_BYTES = 4 * 2**20
SERVED_ENGINES = ("cpu", "echo")  # what `up` of this version can start


class SpecUnreadable(Exception):
    """The file cannot be read at all; the text says which and why."""


@dataclass(frozen=True)
class SpecFile:
    """One file and all that is known of it before anything is started."""

    text: str
    name: str
    base_dir: str
    spec: Spec | None  # None when it could not be read as a spec
    machine: Machine
    hosts: tuple[Host, ...]
    checkpoints: Mapping[str, Checkpoint]
    problems: tuple[Problem, ...]  # of the file, the spec and its checkpoints


def this_machine() -> Machine:
    """The CPUs that we may use, and the instance type where there are Neuron devices."""
    return Machine(this_host.usable_cpus(), this_host.instance_type())


def load(path: str) -> SpecFile:
    """Read a spec (`-` is standard input) and find all its problems. Raises SpecUnreadable."""
    if path == STANDARD_INPUT:
        return examine(sys.stdin.read(MAX_BYTES + 1), "<stdin>", str(Path.cwd()), this_machine())
    file = Path(path)
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        text = data.decode()
    except OSError as error:
        raise SpecUnreadable(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SpecUnreadable(f"{path} is not UTF-8: byte {error.start} is {data[error.start]:#x}") from None
    if len(data) > MAX_BYTES:
        raise SpecUnreadable(f"{path} is larger than {MAX_BYTES} bytes; that is no spec")
    return examine(text, path, str(file.absolute().parent), this_machine())


def examine(text: str, name: str, base_dir: str, machine: Machine) -> SpecFile:
    """All that `validate` says of a text: what the parser finds, then every rule."""
    parsed = parse(text, name, base_dir)
    if parsed.spec is None:
        return SpecFile(text, name, base_dir, None, machine, (), {}, parsed.problems)
    hosts = hosts_for(parsed.spec, machine)
    checkpoints, unread = read_checkpoints(parsed.spec)
    problems = (*parsed.problems, *unread, *check(parsed.spec, hosts, checkpoints))
    return SpecFile(text, name, base_dir, parsed.spec, machine, hosts, checkpoints, problems)


def start_problems(file: SpecFile) -> tuple[Problem, ...]:
    """What a valid spec asks for that `up` of this version, or this machine, cannot start."""
    spec = file.spec
    if spec is None:
        return ()
    problems = []
    if len(file.hosts) > 1:
        what = f"{len(file.hosts)} hosts are asked for, and `up` of this version starts one"
        problems.append(Problem("hosts-not-served", "error", spec.where("hosts", "count"), what, "count: 1"))
    if file.hosts and not file.hosts[0].emulated and _instance(file.hosts[0]) != file.machine.instance:
        what = f"this machine is no {_instance(file.hosts[0])}: it has " + (
            f"the devices of an {file.machine.instance}" if file.machine.instance else "no Neuron devices"
        )
        hint = f"hosts: {{emulate: {_instance(file.hosts[0])}}} runs the same spec on emulated cores"
        problems.append(Problem("host-differs", "error", spec.where("hosts"), what, hint))
    for model in spec.models:
        engine = resolve(model.engine, file.hosts[0]) if file.hosts else model.engine
        if engine not in SERVED_ENGINES:
            where = spec.where("models", model.name, "engine")
            what = f"{model.name}: `up` of this version starts no engine {engine}"
            problems.append(Problem("engine-not-served", "error", where, what, f"one of: {', '.join(SERVED_ENGINES)}"))
        elif engine != "echo" and model.source_path is None:
            where = spec.where("models", model.name, "source")
            what = f"{model.name}: `up` of this version fetches no {model.source_kind} source ({model.source})"
            problems.append(Problem("source-not-served", "error", where, what, "a folder: ./models/NAME"))
    return tuple(problems)


def _instance(host: Host) -> str | None:
    return None if host.topology is None else host.topology.instance
