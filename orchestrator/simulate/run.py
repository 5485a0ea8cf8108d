"""A simulation run: the planner, the router and a scaling policy on a virtual clock."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from orchestrator.scaling.autoscaler import FleetNow, ModelNow, Targets, autoscale
from orchestrator.scaling.demand_report import AUTOSCALE_S
from orchestrator.scaling.forecast import Counts, History, Load
from orchestrator.scaling.schedules import bounds
from orchestrator.simulate.scenario import Arrival, Scenario, SimModel
from orchestrator.simulate.simulated_fleet import Change, Holder, SimFleet, SimulatedPhase
from orchestrator.simulate.simulated_queue import Measured, SimulatedQueue
from orchestrator.simulate.virtual_clock import Clock
from placements.planner.capacity import Place, needs
from placements.planner.host_pool import HostPool
from placements.planner.spec_hosts import prices

GRACE_S = 3600.0
"""The time that a run continues after the last arrival."""


class ScalingPolicy(Protocol):
    """A policy that is called every ``tick_s``, and immediately when a request finds no replica."""

    @property
    def tick_s(self) -> float: ...

    def decide(self, now: float, loads: Mapping[str, Load], fleet: FleetNow) -> Targets:
        """Returns the targets. ``loads`` cover the time since the last call; ``now`` is in seconds of virtual time."""
        ...


class Joint:
    """Production's autoscaler (`orchestrator.scaling.autoscaler`). Keeps the demand history of one run."""

    tick_s = AUTOSCALE_S

    def __init__(self) -> None:
        self._history = History()

    def decide(self, now: float, loads: Mapping[str, Load], fleet: FleetNow) -> Targets:
        self._history = self._history.after(now, loads)
        return autoscale(self._history, fleet, now)


class Fixed:
    """Constant numbers of replicas."""

    tick_s = AUTOSCALE_S

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = dict(counts)

    def decide(self, now: float, loads: Mapping[str, Load], fleet: FleetNow) -> Targets:
        return Targets(dict(self._counts), {})


