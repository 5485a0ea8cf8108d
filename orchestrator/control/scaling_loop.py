"""Collects the gateways' demand reports and runs the autoscaler, which sets the number of replicas of each model.

It decides every ``AUTOSCALE_S`` seconds, and at once when requests wait for a model without replicas. Without any
gateway reports the numbers stay as they are.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from msgspec import UNSET

from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.control.fleet_state import FleetState
from orchestrator.control.host_conditions import blocked_cores
from orchestrator.control.start_times import expected_start_s
from orchestrator.messages.fleet_status import DemandStatus, ScalingStatus
from orchestrator.messages.gateway_places import GATEWAY_LOST_S
from orchestrator.messages.replica_states import STARTING, State
from orchestrator.scaling.autoscaler import FleetNow, History, Load, ModelNow, Targets, autoscale
from orchestrator.scaling.demand_report import AUTOSCALE_S, DemandReport, DemandWindow, RoutingDecision
from orchestrator.scaling.forecast import Counts
from orchestrator.scaling.schedules import Bounds
from placements.facts.topology import Host
from placements.planner.capacity import Need, needs
from placements.planner.host_pool import HostPool
from placements.planner.spec_hosts import prices
from placements.resources.measured_times import Times
from placements.spec.schema import ModelSpec

log = logging.getLogger(__name__)

AT_ONCE_S = 1.0  # shortest interval between decisions for models without a replica
ROUTED_S = 60.0  # interval between two `Routed` events of a model
HELD_BACK_S = 600.0  # interval between two `HeldBack` events of a model
KINDS = ("Woken", "ScaledUp", "ScaledDown", "ScaledToZero", "HeldBack")  # events about numbers of replicas
PREFILL_SHARE = 0.2  # weight of the newest interval in the average prefill time
UNKNOWN_PREFILL_S = 0.5  # assumed if none was measured, at most half of `ttft_ms`


@dataclass
class _Gateway:
    """The last report of one gateway."""

    number: int  # of its last report
    heard: float
    latest: Mapping[str, DemandWindow]


@dataclass
class _ModelHistory:
    """The scaling history of one model."""

    why: str | None = None  # the reason of the last change
    bounds: tuple[ModelSpec, Bounds] | None = None  # the last ones, with the model of their revision
    prefill_s: float | None = None  # from slot to first token; an exponential average
    first_ready_at: float | None = None  # since the model last had no replica
    routed_at: float = float("-inf")
    held_at: float = float("-inf")  # the last `HeldBack` event
    held_on: float = float("-inf")  # when it was last held back, with or without an event
    changes: dict[str, int] = field(default_factory=dict)  # number of events by kind

    def measure_prefill(self, counts: Counts) -> None:
        """Update the average prefill time."""
        if counts.first_tokens:
            mean = counts.prefill_s / counts.first_tokens
            before = mean if self.prefill_s is None else self.prefill_s
            self.prefill_s = before + PREFILL_SHARE * (mean - before)


class Scaler:
    """The autoscaler's driver in one controller, on its event loop. Times are on the state's clock."""

    def __init__(self, state: FleetState, timed: Callable[[str, Mapping[str, Times]], None]) -> None:
        """``timed`` gets the times of each report, by model and its version."""
        self._state = state
        self._timed = timed
        self._gateways: dict[str, _Gateway] = {}
        self._sums: dict[str, Counts] = {}
        self._since = 0.0  # time of the last decision, or start of the first report
        self._urged_at = float("-inf")  # time of the last urgent decision
        self._woken: set[str] = set()  # models that a request waits for
        self._urged: set[str] = set()  # models with an urgent decision since the last regular one
        self._urgent = False
        self._history = History()
        self._known: defaultdict[str, _ModelHistory] = defaultdict(_ModelHistory)

    # Reports

    @property
    def active(self) -> bool:
        """Returns whether any gateway reports demand."""
        return self._state.counts.autoscaled

    def receive(self, report: DemandReport) -> bool:
        """Receive a report; duplicates are ignored. Returns whether requests wait for a model without replicas."""
        now = self._state.clock()
        self._drop_silent_gateways(now)
        gateway = self._gateways.get(report.gateway)
        if gateway is not None and (report.number == gateway.number or 1 < report.number < gateway.number):
            gateway.heard = now
            return False
        if not self._gateways:
            self._since = now - report.seconds
        windows = {
            window.model: window for window in report.models if self._state.current.spec.model(window.model) is not None
        }
        self._gateways[report.gateway] = _Gateway(report.number, now, windows)
        self._state.counts.autoscaled = True
        for name, demand in windows.items():
            self._sums.setdefault(name, Counts()).add(demand)
            if demand.times:
                self._timed(name, demand.times)
            if demand.waiting and name not in self._urged and self._is_asleep(name):
                self._urged.add(name)
                self._urgent = True
        self._record_samples(report.decisions, now)
        return self._urgent

    def wake(self, model: str) -> None:
        """Decide at once about a model without replicas that a request waits for."""
        self._woken.add(model)
        self._urgent = True

    def end_manual_scaling(self, model: ModelSpec, count: int) -> None:
        """Start from ``count`` after manual scaling ends; with demand reports, only the autoscaler lowers it."""
        self._state.counts.set_target(model, count if self.active and model.scaling.auto and count else None)

    def _is_asleep(self, name: str) -> bool:
        model = self._state.current.spec.model(name)
        return model is not None and model.scaling.auto and self._state.counts.desired(model) == 0

    def _drop_silent_gateways(self, now: float) -> None:
        for name in [name for name, gateway in self._gateways.items() if now - gateway.heard > GATEWAY_LOST_S]:
            log.info("gateway %s has stopped reporting", name)
            del self._gateways[name]
        if not self._gateways:  # their interval is unknown, and nothing is decided
            self._sums.clear()
            self._state.counts.held_back.clear()
            self._state.counts.autoscaled = False

    def _record_samples(self, decisions: Iterable[RoutingDecision], now: float) -> None:
        for decision in decisions:
            if self._state.current.spec.model(decision.model) is None:
                continue
            memory = self._known[decision.model]
            if now - memory.routed_at >= ROUTED_S:
                memory.routed_at = now
                view = self._state.views.get(decision.replica)
                self._state.records.event("info", "Routed", _routing_message(decision), view=view, model=decision.model)

    # Decisions

    def round(self) -> None:
        """Apply schedules and decide if due. Called once in each round, before the goal is computed."""
        now = self._state.clock()
        self._drop_silent_gateways(now)
        self._update_history()
        self._follow_bounds()
        in_time = now - self._since >= AUTOSCALE_S
        if self.active and (in_time or self.due_in() == 0.0):
            if self._urgent:
                self._urged_at = now
            if in_time:
                self._urged.clear()
            self._decide(now)
        elif self._woken and not self.active:
            self._wake_all()

    def due_in(self) -> float | None:
        """Returns the seconds until the pending urgent decision; None: there is none."""
        return max(0.0, self._urged_at + AT_ONCE_S - self._state.clock()) if self._urgent and self.active else None

    def _wake_all(self) -> None:
        """Wake models whose requests wait although no gateway reports any more."""
        for name in self._woken:
            if self._is_asleep(name):
                self._state.counts.woken.add(name)
        self._woken.clear()
        self._urgent = False

    def _update_history(self) -> None:
        """Update first readiness, which decisions need."""
        for model in self._state.current.spec.models:
            memory = self._known[model.name]
            views = self._state.views.of_model(model.name)
            ready = [view.since for view in views if view.state is State.READY]
            if ready and memory.first_ready_at is None:
                memory.first_ready_at = min(ready)
            elif not views:
                memory.first_ready_at = None

    def _follow_bounds(self) -> None:
        """Record when a schedule begins or ends. An apply, which has an event of its own, follows its own bounds."""
        counts = self._state.counts
        for model in self._state.current.spec.models:
            memory, held = self._known[model.name], counts.bounds(model)
            previous, memory.bounds = memory.bounds, (model, held)
            if previous is None or previous[0] is not model or previous[1] == held:
                continue
            before, had = previous[1], counts.within(model, previous[1])
            counts.follow(model, before)
            why = f"by schedule at least {held.min} and at most {held.max}; it was {before.min} and {before.max}"
            self._record_change(model, had, counts.desired(model), why)

    def _decide(self, now: float) -> None:
        state = self._state
        models = state.current.spec.models
        names = {model.name for model in models}
        loads = {name: self._load(name, now) for name in names}
        history = self._history.after(now, loads)
        for name in history.courses.keys() - names:
            history = history.without(name)
            self._known.pop(name, None)
            state.counts.held_back.pop(name, None)
        self._history = history
        self._since, self._urgent = now, False
        for name, counts in self._sums.items():
            self._known[name].measure_prefill(counts)
        self._sums.clear()
        self._woken.clear()
        decision = autoscale(history, self.fleet_now(), now)
        for model in models:
            self._apply_target(model, decision, loads[model.name], now)

    def _apply_target(self, model: ModelSpec, decision: Targets, load: Load, now: float) -> None:
        state = self._state
        count, why = decision.counts.get(model.name), decision.reasons.get(model.name)
        if count is None or not self._decides(model):
            state.counts.held_back.pop(model.name, None)
            return
        before = state.counts.desired(model)
        state.counts.set_target(model, count)
        after = state.counts.desired(model)
        if after != before or why is None:
            state.counts.held_back.pop(model.name, None)
        if after != before:
            self._record_change(model, before, after, why or "", woken=load.waiting > 0)
        elif why is not None:
            self._record_held_back(model, why, now)

    def _decides(self, model: ModelSpec) -> bool:
        """Returns whether the autoscaler decides: the model is not scaled manually, and the spec allows it."""
        return model.scaling.auto and model.name not in self._state.records.state.scales

    def _record_change(self, model: ModelSpec, before: int, after: int, why: str, *, woken: bool = False) -> None:
        memory = self._known[model.name]
        memory.why = why
        if after == before:
            return
        if after > before:
            kind = "Woken" if before == 0 and woken else "ScaledUp"
        else:
            kind = "ScaledDown" if after else "ScaledToZero"
        memory.changes[kind] = memory.changes.get(kind, 0) + 1
        step = f"{before} to {after}"
        message = why if why.startswith(step) else f"{step}: {why}" if why else step
        self._state.records.event("info", kind, message, model=model.name)

    def _record_held_back(self, model: ModelSpec, why: str, now: float) -> None:
        """Record that the model is held back: when it begins, then rarely."""
        memory = self._known[model.name]
        began = now - memory.held_on > ROUTED_S
        self._state.counts.held_back.setdefault(model.name, why)  # the first reason: its figures change all the time
        memory.held_on = now
        if now - memory.held_at >= (ROUTED_S if began else HELD_BACK_S):
            memory.held_at = now
            memory.changes["HeldBack"] = memory.changes.get("HeldBack", 0) + 1
            self._state.records.event("info", "HeldBack", why, model=model.name)

    # Input of decisions

    def _load(self, name: str, now: float) -> Load:
        latest = self._latest(name)
        return Load.of(
            self._sums.get(name, Counts()),
            now - self._since,
            waiting=max(sum(window.waiting for window in latest), 1 if name in self._woken else 0),
            live=sum(window.live for window in latest),
            longest_wait_s=max((window.longest_wait_s for window in latest), default=0.0),
        )

    def _latest(self, name: str) -> list[DemandWindow]:
        return [gateway.latest[name] for gateway in self._gateways.values() if name in gateway.latest]

    def fleet_now(self) -> FleetNow:
        """Returns the autoscaler's input: live hosts, usable cores, and replicas that are not stopping."""
        state = self._state
        spec = state.current.spec
        pool = HostPool(_hosts_to_use(state), blocked_cores(state), prices(spec, state.hosts))
        need_of = needs(spec, pool, state.current.checkpoints)
        expected = Counter(placement.model for placement in state.uses.expected)
        placed = Counter(target.model for target in state.goal.targets) | expected
        models = (
            self._model_now(model, placed[model.name], need_of.get(model.name), pool.numbers) for model in spec.models
        )
        return FleetNow(tuple(models), pool)

    def _model_now(self, model: ModelSpec, placed: int, need: Need | None, hosts: Mapping[str, int]) -> ModelNow:
        """``placed``: replicas in the last plan; ``need``: of each replica, None if the model uses no cores; ``hosts``:
        the numbers of live hosts, by name."""
        state, memory = self._state, self._known[model.name]
        every = state.views.of_model(model.name)
        views = [view for view in every if _is_counted(view) and view.host in hosts]
        given_up = sum(view.state is State.FAILED and not _is_counted(view) for view in every)
        ready = sum(view.state is State.READY for view in views)
        held, desired = state.counts.bounds(model), state.counts.desired(model)
        own = ((view.host, view.cores.first) for view in views if view.cores is not None)
        encodes = model.kind != "generate"
        batch_wait_s = model.max_wait_ms / 1000 if encodes else 0.0
        return ModelNow(
            name=model.name,
            need=need,
            slots=model.max_batch,
            min=held.min,
            max=held.max,
            priority=model.priority,
            load_s=expected_start_s(state, model),
            objectives=model.objectives,
            idle_s=model.scaling.idle_s,
            override=None if self._decides(model) else desired,
            target=desired,
            ready=ready,
            starting=len(views) - ready,
            since=max((_since(view) for view in views), default=None),
            given_up=given_up,
            reachable=placed if model.name in state.goal.steps else None,
            worth_per_1000=model.scaling.worth_per_1000,
            first_ready_at=memory.first_ready_at,
            prefill_s=_prefill_s(memory.prefill_s, model.objectives.ttft_ms) + batch_wait_s,
            encodes=encodes,
            places=tuple((hosts[host], first) for host, first in (*own, *_awaited_places(state, model.name, hosts))),
        )

    # Status

    def status(self, model: ModelSpec) -> ScalingStatus:
        """Returns the scaling status of a model: target, reason, bounds and demand."""
        held = self._state.counts.bounds(model)
        memory = self._known[model.name]
        return ScalingStatus(
            auto=model.scaling.auto,
            min=held.min,
            max=held.max,
            target=self._state.counts.target(model),
            why=self._state.counts.held_back.get(model.name, memory.why),
            demand=self._demand(model),
        )

    def _demand(self, model: ModelSpec) -> DemandStatus | None:
        if not self.active:
            return None
        latest, forecast = self._latest(model.name), self._history.course(model.name).forecast()
        return DemandStatus(
            arrivals_per_s=round(forecast.rates[0], 3),
            waiting=sum(window.waiting for window in latest),
            live=sum(window.live for window in latest),
            items_per_s_of_replica=UNSET if forecast.input_s is None else round(1 / forecast.input_s, 1),
        )

    def changes(self) -> dict[tuple[str, ...], int]:
        """Returns the number of scaling events by model and kind."""
        names = [model.name for model in self._state.current.spec.models]
        return {(name, kind): self._known[name].changes.get(kind, 0) for name in names for kind in KINDS}


