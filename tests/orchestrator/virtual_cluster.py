"""A cluster of many hosts, as unkind as Ray was measured to be: calls to a host that is cut off hang until a deadline,
deaths are noticed late, and what a lost host ran may still hold its cores when the host is back."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from orchestrator.control.decisions.replica_view import actor_name
from orchestrator.control.effects import CoreOwner, HostLost, HostReport, LogText, Loss, ReplicaDied, Survivor
from orchestrator.control.journal.journal import Journal
from orchestrator.control.journal.journal_records import Event, R
from tests.orchestrator.fakes import FakeCluster, FakeReplica
from workers.host.interpreter import Interpreter
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Phase, ReplicaStatus

CALL_S = 20.0  # the deadline of a call to a host actor
HANGS_S = 15.0  # a replica that has replied before and is silent for this long counts as dead
DECLARED_S = 18.0  # until Ray declares the node of a silent machine dead
REPORT_S = 60.0  # a watch returns at least this often; Ray's does every 5 s, which costs time and shows nothing here
HOST_ACTOR_S = 6.0  # the start of a host actor on a new node
CONFIRM_S = 10.0  # for which a host actor waits for the end of a process
ADOPT_S = 3.0  # the deadline of a survivor's description


@dataclass(eq=False)
class VirtualReplica(FakeReplica):
    """An actor and its process. ``dead`` is the process's end, ``noticed`` what Ray reports, some time later."""

    generation: int = 0  # of its machine's Ray node
    hangs: bool = False
    runs: bool = False  # its process has begun and holds its cores
    noticed: str | None = None

    @property
    def name(self) -> str:
        return actor_name(self.config.model.name, self.config.place.replica, self.config.run.epoch)


@dataclass
class Machine:
    """One host."""

    linked: bool = True  # calls reach it
    powered: bool = True  # since Ray last declared it alive
    alive: bool = True  # Ray's word
    silent: bool = False  # its host actor hangs, its replicas do not
    generation: int = 0  # of its Ray node: a machine that is back has a new one
    cuts: int = 0  # times that it was cut off or lost, so that an older one does not declare it dead


