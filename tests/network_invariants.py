"""What must hold of the cores of network hosts, read from the processes there and not from a controller."""

from __future__ import annotations

import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from placements.facts.core_range import CoreRange
from tests.network_hosts import NetworkHost
from tests.repeated import Repeated

LOCK_FILE = re.compile(r"/emulated/emu-(\d+)/nc(\d+)\.lock")
MARGIN_S = 5.0  # a busy machine is read seldom


class Held(NamedTuple):
    """A core that a process has locked."""

    host: str  # the planner's, by its number
    core: int
    pid: int  # as the machine itself sees it


class Running(NamedTuple):
    """A process of a replica, with its locks."""

    id: str
    locks: list[Held]
    pid: int  # on this machine


def running_on(machine: NetworkHost) -> list[Running]:
    """Returns every process of a replica on a machine, of whatever epoch."""
    running = []
    for pid in machine.processes("ray::Replica["):
        with contextlib.suppress(OSError, StopIteration):  # it has ended
            tag = re.search(rb"\0NEURON_PROCESS_TAG=([^\0]+)", Path(f"/proc/{pid}/environ").read_bytes())
            running.append(Running(tag[1].decode() if tag else f"pid {pid}", list(_locks(pid)), pid))
    return running


def _locks(pid: int) -> Iterator[Held]:
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it is closed
            match = LOCK_FILE.search(str(file.readlink()))
            if match is not None and "lock:" in Path(f"/proc/{pid}/fdinfo/{file.name}").read_text():
                yield Held(match[1], int(match[2]), _own_pid(pid))


def held_cores(machine: NetworkHost) -> list[Held]:
    """Returns all locks on cores of a machine."""
    return [lock for process in running_on(machine) for lock in process.locks]


def _own_pid(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])


def differences(status: Mapping[str, Any], machines: Sequence[NetworkHost]) -> list[str]:
    """Returns what keeps the fleet from its rest: each wanted replica is ready, and holds its cores on its host; no
    other core is held, and no other replica's process is left."""
    deviations = []
    planned = set()
    for model in status["models"]:
        states = [replica["state"] for replica in model["replicas"]]
        if states != ["ready"] * model["wanted"]:
            deviations.append(f"{model['name']} wants {model['wanted']} and has {states}: {model['reason']}")
        for replica in model["replicas"]:
            if replica["version"] != model["version"]:
                deviations.append(f"{replica['id']} is of another version")
            number = replica["host"].rpartition("/")[2]
            cores = CoreRange.parse(replica["cores"]) if replica["cores"] else ()
            planned |= {Held(number, core, replica["pid"]) for core in cores}
    running = [process for machine in machines for process in running_on(machine)]
    held = [lock for process in running for lock in process.locks]
    if set(held) != planned or len(held) != len(planned):
        deviations.append(f"held is {sorted(held)}, planned {sorted(planned)}")
    processes = sorted(process.id for process in running)
    replicas = sorted(replica["id"] for model in status["models"] for replica in model["replicas"])
    if processes != replicas:
        deviations.append(f"processes are {processes}, replicas {replicas}")
    return deviations


class CoreWatch(Repeated):
    """Reads the processes of all machines again and again, and notes each core that two of them hold at once, and where
    each replica was."""

    def __init__(self, machines: Sequence[NetworkHost]) -> None:
        self.violations: list[str] = []
        self.looks = 0
        self._machines = machines
        self._seen: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)  # by id: when, on which machine

    def look(self) -> None:
        for machine in self._machines:
            running = running_on(machine)
            self.check(machine.name, [lock for process in running for lock in process.locks])
            for process in running:
                self._seen[process.id].append((time.monotonic(), machine.name))
        self.looks += 1

    def check(self, machine: str, held: Sequence[Held]) -> None:
        for core in {lock.core for lock in held}:
            owners = [lock for lock in held if lock.core == core]
            if len(owners) > 1:
                self.violations.append(f"{machine}: two processes hold a core: {owners}")

    def machines_of(self, id: str, began: float, ended: float) -> set[str]:
        """Returns the machines on which the replica was in that time, or all replicas whose ids begin so."""
        times = [time for seen, times in list(self._seen.items()) if seen.startswith(id) for time in list(times)]
        return {machine for at, machine in times if began - MARGIN_S <= at <= ended + MARGIN_S}
