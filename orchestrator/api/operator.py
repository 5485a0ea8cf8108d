"""The operations on a running fleet (`Operator`): each is checked, journaled, then carried out.

An operation that raises has changed nothing. From the last check of the state to the end it is exclusive: no other
operation and no round of the controller decides meanwhile, and it is finished even if its caller is gone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from orchestrator.api.action_preview import ActionPreview
from orchestrator.api.fleet_operation import exclusive
from orchestrator.api.fleet_queries import FleetQueries
from orchestrator.api.refused import OperationRefused
from orchestrator.api.replica_operations import ReplicaOperations
from orchestrator.api.rollout_operations import changes_text
from orchestrator.api.spec_preview import Outlook, SpecPreview
from orchestrator.records.journal_records import Revision
from orchestrator.revisions.resolved_revision import ResolvedRevision
from orchestrator.revisions.spec_file import SpecFile
from orchestrator.state.rollout_progress import rollout_state


class Operator(SpecPreview, ActionPreview, ReplicaOperations, FleetQueries):
    """All operations on the fleet of one controller, on its event loop. ``by`` names the caller in the journal."""

    async def apply(
        self,
        text: str,
        file: str,
        base_dir: str,
        *,
        by: str,
        cause: str = "apply",
        check_index: int | None = None,
        canary: float | None = None,
    ) -> dict[str, Any]:
        """Creates a revision: {changed, revision, index, plan}. ``canary`` is a share of requests, 0 to 1 exclusive."""
        spec_file, generation = await self._read(text, file, base_dir, by=by, cause=cause, canary=canary)
        return await self._install(spec_file, generation, check_index)

    async def undo(self, to: int | None, by: str, check_index: int | None = None) -> dict[str, Any]:
        """Applies an earlier revision again: ``to``, or by default the previous one."""
        number = self._previous_revision() if to is None else to
        before = self._revision(number)
        spec_file, generation = await self._read(
            before.text, before.file, before.base_dir, by=by, cause="undo", of=before.number
        )
        return {**await self._install(spec_file, generation, check_index), "of": before.number}

    @exclusive
    async def _install(
        self, spec_file: SpecFile, generation: ResolvedRevision, check_index: int | None, over: int | None = None
    ) -> dict[str, Any]:
        """``over`` is the revision that the spec was made from, if it must still be the current one."""
        state = self._state
        if over is not None and over != state.current.number:
            what = f"revision {state.current.number} was applied meanwhile"
            raise OperationRefused("index-changed", what, "repeat the request")
        index = state.records.state.index
        if check_index is not None and check_index != index:
            what = f"the fleet's index is {index}, not {check_index}: the fleet has changed since the plan"
            raise OperationRefused("index-changed", what, "run corewright plan SPEC again")
        outlook = await self._outlook(generation)
        proposal = await self._proposal(spec_file, generation, outlook)
        revision = generation.revision
        same = _content(revision) == _content(state.current.revision)
        is_current = (
            state.hold is None and rollout_state(state)[0] in ("complete", "progressing") and not state.in_canary
        )
        if same and revision.canary is None and is_current:
            return {"changed": False, "revision": state.current.number, "index": index, "plan": proposal}
        _refuse_impossible(outlook, generation)
        summary = {"models": proposal["models"], "changes": proposal["changes"]}
        revision = msgspec.structs.replace(revision, number=state.next_number, plan=summary)
        revision = await self._write(revision)
        state.install(dataclasses.replace(generation, revision=revision), outlook.first)
        self._controller.table.renew_deadlines()
        state.records.event("info", "Applied", f"revision {revision.number} by {revision.by}, {changes_text(proposal)}")
        self._controller.wake_up()
        return {"changed": True, "revision": revision.number, "index": state.records.state.index, "plan": proposal}


def _content(revision: Revision) -> tuple[object, ...]:
    """Returns what a revision is made of."""
    return revision.text, revision.base_dir


def _refuse_impossible(outlook: Outlook, generation: ResolvedRevision) -> None:
    for name, choice in outlook.choices.items():
        if not choice.possible:
            what = f"{name}: update.strategy is {choice.strategy}, and {choice.why}"
            raise OperationRefused("update-impossible", what, "update: {strategy: auto}")
    if generation.revision.canary is None:
        return
    for name, choice in outlook.choices.items():
        desired = outlook.situation.desired_models[name]
        if not desired.mixes:
            what = f"{name}: the tokenizer changes, so the two versions cannot share requests"
            raise OperationRefused("canary-impossible", what, "apply without --canary")
        if choice.strategy != "surge" and desired.count < 2:
            what = f"{name}: there is no room for a canary beside its only replica: {choice.why}"
            raise OperationRefused("canary-impossible", what, "apply without --canary, or free some cores")
