"""Builds the fleet's status for operators and its route table for gateways. Read-only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from orchestrator.control.decisions.preparation import Preparation, preparation_of
from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.control.decisions.rollout_step import ModelStep
from orchestrator.control.fleet_goal import desired_model
from orchestrator.control.fleet_state import FleetState
from orchestrator.control.host_status import host_statuses
from orchestrator.control.rollout_progress import is_settled, leaving, rollout_state, settled_everywhere
from orchestrator.control.start_times import expected_ready_at, expected_start_s, is_expected_back, parked_start
from orchestrator.messages.fleet_status import (
    ConditionStatus,
    FetchProgress,
    FleetStatus,
    GatewayInFleet,
    HostInFleet,
    ManualScale,
    ModelInFleet,
    ModelRollout,
    ParkedStatus,
    PreparationStatus,
    ReplicaInFleet,
    RolloutStatus,
    ScalingStatus,
    SpeculationStatus,
)
from orchestrator.messages.replica_states import ModelState, State, model_state
from orchestrator.messages.route_table import ModelRoutes, Route, RouteTable
from placements.spec.schema import ModelSpec
from workers.host.start_phases import next_phase

log = logging.getLogger(__name__)


class Condition(NamedTuple):
    """The current value of one condition."""

    type: str
    status: bool
    reason: str  # CamelCase, one word
    message: str


class Conditions:
    """Remembers since when each condition has had its value."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._since: dict[tuple[str, str], tuple[bool, float]] = {}

    def report(self, subject: str, conditions_now: Iterable[Condition]) -> list[ConditionStatus]:
        """Returns the conditions of the fleet or of a model, each with the time since which it holds."""
        conditions = []
        for condition in conditions_now:
            key = subject, condition.type
            previous = self._since.get(key)
            if previous is None or previous[0] is not condition.status:
                previous = self._since[key] = condition.status, round(self._wall(), 3)
            conditions.append(ConditionStatus(**condition._asdict(), since=previous[1]))
        return conditions


def route_table(state: FleetState, *, ready: bool, closing: bool, draining: list[str]) -> RouteTable:
    """Returns the route table for the gateways."""
    return RouteTable(
        ready=ready,
        stopping=closing,
        token=state.settings.token,
        credentials=state.settings.gateway,
        draining=draining,
        models=[_model_routes(state, model, closing) for model in state.current.spec.models]
        + [_routes_of_lost_model(state, name, closing) for name in _models_of_lost_revision(state)],
    )


def _models_of_lost_revision(state: FleetState) -> list[str]:
    """Returns the serving models that only a lost revision had, while the fleet is held."""
    serving = dict.fromkeys(view.model for view in state.views.values() if view.state is State.READY)
    return [name for name in serving if state.hold is not None and state.current.spec.model(name) is None]


def _routes_of_lost_model(state: FleetState, name: str, closing: bool) -> ModelRoutes:
    """Returns routes from the replicas' configuration; values that only a spec has are defaults, without aliases."""
    views = [view for view in state.views.of_model(name) if view.state is State.READY]
    first = state.configs[views[0].id]
    return ModelRoutes(
        name=name,
        state=ModelState.READY,
        reason=None,
        engine=first.model.engine,
        kind=first.model.kind,
        source=first.source,
        tokenizer=first.run.tokenizer,
        max_len=min(state.configs[view.id].max_len for view in views),
        max_queue=ModelSpec.model_fields["max_queue"].default,
        loads_on_request=False,
        replicas=_routes(
            state, (view for view in views if state.configs[view.id].run.tokenizer == first.run.tokenizer), closing
        ),
    )


def _routes(state: FleetState, views: Iterable[ReplicaView], closing: bool) -> list[Route]:
    """Returns the routes to the views; with the setting ``data_plane: tcp`` no gateway uses their sockets."""
    if closing:
        return []
    tcp = state.settings.data_plane == "tcp"
    return [Route(view.id, view.epoch, "" if tcp else view.socket or "", view.remote, view.version) for view in views]


