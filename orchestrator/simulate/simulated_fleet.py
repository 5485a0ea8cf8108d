"""The simulated fleet: the replicas of a run and the cores that they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from orchestrator.simulate.scenario import Scenario
from orchestrator.simulate.simulated_encoder import SimEncoder
from orchestrator.simulate.simulated_hosts import SimHosts
from orchestrator.simulate.simulated_replica import SimReplica
from orchestrator.simulate.simulated_request import SimRequest
from orchestrator.simulate.virtual_clock import Clock
from placements.facts.topology import Host
from placements.planner.host_choice import choose_hosts
from placements.planner.placement import Placement, Running
from placements.planner.plan import Plan, plan


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
    since: float  # in this phase
    phase: SimulatedPhase = SimulatedPhase.LOADING

    @property
    def running(self) -> Running:
        """The replica as the planner's input."""
        return self.placement.running

    @property
    def cores(self) -> int:
        return 0 if self.placement.cores is None else len(self.placement.cores)


@dataclass(frozen=True)
class Change:
    """One transition of a replica, for the timeline."""

    at: float
    model: str
    replica: int
    host: str
    cores: str
    what: str  # start, ready, drain, end


@dataclass(eq=False)
class SimFleet:
    """Carries out plans. A core is held by at most one replica at a time.

    1. Running replicas that are not in the plan are removed: loading ones stop immediately, ready ones drain.
    2. A placement starts as soon as its cores and its index are free; it is ready ``load_s`` later.
    3. A replica that drains for longer than the spec's ``deadlines.drain_s`` is stopped with its requests.
    """

    scenario: Scenario
    clock: Clock
    on_ready: Callable[[str, SimReplica], None]
    on_drain: Callable[[str, SimReplica], None]  # removes the replica from routing; calls `emptied` at its last request
    on_lost: Callable[[str, list[SimRequest]], None]
    record: bool  # keep all ``changes``

    def __post_init__(self) -> None:
        scenario = self.scenario
        self.holders: dict[tuple[str, int], Holder] = {}
        self.loads: dict[str, int] = dict.fromkeys((model.name for model in scenario.models), 0)
        self.core_s: dict[str, float] = dict.fromkeys(self.loads, 0.0)  # of stopped replicas
        self.reachable: dict[str, int | None] = dict.fromkeys(self.loads, None)
        self.changes: list[Change] | None = [] if self.record else None
        self._models = {model.name: model for model in scenario.models}
        self._drain_s = {model.name: model.deadlines.drain_s for model in scenario.spec.models}
        self._cores = {host.name: 0 for host in scenario.hosts}  # bit masks of the cores in use
        self._pending: list[Placement] = []  # planned, waiting for cores
        self._counts: Mapping[str, int] = {}  # as planned last
        self._unplaced = False  # replicas of the last plan have no place
        self._awaited: tuple[Placement, ...] = ()  # of replicas that wait for the machine of their host
        self.hosts = SimHosts(
            scenario.spec, scenario.hosts, clock=self.clock, start_s=scenario.host_start_s, on_joined=self._on_joined
        )
        self._by_replica: dict[SimReplica, Holder] = {}

    def counts(self) -> dict[str, tuple[int, int, float | None]]:
        """Returns by model: ready replicas, loading replicas, and when the newest became ready or started to load."""
        ready, loading = dict.fromkeys(self.loads, 0), dict.fromkeys(self.loads, 0)
        since: dict[str, float | None] = dict.fromkeys(self.loads, None)
        for (name, _), holder in self.holders.items():
            if holder.phase is SimulatedPhase.READY:
                ready[name] += 1
            elif holder.phase is SimulatedPhase.LOADING:
                loading[name] += 1
            else:
                continue
            newest = since[name]
            since[name] = holder.since if newest is None else max(newest, holder.since)
        return {name: (ready[name], loading[name], since[name]) for name in self.loads}

    def places(self, numbers: Mapping[str, int]) -> dict[str, tuple[tuple[int, int], ...]]:
        """Returns by model: host (by ``numbers``) and first core of each loading, ready, pending or awaited
        replica, lowest index first."""
        places: dict[str, list[tuple[int, tuple[int, int]]]] = {name: [] for name in self.loads}
        live = [holder.placement for holder in self.holders.values() if holder.phase is not SimulatedPhase.DRAINING]
        for placement in [*live, *self._pending, *self._awaited]:
            if placement.cores is not None:
                place = numbers[placement.host], placement.cores.first
                places[placement.model].append((placement.replica, place))
        return {name: tuple(place for _, place in sorted(own)) for name, own in places.items()}

    def apply(self, counts: Mapping[str, int], *, at_once: bool = False) -> None:
        """Plans for these numbers of replicas and starts the changes. With ``at_once`` new replicas are ready
        immediately, as at the start of a run."""
        self._counts = dict(counts)
        live = [holder for holder in self.holders.values() if holder.phase is not SimulatedPhase.DRAINING]
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
            if holder.running in wanted:
                del wanted[holder.running]
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
        self._end(self._by_replica[replica])
        self._start_pending()

    def core_seconds(self, model: str) -> float:
        """Returns the core-seconds of a model's replicas until now."""
        now = self.clock.now
        return self.core_s[model] + sum(
            (now - holder.started_at) * holder.cores for (name, _), holder in self.holders.items() if name == model
        )

    # Inside

    def _plan(self, hosts: Sequence[Host]) -> Plan:
        live = [holder.running for holder in self.holders.values() if holder.phase is not SimulatedPhase.DRAINING]
        return plan(self.scenario.spec, hosts, self.scenario.checkpoints, live, dict(self._counts))

    def _request_hosts(self) -> Plan:
        """Requests the cheapest hosts for replicas without a place. Returns the plan with all requested hosts."""
        hosts = self.hosts
        choice = choose_hosts(
            self.scenario.spec, hosts.groups, hosts.absent, lambda more: self._plan(hosts.with_coming(more))
        )
        hosts.request(choice.hosts)
        coming = {host.name for host in hosts.coming}
        self._awaited = tuple(placement for placement in choice.plan.placements if placement.host in coming)
        return choice.plan

    def _on_joined(self) -> None:
        self.apply(self._counts)

    def _held_cores(self) -> dict[str, int]:
        cores = Counter[str]()
        for holder in self.holders.values():
            cores[holder.placement.host] += max(1, holder.cores)
        return cores

    def _start_pending(self, at_once: bool = False) -> None:
        waiting, self._pending = self._pending, []
        for placement in waiting:
            mask = _mask(placement)
            if (placement.model, placement.replica) in self.holders or self._cores[placement.host] & mask:
                self._pending.append(placement)
            else:
                self._start(placement, mask, at_once)

    def _start(self, placement: Placement, mask: int, at_once: bool) -> None:
        model, now = self._models[placement.model], self.clock.now
        replica = partial(SimReplica if model.encoder is None else SimEncoder, model)
        holder = Holder(placement, replica(placement.replica), now, now)
        self.holders[placement.model, placement.replica] = holder
        self._by_replica[holder.replica] = holder
        self._cores[placement.host] |= mask
        self._record(holder, "start")
        if at_once:
            self._ready(holder)
        else:
            self.loads[placement.model] += 1
            self.clock.at(now + model.load_s, self._ready, holder)

    def _ready(self, holder: Holder) -> None:
        if holder.phase is SimulatedPhase.LOADING:
            holder.phase, holder.since = SimulatedPhase.READY, self.clock.now
            self._record(holder, "ready")
            self.on_ready(holder.placement.model, holder.replica)

    def _drain(self, holder: Holder) -> None:
        name = holder.placement.model
        holder.phase, holder.since = SimulatedPhase.DRAINING, self.clock.now
        self._record(holder, "drain")
        self.clock.at(self.clock.now + self._drain_s[name], self._cut_off, holder)
        self.on_drain(name, holder.replica)

    def _cut_off(self, holder: Holder) -> None:
        if holder.phase is SimulatedPhase.DRAINING:
            self.on_lost(holder.placement.model, holder.replica.take_all())
            self._end(holder)
            self._start_pending()

    def _end(self, holder: Holder) -> None:
        placement = holder.placement
        holder.phase = SimulatedPhase.GONE
        del self.holders[placement.model, placement.replica]
        del self._by_replica[holder.replica]
        self._cores[placement.host] &= ~_mask(placement)
        self.core_s[placement.model] += (self.clock.now - holder.started_at) * holder.cores
        self._record(holder, "end")

    def _record(self, holder: Holder, what: str) -> None:
        if self.changes is not None:
            placement = holder.placement
            cores = "" if placement.cores is None else str(placement.cores)
            self.changes.append(Change(self.clock.now, placement.model, placement.replica, placement.host, cores, what))


def _mask(placement: Placement) -> int:
    cores = placement.cores
    return 0 if cores is None else ((1 << len(cores)) - 1) << cores.first
