"""The operations on revisions and rollouts: the history, pause, resume, promote and restart."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from orchestrator.api.fleet_operation import FleetOperation, exclusive
from orchestrator.api.refused import OperationRefused
from orchestrator.control.status import rollout
from orchestrator.fleet.fleet_status import RolloutReport
from orchestrator.fleet.snapshot import ReplicaView
from orchestrator.records.journal_records import Replace, Revision, RolloutState
from orchestrator.rollout.changes import Action
from orchestrator.rollout.rollout_step import compute_goal
from orchestrator.state.rollout_progress import rollout_state

ROLLOUT_STATUS = "corewright rollout status shows the rollout"


class RolloutOperations(FleetOperation):
    """The revisions of a fleet, and the rollout of the newest one."""

    def rollout(self) -> RolloutReport:
        """Returns the progress of the newest revision."""
        failed, previous = self._earlier_revisions()
        undo = previous[0] if previous else None
        return RolloutReport(**msgspec.structs.asdict(rollout(self._state)), undo=undo, undo_skips=failed)

    def revisions(self) -> dict[str, Any]:
        """Returns {revisions: [{revision, at, by, cause, of, state, changes}]}, newest first."""
        journal = self._state.records.state
        newest_first = sorted(journal.revisions, reverse=True)
        return {"revisions": [self._revision_row(journal.revisions[number]) for number in newest_first]}

    def revision(self, number: int | None) -> dict[str, Any]:
        """Returns one revision with its ``text``, ``file``, ``base_dir`` and ``plan``; None: the one that ``undo``
        applies by default."""
        revision = self._revision(self._previous_revision() if number is None else number)
        extra = {"text": revision.text, "file": revision.file, "base_dir": revision.base_dir, "plan": revision.plan}
        return {**self._revision_row(revision), **extra}

    def spec(self) -> dict[str, Any]:
        """Returns the ``file``, ``base_dir``, ``text`` and number of the running revision."""
        revision = self.revision(self._state.current.number)
        return {key: revision[key] for key in ("file", "base_dir", "text", "revision")}

    def _revision(self, number: int) -> Revision:
        revisions = self._state.records.state.revisions
        if number == self._state.current.number:
            return revisions.get(number, self._state.current.revision)
        if number not in revisions:
            what = f"there is no revision {number}"
            hint = f"existing revisions: {min(revisions)} to {max(revisions)}" if revisions else "the journal has none"
            raise OperationRefused("revision-unknown", what, hint, status=404)
        return revisions[number]

    def _revision_row(self, revision: Revision) -> dict[str, Any]:
        journal = self._state.records.state
        outcome = journal.outcomes.get(revision.number)
        if revision.number == self._state.current.number:
            state = rollout_state(self._state)[0]
        else:
            state = outcome.state if outcome is not None and outcome.state != "progressing" else "superseded"  # type: ignore[assignment]
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

    def _previous_revision(self) -> int:
        """Returns the revision that was current before the last apply, or the newest one before it that did not fail.
        Raises Refused."""
        _, previous = self._earlier_revisions()
        if not previous:
            what = f"no revision before {self._state.current.number} differs from it and did not fail"
            hint = "choose one of corewright rollout history: corewright rollout undo --to REVISION"
            raise OperationRefused("nothing-to-undo", what, hint)
        return previous[0]

    def _earlier_revisions(self) -> tuple[list[int], list[int]]:
        """Returns the earlier revisions of this fleet with another text, newest first: the failed ones before the first
        that did not fail, and those from it on."""
        journal, current = self._state.records.state, self._state.current
        earlier = [
            number
            for number, revision in sorted(journal.revisions.items(), reverse=True)
            if number < current.number
            and revision.fleet == self.settings.fleet
            and revision.text != current.revision.text
        ]
        failed = list(itertools.takewhile(self._has_failed, earlier))
        return failed, [number for number in earlier[len(failed) :] if not self._has_failed(number)]

    def _has_failed(self, number: int) -> bool:
        outcome = self._state.records.state.outcomes.get(number)
        return outcome is not None and outcome.state in ("failed", "rolled_back")

    @exclusive
    async def pause(self, by: str) -> RolloutReport:
        self._refuse_on_hold()
        now, _ = rollout_state(self._state)
        if now not in ("progressing", "canary"):
            raise OperationRefused(
                "rollout-not-running", f"the rollout is {now}: there is nothing to pause", ROLLOUT_STATUS
            )
        return await self._set_rollout("paused", f"by {by}", "RolloutPaused")

    @exclusive
    async def resume(self, by: str) -> RolloutReport:
        self._refuse_on_hold()
        now, _ = rollout_state(self._state)
        if now not in ("paused", "failed"):
            raise OperationRefused(
                "rollout-not-paused", f"the rollout is {now}: there is nothing to resume", ROLLOUT_STATUS
            )
        self._controller.reset_failures()
        return await self._set_rollout("progressing", f"resumed by {by}", "RolloutResumed")

    @exclusive
    async def promote(self, by: str) -> RolloutReport:
        """Ends the canary: the rollout continues with every replica."""
        self._refuse_on_hold()
        if not self._state.in_canary:
            raise OperationRefused("no-canary", "there is no canary", "start one: corewright apply --canary SHARE SPEC")
        return await self._set_rollout("progressing", f"promoted by {by}", "CanaryPromoted", promoted=True)

    async def _set_rollout(self, rollout_state: Any, reason: str, event: str, promoted: bool = False) -> RolloutReport:
        number = self._state.current.number
        await self._write(RolloutState(revision=number, state=rollout_state, reason=reason, promoted=promoted))
        self._state.restart_progress()
        # so that the response shows the new rollout
        self._state.goal = await self._state.in_thread(compute_goal, self._state.situation())
        self._state.records.event("info", event, f"revision {number}, {reason}")
        self._controller.wake_up()
        return self.rollout()

    @exclusive
    async def restart(self, model: str, by: str, check_index: int | None = None) -> RolloutReport:
        """Replaces every replica of a model with a new process, as an update would."""
        self._refuse_changed(check_index)
        self._model(model)
        self._refuse_frozen("restart")
        for view in self._state.replicas_of(model):
            await self._replace(view, by)
        self._state.refresh_source(model)
        return await self._set_rollout("progressing", f"restart of {model} by {by}", "RolloutRestarted")

    async def _replace(self, view: ReplicaView, by: str) -> None:
        await self._write(Replace(model=view.model, replica=view.replica, epoch=view.epoch, by=by))
        self._state.records.event("info", "Replacing", f"by {by}: with a new process", view=view)


def changes_text(proposal: dict[str, Any]) -> str:
    """Returns the changes in one line, like "chat: replace by surge; code: update"."""
    actions = [
        (model, model.get("action", model["tag"])) for model in proposal["models"]
    ]  # older records have only the tag
    parts = [
        f"{model['model']}: {action}" + (f" by {model['strategy']}" if model["strategy"] else "")
        for model, action in actions
        if action != Action.NONE.value
    ]
    return "; ".join(parts) or "nothing changes"
