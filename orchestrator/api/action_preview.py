"""The previews of manual changes: what scaling, loading, unloading, restarting and draining would do now."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from orchestrator.api.fleet_operation import FleetOperation
from orchestrator.api.refused import OperationRefused
from orchestrator.rollout.changes import replica_changes
from orchestrator.rollout.host_drain import refusal, without_host
from orchestrator.rollout.rollout_step import Goal, Situation, compute_goal
from orchestrator.rollout.update_strategy import choose_strategy

Manual = Literal["scale", "load", "unload", "restart", "drain"]


class ActionPreview(FleetOperation):
    """The effects of manual changes, without a change."""

    async def preview(self, action: Manual, target: str, count: int | None = None) -> dict[str, Any]:
        """Returns {index, revision, changes, placements, unplaced, strategies, refusal} as `plan` does. ``target`` is a
        model, or for a drain a host or a replica; ``count`` is that of `scale`."""
        if action in ("restart", "drain"):
            self._refuse_frozen(action)
        else:
            self._refuse_on_hold()
        state = self._state
        index, situation = state.records.state.index, state.situation()
        cause = None
        if action == "drain" and any(host.name == target for host in state.hosts):
            after = without_host(situation, target)
            cause = await state.in_thread(refusal, situation, target, partly=False)
        elif action in ("restart", "drain"):
            after = dataclasses.replace(situation, replaced=situation.replaced | self._starts_of(action, target))
        else:
            desired = situation.desired_models[self._model(target).name]
            wanted = self._count_after(action, target, count)
            after = situation.with_desired(dataclasses.replace(desired, count=wanted))
        settled, strategies = await state.in_thread(_effects, situation, after)
        replaced = {id for id, _ in after.replaced - situation.replaced}
        changes = [{"replica": id, "change": "restart"} for id in sorted(replaced)]
        if not replaced:
            changes = replica_changes(Goal(), situation.views, settled)
        planned = settled.plan.as_dict()
        return {
            "index": index,
            "revision": state.current.number,
            "changes": changes,
            "placements": planned["placements"],
            "unplaced": planned["unplaced"],
            "strategies": strategies,
            "refusal": cause,
        }

    def _count_after(self, action: Manual, name: str, count: int | None) -> int:
        """Returns the number of replicas that the operation of that name would request. Raises Refused."""
        model, counts = self._model(name), self._state.counts
        if action == "unload":
            return 0
        if action == "load":
            return counts.desired(model) or max(model.replicas.min, 1)
        if count is not None and count > model.replicas.max:
            what = f"{name}: {count} replicas are more than the spec's max of {model.replicas.max}"
            raise OperationRefused("scale-over-max", what, "raise replicas.max in the spec and apply it")
        return counts.target(model) if count is None else count

    def _starts_of(self, action: Manual, target: str) -> frozenset[tuple[str, int]]:
        """Returns id and epoch of the replicas that get a new process. Raises Refused."""
        views = self._state.replicas_of(self._model(target).name) if action == "restart" else [self._view(target)]
        return frozenset((view.id, view.epoch) for view in views)


def _effects(before: Situation, after: Situation) -> tuple[Goal, list[dict[str, Any]]]:
    """Returns the goal at the end of the change, and how replicas that serve now are replaced."""
    models = {id.partition("/")[0] for id, _ in after.replaced - before.replaced}
    choices = {name: choose_strategy(after, name) for name in sorted(models)}
    strategies = [
        {"model": name, "strategy": choice.strategy, "outage_s": choice.outage_s, "why": choice.why}
        for name, choice in choices.items()
    ]
    return compute_goal(dataclasses.replace(after, replaced=before.replaced)), strategies
