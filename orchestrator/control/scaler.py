"""Keeps what gateways tell of the demand, and has the autoscaler decide how many replicas each model shall have.

It decides every ``AUTOSCALE_S`` seconds, and at once when requests wait for a model that has no replica. While no
gateway tells anything it decides nothing: the numbers stay as they are.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.fleet.core_allocation import rows_of
from orchestrator.fleet.lifecycle import STARTING, State
from orchestrator.fleet.snapshot import ReplicaView
from orchestrator.scaling.autoscaler import FleetNow, History, Load, ModelNow, Objectives, Targets, autoscale
from orchestrator.scaling.demand_report import AUTOSCALE_S, Counts, DemandReport, DemandWindow, RoutingDecision
from orchestrator.scaling.schedules import Bounds
from orchestrator.state.fleet_state import FleetState
from placements.facts.engines import takes_cores
from placements.planner.spec_hosts import prices
from placements.spec.schema import ModelSpec

log = logging.getLogger(__name__)

AT_ONCE_S = 1.0  # the same, when requests wait for a model without a replica
SILENT_S = 10.0  # a gateway that has told nothing for so long is gone
ROUTED_S = 60.0  # between two samples of a model's requests in the events
HELD_BACK_S = 600.0  # between two events about a model that is held back all the time
KINDS = ("Woken", "ScaledUp", "ScaledDown", "ScaledToZero", "HeldBack")  # events about numbers of replicas
PREFILL_SHARE = 0.2  # of the newest interval in what a prompt takes
UNKNOWN_PREFILL_S = 0.5  # at most half of what `ttft_ms` allows, while none was measured
UNKNOWN_LOAD_S = 60.0  # to start a replica, of a model of which no start was measured


@dataclass
class _Gateway:
    """What one gateway has told."""

    number: int  # of its last report
    heard: float
    latest: Mapping[str, DemandWindow]


@dataclass
class _Memory:
    """What is remembered of one model."""

    why: str | None = None  # the last reason
    bounds: tuple[ModelSpec, Bounds] | None = None  # seen last, and of which revision's model
    load_s: float | None = None  # of its last start
    prefill_s: float | None = None  # from the slot to the first token; an exponential average
    first_ready_at: float | None = None  # since it had no replica last
    routed_at: float = float("-inf")
    held_at: float = float("-inf")  # when it was told that it is held back
    held_on: float = float("-inf")  # when it was held back last, told or not
    changes: dict[str, int] = field(default_factory=dict)  # how many events of each kind

    def measure_prefill(self, told: Counts) -> None:
        """Learn from what was counted."""
        if told.first_tokens:
            mean = told.prefill_s / told.first_tokens
            before = mean if self.prefill_s is None else self.prefill_s
            self.prefill_s = before + PREFILL_SHARE * (mean - before)


class Scaler:
    """Of one controller, on its event loop. Times are those of the state's clock."""

    def __init__(self, state: FleetState) -> None:
        self._state = state
        self._gateways: dict[str, _Gateway] = {}
        self._sums: dict[str, Counts] = {}
        self._since = 0.0  # when the last decision was, or the first report began
        self._urged_at = float("-inf")  # when it was decided at once last
        self._woken: set[str] = set()  # models that a request asks for
        self._urged: set[str] = set()  # models that were decided about at once since the last decision in its time
        self._urgent = False
        self._history = History()
        self._known: dict[str, _Memory] = {}

    # What is told

    @property
    def active(self) -> bool:
        """Whether some gateway tells what is asked for."""
        return bool(self._gateways)

    def hear(self, report: DemandReport) -> bool:
        """Take a report, unless it was here before. True: something waits for a model that has no replica."""
        now = self._state.clock()
        self._forget_silent(now)
        known = self._gateways.get(report.gateway)
        if known is not None and (report.number == known.number or 1 < report.number < known.number):
            known.heard = now
            return False
        if not self._gateways:
            self._since = now - report.seconds
        told = {one.model: one for one in report.models if self._state.current.spec.model(one.model) is not None}
        self._gateways[report.gateway] = _Gateway(report.number, now, told)
        for name, demand in told.items():
            self._sums.setdefault(name, Counts()).add(demand)
            if demand.waiting and name not in self._urged and self._is_asleep(name):
                self._urged.add(name)
                self._urgent = True
        self._tell_samples(report.decisions, now)
        return self._urgent

    def wake(self, model: str) -> None:
        """A request asks for a model without replicas: decide about it at once."""
        self._woken.add(model)
        self._urgent = True

    def released(self, model: ModelSpec, count: int) -> None:
        """Nobody's hand holds the number any longer: with demand to decide from it is lowered by that only."""
        self._state.aim_at(model, count if self.active and model.scaling.auto and count else None)

    def _is_asleep(self, name: str) -> bool:
        model = self._state.current.spec.model(name)
        return model is not None and model.scaling.auto and self._state.wanted(model) == 0

    def _forget_silent(self, now: float) -> None:
        for name in [name for name, one in self._gateways.items() if now - one.heard > SILENT_S]:
            log.info("gateway %s tells nothing any more", name)
            del self._gateways[name]
        if not self._gateways:  # what was told before belongs to no interval that is known
            self._sums.clear()

    def _tell_samples(self, decisions: Iterable[RoutingDecision], now: float) -> None:
        for one in decisions:
            if self._state.current.spec.model(one.model) is None:
                continue
            memory = self._memory(one.model)
            if now - memory.routed_at >= ROUTED_S:
                memory.routed_at = now
                view = self._state.views.get(one.replica)
                self._state.tell("info", "Routed", _sample(one), view=view, model=one.model)

    # What is decided

    def round(self) -> None:
        """Once in each round of the controller, before it aims: follow the schedules, and decide when it is time."""
        now = self._state.clock()
        self._forget_silent(now)
        self._watch()
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
        """Seconds until the decision that something waits for; None: nothing does."""
        return max(0.0, self._urged_at + AT_ONCE_S - self._state.clock()) if self._urgent and self.active else None

    def _wake_all(self) -> None:
        """The gateways have fallen silent before it was decided."""
        for name in self._woken:
            if self._is_asleep(name):
                self._state.woken.add(name)
        self._woken.clear()
        self._urgent = False

    def _views(self) -> dict[str, list[ReplicaView]]:
        """By model, in the order of their numbers."""
        found: dict[str, list[ReplicaView]] = {}
        for view in sorted(self._state.views.values(), key=lambda view: view.replica):
            found.setdefault(view.model, []).append(view)
        return found

    def _watch(self) -> None:
        """What a decision needs to know of the past of the replicas."""
        views_of = self._views()
        for model in self._state.current.spec.models:
            memory = self._memory(model.name)
            views = views_of.get(model.name, [])
            measured = [view.load_s for view in views if view.load_s is not None]
            memory.load_s = max(measured, default=memory.load_s)
            ready = [view.since for view in views if view.state is State.READY]
            if ready and memory.first_ready_at is None:
                memory.first_ready_at = min(ready)
            elif not views:
                memory.first_ready_at = None

    def _follow_bounds(self) -> None:
        """Tell when a schedule begins or ends. Where there may be fewer now, by a schedule or by a new revision, what
        runs goes on until the autoscaler finds it too much."""
        for model in self._state.current.spec.models:
            memory, held = self._memory(model.name), self._state.bounds(model)
            known, memory.bounds = memory.bounds, (model, held)
            if known is None or known[1] == held:
                continue
            before = known[1]
            had = min(max(before.min, self._state.targets.get(model.name, 0)), before.max)
            if self.active and model.scaling.auto and held.min < had:
                self._state.aim_at(model, min(had, held.max))
            if known[0] is model:  # else somebody has applied it, which is an event of its own
                why = f"by schedule at least {held.min} and at most {held.max}; it was {before.min} and {before.max}"
                self._tell(model, had, self._state.wanted(model), why)

    def _decide(self, now: float) -> None:
        state = self._state
        models = state.current.spec.models
        names = {model.name for model in models}
        loads = {name: self._load(name, now) for name in names}
        history = self._history.after(now, loads)
        for name in history.courses.keys() - names:
            history = history.without(name)
            self._known.pop(name, None)
            state.held_back.pop(name, None)
        self._history = history
        self._since, self._urgent = now, False
        for name, told in self._sums.items():
            self._memory(name).measure_prefill(told)
        self._sums.clear()
        self._woken.clear()
        found = autoscale(history, self.fleet_now(), now)
        for model in models:
            self._act(model, found, loads[model.name], now)

    def _act(self, model: ModelSpec, found: Targets, load: Load, now: float) -> None:
        state = self._state
        count, why = found.counts.get(model.name), found.reasons.get(model.name)
        if count is None or not self._decides(model):
            return
        before = state.wanted(model)
        state.aim_at(model, count)
        after = state.wanted(model)
        if after != before or why is None:
            state.held_back.pop(model.name, None)
        if after != before:
            self._tell(model, before, after, why or "", woken=load.waiting > 0)
        elif why is not None:
            self._tell_held_back(model, why, now)

    def _decides(self, model: ModelSpec) -> bool:
        """Whether the number is the autoscaler's: it is nobody's by hand, and the spec lets it."""
        return model.scaling.auto and model.name not in self._state.journal.state().scales

    def _tell(self, model: ModelSpec, before: int, after: int, why: str, *, woken: bool = False) -> None:
        memory = self._memory(model.name)
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
        self._state.tell("info", kind, message, model=model.name)

    def _tell_held_back(self, model: ModelSpec, why: str, now: float) -> None:
        """When it begins, and then seldom."""
        memory = self._memory(model.name)
        memory.why = why
        began = now - memory.held_on > ROUTED_S
        self._state.held_back.setdefault(model.name, why)  # as it began: its figures change all the time
        memory.held_on = now
        if now - memory.held_at >= (ROUTED_S if began else HELD_BACK_S):
            memory.held_at = now
            memory.changes["HeldBack"] = memory.changes.get("HeldBack", 0) + 1
            self._state.tell("info", "HeldBack", why, model=model.name)

    # What it is decided from

    def _load(self, name: str, now: float) -> Load:
        told = self._sums.get(name) or Counts()
        latest = self._latest(name)
        return told.load(
            now - self._since,
            waiting=max(sum(one.waiting for one in latest), 1 if name in self._woken else 0),
            live=sum(one.live for one in latest),
            longest_wait_s=max((one.longest_wait_s for one in latest), default=0.0),
        )

    def _latest(self, name: str) -> list[DemandWindow]:
        return [one.latest[name] for one in self._gateways.values() if name in one.latest]

    def fleet_now(self) -> FleetNow:
        """The fleet as the autoscaler sees it: hosts that live, cores that may be used, replicas that do not end."""
        state = self._state
        hosts = state.living_hosts
        rows, blocked = rows_of(hosts, prices(state.current.spec, state.hosts), state.blocked())
        numbers = {host.name: i for i, host in enumerate(hosts)}
        views = self._views()
        placed = Counter(target.model for target in state.goal.targets)
        models = (
            self._model_now(model, views.get(model.name, []), placed[model.name], numbers)
            for model in state.current.spec.models
        )
        return FleetNow(
            models=tuple(models),
            hosts=rows,
            blocked=blocked,
        )

    def _model_now(
        self, model: ModelSpec, every: Iterable[ReplicaView], placed: int, hosts: Mapping[str, int]
    ) -> ModelNow:
        """``placed``: how many the last plan had; ``hosts``: the numbers of those that live, by name."""
        state, memory = self._state, self._memory(model.name)
        every = list(every)
        views = [view for view in every if _counts(view) and view.host in hosts]
        given_up = sum(view.state is State.FAILED and not _counts(view) for view in every)
        ready = sum(view.state is State.READY for view in views)
        held, wanted = state.bounds(model), state.wanted(model)
        in_cores = any(takes_cores(state.current.engines[model.name], host) for host in state.living_hosts)
        wishes = model.objectives
        return ModelNow(
            name=model.name,
            cores=model.tp_degree if in_cores else 0,
            slots=model.max_batch,
            min=held.min,
            max=held.max,
            priority=model.priority,
            load_s=UNKNOWN_LOAD_S if memory.load_s is None else memory.load_s,
            objectives=Objectives(_seconds(wishes.ttft_ms), _seconds(wishes.tpot_ms), _seconds(wishes.queue_ms)),
            idle_s=model.scaling.idle_s,
            override=None if self._decides(model) else wanted,
            target=wanted,
            ready=ready,
            starting=len(views) - ready,
            since=max((_since(view) for view in views), default=None),
            given_up=given_up,
            reachable=placed if model.name in state.goal.steps else None,
            worth_per_1000=model.scaling.worth_per_1000,
            first_ready_at=memory.first_ready_at,
            prefill_s=_prefill_s(memory.prefill_s, _seconds(wishes.ttft_ms)),
            places=tuple((hosts[view.host], view.cores.first) for view in views if view.cores is not None),
        )

    def _memory(self, name: str) -> _Memory:
        return self._known.setdefault(name, _Memory())

    # What is shown

    def told(self, model: ModelSpec) -> dict[str, Any]:
        """For the status: what is aimed at and why, within which bounds, and what is asked for."""
        held = self._state.bounds(model)
        memory = self._known.get(model.name) or _Memory()
        return {
            "auto": model.scaling.auto,
            "min": held.min,
            "max": held.max,
            "target": self._state.target(model),
            "why": memory.why,
            "demand": self._demand(model.name),
        }

    def _demand(self, name: str) -> dict[str, Any] | None:
        if not self.active:
            return None
        latest = self._latest(name)
        return {
            "arrivals_per_s": round(self._history.forecast(name).rates[0], 3),
            "waiting": sum(one.waiting for one in latest),
            "live": sum(one.live for one in latest),
        }

    def load_times(self) -> dict[str, float]:
        """How long the last start of a replica took, in seconds, by model; of those that have been measured."""
        times = {name: memory.load_s for name, memory in self._known.items()}
        return {name: time for name, time in times.items() if time is not None}

    def changes(self) -> dict[tuple[str, ...], int]:
        """How many events of each kind there were, by model and kind."""
        names = [model.name for model in self._state.current.spec.models]
        return {(name, kind): self._memory(name).changes.get(kind, 0) for name in names for kind in KINDS}


def _counts(view: ReplicaView) -> bool:
    """Whether it serves, or will before long."""
    if view.state is State.FAILED:
        return not view.stopped and not view.breaker_open
    return view.state in STARTING or view.state is State.READY


def _since(view: ReplicaView) -> float:
    return view.since if view.state is State.READY else view.begun


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _sample(one: RoutingDecision) -> str:
    parts = [
        f"{one.request} waited {one.queue_ms:.0f} ms",
        f"{one.candidates} had a free slot, {one.replica} took it as {one.slot} of {one.slots}",
    ]
    if one.affinity:
        parts.append(f"for its {one.affinity}")
    if one.cold:
        parts.append("no replica was ready when it came")
    if one.retries:
        parts.append(f"{one.retries} tried before")
    return ", ".join(parts)


def _prefill_s(measured: float | None, ttft_s: float | None) -> float:
    """What of the time to the first token is not for waiting."""
    if measured is not None:
        return measured
    return UNKNOWN_PREFILL_S if ttft_s is None else min(UNKNOWN_PREFILL_S, ttft_s / 2)
