"""Follows the rollout of the current revision: its state, its end, and its rollback if it fails."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec.structs

from orchestrator.control.decisions.decide import decide
from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.control.decisions.rollout_step import ModelStep
from orchestrator.control.fleet_goal import install_revision, snapshot_of
from orchestrator.control.fleet_state import FleetState
from orchestrator.control.journal.journal_records import Revision, RolloutState
from orchestrator.control.resolve.resolved_revision import ResolvedRevision, revert_changes
from orchestrator.messages.replica_states import STARTING, State
from placements.facts.topology import Machine
from placements.spec.schema import ModelSpec

Outcome = Literal["progressing", "paused", "canary", "complete", "failed", "rolled_back"]


@dataclass(frozen=True)
class Rollback:
    """A failed rollout: the revision to restore, the failed model, and the cause."""

    to: ResolvedRevision
    model: str
    cause: str
    undone: tuple[int, ...] = ()  # the only revisions to revert; empty: all since ``to``


def settled_everywhere(state: FleetState) -> bool:
    """Returns whether every replica that has a place is ready, by a goal that follows from the present records."""
    if state.planned_index != state.records.state.index:
        return False
    views = (state.views.get(target.id) for target in state.goal.targets)
    return all(view is not None and view.state is State.READY for view in views)


def is_settled(state: FleetState, model: ModelSpec) -> bool:
    """Returns whether the rollout of the model is finished."""
    step = state.goal.steps.get(model.name)
    ready = step is not None and step.old == 0 and step.ready >= state.counts.required(model)
    return ready and not with_other_adapters(state, model)


def with_other_adapters(state: FleetState, model: ModelSpec) -> list[ReplicaView]:
    """Returns the ready replicas of the current version whose LoRA adapters are not those of the spec."""
    version, places = state.current.versions[model.name], model.adapter_places
    views = [view for view in state.views.of_model(model.name) if view.state is State.READY and view.version == version]
    return [view for view in views if state.configs[view.id].model.adapters != places]


def rollout_state(state: FleetState) -> tuple[Outcome, str]:
    """Returns the state of the current revision's rollout, and the reason."""
    outcome = state.outcome
    if outcome is not None and outcome.state != "progressing":
        return outcome.state, outcome.reason
    if state.in_canary and all(_canary_stands(state, name) for name in state.goal.steps):
        parts = [
            "waits for `corewright rollout promote`",
            _unsettled(state, lambda step: not (step.old or step.lost)),
        ]
        for name, step in state.goal.steps.items():
            if step.lost:
                is_missing = "is missing" if step.lost == 1 else "are missing"
                parts.append(f"{name}: {step.lost} of the former version {is_missing}")
        return "canary", "; ".join(part for part in parts if part)
    return "progressing", _unsettled(state) or (outcome.reason if outcome else "")


def _canary_stands(state: FleetState, name: str) -> bool:
    step = state.goal.steps[name]
    return not step.old or step.ready >= step.count


def leaving(state: FleetState) -> Counter[str]:
    """Returns the number of replicas by model, of models that the spec no longer has."""
    names = {model.name for model in state.current.spec.models}
    return Counter(view.model for view in state.views.values() if view.model not in names)


def _unsettled(state: FleetState, counts: Callable[[ModelStep], bool] = lambda step: True) -> str:
    """Returns the progress of unfinished models as text."""
    parts = []
    for model in state.current.spec.models:
        step = state.goal.steps.get(model.name)
        if step is not None and not is_settled(state, model) and counts(step):
            behind = len(with_other_adapters(state, model))
            adapters = f", {behind} with other adapters" if behind else ""
            ready = f"{step.ready} of {state.counts.desired(model)} ready"
            parts.append(f"{model.name}: {ready}, {step.old} old{adapters}")
    return "; ".join([*parts, *(f"{name}: 0 of 0 ready, {old} old" for name, old in leaving(state).items())])


def follow_rollout(state: FleetState) -> Rollback | None:
    """Check the progress of the rollout and record its end. Returns the rollback if it failed."""
    if rollout_state(state)[0] != "progressing":
        state.restart_progress()
        return None
    unsettled = [model for model in state.current.spec.models if not is_settled(state, model)]
    if not unsettled and not leaving(state):
        _end_rollout(state, "complete", "every model matches the spec")
        state.stable = None
        return None
    restorable = state.stable
    if state.current.revision.cause == "rollback" and not any(
        _is_changed(state, model) for model in state.current.spec.models
    ):
        restorable = None  # no other revision is known to work
    under_way = [model for model in unsettled if restorable is None or _is_changed(state, model)]
    _watch_progress(state, under_way)
    if restorable is None:  # retried with growing pauses
        _limit_stuck_models(state, under_way)
        return None
    failed = next(((model, cause) for model in under_way if (cause := failure_of(state, model)) is not None), None)
    if failed is None:
        return None
    model, cause = failed
    if model.update.rollback:
        return Rollback(restorable, model.name, cause)
    _end_rollout(state, "failed", cause)
    return None


