"""The operations on revisions and rollouts: history, apply, undo, pause, resume, promote and restart."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from orchestrator.api.operation import (
    OperatedFleet,
    exclusive,
    model_of,
    refuse_changed,
    refuse_frozen,
    refuse_on_hold,
    write,
)
from orchestrator.api.preview import Cause, Outlook, apply_preview, outlook_of, read_spec
from orchestrator.api.schemas import (
    Applied,
    ModelName,
    OperationRefused,
    RevisionList,
    RevisionNumber,
    RunningSpec,
    SpecText,
    SpecToApply,
    Undone,
    UndoTarget,
)
from orchestrator.control.decisions.changes import Action
from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.control.decisions.rollout_step import compute_goal
from orchestrator.control.fleet_goal import install_revision, situation_of
from orchestrator.control.journal.journal_records import Replace, Revision, RolloutState
from orchestrator.control.resolve.resolved_revision import ResolvedRevision
from orchestrator.control.resolve.spec_file import SpecFile
from orchestrator.control.rollout_progress import rollout_state
from orchestrator.control.status import rollout as rollout_status
from orchestrator.messages.fleet_status import RevisionRow, RevisionText, RolloutReport

ROLLOUT_STATUS = "corewright rollout status shows the rollout"

# The history


def rollout(fleet: OperatedFleet) -> RolloutReport:
    """Returns the progress of the newest revision."""
    failed, previous = _earlier_revisions(fleet)
    undo = previous[0] if previous else None
    return RolloutReport(**msgspec.structs.asdict(rollout_status(fleet.state)), undo=undo, undo_skips=failed)


def revisions(fleet: OperatedFleet) -> RevisionList:
    """Returns all revisions, newest first."""
    newest_first = sorted(fleet.state.records.state.revisions.items(), reverse=True)
    return RevisionList(revisions=[RevisionRow(**_row(fleet, revision)) for _, revision in newest_first])


def revision(fleet: OperatedFleet, request: RevisionNumber) -> RevisionText:
    """Returns one revision with its spec and the summary of its plan."""
    own = _revision(fleet, request.number)
    return RevisionText(**_row(fleet, own), text=own.text, file=own.file, base_dir=own.base_dir, plan=own.plan)


def spec(fleet: OperatedFleet) -> RunningSpec:
    """Returns the spec of the running revision."""
    own = _revision(fleet, fleet.state.current.number)
    return RunningSpec(file=own.file, base_dir=own.base_dir, text=own.text, revision=own.number)


def _revision(fleet: OperatedFleet, number: int) -> Revision:
    revisions = fleet.state.records.state.revisions
    if number == fleet.state.current.number:
        return revisions.get(number, fleet.state.current.revision)
    if number not in revisions:
        fact = f"there is no revision {number}"
        hint = f"existing revisions: {min(revisions)} to {max(revisions)}" if revisions else "the journal has none"
        raise OperationRefused("revision-unknown", fact, hint, status=404)
    return revisions[number]


def _row(fleet: OperatedFleet, revision: Revision) -> dict[str, Any]:
    """Returns the fields of a ``RevisionRow``."""
    outcome = fleet.state.records.state.outcomes.get(revision.number)
    state: str = "superseded" if outcome is None or outcome.state == "progressing" else outcome.state
    if revision.number == fleet.state.current.number:
        state = rollout_state(fleet.state)[0]
    return {
        "revision": revision.number,
        "at": round(revision.at, 3),
        "by": revision.by,
        "cause": revision.cause,
        "of": revision.of,
        "state": state,
        "reason": outcome.reason if outcome is not None else "",
        "changes": changes_text(revision.plan) if revision.plan else "",
    }


def changes_text(plan: Mapping[str, Any]) -> str:
    """Returns the changes of a revision's summary in one line, like "chat: replace by surge; code: update"."""
    actions = [(model, model.get("action", model["tag"])) for model in plan["models"]]  # older records: only the tag
    parts = [
        f"{model['model']}: {action}" + (f" by {model['strategy']}" if model["strategy"] else "")
        for model, action in actions
        if action != Action.NONE.value
    ]
    return "; ".join(parts) or "nothing changes"