def _hosts_to_use(state: FleetState) -> tuple[Host, ...]:
    """Returns the live hosts, and those that can be added, whose replicas start later."""
    living, avoided = set(state.living_hosts), state.uses.avoided()
    more = {
        host
        for group in state.current.groups
        if group.elastic and group.instance not in avoided
        for host in group.hosts
    }
    return tuple(host for host in state.hosts if host in living or host in more)


def _awaited_places(state: FleetState, model: str, hosts: Collection[str]) -> Iterator[tuple[str, int]]:
    """Yields host and first core of replicas that wait for their machine. Without a place they would be dropped,
    and requested anew, with each decision."""
    waiting = state.uses.waiting()
    for placement in state.uses.expected:
        if placement.model == model and placement.host in waiting and placement.host in hosts and placement.cores:
            yield placement.host, placement.cores.first


def _is_counted(view: ReplicaView) -> bool:
    """Returns whether the replica serves or is expected to."""
    if view.state is State.FAILED:
        return not view.stopped and not view.breaker_open
    return view.state in STARTING or view.state is State.READY


def _since(view: ReplicaView) -> float:
    return view.since if view.state is State.READY else view.begun


def _routing_message(decision: RoutingDecision) -> str:
    parts = [
        f"{decision.request} waited {decision.queue_ms:.0f} ms",
        f"{decision.candidates} had a free slot, {decision.replica} took it as {decision.slot} of {decision.slots}",
    ]
    if decision.affinity:
        parts.append(f"for its {decision.affinity}")
    if decision.cold:
        parts.append("no replica was ready when it came")
    if decision.retries:
        parts.append(f"{decision.retries} tried before")
    return ", ".join(parts)


def _prefill_s(measured: float | None, ttft_ms: float | None) -> float:
    """Returns the part of the time to first token that is not spent waiting."""
    if measured is not None:
        return measured
    return UNKNOWN_PREFILL_S if ttft_ms is None else min(UNKNOWN_PREFILL_S, ttft_ms / 2000)