def _watch_progress(state: FleetState, under_way: Iterable[ModelSpec]) -> None:
    """Update the time of the last progress.

    Starts within their deadlines, compilation, drains and missing replicas of a lost host count as progress. Failed
    starts are counted elsewhere, so that an update whose starts all hang ends as well.
    """
    now = state.clock()
    reach = tuple((name, step.old, step.ready) for name, step in state.goal.steps.items())
    versions = {model.name: state.current.versions[model.name] for model in under_way}
    starting = any(
        view.state in STARTING and versions.get(view.model) == view.version and view.overdue(now) is None
        for view in state.views.values()
    )
    starting = starting or any(model in versions and versions[model] == v for model, v, _ in state.preparing)
    draining = any(view.state is State.DRAINING for view in state.views.values())
    homeless = bool(state.lost and state.goal.plan.unplaced)
    if reach != state.progress[0] or starting or draining or homeless:
        state.progress = (reach, now)


def _limit_stuck_models(state: FleetState, under_way: Iterable[ModelSpec]) -> None:
    """Limit stuck models to as many replicas as can be placed: otherwise their old replicas would stay forever."""
    quiet = state.clock() - state.progress[1]
    for model in under_way:
        late = quiet > model.update.progress_deadline_s and state.goal.steps[model.name].keep
        if late and not state.in_canary and model.name not in state.late:
            state.late.add(model.name)
            cause = f"no progress for {quiet:.0f} s (progress_deadline_s), and no revision to restore"
            effect = "old replicas stay only for as many new ones as can be placed"
            state.records.event("warning", "UpdateStuck", f"{cause}: {effect}", model=model.name)


def _is_changed(state: FleetState, model: ModelSpec) -> bool:
    before = state.stable.versions.get(model.name) if state.stable is not None else None
    return before != state.current.versions[model.name]


def failure_of(state: FleetState, model: ModelSpec) -> str | None:
    """Returns why the update of a model failed; None while it may still succeed."""
    version = state.current.versions[model.name]
    for view in state.views.of_model(model.name):
        tried = view.stopped or view.failures >= model.update.max_failures
        fails = view.state is not State.READY and tried
        if view.version == version and fails:
            times = "once" if view.failures == 1 else f"{view.failures} times"
            return f"{view.id} failed {times}: {view.reason}"
    for preparation in state.preparations.values():
        fails = preparation.stopped or preparation.failures >= model.update.max_failures
        if (preparation.model, preparation.version) == (model.name, version) and fails:
            return f"{model.name} cannot be prepared on {preparation.host}: {preparation.reason}"
    quiet = state.clock() - state.progress[1]
    if quiet > model.update.progress_deadline_s:
        return f"{model.name}: no progress for {quiet:.0f} s (progress_deadline_s)"
    return None


def _end_rollout(state: FleetState, outcome: Literal["complete", "failed", "rolled_back"], reason: str) -> None:
    state.records.note(RolloutState(revision=state.current.number, state=outcome, reason=reason))
    complete = outcome == "complete"
    name = "RolloutComplete" if complete else "RolloutFailed"
    state.records.event("info" if complete else "error", name, f"revision {state.current.number}: {reason}")


def _narrowed(rollback: Rollback, revisions: Mapping[int, Revision], current: int, machine: Machine) -> Rollback:
    """Returns the rollback limited to revisions that changed the failed model, if possible. Blocks."""
    numbers = range(rollback.to.number, current + 1)
    if len(numbers) < 3 or any(number not in revisions for number in numbers):
        return rollback
    narrower = revert_changes([revisions[number] for number in numbers], rollback.model, machine)
    return rollback if narrower is None else dataclasses.replace(rollback, to=narrower[0], undone=tuple(narrower[1]))


async def roll_back(state: FleetState, rollback: Rollback) -> None:
    """Make the earlier revision current again, if possible without the changes of some revisions only.

    Its record is written first: it alone suffices after a crash.
    """
    failed = state.current.number
    rollback = await state.in_thread(_narrowed, rollback, state.records.state.revisions, failed, state.machine)
    before = rollback.to.revision
    canary = state.current.revision.canary if rollback.undone and state.in_canary else None
    revision = msgspec.structs.replace(
        before,
        seq=0,
        at=state.wall(),
        number=state.next_number,
        fleet=state.settings.fleet,
        cause="rollback",
        by="controller",
        of=None if rollback.undone else before.number,
        plan={},
        canary=canary,
    )
    restored = dataclasses.replace(rollback.to, revision=revision)
    decision = await state.in_thread(decide, snapshot_of(state, restored))
    state.records.note(revision)
    _end_rollout(state, "rolled_back", rollback.cause)
    undone = " and ".join(map(str, rollback.undone))
    description = f"revision {failed} without the changes of {undone}" if undone else f"revision {before.number} again"
    state.records.event("warning", "RolledBack", f"revision {revision.number} is {description}")
    install_revision(state, restored, decision)