def _earlier_revisions(fleet: OperatedFleet) -> tuple[list[int], list[int]]:
    """Returns the earlier revisions of this fleet with another text, newest first: the failed ones before the first
    that did not fail, and those from it on that did not fail."""
    journal, current = fleet.state.records.state, fleet.state.current
    earlier = [
        number
        for number, revision in sorted(journal.revisions.items(), reverse=True)
        if number < current.number and revision.fleet == fleet.settings.fleet and revision.text != current.revision.text
    ]

    def has_failed(number: int) -> bool:
        outcome = journal.outcomes.get(number)
        return outcome is not None and outcome.state in ("failed", "rolled_back")

    failed = list(itertools.takewhile(has_failed, earlier))
    return failed, list(itertools.filterfalse(has_failed, earlier[len(failed) :]))


# New revisions


async def apply(fleet: OperatedFleet, request: SpecToApply, by: str, cause: Cause = "apply") -> Applied:
    """Makes a spec the newest revision. ``by`` names the caller in the journal."""
    read = await read_spec(fleet, request, by=by, cause=cause, canary=request.canary)
    return await install(fleet, *read, request.check_index)


async def undo(fleet: OperatedFleet, request: UndoTarget, by: str) -> Undone:
    """Applies an earlier revision again, by default the one that was current before the last apply, or the newest one
    before it that did not fail."""
    number = request.to
    if number is None:
        _, previous = _earlier_revisions(fleet)
        if not previous:
            fact = f"no revision before {fleet.state.current.number} differs from it and did not fail"
            hint = "choose one of corewright rollout history: corewright rollout undo --to REVISION"
            raise OperationRefused("nothing-to-undo", fact, hint)
        number = previous[0]
    before = _revision(fleet, number)
    text = SpecText(text=before.text, file=before.file, base_dir=before.base_dir)
    read = await read_spec(fleet, text, by=by, cause="undo", of=before.number)
    applied = await install(fleet, *read, request.check_index)
    return Undone(**msgspec.structs.asdict(applied), of=before.number)


@exclusive
async def install(
    fleet: OperatedFleet,
    spec_file: SpecFile,
    generation: ResolvedRevision,
    check_index: int | None = None,
    over: int | None = None,
) -> Applied:
    """Installs a revision that was read. ``over`` is the revision that its spec was made from, if that must still be
    the current one. Raises OperationRefused."""
    state = fleet.state
    if over is not None and over != state.current.number:
        fact = f"revision {state.current.number} was applied meanwhile"
        raise OperationRefused("index-changed", fact, "repeat the request")
    refuse_changed(fleet, check_index, "run corewright plan SPEC again")
    index = state.records.state.index
    outlook = await outlook_of(fleet, spec_file, generation)
    plan = await apply_preview(fleet, spec_file, generation, outlook)
    revision, current = generation.revision, state.current.revision
    same = (revision.text, revision.base_dir) == (current.text, current.base_dir)
    is_current = state.hold is None and rollout_state(state)[0] in ("complete", "progressing") and not state.in_canary
    if same and revision.canary is None and is_current:
        return Applied(changed=False, revision=state.current.number, index=index, plan=plan)
    _refuse_impossible(outlook, generation)
    summary = msgspec.to_builtins({"models": plan.models, "changes": plan.changes})
    revision = await write(fleet, msgspec.structs.replace(revision, number=state.next_number, plan=summary))
    install_revision(state, dataclasses.replace(generation, revision=revision), outlook.decision)
    state.records.event("info", "Applied", f"revision {revision.number} by {revision.by}, {changes_text(summary)}")
    fleet.controller.wake_up()
    return Applied(changed=True, revision=revision.number, index=state.records.state.index, plan=plan)


