"""The replicas of a run, and the cores that they hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from orchestrator.simulate.scenario import Scenario
from orchestrator.simulate.simulated_replica import SimReplica
from orchestrator.simulate.simulated_request import SimRequest
from orchestrator.simulate.virtual_clock import Clock
from placements.planner.placement import Placement, Running
from placements.planner.plan import plan


class Phase(Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


class Holder:
    """One replica from its start to its end, with the cores that it holds."""

    __slots__ = ("phase", "placement", "replica", "since", "started_at")

    def __init__(self, placement: Placement, replica: SimReplica, now: float) -> None:
        self.placement = placement
        self.replica = replica
        self.started_at = now
        self.since = now  # in this phase
        self.phase = Phase.LOADING

    @property
    def running(self) -> Running:
        """As the planner sees it."""
        return self.placement.running

    @property
    def cores(self) -> int:
        return 0 if self.placement.cores is None else len(self.placement.cores)


@dataclass(frozen=True)
class Change:
    """One replica has begun or ended to hold its cores: what a picture is drawn from."""

    at: float
    model: str
    replica: int
    host: str
    cores: str
    what: str  # start, ready, drain, end


class SimFleet:
    """Carries out what the planner says. One replica after the other holds a core, never two.

    1. Running replicas that the plan does not have end: those that load at once, those that are ready drain.
    2. A placement begins as soon as its cores and its number are free; it is ready ``load_s`` later.
    3. What drains for longer than the spec's ``deadlines.drain_s`` is cut off.
    """

    def __init__(
        self,
        scenario: Scenario,
        clock: Clock,
        *,
        on_ready: Callable[[str, SimReplica], None],
        on_drain: Callable[[str, SimReplica], None],
        on_lost: Callable[[str, list[SimRequest]], None],
        record: bool = False,
    ) -> None:
        """``on_drain`` takes the replica out of the routes, and calls ``emptied`` once it has ended its last request.
        With ``record`` all ``changes`` are kept."""
        self.scenario = scenario
        self.clock = clock
        self.holders: dict[tuple[str, int], Holder] = {}
        self.loads: dict[str, int] = dict.fromkeys((model.name for model in scenario.models), 0)
        self.core_s: dict[str, float] = dict.fromkeys(self.loads, 0.0)  # of those that are gone
        self.reachable: dict[str, int | None] = dict.fromkeys(self.loads, None)
        self.changes: list[Change] | None = [] if record else None
        self._models = {model.name: model for model in scenario.models}
        self._drain_s = {model.name: model.deadlines.drain_s for model in scenario.spec.models}
        self._cores = {host.name: 0 for host in scenario.hosts}  # bit masks of what is held
        self._held: list[Placement] = []  # planned, and waiting for cores
        self._by_replica: dict[SimReplica, Holder] = {}
        self._on_ready, self._on_drain, self._on_lost = on_ready, on_drain, on_lost

    def of(self, model: str) -> list[Holder]:
        """Its replicas that load or are ready."""
        return [
            holder
            for (name, _), holder in self.holders.items()
            if name == model and holder.phase in (Phase.LOADING, Phase.READY)
        ]

    def counts(self) -> dict[str, tuple[int, int, float | None]]:
        """Of each model: ready, loading, and since when the newest is ready or loads."""
        ready, loading = dict.fromkeys(self.loads, 0), dict.fromkeys(self.loads, 0)
        since: dict[str, float | None] = dict.fromkeys(self.loads, None)
        for (name, _), holder in self.holders.items():
            if holder.phase is Phase.READY:
                ready[name] += 1
            elif holder.phase is Phase.LOADING:
                loading[name] += 1
            else:
                continue
            newest = since[name]
            since[name] = holder.since if newest is None else max(newest, holder.since)
        return {name: (ready[name], loading[name], since[name]) for name in self.loads}

    def places(self, numbers: Mapping[str, int]) -> dict[str, tuple[tuple[int, int], ...]]:
        """Of each model: host (by ``numbers``) and first core of each replica that loads or is ready, lowest index
        first; those that are planned and wait for their cores among them."""
        found: dict[str, list[tuple[int, tuple[int, int]]]] = {name: [] for name in self.loads}
        live = [holder.placement for holder in self.holders.values() if holder.phase is not Phase.DRAINING]
        for placement in [*live, *self._held]:
            if placement.cores is not None:
                place = numbers[placement.host], placement.cores.first
                found[placement.model].append((placement.replica, place))
        return {name: tuple(place for _, place in sorted(own)) for name, own in found.items()}

    def apply(self, counts: Mapping[str, int], *, at_once: bool = False) -> None:
        """Plan for so many replicas, and begin with it. ``at_once``: what starts is ready already, as at the beginning
        of a run."""
        live = [holder for holder in self.holders.values() if holder.phase is not Phase.DRAINING]
        scenario = self.scenario
        made = plan(scenario.spec, scenario.hosts, scenario.checkpoints, [one.running for one in live], dict(counts))
        wished = {placement.running: placement for placement in made.placements}
        for name in self.reachable:
            self.reachable[name] = None
        for name in {one.model for one in made.unplaced}:
            self.reachable[name] = sum(1 for placement in made.placements if placement.model == name)
        self._held = []
        for holder in live:  # 1
            if holder.running in wished:
                del wished[holder.running]
            elif holder.phase is Phase.LOADING:
                self._end(holder)
            else:
                self._drain(holder)
        self._held = list(wished.values())
        self._start_held(at_once)

    def emptied(self, replica: SimReplica) -> None:
        """A draining replica has ended its last request."""
        self._end(self._by_replica[replica])
        self._start_held()

    def core_seconds(self, model: str) -> float:
        """That its replicas have held until now."""
        now = self.clock.now
        return self.core_s[model] + sum(
            (now - holder.started_at) * holder.cores for (name, _), holder in self.holders.items() if name == model
        )

    # Inside

    def _start_held(self, at_once: bool = False) -> None:
        waiting, self._held = self._held, []
        for placement in waiting:
            mask = _mask(placement)
            if (placement.model, placement.replica) in self.holders or self._cores[placement.host] & mask:
                self._held.append(placement)
            else:
                self._start(placement, mask, at_once)

    def _start(self, placement: Placement, mask: int, at_once: bool) -> None:
        model, now = self._models[placement.model], self.clock.now
        holder = Holder(placement, SimReplica(model, placement.replica), now)
        self.holders[placement.model, placement.replica] = holder
        self._by_replica[holder.replica] = holder
        self._cores[placement.host] |= mask
        self._tell(holder, "start")
        if at_once:
            self._ready(holder)
        else:
            self.loads[placement.model] += 1
            self.clock.at(now + model.load_s, self._ready, holder)

    def _ready(self, holder: Holder) -> None:
        if holder.phase is Phase.LOADING:
            holder.phase, holder.since = Phase.READY, self.clock.now
            self._tell(holder, "ready")
            self._on_ready(holder.placement.model, holder.replica)

    def _drain(self, holder: Holder) -> None:
        name = holder.placement.model
        holder.phase, holder.since = Phase.DRAINING, self.clock.now
        self._tell(holder, "drain")
        self.clock.at(self.clock.now + self._drain_s[name], self._cut_off, holder)
        self._on_drain(name, holder.replica)

    def _cut_off(self, holder: Holder) -> None:
        if holder.phase is Phase.DRAINING:
            self._on_lost(holder.placement.model, holder.replica.take_all())
            self._end(holder)
            self._start_held()

    def _end(self, holder: Holder) -> None:
        placement = holder.placement
        holder.phase = Phase.GONE
        del self.holders[placement.model, placement.replica]
        del self._by_replica[holder.replica]
        self._cores[placement.host] &= ~_mask(placement)
        self.core_s[placement.model] += (self.clock.now - holder.started_at) * holder.cores
        self._tell(holder, "end")

    def _tell(self, holder: Holder, what: str) -> None:
        if self.changes is not None:
            placement = holder.placement
            cores = "" if placement.cores is None else str(placement.cores)
            self.changes.append(Change(self.clock.now, placement.model, placement.replica, placement.host, cores, what))


def _mask(placement: Placement) -> int:
    cores = placement.cores
    return 0 if cores is None else ((1 << len(cores)) - 1) << cores.first