class PolicyDecision(NamedTuple):
    """One decision of the policy about one model."""

    at: float
    model: str
    before: int
    after: int
    reason: str


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run, by model."""

    scenario: Scenario
    seconds: float  # of the virtual clock
    measured: Mapping[str, Measured]
    loads: Mapping[str, int]  # starts of replicas
    core_s: Mapping[str, float]  # core-seconds of its replicas, including loading ones
    host_s: Mapping[str, float]  # seconds with a machine, by host
    host_starts: int  # machines that were requested
    changes: tuple[Change, ...] = ()
    decisions: tuple[PolicyDecision, ...] = ()

    @property
    def attainment(self) -> float:
        """The fraction of all requests that were answered within the objectives."""
        arrived = sum(measured.arrived for measured in self.measured.values())
        return sum(measured.attained for measured in self.measured.values()) / arrived if arrived else 1.0


def simulate(
    scenario: Scenario,
    arrivals: Iterable[Arrival],
    policy: ScalingPolicy,
    *,
    seed: int = 0,
    initial: Mapping[str, int] | None = None,
    since: float = 0.0,
    record: bool = False,
) -> Outcome:
    """Simulates the arrivals, in the order of their times, until all have ended, or GRACE_S after the last.

    ``initial`` is the number of replicas of each model that are ready at the start, by default its ``min``. Requests
    before ``since`` are not measured. ``record`` keeps every change of a replica and every decision. Raises KeyError
    for a model that is not in the scenario. The same arguments give the same outcome.
    """
    if initial is None:
        initial = {model.name: model.spec.replicas.min for model in scenario.models}
    return _Run(scenario, policy, seed, since, record).run(arrivals, initial)


class _Run:
    def __init__(self, scenario: Scenario, policy: ScalingPolicy, seed: int, since: float, record: bool) -> None:
        self.scenario, self.policy = scenario, policy
        self.clock = clock = Clock()
        self.queues = {
            model.name: SimulatedQueue(model, clock, gateways=scenario.gateways, seed=seed, since=since)
            for model in scenario.models
        }
        self.fleet = SimFleet(scenario, clock, self.queues, record)
        for queue in self.queues.values():
            queue.on_cold, queue.on_empty = self._on_cold, self.fleet.emptied
        self.targets: dict[str, int] = {}
        self.decisions: list[PolicyDecision] | None = [] if record else None
        self._pool = HostPool(scenario.hosts, {}, prices(scenario.spec, scenario.hosts))
        self._needs = needs(scenario.spec, self._pool, scenario.checkpoints)
        self._by_request: set[str] = set()  # models without scaling that a request has started
        self._last_tick = 0.0
        self._woken = False
        self._stop_at = math.inf

    def run(self, arrivals: Iterable[Arrival], initial: Mapping[str, int]) -> Outcome:
        queues, fleet = self.queues, self.fleet
        self.targets = {name: initial.get(name, 0) for name in queues}
        fleet.apply(self.targets, at_once=True)
        self.clock.at(self.policy.tick_s, self._tick)
        self.clock.run(arrivals, lambda arrival: queues[arrival.model].arrive(arrival))
        return Outcome(
            self.scenario,
            self.clock.now,
            {name: queue.measured for name, queue in queues.items()},
            fleet.loads,
            fleet.core_seconds(),
            fleet.hosts.host_seconds(),
            fleet.hosts.requests,
            tuple(fleet.changes or ()),
            tuple(self.decisions or ()),
        )

    # Events

    def _tick(self, _: object) -> None:
        self._decide()
        self.fleet.give_back_hosts()
        if self._is_over():
            self.fleet.hosts.stop()
        else:
            self.clock.at(self.clock.now + self.policy.tick_s, self._tick)

    def _is_over(self) -> bool:
        if self.clock.arriving:
            return False
        if self._stop_at == math.inf:
            self._stop_at = self.clock.now + GRACE_S
        return self.clock.now >= self._stop_at or not any(queue.live or queue.waiting for queue in self.queues.values())

    def _on_cold(self) -> None:
        """Schedules an immediate decision for the first request of a model without replicas."""
        if not self._woken:
            self._woken = True
            self.clock.at(self.clock.now, self._wake)

    def _wake(self, _: object) -> None:
        self._woken = False
        live = {holder.placement.model for holder in self.fleet.live}
        cold = [queue.model for name, queue in self.queues.items() if queue.waiting and name not in live]
        self._by_request |= {model.name for model in cold if not model.spec.scaling.auto}
        if cold:
            self._decide()

    # Scaling

    def _decide(self) -> None:
        now = self.clock.now
        seconds, self._last_tick = now - self._last_tick, now
        loads = {name: _load(queue, seconds) for name, queue in self.queues.items()}
        decision = self.policy.decide(now, loads, self._fleet_now())
        before = self.targets
        self.targets = {name: decision.counts.get(name, old) for name, old in before.items()}
        if self.decisions is not None:
            for name, reason in decision.reasons.items():
                if before[name] != self.targets[name]:
                    self.decisions.append(PolicyDecision(now, name, before[name], self.targets[name], reason))
        if self.targets != before:
            self.fleet.apply(self.targets)

    def _fleet_now(self) -> FleetNow:
        places, live = self.fleet.places(self._pool.numbers), defaultdict[str, list[Holder]](list)
        for holder in self.fleet.live:
            live[holder.placement.model].append(holder)
        models = (self._model_now(model, live[model.name], places[model.name]) for model in self.scenario.models)
        return FleetNow(tuple(models), self._pool)

    def _model_now(self, model: SimModel, live: Sequence[Holder], places: tuple[Place, ...]) -> ModelNow:
        name, spec, first_ready = model.name, model.spec, self.fleet.first_ready
        held = bounds(spec, self.scenario.begins + self.clock.now)
        ready = sum(holder.phase is SimulatedPhase.READY for holder in live)
        if not live:
            first_ready[name] = None
        return ModelNow(
            name=name,
            need=self._needs.get(name),
            slots=model.slots,
            min=held.min,
            max=held.max,
            priority=spec.priority,
            load_s=model.speed.load_s,
            objectives=spec.objectives,
            idle_s=spec.scaling.idle_s,
            override=None if spec.scaling.auto else max(held.min, int(name in self._by_request)),
            target=self.targets[name],
            ready=ready,
            starting=len(live) - ready,
            since=max((holder.since for holder in live), default=None),
            reachable=self.fleet.reachable[name],
            worth_per_1000=spec.scaling.worth_per_1000,
            first_ready_at=first_ready[name],
            places=places,
            prefill_s=model.typical_prefill_s,
            encodes=model.encoder is not None,
        )


def _load(queue: SimulatedQueue, seconds: float) -> Load:
    """Returns the load since the last tick and resets the counts."""
    counts, queue.counts = queue.counts, Counts()
    return Load.of(counts, seconds, waiting=queue.waiting, live=queue.live, longest_wait_s=queue.longest_wait_s)