class VirtualCluster(FakeCluster):
    """A ``ClusterClient`` whose ``violations`` also list cores that two processes hold and epochs that are reused."""

    def __init__(self, hosts: Sequence[str], rng: random.Random) -> None:
        super().__init__()
        self.machines = {host: Machine() for host in hosts}
        self.rng = rng
        self.actors: dict[str, VirtualReplica] = {}  # that Ray knows
        self.holders: dict[str, dict[int, VirtualReplica]] = {host: {} for host in hosts}
        self.last_epochs: dict[str, int] = {}
        self.starts: Counter[str] = Counter()  # by model
        self.slow_starts = 0  # this many of the next starts hang longer than any deadline
        self._changed: dict[str, asyncio.Condition] = {host: asyncio.Condition() for host in hosts}

    def processes(self) -> set[VirtualReplica]:
        """Returns all processes, also those that Ray has forgotten."""
        return {replica for held in self.holders.values() for replica in held.values()}

    def _later(self, delay_s: float, work: Callable[[], Any]) -> None:
        async def run() -> None:
            await asyncio.sleep(delay_s)
            await work()

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # What happens to machines and processes

    async def _notify(self, host: str) -> None:
        for replica in [replica for replica in self.actors.values() if replica.config.place.host == host]:
            async with replica.changed:
                replica.changed.notify_all()
        async with self._changed[host]:
            self._changed[host].notify_all()

    async def die(self, replica: VirtualReplica, cause: str) -> None:
        """The process ends and its cores are free; Ray notices a little later, if the machine is linked."""
        replica.dead = replica.dead or cause
        held = self.holders[replica.config.place.host]
        for core in [core for core, holder in held.items() if holder is replica]:
            del held[core]

        async def notice() -> None:
            if self.machines[replica.config.place.host].linked:
                await self._report(replica, cause)

        self._later(self.rng.uniform(0.1, 3.0), notice)

    async def _report(self, replica: VirtualReplica, cause: str) -> None:
        async with replica.changed:
            replica.noticed = replica.noticed or cause
            replica.changed.notify_all()

    async def hang(self, replica: VirtualReplica) -> None:
        replica.hangs = True

    async def cut_off(self, host: str, *, power: bool = False) -> None:
        """The machine cannot be reached any more. Its processes live on, unless it has lost its ``power``."""
        machine = self.machines[host]
        machine.linked, machine.cuts = False, machine.cuts + 1
        cut = machine.cuts
        if power:
            machine.powered = False
            for replica in dict.fromkeys(self.holders[host].values()):
                await self.die(replica, "its machine lost power")

        async def declare() -> None:
            if not machine.linked and machine.cuts == cut:
                await self._declare_dead(host)

        self._later(DECLARED_S, declare)

    async def _declare_dead(self, host: str) -> None:
        self.machines[host].alive = False
        for replica in [replica for replica in self.actors.values() if replica.config.place.host == host]:
            await self._report(replica, "its host is lost")
        await self._notify(host)

    async def come_back(self, host: str, lingers_s: float = 8.0) -> None:
        """The machine is linked again. If Ray has declared its node dead, it joins with a new one at once; processes
        from before end within ``lingers_s``."""
        machine = self.machines[host]
        if machine.linked:
            return
        machine.linked = True
        if not machine.alive or not machine.powered:
            for replica in [replica for replica in self.actors.values() if replica.config.place.host == host]:
                await self._report(replica, "its host is lost")
            machine.alive, machine.powered, machine.generation = True, True, machine.generation + 1
            machine.silent = True  # while its new host actor starts
            self._later(self.rng.uniform(0.5, HOST_ACTOR_S), partial(self.answer, host))
        for replica in dict.fromkeys(self.holders[host].values()):  # in an order that a seed repeats
            if self.actors.get(replica.name) is not replica or replica.noticed is not None:
                self._end_later(replica, self.rng.uniform(0.5, lingers_s))
        await self._notify(host)

    async def answer(self, host: str) -> None:
        """The host actor replies again."""
        self.machines[host].silent = False
        await self._notify(host)

    def _end_later(self, replica: VirtualReplica, delay_s: float) -> None:
        async def end() -> None:
            await self.die(replica, "its raylet has ended")

        self._later(delay_s, end)

    # ClusterClient

    async def start(self, config: ReplicaConfig) -> None:
        id, name = config.id, actor_name(config.model.name, config.place.replica, config.run.epoch)
        if not self.machines[config.place.host].alive:
            raise HostLost(config.place.host)
        if config.run.epoch <= self.last_epochs.get(id, 0):
            self.violations.append(f"{name} reuses an epoch, the last one is {self.last_epochs[id]}")
        assert self.records is not None
        if self.records.writable and self.records.journal.state().epochs.get(id, 0) < config.run.epoch:
            self.violations.append(f"{name} is started before its record is written")
        self.last_epochs[id] = config.run.epoch
        self.starts[config.model.name] += 1
        status = ReplicaStatus(version=0, phase=Phase.LOADING, pid=next(self._pids), started=0.0)
        replica = VirtualReplica(config, status, generation=self.machines[config.place.host].generation)
        self.actors[name] = replica
        slow, self.slow_starts = self.slow_starts > 0, max(0, self.slow_starts - 1)
        task = asyncio.get_running_loop().create_task(self._run(replica, 1e5 if slow else self.load_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, replica: VirtualReplica, load_s: float) -> None:
        """Begin the process once the machine can be reached and Ray's own cores are free; then load."""
        host = replica.config.place.host
        machine, held = self.machines[host], self.holders[host]

        def is_ended() -> bool:
            return replica.noticed is not None or replica.dead is not None

        def may_begin() -> bool:
            blocking = [held[core] for core in replica.config.place.cores if core in held]
            return machine.linked and all(other.generation != replica.generation for other in blocking)

        while not (is_ended() or may_begin()):  # noqa: ASYNC110 - as Ray's own scheduling
            await asyncio.sleep(0.5)
        await asyncio.sleep(self.process_s)
        if is_ended() or not machine.linked:
            return
        for core in replica.config.place.cores:
            if core in held:
                self.violations.append(f"{replica.name} takes core {core} of {host}, which {held[core].name} holds")
            held[core] = replica
        replica.runs = True
        await replica.report(phase=Phase.LOADING)
        await asyncio.sleep(load_s)
        if not is_ended():
            await replica.report(phase=Phase.READY, load_s=load_s, address=f"tls://{host}")

    async def watch(self, name: str, seen: int) -> ReplicaStatus:
        replica, loop = self.actors.get(name), asyncio.get_running_loop()
        if replica is None:
            raise ReplicaDied("Ray has no such actor")
        machine, begun = self.machines[replica.config.place.host], loop.time()
        silent_since = begun
        async with replica.changed:
            while True:
                now = loop.time()
                if replica.noticed is not None:
                    raise ReplicaDied(replica.noticed)
                replies = machine.linked and replica.runs and not replica.hangs and replica.dead is None
                if replies and (replica.status.version > seen or now - begun >= REPORT_S):
                    return replica.status
                if replies:
                    silent_since = now
                elif replica.runs and now - silent_since >= HANGS_S:
                    raise ReplicaDied(f"it has not replied for {HANGS_S:.0f} s: its process hangs")
                await _wait(replica.changed, REPORT_S if replies else 5.0)

    async def drain(self, name: str, timeout_s: float) -> bool:
        replica = self.actors.get(name)
        if replica is not None:
            machine = self.machines[replica.config.place.host]
            async with replica.changed:
                while replica.noticed is None and (not machine.linked or replica.hangs):
                    await _wait(replica.changed, 5.0)
            await asyncio.sleep(min(self.drain_s, timeout_s))
        return True

    async def end(self, name: str, pid: int | None, started: float | None, host: str | None = None) -> bool:
        assert host is not None
        machine, replica = self.machines[host], self.actors.get(name)
        if not machine.linked and machine.alive:
            await self._hang(host)
            if machine.alive and not machine.linked:
                return False
        if not machine.alive:
            self.actors.pop(name, None)  # its process may live on
            return True
        if replica is None or replica.generation != machine.generation:  # a new host actor looks for the process
            self.actors.pop(name, None)
            return await self._is_gone(host, pid)
        await self.die(replica, "killed")
        if machine.silent and pid is not None:
            await asyncio.sleep(CALL_S)
            if machine.silent:
                return False
        self.actors.pop(name, None)
        return True

    async def _is_gone(self, host: str, pid: int | None) -> bool:
        """Returns whether a process has ended within the deadline of a host actor."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CONFIRM_S
        while any(holder.status.pid == pid for holder in self.holders[host].values()):
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(0.5)
        return True

    async def _hang(self, host: str) -> None:
        """Wait for a reply of a host that does not reply: until its link is back, it is declared dead, or too long."""
        machine, loop = self.machines[host], asyncio.get_running_loop()
        deadline = loop.time() + CALL_S
        async with self._changed[host]:
            while machine.alive and (not machine.linked or machine.silent) and loop.time() < deadline:
                await _wait(self._changed[host], deadline - loop.time())

    async def held_cores(self, claims: str | None, host: str | None = None) -> dict[int, CoreOwner]:
        assert host is not None
        machine = self.machines[host]
        if machine.alive and (not machine.linked or machine.silent):
            await self._hang(host)
            if machine.alive and (not machine.linked or machine.silent):
                raise HostLost(f"no host actor replies for {host}")
        if not machine.alive:
            return {}
        return {core: CoreOwner(replica.status.pid, "a replica") for core, replica in self.holders[host].items()}

    async def interpreter(self, python: str | None, host: str | None = None) -> Interpreter:
        assert host is not None
        if not self.machines[host].linked:
            await self._hang(host)
        if not self.machines[host].linked:
            raise HostLost(host)
        return await super().interpreter(python, host)

    async def read_log(
        self, path: str, lines: int, host: str | None = None, offset: int | None = None, *, ended: bool = False
    ) -> LogText:
        if host is not None and not self.machines[host].linked:
            await self._hang(host)
        return LogText("")

    async def lost_hosts(self) -> Mapping[str, Loss]:
        return {host: Loss("its Ray node is gone") for host, machine in self.machines.items() if not machine.alive}

    async def host_reports(self) -> Mapping[str, HostReport]:
        machines = self.machines.items()
        return {
            host: HostReport(str(machine.generation))
            for host, machine in machines
            if machine.alive and machine.linked and not machine.silent
        }

    async def survivors(self) -> tuple[Sequence[Survivor], Mapping[str, int]]:
        """Returns the actors that reply. Ray kills the others: a process on a machine that is cut off learns of it when
        the link is back."""
        found: list[Survivor] = []
        lost: dict[str, int] = {}
        for name, replica in list(self.actors.items()):
            machine = self.machines[replica.config.place.host]
            if machine.linked and replica.runs and not replica.hangs and replica.noticed is None and not replica.dead:
                found.append(Survivor(replica.config, replica.status))
                continue
            id = f"{replica.config.model.name}/{replica.config.place.replica}"
            lost[id] = max(replica.config.run.epoch, lost.get(id, 0))
            del self.actors[name]
            replica.noticed = replica.noticed or "it was killed"
            if machine.linked and replica.dead is None:
                await self.die(replica, "killed")
        if lost:
            await asyncio.sleep(ADOPT_S)
        return found, lost


async def _wait(changed: asyncio.Condition, most_s: float) -> None:
    """Wait for a notification, for at most ``most_s``. The caller holds the condition."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(changed.wait(), max(0.001, most_s))


class TailJournal(Journal):
    """A journal in memory whose end can be lost as by a power failure: the events after the last synced record."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(None, clock=clock)
        self._synced = self._state

    def append(self, record: R) -> R:
        stored = super().append(record)
        if not isinstance(stored, Event):
            self._synced = self._state
        return stored

    def lose_tail(self) -> None:
        while self._events and self._events[-1].seq > self._synced.seq:
            self._events.pop()
        self._state = self._synced