def _model_routes(state: FleetState, model: ModelSpec, closing: bool) -> ModelRoutes:
    """Returns routes to one of the versions if they do not mix: to the older one while it serves."""
    current = state.current
    step = state.goal.steps.get(model.name)
    version = current.versions[model.name]
    views = [view for view in state.views.of_model(model.name) if view.state is State.READY]
    configs = [state.configs[view.id] for view in views if view.version != version and view.id in state.configs]
    engine: str = current.engines[model.name]
    source, max_len = current.folder(model), current.length(model)
    own, kind = current.tokenizers[model.name], model.kind
    serves_old = step is not None and step.serves_old
    if state.hold is not None:  # replicas of a lost revision serve if there are no others
        serves_old = not any(view.version == version for view in views)
    if serves_old and configs:
        views = [view for view in views if view.version != version]
        source, engine, max_len = configs[0].source, configs[0].model.engine, configs[0].max_len
        own, kind = configs[0].run.tokenizer, configs[0].model.kind
    else:
        views = [v for v in views if v.version == version or state.configs[v.id].run.tokenizer == own]
        max_len = min([max_len, *(config.max_len for config in configs if config.run.tokenizer == own)])
    if source is None and model.has_source:  # its metadata is unknown here: use the folder that a host has fetched
        source = next((state.configs[view.id].source for view in views), None)
    model_state, reason = _state_of(state, model)
    canary = current.revision.canary if state.in_canary else None
    return ModelRoutes(
        name=model.name,
        state=model_state,
        reason=reason_for_clients(state, model, reason),
        engine=engine,
        kind=kind,
        source=source,
        tokenizer=own,
        max_len=max_len,
        max_queue=model.max_queue,
        max_queue_bytes=model.max_queue_bytes,
        max_wait_s=model.max_wait_s,
        queue_order=model.queue_order,
        hold_s=model.scaling.hold_s,
        start_s=round(expected_start_s(state, model), 1),
        ready_at=expected_ready_at(state, model),
        loads_on_request=_loads_on_request(state, model),
        required=min(state.counts.bounds(model).min, state.counts.desired(model)) > 0,
        holds=state.holds(model) or is_expected_back(state, model),
        aliases=list(model.aliases),
        request_defaults=model.defaults_by_name,
        adapters=[name for name in model.adapters if all(name in state.configs[view.id].adapters for view in views)],
        response_template=model.response_template,
        canary=canary,
        canaries=[view.id for view in views if view.version == version] if canary is not None else [],
        replicas=_routes(state, views, closing),
    )


def _loads_on_request(state: FleetState, model: ModelSpec) -> bool:
    held = state.counts.bounds(model)
    return held.min == 0 and held.max > 0 and not state.counts.is_unloaded(model.name)


def status(
    state: FleetState,
    conditions: Conditions,
    *,
    ready: bool,
    log_of: Callable[[str, int], Path],
    scaling_of: Callable[[ModelSpec], ScalingStatus],
    gateways: list[GatewayInFleet],
    hosts: list[HostInFleet],
) -> FleetStatus:
    """Returns the status of the fleet."""
    return FleetStatus(
        name=state.current.spec.name,
        ready=ready,
        revision=state.current.number,
        index=state.records.state.index,
        settled=settled_everywhere(state),
        rollout=rollout(state),
        conditions=conditions.report("fleet", _fleet_conditions(state, ready, hosts)),
        models=[
            _model_status(state, model, conditions, log_of, scaling_of(model)) for model in state.current.spec.models
        ],
        hosts=hosts,
        gateways=gateways,
    )


def record_conditions(state: FleetState, conditions: Conditions, *, ready: bool) -> None:
    """Records since when the conditions hold, without the rest of the status: that takes longer than a decision."""
    hosts = host_statuses(state, {}, {})
    conditions.report("fleet", _fleet_conditions(state, ready, hosts))
    for model in state.current.spec.models:
        conditions.report(model.name, _model_conditions(state, model))


def rollout(state: FleetState) -> RolloutStatus:
    """Returns the progress of the current revision's rollout."""
    progress, reason = rollout_state(state)
    outcome = state.outcome
    gone = [
        ModelRollout(model=name, strategy=None, wanted=0, updated=0, ready=0, old=old, state=progress)
        for name, old in leaving(state).items()
    ]
    return RolloutStatus(
        revision=state.current.number,
        state=progress,
        reason=reason,
        since=round(outcome.at if outcome is not None else state.current.revision.at, 3),
        canary=state.current.revision.canary if state.in_canary else None,
        models=[_model_rollout(state, model, progress) for model in state.current.spec.models] + gone,
    )


