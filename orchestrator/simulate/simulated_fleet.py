"""The simulated fleet: its hosts, some of which come and go, and the replicas with the cores that they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from orchestrator.control.decisions.host_demand import CHECK_S, SPARE_S
from orchestrator.simulate.scenario import Scenario
from orchestrator.simulate.simulated_queue import SimulatedQueue
from orchestrator.simulate.simulated_replica import SimEncoder, SimReplica
from orchestrator.simulate.virtual_clock import Clock
from placements.facts.topology import Host
from placements.planner.host_choice import choose_hosts, spare_host
from placements.planner.placement import Placement
from placements.planner.plan import Plan, plan
from placements.planner.spec_hosts import host_groups, least_hosts


class SimulatedPhase(Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Holder:
    """One replica and its cores, from its start to its end."""

    placement: Placement
    replica: SimReplica
    started_at: float
    since: float = 0.0  # in this phase
    phase: SimulatedPhase = SimulatedPhase.LOADING

    def core_seconds(self, now: float) -> float:
        """Returns for how long its cores were held, summed."""
        return (now - self.started_at) * len(self.placement.cores or ())


class Change(NamedTuple):
    """The beginning of a phase of a replica, for the timeline."""

    at: float
    placement: Placement
    phase: SimulatedPhase


class SimFleet:
    """Carries out plans. A core is held by at most one replica at a time.

    1. Running replicas that are not in the plan are removed: loading ones stop immediately, ready ones drain.
    2. A placement starts as soon as its cores and its index are free; it is ready ``load_s`` later.
    3. A replica that drains for longer than the spec's ``deadlines.drain_s`` is stopped with its requests.
    """

    def __init__(self, scenario: Scenario, clock: Clock, queues: Mapping[str, SimulatedQueue], record: bool) -> None:
        """``queues`` get the ready replicas of each model; ``record`` keeps all ``changes``."""
        self.hosts = SimHosts(scenario, clock, lambda: self.apply(self._counts))
        self.holders: dict[tuple[str, int], Holder] = {}
        self.loads = dict.fromkeys(queues, 0)  # starts by model
        self.reachable: dict[str, int | None] = dict.fromkeys(queues, None)
        self.first_ready: dict[str, float | None] = dict.fromkeys(queues, None)  # since a model last had no replica
        self.changes: list[Change] | None = [] if record else None
        self._scenario, self._clock, self._queues = scenario, clock, queues
        self._core_s = dict.fromkeys(queues, 0.0)  # of stopped replicas
        self._held: set[tuple[str, int]] = set()  # host and number of the cores in use
        self._pending: list[Placement] = []  # planned, waiting for cores
        self._counts: Mapping[str, int] = {}  # as planned last
        self._unplaced = False  # replicas of the last plan have no place
        self._awaited: tuple[Placement, ...] = ()  # of replicas that wait for the machine of their host

    @property
    def live(self) -> list[Holder]:
        """The replicas that load or are ready."""
        return [holder for holder in self.holders.values() if holder.phase is not SimulatedPhase.DRAINING]

    def places(self, numbers: Mapping[str, int]) -> dict[str, tuple[tuple[int, int], ...]]:
        """Returns by model: host (by ``numbers``) and first core of each loading, ready, pending or awaited
        replica, lowest index first."""
        places: dict[str, list[tuple[int, tuple[int, int]]]] = {name: [] for name in self.loads}
        live = (holder.placement for holder in self.live)
        for placement in (*live, *self._pending, *self._awaited):
            if placement.cores is not None:
                place = numbers[placement.host], placement.cores.first
                places[placement.model].append((placement.replica, place))
        return {name: tuple(place for _, place in sorted(own)) for name, own in places.items()}

    def apply(self, counts: Mapping[str, int], *, at_once: bool = False) -> None:
        """Plans for these numbers of replicas and starts the changes. With ``at_once`` new replicas are ready
        immediately, as at the start of a run."""
        self._counts = dict(counts)
        live = self.live
        new_plan = self._plan(self.hosts.usable)
        if new_plan.unplaced and self.hosts.keep_leaving():
            new_plan = self._plan(self.hosts.usable)
        self._unplaced = bool(new_plan.unplaced)
        wanted = {placement.running: placement for placement in new_plan.placements}
        for name in self.reachable:
            self.reachable[name] = None
        self._awaited = ()
        expected = self._request_hosts() if self._unplaced and self.hosts.elastic else new_plan
        for name in {item.model for item in expected.unplaced}:
            self.reachable[name] = sum(1 for placement in expected.placements if placement.model == name)
        self._pending = []
        for holder in live:  # 1
            if holder.placement.running in wanted:
                del wanted[holder.placement.running]
            elif holder.phase is SimulatedPhase.LOADING:
                self._end(holder)
            else:
                self._drain(holder)
        self._pending = list(wanted.values())
        self._start_pending(at_once)

    def give_back_hosts(self) -> None:
        """Gives back hosts that no replica needs; to be called every few seconds."""
        if self.hosts.elastic and not self._unplaced and self.hosts.give_back(self._held_cores(), self._plan):
            self.apply(self._counts)

    def emptied(self, replica: SimReplica) -> None:
        """Removes a draining replica that has ended its last request."""
        self._end(self.holders[replica.model.name, replica.index])
        self._start_pending()

    def core_seconds(self) -> dict[str, float]:
        """Returns by model the core-seconds of its replicas until now, including loading and draining ones."""
        sums, now = dict(self._core_s), self._clock.now
        for (name, _), holder in self.holders.items():
            sums[name] += holder.core_seconds(now)
        return sums

    # Inside

    def _plan(self, hosts: Sequence[Host]) -> Plan:
        running = [holder.placement.running for holder in self.live]
        return plan(self._scenario.spec, hosts, self._scenario.checkpoints, running, dict(self._counts))

    def _request_hosts(self) -> Plan:
        """Requests the cheapest hosts for replicas without a place. Returns the plan with all requested hosts."""
        hosts = self.hosts
        choice = choose_hosts(
            self._scenario.spec, hosts.groups, hosts.absent, lambda more: self._plan(hosts.with_coming(more))
        )
        hosts.request(choice.hosts)
        coming = {host.name for host in hosts.coming}
        self._awaited = tuple(placement for placement in choice.plan.placements if placement.host in coming)
        return choice.plan

    def _held_cores(self) -> dict[str, int]:
        cores = Counter[str]()
        for holder in self.holders.values():
            cores[holder.placement.host] += max(1, len(holder.placement.cores or ()))
        return cores

    def _start_pending(self, at_once: bool = False) -> None:
        waiting, self._pending = self._pending, []
        for placement in waiting:
            cores = {(placement.host, core) for core in placement.cores or ()}
            if (placement.model, placement.replica) in self.holders or self._held & cores:
                self._pending.append(placement)
            else:
                self._held |= cores
                self._start(placement, at_once)

    def _start(self, placement: Placement, at_once: bool) -> None:
        model, now = self._queues[placement.model].model, self._clock.now
        replica = (SimReplica if model.encoder is None else SimEncoder)(model, placement.replica)
        holder = self.holders[placement.model, placement.replica] = Holder(placement, replica, now)
        self._enter(holder, SimulatedPhase.LOADING)
        if at_once:
            self._ready(holder)
        else:
            self.loads[placement.model] += 1
            self._clock.at(now + model.speed.load_s, self._ready, holder)

    def _ready(self, holder: Holder) -> None:
        if holder.phase is SimulatedPhase.LOADING:
            self._enter(holder, SimulatedPhase.READY)
            name = holder.placement.model
            if self.first_ready[name] is None:
                self.first_ready[name] = self._clock.now
            self._queues[name].add(holder.replica)

    def _drain(self, holder: Holder) -> None:
        queue = self._queues[holder.placement.model]
        self._enter(holder, SimulatedPhase.DRAINING)
        self._clock.at(self._clock.now + queue.model.spec.deadlines.drain_s, self._cut_off, holder)
        queue.retire(holder.replica)

    def _cut_off(self, holder: Holder) -> None:
        if holder.phase is SimulatedPhase.DRAINING:
            self._queues[holder.placement.model].lose(holder.replica.take_all())
            self._end(holder)
            self._start_pending()

    def _end(self, holder: Holder) -> None:
        placement = holder.placement
        del self.holders[placement.model, placement.replica]
        self._held.difference_update((placement.host, core) for core in placement.cores or ())
        self._core_s[placement.model] += holder.core_seconds(self._clock.now)
        self._enter(holder, SimulatedPhase.GONE)

    def _enter(self, holder: Holder, phase: SimulatedPhase) -> None:
        holder.phase, holder.since = phase, self._clock.now
        if self.changes is not None:
            self.changes.append(Change(holder.since, holder.placement, phase))


class SimHosts:
    """Which hosts of a spec have a machine. Decides as `orchestrator.control.host_requests` does.

    A run begins with the ``min`` hosts of each entry. A requested machine joins ``host_start_s`` later, always.
    """

    def __init__(self, scenario: Scenario, clock: Clock, on_joined: Callable[[], None]) -> None:
        """``on_joined`` is called when a machine has joined."""
        self.requests = 0  # machines that were requested
        self._all = scenario.hosts  # up to ``max`` of each entry of the spec
        self._clock, self._start_s, self._on_joined = clock, scenario.host_start_s, on_joined
        self.groups = host_groups(scenario.spec, scenario.hosts)
        self.elastic = any(group.elastic for group in self.groups)
        self._since = {host.name: 0.0 for host in least_hosts(self.groups)}  # by host, when its machine was requested
        self._coming: dict[str, int] = {}  # the scheduled joining, by host
        self._leaving: set[str] = set()
        self._released = dict.fromkeys((host.name for host in self._all), 0.0)  # seconds with former machines
        self._spare: tuple[str, float] | None = None  # instance type of which a host is spare, and since when
        self._check_at = 0.0

    @property
    def usable(self) -> tuple[Host, ...]:
        """The hosts for replicas: those with a machine that is not to be given back."""
        without = self._coming.keys() | self._leaving
        return tuple(host for host in self._all if host.name in self._since and host.name not in without)

    def with_coming(self, added: Collection[Host] = (), without: Host | None = None) -> tuple[Host, ...]:
        """The hosts for replicas once all requested machines are there, with ``added`` hosts and without one."""
        chosen = {*self.usable, *added}
        return tuple(host for host in self._all if (host in chosen or host.name in self._coming) and host != without)

    @property
    def coming(self) -> list[Host]:
        """The hosts that wait for their machine."""
        return [host for host in self._all if host.name in self._coming]

    @property
    def absent(self) -> list[Host]:
        """The hosts without a machine and without a request."""
        return [host for host in self._all if host.name not in self._since]

    def host_seconds(self) -> dict[str, float]:
        """Returns by host how long it had a machine until now, from the request on."""
        now = self._clock.now
        own = {name: now - since for name, since in self._since.items()}
        return {host.name: self._released[host.name] + own.get(host.name, 0.0) for host in self._all}

    def keep_leaving(self) -> bool:
        """Keeps the hosts that were to be given back. Returns whether there were any."""
        kept, self._leaving, self._spare = bool(self._leaving), set(), None
        return kept

    def request(self, hosts: Collection[Host]) -> None:
        """Requests a machine for each of these absent hosts."""
        for host in hosts:
            self.requests += 1
            self._since[host.name] = self._clock.now
            self._coming[host.name] = self._clock.at(self._clock.now + self._start_s, self._join, host.name)

    def give_back(self, held_cores: Mapping[str, int], draw: Callable[[tuple[Host, ...]], Plan]) -> bool:
        """Releases hosts that are empty and were to be given back; else looks for one that is spare for long enough.
        Returns whether the hosts for replicas have changed.

        ``held_cores``: by host, those of its replicas. ``draw``: plans the present counts on these hosts.
        """
        now = self._clock.now
        if self._leaving or now < self._check_at:
            for name in [name for name in self._leaving if not held_cores.get(name)]:
                self._release(name)
            return False
        self._check_at = now + CHECK_S
        known = {host.name: held_cores.get(host.name, 0) for host in self.usable}
        host = spare_host(self.groups, self._since.keys(), known, lambda without: draw(self.with_coming((), without)))
        if host is None:
            self._spare = None
            return False
        if host.name in self._coming:
            self._clock.cancel(self._coming.pop(host.name))
            self._release(host.name)
            return False
        instance = host.name.rpartition("/")[0]
        if self._spare is None or self._spare[0] != instance:
            self._spare = instance, now
        if now - self._spare[1] < max(SPARE_S, self._start_s):
            return False
        self._spare = None
        self._leaving.add(host.name)
        return True

    def stop(self) -> None:
        """Withdraws all requests, at the end of a run."""
        for name, number in self._coming.items():
            self._clock.cancel(number)
            self._release(name)
        self._coming.clear()

    def _join(self, name: str) -> None:
        del self._coming[name]
        self._on_joined()

    def _release(self, name: str) -> None:
        self._leaving.discard(name)
        self._released[name] += self._clock.now - self._since.pop(name)
