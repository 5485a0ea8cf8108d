"""Takes the snapshot of a fleet, decides about it, and makes the decision, or an applied revision, the current one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from orchestrator.control.decisions.decide import RELOCATION_S, FleetDecision, FleetSnapshot, decide
from orchestrator.control.decisions.preparation import Key, Preparation, takes_long
from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.control.decisions.rollout_step import DesiredModel, FormerVersion, Goal, Situation
from orchestrator.control.fleet_state import FleetState
from orchestrator.control.host_conditions import (
    blocked_cores,
    drained_cores,
    hosts_leaving,
    replicas_ending,
    replicas_replaced,
)
from orchestrator.control.journal.journal_records import Replace, Target
from orchestrator.control.resolve.resolved_revision import ResolvedRevision
from orchestrator.messages.replica_states import State
from orchestrator.scaling.schedules import Bounds
from placements.spec.schema import ModelSpec


def snapshot_of(state: FleetState, revision: ResolvedRevision | None = None) -> FleetSnapshot:
    """Returns the input of `decide`, now or right after the installation of another revision."""
    generation, now = revision or state.current, state.clock()
    memory = state.memory if revision is None else dataclasses.replace(state.memory, strategies={})
    relocation = memory.relocation
    limit_s = 0.0
    if relocation is not None:
        limit_s = RELOCATION_S + max(view.deadlines.start_s for view in relocation.moving)
    return FleetSnapshot(
        situation=situation_of(state, revision),
        memory=memory,
        engines=generation.engines,
        preparations=_preparations_of(state, generation),
        compiled_on=_compiled_on(state, generation),
        lost_hosts=state.lost,
        scaled=frozenset(state.records.state.scales),
        held=revision is None and state.hold is not None,
        frozen=revision is None and state.frozen,
        in_canary=state.in_canary if revision is None else revision.revision.canary is not None,
        may_relocate=now - state.relocated_at >= RELOCATION_S,
        relocation_late=relocation is not None and now - state.relocated_at > limit_s,
    )


def situation_of(state: FleetState, revision: ResolvedRevision | None = None) -> Situation:
    """Returns the input of `compute_goal`, now or right after the installation of another revision."""
    generation = revision or state.current
    return Situation(
        generation.spec,
        state.living_hosts,
        generation.checkpoints,
        {model.name: desired_model(state, model, revision) for model in generation.spec.models},
        tuple(state.views.values()),
        blocked_cores(state),
        drained_cores(state),
        replicas_replaced(state),
        _models_held(state, generation),
        frozenset(hosts_leaving(state)),
        replicas_ending(state),
    )


def desired_model(state: FleetState, model: ModelSpec, revision: ResolvedRevision | None = None) -> DesiredModel:
    """Returns the desired state of the model, now or right after the installation of another revision."""
    generation, before = revision or state.current, None if revision is None else _bounds_now(state, model)
    count = state.counts.desired(model, before)
    strategy = None if revision is not None else state.memory.strategies.get(model.name)
    canary = state.in_canary if revision is None else revision.revision.canary is not None
    frozen = revision is None and state.frozen
    limited = revision is None and (model.name in state.late or state.is_complete)
    return DesiredModel(
        model,
        count,
        generation.versions[model.name],
        strategy="surge" if strategy is None else strategy.strategy,
        mixes=_mixes(state, generation, model),
        canary=canary,
        frozen=frozen,
        former=_former(state, model, generation) if canary or frozen else None,
        reachable=limited or count > state.counts.required(model, before),
    )


def _bounds_now(state: FleetState, model: ModelSpec) -> Bounds | None:
    """Returns the bounds of the model in the current revision; None if it does not have the model."""
    current = state.current.spec.model(model.name)
    return None if current is None else state.counts.bounds(current)


def _former(state: FleetState, model: ModelSpec, generation: ResolvedRevision) -> FormerVersion | None:
    """Returns the version in which lost replicas restart during a canary or a frozen rollout of ``generation``."""
    before = state.current if generation is not state.current and state.is_complete else state.stable
    old = None if before is None else before.spec.model(model.name)
    if before is None or old is None or before.versions[model.name] == generation.versions[model.name]:
        return None
    return FormerVersion(old, before.versions[model.name], before.checkpoints.get(model.name))


def _mixes(state: FleetState, generation: ResolvedRevision, model: ModelSpec) -> bool:
    """Returns whether all running versions of the model have the same tokenizer as ``generation``."""
    version, own = generation.versions[model.name], generation.tokenizers[model.name]
    return all(
        state.configs[view.id].run.tokenizer == own
        for view in state.views.of_model(model.name)
        if view.version != version and view.id in state.configs
    )


def remote_sources(state: FleetState, model: ModelSpec, revision: ResolvedRevision | None = None) -> frozenset[str]:
    """Returns the remote sources of the model and its draft."""
    if not takes_long(model, (revision or state.current).engines[model.name]):
        return frozenset()
    elsewhere = {model.source} if model.source_kind != "path" else set()
    draft = {model.draft.source} if model.draft is not None and model.draft_kind != "path" else set()
    return frozenset(elsewhere | draft)


def _models_held(state: FleetState, generation: ResolvedRevision) -> dict[str, frozenset[str]]:
    """Returns the models of a revision by host that have nothing to fetch there."""
    sources_of = {
        model.name: sources for model in generation.spec.models if (sources := remote_sources(state, model, generation))
    }
    if not sources_of:
        return {}
    return {
        host: frozenset(name for name, sources in sources_of.items() if sources <= stored)
        for host, stored in state.held.items()
    }


def _preparations_of(state: FleetState, generation: ResolvedRevision) -> dict[Key, Preparation]:
    """Returns the preparations for the versions of a revision."""
    versions = set(generation.versions.items())
    return {key: preparation for key, preparation in state.preparations.items() if key[:2] in versions}


def _compiled_on(state: FleetState, generation: ResolvedRevision) -> frozenset[Key]:
    """Returns where starts of running versions, or of those of a revision, have nothing to compile."""
    used = {(view.model, view.version) for view in state.views.values()}.union(generation.versions.items())
    return frozenset(key for key in state.compiled_on if key[:2] in used)


async def update_goal(state: FleetState) -> Goal:
    """Decide anew, again if cores or a ready replica that the decision counts on are lost meanwhile. Most rounds of
    a large fleet at rest have the snapshot of the last one, and its decision."""
    while True:
        index, changes, snapshot = state.records.state.index, state.views.changes, snapshot_of(state)
        if state.decided == (changes, snapshot):
            state.planned_index = index
            return state.goal
        blocked, ready = blocked_cores(state), _ready_processes(state.views.values())
        decision: FleetDecision = await state.in_thread(decide, snapshot)
        keeps = changes == state.views.changes or ready <= _ready_processes(state.views.values())
        if keeps and blocked == blocked_cores(state):
            recorded = state.records.state.index
            _commit(state, decision)
            state.planned_index = state.records.state.index if recorded == index else index
            state.decided = changes, decision.after
            return state.goal


def install_revision(state: FleetState, generation: ResolvedRevision, decision: FleetDecision) -> None:
    """Make an applied revision the current one; ``decision`` is that about its `snapshot`."""
    if state.is_complete:
        state.stable = state.current
    for model in generation.spec.models:
        if (before := _bounds_now(state, model)) is not None:
            state.counts.follow(model, before)
    state.current = generation
    for view in list(state.views.values()):  # the change may have fixed the cause of a stop
        own = generation.spec.model(view.model)
        deadlines = view.deadlines if own is None else own.deadlines
        state.views[view.id] = dataclasses.replace(view, stopped=False, deadlines=deadlines)
    state.late.clear()
    used = {(view.model, view.version) for view in state.views.values()}.union(generation.versions.items())
    state.preparations = _preparations_of(state, generation)
    state.pins.unpin(lambda pin: (pin.model, pin.version) not in used)
    state.compiled_on = set(_compiled_on(state, generation))
    _commit(state, decision)
    state.decided = state.views.changes, decision.after
    state.restart_progress()
    names = {model.name for model in generation.spec.models}
    state.counts.woken &= names
    for name in state.records.state.targets.keys() - names:
        state.records.note(Target(model=name, count=None))


def _commit(state: FleetState, decision: FleetDecision) -> None:
    state.goal, state.upcoming, state.memory = decision.goal, decision.upcoming, decision.after.memory
    if decision.moved:
        state.relocated_at = state.clock()
    for view in decision.moved:
        state.records.note(Replace(model=view.model, replica=view.replica, epoch=view.epoch, by="the controller"))
    for event in decision.events:
        state.records.note_event(event)


def _ready_processes(views: Iterable[ReplicaView]) -> set[tuple[str, int]]:
    return {(view.id, view.epoch) for view in views if view.state is State.READY}