def _model_rollout(state: FleetState, model: ModelSpec, progress: str) -> ModelRollout:
    step = state.goal.steps.get(model.name, ModelStep())
    way = state.memory.strategies.get(model.name)
    if progress == "complete" or is_settled(state, model):
        progress = "complete"
    elif progress == "canary" and not step.old and not step.lost:
        progress = "progressing"  # it is not part of the canary, and is repaired
    return ModelRollout(
        model=model.name,
        strategy=None if way is None else way.strategy,
        wanted=state.counts.desired(model),
        updated=step.alive,
        ready=step.ready,
        old=step.old,
        state=progress,
    )


def _fleet_conditions(state: FleetState, ready: bool, hosts: list[HostInFleet]) -> Iterable[Condition]:
    yield Condition(
        "Ready", ready, "Served" if ready else "Loading", "every model has reached its min replicas" if ready else ""
    )
    writable = state.records.writable
    yield Condition(
        "JournalWritable",
        writable,
        "Written" if writable else "DiskFull",
        "" if writable else "the journal cannot be written: nothing can be applied, repairs continue",
    )
    hold = state.hold
    intact, why = hold is None, "" if hold is None else hold.line
    yield Condition("JournalIntact", intact, "Intact" if intact else "ActionsHeld", why)
    wrong = [host.name for host in hosts if not host.balanced]
    yield Condition("CoresAddUp", not wrong, "Wrong" if wrong else "Counted", ", ".join(wrong))
    lost = [host.name for host in hosts if host.lost]
    yield Condition("HostsAlive", not lost, "HostLost" if lost else "Alive", ", ".join(lost))


def _model_conditions(state: FleetState, model: ModelSpec) -> Iterable[Condition]:
    ready, desired = state.ready(model.name), state.counts.desired(model)
    enough = ready >= min(model.replicas.min, desired)
    yield Condition(
        "Available", enough, "Serving" if ready else "NoReplica", f"{ready} of {desired} replicas are ready"
    )
    step = state.goal.steps.get(model.name)
    moving = step is not None and not step.settled(desired_model(state, model))
    yield Condition(
        "Progressing", moving, "Updating" if moving and step and step.old else "Starting" if moving else "Settled", ""
    )
    missing = [unplaced for unplaced in state.goal.plan.unplaced if unplaced.model == model.name]
    awaited = state.awaited_hosts(model.name)
    if missing and sum(target.model == model.name for target in state.goal.targets) >= _due(state, model):
        missing = []  # only replicas that the autoscaler adds are missing
    awaits = [] if awaited is None else [awaited]
    problems = "; ".join([*awaits, *(problem.what for unplaced in missing for problem in unplaced.problems)])
    yield Condition("Placed", not missing, "NoRoom" if missing else "Placed", problems)
    cut_off = [view.id for view in state.views.of_model(model.name) if view.id in state.unreachable]
    yield Condition("Reachable", not cut_off, "Unreachable" if cut_off else "Connected", ", ".join(cut_off))
    failed = [view for view in state.views.of_model(model.name) if view.state is State.FAILED]
    yield Condition("Healthy", not failed, _health(failed), "; ".join(f"{view.id}: {view.reason}" for view in failed))


def _health(failed: list[ReplicaView]) -> str:
    if any(view.stopped for view in failed):
        return "Stopped"
    return "BreakerOpen" if any(view.breaker_open for view in failed) else "ReplicaFailed" if failed else "Healthy"


def _model_status(
    state: FleetState,
    model: ModelSpec,
    conditions: Conditions,
    log_of: Callable[[str, int], Path],
    scaling: ScalingStatus,
) -> ModelInFleet:
    current, reason = _state_of(state, model)
    parked = None
    if (last := parked_start(state, model.name)) is not None:
        parked = ParkedStatus(host=last.host, start_s=round(expected_start_s(state, model), 1))
        if current is ModelState.UNLOADED and reason is None:
            reason = f"parked on {parked.host}: a start takes about {parked.start_s:.1f} s"
    scale = state.records.state.scales.get(model.name)
    usual = {phase for view in state.views.of_model(model.name) for phase in view.load_phases}
    return ModelInFleet(
        name=model.name,
        kind=model.kind,
        state=current,
        reason=reason,
        parked=parked,
        wanted=state.counts.desired(model),
        scaled=None if scale is None else ManualScale(count=0 if scale.sleep else scale.count, by=scale.by),
        scaling=scaling,
        version=state.current.versions[model.name],
        preparing=[_preparing(state, preparation) for preparation in _preparations(state, model)],
        conditions=conditions.report(model.name, _model_conditions(state, model)),
        replicas=[_replica_status(state, view, usual, log_of) for view in state.views.of_model(model.name)],
    )


