"""What all operations on a running fleet share: exclusive decisions, the journal, and refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from orchestrator.access.source_policy import allowed_by_setting
from orchestrator.api.refused import OperationRefused
from orchestrator.control.controller import Controller
from orchestrator.fleet.effects import ClusterClient
from orchestrator.fleet.replica_states import LEAVING
from orchestrator.fleet.snapshot import ReplicaView
from orchestrator.records.journal import JournalLost, JournalUnwritable
from orchestrator.records.journal_records import R
from orchestrator.state.rollout_progress import rollout_state
from placements.planner.plan import Running
from placements.spec.schema import ModelSpec

P = ParamSpec("P")
T = TypeVar("T")
Group = TypeVar("Group", bound="FleetOperation")


def exclusive(
    operation: Callable[Concatenate[Group, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Group, P], Coroutine[Any, Any, T]]:
    """Makes an operation exclusive: nothing else decides until it has ended, also if its caller is gone."""

    async def run(operator: Group, /, *args: P.args, **kwargs: P.kwargs) -> T:
        async with operator._state.deciding:
            return await operation(operator, *args, **kwargs)

    @wraps(operation)
    async def shielded(operator: Group, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.shield(asyncio.ensure_future(run(operator, *args, **kwargs)))

    return shielded


def missing_object(id: str, name: str, names: Sequence[str]) -> OperationRefused:
    kind = id.removesuffix("-unknown")
    hint = f"existing {kind}s: {', '.join(names) or 'none'}"
    return OperationRefused(id, f"there is no {kind} {name}", hint, status=404)


class FleetOperation:
    """The controller of a fleet, as the operations use it."""

    def __init__(self, controller: Controller, cluster: ClusterClient) -> None:
        self._controller = controller
        self._cluster = cluster
        self._state = controller.state
        self.settings = controller.settings
        self._allowed = allowed_by_setting(controller.settings)

    def _running(self) -> tuple[Running, ...]:
        """Returns the replicas that hold cores, without those that are stopping."""
        return tuple(
            Running(view.model, view.replica, view.host, view.cores)
            for view in self._state.views.values()
            if view.state not in LEAVING and view.host not in self._state.lost
        )

    def _refuse_on_hold(self) -> None:
        """Refuses changes of models or replicas while the newest revision is unknown."""
        hold = self._state.hold
        if hold is not None:
            raise OperationRefused(hold.id, hold.what, hold.hint)

    def _refuse_frozen(self, verb: str) -> None:
        self._refuse_on_hold()
        if self._state.frozen:
            now = rollout_state(self._state)[0]
            what = f"the rollout is {now}, so a {verb} would replace nothing"
            raise OperationRefused("rollout-paused", what, "run corewright rollout resume or rollout undo first")

    def _view(self, target: str) -> ReplicaView:
        """Returns the replica that a drain names. Raises Refused."""
        view = self._state.views.get(target)
        if view is None:
            targets = ", ".join([host.name for host in self._state.hosts] + sorted(self._state.views))
            what = f"there is no host or replica {target}"
            raise OperationRefused("target-unknown", what, f"hosts and replicas: {targets}", status=404)
        return view

    def _refuse_changed(self, check_index: int | None) -> None:
        """Refuses a change if the fleet's index is no longer that of its preview."""
        index = self._state.records.state.index
        if check_index is not None and check_index != index:
            what = f"the fleet's index is {index}, not {check_index}: the fleet has changed since the preview"
            raise OperationRefused("index-changed", what, "preview the change again")

    def _model(self, name: str) -> ModelSpec:
        model = self._state.current.spec.model(name)
        if model is None:
            raise missing_object(
                "model-unknown", name, [candidate.name for candidate in self._state.current.spec.models]
            )
        return model

    async def _write(self, record: R) -> R:
        try:
            return await self._state.records.record(record)
        except JournalUnwritable as error:
            what = f"the journal cannot be written: {error.strerror}"
            if isinstance(error, JournalLost):
                raise OperationRefused(
                    "journal-lost", what, "corewright down, then corewright up SPEC", status=507
                ) from None
            hint = "free disk space; running replicas are not affected"
            raise OperationRefused("journal-unwritable", what, hint, status=507) from None
