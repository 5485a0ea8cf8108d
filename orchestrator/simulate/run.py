"""A run with the planner, and a policy that scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from orchestrator.fleet.core_allocation import core_rows
from orchestrator.scaling.autoscaler import FleetNow, ModelNow
from orchestrator.scaling.demand_report import Counts
from orchestrator.scaling.forecast import Load
from orchestrator.simulate.scaling_policy import ScalingPolicy
from orchestrator.simulate.scenario import Scenario
from orchestrator.simulate.simulated_fleet import Change, Phase, SimFleet
from orchestrator.simulate.simulated_model import SimModel
from orchestrator.simulate.simulated_queue import Choice, Measured, SimulatedQueue
from orchestrator.simulate.simulated_replica import SimReplica
from orchestrator.simulate.simulated_request import Arrival, SimRequest
from orchestrator.simulate.virtual_clock import Clock
from placements.planner.spec_hosts import prices

GRACE_S = 3600.0
"""How long after the last arrival a run waits for answers."""


@dataclass(frozen=True)
class Decision:
    """What the policy said of one model."""

    at: float
    model: str
    before: int
    after: int
    reason: str


@dataclass(frozen=True)
class Outcome:
    """What a run showed, by model."""

    scenario: Scenario
    seconds: float  # of the virtual clock
    measured: Mapping[str, Measured]
    loads: Mapping[str, int]  # starts of replicas
    core_s: Mapping[str, float]  # core-seconds that its replicas held, loading ones too
    changes: tuple[Change, ...] = ()
    decisions: tuple[Decision, ...] = ()

    @property
    def attainment(self) -> float:
        """Of all requests of all models, those that were answered within the objectives."""
        arrived = sum(one.arrived for one in self.measured.values())
        return sum(one.attained for one in self.measured.values()) / arrived if arrived else 1.0


def simulate(
    scenario: Scenario,
    arrivals: Iterable[Arrival],
    policy: ScalingPolicy,
    *,
    seed: int = 0,
    initial: Mapping[str, int] | None = None,
    choice: Choice | None = None,
    since: float = 0.0,
    bounds: Callable[[SimModel, float], tuple[int, int]] | None = None,
    record: bool = False,
) -> Outcome:
    """Run the arrivals, which are in the order of their times, until all are answered, or GRACE_S after the last.

    ``initial`` is how many replicas of each model are ready at the beginning, by default its ``min``; ``choice``
    another router than production's; ``since``: requests that come earlier are not measured; ``bounds`` gives min and
    max of a model at a time (schedules); ``record`` keeps every change of a replica and every decision. Raises KeyError
    for a model that the scenario does not have. The same arguments give the same outcome.
    """
    run = _Run(scenario, policy, seed, choice, since, bounds, record)
    return run.run(arrivals, initial)


class _Run:
    def __init__(
        self,
        scenario: Scenario,
        policy: ScalingPolicy,
        seed: int,
        choice: Choice | None,
        since: float,
        bounds: Callable[[SimModel, float], tuple[int, int]] | None,
        record: bool,
    ) -> None:
        self.scenario = scenario
        self.policy = policy
        self.clock = clock = Clock()
        self.bounds = bounds
        self.desks: dict[str, SimulatedQueue] = {}
        for model in scenario.models:
            desk = self.desks[model.name] = SimulatedQueue(
                model, clock, gateways=scenario.gateways, seed=seed, choice=choice
            )
            desk.since = since
            desk.on_cold = self._on_cold
            desk.on_empty = self._on_empty
        self.fleet = SimFleet(
            scenario, clock, on_ready=self._on_ready, on_drain=self._on_drain, on_lost=self._on_lost, record=record
        )
        self.targets: dict[str, int] = {}
        self.decisions: list[Decision] | None = [] if record else None
        self._first_ready: dict[str, float | None] = dict.fromkeys(self.desks, None)
        self._hosts, self._blocked = core_rows(scenario.hosts, prices(scenario.spec, scenario.hosts))
        self._host_numbers = {host.name: i for i, host in enumerate(scenario.hosts)}
        self._by_request: set[str] = set()  # models without scaling that a request has started
        self._last_tick = 0.0
        self._woken = False
        self._stop_at = math.inf

    def run(self, arrivals: Iterable[Arrival], initial: Mapping[str, int] | None) -> Outcome:
        names = self.scenario.models
        self.targets = {model.name: model.min if initial is None else initial.get(model.name, 0) for model in names}
        self.fleet.apply(self.targets, at_once=True)
        self.clock.at(self.policy.tick_s, self._tick)
        desks = self.desks
        self.clock.run(arrivals, lambda arrival: desks[arrival.model].arrive(arrival))
        return Outcome(
            self.scenario,
            self.clock.now,
            MappingProxyType({name: desk.measured for name, desk in desks.items()}),
            MappingProxyType(dict(self.fleet.loads)),
            MappingProxyType({name: self.fleet.core_seconds(name) for name in desks}),
            tuple(self.fleet.changes or ()),
            tuple(self.decisions or ()),
        )

    # What happens

    def _tick(self, _: object) -> None:
        self._decide()
        for desk in self.desks.values():
            hold_s = desk.model.hold_s
            if hold_s != math.inf and not desk.replicas and desk.waiting:
                desk.refuse_older(self.clock.now - hold_s)
        if not self._is_over():
            self.clock.at(self.clock.now + self.policy.tick_s, self._tick)

    def _is_over(self) -> bool:
        if self.clock.arriving:
            return False
        if self._stop_at == math.inf:
            self._stop_at = self.clock.now + GRACE_S
        return self.clock.now >= self._stop_at or not any(desk.live or desk.waiting for desk in self.desks.values())

    def _on_cold(self) -> None:
        """The first request of a model without replicas is there: decide at once, unless one starts already."""
        if not self._woken:
            self._woken = True
            self.clock.at(self.clock.now, self._wake)

    def _wake(self, _: object) -> None:
        self._woken = False
        starting = {name for (name, _), holder in self.fleet.holders.items() if holder.phase is Phase.LOADING}
        cold = [
            desk for name, desk in self.desks.items() if desk.waiting and not desk.replicas and name not in starting
        ]
        self._by_request |= {desk.model.name for desk in cold if not desk.model.auto and desk.model.max}
        if cold:
            self._decide()

    def _on_ready(self, model: str, replica: SimReplica) -> None:
        if self._first_ready[model] is None:
            self._first_ready[model] = self.clock.now
        self.desks[model].add(replica)

    def _on_drain(self, model: str, replica: SimReplica) -> None:
        self.desks[model].retire(replica)

    def _on_empty(self, replica: SimReplica) -> None:
        self.fleet.emptied(replica)

    def _on_lost(self, model: str, requests: list[SimRequest]) -> None:
        self.desks[model].lose(requests)

    # Scaling

    def _decide(self) -> None:
        now = self.clock.now
        seconds, self._last_tick = now - self._last_tick, now
        loads = {name: _load(desk, seconds) for name, desk in self.desks.items()}
        found = self.policy.decide(now, loads, self._fleet_now())
        before, self.targets = self.targets, {name: found.counts.get(name, old) for name, old in self.targets.items()}
        if self.decisions is not None:
            for name, reason in found.reasons.items():
                if before[name] != self.targets[name]:
                    self.decisions.append(Decision(now, name, before[name], self.targets[name], reason))
        if self.targets != before:
            self.fleet.apply(self.targets)

    def _fleet_now(self) -> FleetNow:
        counts, places = self.fleet.counts(), self.fleet.places(self._host_numbers)
        return FleetNow(
            tuple(self._model_now(model, *counts[model.name], places[model.name]) for model in self.scenario.models),
            self._hosts,
            self._blocked,
        )

    def _model_now(
        self, model: SimModel, ready: int, starting: int, since: float | None, places: tuple[tuple[int, int], ...]
    ) -> ModelNow:
        name = model.name
        low, high = (model.min, model.max) if self.bounds is None else self.bounds(model, self.clock.now)
        if not ready and not starting:
            self._first_ready[name] = None
        return ModelNow(
            name=name,
            cores=model.cores,
            slots=model.slots,
            min=low,
            max=high,
            priority=model.priority,
            load_s=model.load_s,
            objectives=model.objectives,
            idle_s=model.idle_s,
            override=None if model.auto else max(low, int(name in self._by_request)),
            target=self.targets[name],
            ready=ready,
            starting=starting,
            since=since,
            reachable=self.fleet.reachable[name],
            worth_per_1000=model.worth_per_1000,
            first_ready_at=self._first_ready[name],
            places=places,
            prefill_s=model.typical_prefill_s,
        )


def _load(desk: SimulatedQueue, seconds: float) -> Load:
    """What has happened since the last tick; the count begins anew."""
    counts, desk.counts = desk.counts, Counts()
    waiting = desk.waiting
    longest_wait_s = desk.longest_wait_s if waiting else 0.0
    return counts.load(seconds, waiting=waiting, live=desk.live, longest_wait_s=longest_wait_s)