def _replica_status(
    state: FleetState, view: ReplicaView, usual: set[str], log_of: Callable[[str, int], Path]
) -> ReplicaInFleet:
    """``usual``: the phases of earlier loads of the model."""
    return ReplicaInFleet(
        id=view.id,
        engine=state.configs[view.id].model.engine if view.id in state.configs else None,
        host=view.host,
        cores=None if view.cores is None else str(view.cores),
        state=view.state,
        since=round(state.wall() - state.clock() + view.since, 1),
        phase=next_phase(view.ended_phases, usual),
        pid=None if view.gone else view.pid,
        epoch=view.epoch,
        version=view.version,
        restarts=view.restarts,
        reason=view.reason,
        failures=view.failures,
        pause_s=view.pause_s if view.state is State.FAILED and not view.stopped else None,
        stopped=view.stopped and view.state is State.FAILED,
        load_s=view.load_s,
        load_phases={phase: round(seconds, 3) for phase, seconds in view.load_phases.items()},
        compile_s=round(view.compile_s, 1),
        compiled=view.compiled,
        fetch=None if view.fetch is None else FetchProgress.of(view.fetch),
        live=view.live,
        waiting=view.waiting,
        speculation=_speculation(view),
        server=view.server,
        log=list(view.log),
        log_file=str(log_of(view.model, view.replica)),
    )


def _preparations(state: FleetState, model: ModelSpec) -> list[Preparation]:
    """Returns the preparations that the model's update waits for."""
    preparations = {
        (preparation := preparation_of(target, state.preparations)).key: preparation
        for target in state.upcoming
        if target.model == model.name
    }
    return list(preparations.values())


def _preparing(state: FleetState, preparation: Preparation) -> PreparationStatus:
    return PreparationStatus(
        host=preparation.host,
        version=preparation.version,
        state=state.preparing.get(preparation.key) or ("failed" if preparation.failures else "waiting"),
        failures=preparation.failures,
        reason=preparation.reason,
    )


def _state_of(state: FleetState, model: ModelSpec) -> tuple[ModelState, str | None]:
    views = state.views.of_model(model.name)
    failed = any(view.state is State.FAILED for view in views)
    due = state.counts.desired(model) if failed else _due(state, model)
    result = model_state(due, (view.outlook for view in views))
    reasons = [view.reason for view in views if view.state is not State.READY and view.reason is not None]
    reasons += [
        problem.what
        for missing in state.goal.plan.unplaced
        if missing.model == model.name
        for problem in missing.problems
    ]
    awaited = state.awaited_hosts(model.name)
    if awaited is not None:
        reasons.insert(0, awaited)
    elif reasons and not views:
        result = ModelState.FAILED  # it cannot be placed
    if result is ModelState.UNLOADED:
        reasons = why_unloaded(state, model) or reasons
    return result, reasons[0] if reasons and result is not ModelState.READY else None


def _due(state: FleetState, model: ModelSpec) -> int:
    """Returns the number of required replicas, at least 1: those that the autoscaler adds may start later."""
    return min(state.counts.desired(model), max(1, state.counts.required(model)))


def _speculation(view: ReplicaView) -> SpeculationStatus | None:
    if not view.drafted:
        return None
    acceptance = round(view.accepted / view.drafted, 3)
    return SpeculationStatus(drafted=view.drafted, accepted=view.accepted, acceptance=acceptance)


def why_unloaded(state: FleetState, model: ModelSpec) -> list[str]:
    """Returns the reasons for an operator: the manual action with the command that reverts it, or the autoscaler's.

    Empty: the model is at zero for lack of requests.
    """
    scale = state.records.state.scales.get(model.name)
    if scale is not None and scale.sleep:
        return [f"unloaded by hand: corewright load {model.name}"]
    if scale is not None and scale.count == 0:
        return [f"scaled to 0 by hand: corewright scale {model.name} auto"]
    return [state.counts.held_back[model.name]] if model.name in state.counts.held_back else []


def reason_for_clients(state: FleetState, model: ModelSpec, reason: str | None) -> str | None:
    """Returns ``reason`` for clients, without commands and without the figures of an autoscaler decision."""
    scale = state.records.state.scales.get(model.name)
    if scale is not None and (scale.sleep or scale.count == 0):
        return "by hand" if scale.sleep else "scaled to 0 by hand"
    held = state.counts.held_back.get(model.name)
    return reason if held is None or reason != held else held.partition(";")[0]