def _refuse_impossible(outlook: Outlook, generation: ResolvedRevision) -> None:
    for name, choice in outlook.choices.items():
        if not choice.possible:
            fact = f"{name}: update.strategy is {choice.strategy}, and {choice.why}"
            raise OperationRefused("update-impossible", fact, "update: {strategy: auto}")
    if generation.revision.canary is None:
        return
    for name, choice in outlook.choices.items():
        desired = outlook.desired_models[name]
        if not desired.mixes:
            fact = f"{name}: the tokenizer changes, so the two versions cannot share requests"
            raise OperationRefused("canary-impossible", fact, "apply without --canary")
        if choice.strategy != "surge" and desired.count < 2:
            fact = f"{name}: there is no room for a canary beside its only replica: {choice.why}"
            raise OperationRefused("canary-impossible", fact, "apply without --canary, or free some cores")


# The rollout


@exclusive
async def pause(fleet: OperatedFleet, by: str) -> RolloutReport:
    """Pauses the rollout: no further replica is started."""
    refuse_on_hold(fleet)
    now, _ = rollout_state(fleet.state)
    if now not in ("progressing", "canary"):
        fact = f"the rollout is {now}: there is nothing to pause"
        raise OperationRefused("rollout-not-running", fact, ROLLOUT_STATUS)
    return await set_rollout(fleet, "paused", f"by {by}", "RolloutPaused")


@exclusive
async def resume(fleet: OperatedFleet, by: str) -> RolloutReport:
    """Resumes a paused or failed rollout."""
    refuse_on_hold(fleet)
    now, _ = rollout_state(fleet.state)
    if now not in ("paused", "failed"):
        fact = f"the rollout is {now}: there is nothing to resume"
        raise OperationRefused("rollout-not-paused", fact, ROLLOUT_STATUS)
    fleet.controller.reset_failures()
    return await set_rollout(fleet, "progressing", f"resumed by {by}", "RolloutResumed")


@exclusive
async def promote(fleet: OperatedFleet, by: str) -> RolloutReport:
    """Ends the canary: the rollout continues with every replica."""
    refuse_on_hold(fleet)
    if not fleet.state.in_canary:
        raise OperationRefused("no-canary", "there is no canary", "start one: corewright apply --canary SHARE SPEC")
    return await set_rollout(fleet, "progressing", f"promoted by {by}", "CanaryPromoted", promoted=True)


@exclusive
async def restart(fleet: OperatedFleet, request: ModelName, by: str) -> RolloutReport:
    """Replaces every replica of a model with a new process, as an update would."""
    refuse_changed(fleet, request.check_index)
    model_of(fleet, request.model)
    refuse_frozen(fleet, "restart")
    for view in fleet.state.views.of_model(request.model):
        await replace_replica(fleet, view, by)
    fleet.state.refresh_source(request.model)
    return await set_rollout(fleet, "progressing", f"restart of {request.model} by {by}", "RolloutRestarted")


async def replace_replica(fleet: OperatedFleet, view: ReplicaView, by: str) -> None:
    """Has a replica replaced by one with a new process."""
    await write(fleet, Replace(model=view.model, replica=view.replica, epoch=view.epoch, by=by))
    fleet.state.records.event("info", "Replacing", f"by {by}: with a new process", view=view)


async def set_rollout(
    fleet: OperatedFleet, new_state: Literal["progressing", "paused"], reason: str, event: str, promoted: bool = False
) -> RolloutReport:
    """Records the state of the newest revision's rollout, and returns the rollout."""
    state, number = fleet.state, fleet.state.current.number
    await write(fleet, RolloutState(revision=number, state=new_state, reason=reason, promoted=promoted))
    state.restart_progress()
    # so that the response shows the new rollout
    state.goal = await state.in_thread(compute_goal, situation_of(state))
    state.records.event("info", event, f"revision {number}, {reason}")
    fleet.controller.wake_up()
    return rollout(fleet)
