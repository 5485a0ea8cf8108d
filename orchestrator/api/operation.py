"""A running fleet as its operations use it: exclusive decisions, the journal, and common refusals."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from orchestrator.access.source_policy import SourcePolicy, allowed_by_setting, allowed_to_keys
from orchestrator.api.schemas import OperationRefused
from orchestrator.control.controller import Controller
from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.control.effects import ClusterClient
from orchestrator.control.fleet_state import FleetState
from orchestrator.control.journal.journal import JournalLost, JournalUnwritable
from orchestrator.control.journal.journal_records import R
from orchestrator.control.rollout_progress import rollout_state
from orchestrator.messages.controller_settings import ControllerSettings
from placements.spec.schema import ModelSpec

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class OperatedFleet:
    """The fleet of one controller, for the operations on it; they run on the controller's event loop.

    An operation that raises has changed nothing.
    """

    controller: Controller
    cluster: ClusterClient
    request_shutdown: Callable[[], Awaitable[None]]  # notifies the daemon
    by_key: bool = False  # the caller has an API key, so its specs may name less

    @property
    def state(self) -> FleetState:
        return self.controller.state

    @property
    def settings(self) -> ControllerSettings:
        return self.controller.settings

    @cached_property  # it parses the spec of `up`
    def allowed(self) -> SourcePolicy:
        """The places and programs that a spec of the caller may name."""
        return (allowed_to_keys if self.by_key else allowed_by_setting)(self.settings)

    @cached_property
    def for_keys(self) -> OperatedFleet:
        """The fleet for a caller with an API key."""
        return dataclasses.replace(self, by_key=True)


def exclusive(
    operation: Callable[Concatenate[OperatedFleet, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[OperatedFleet, P], Coroutine[Any, Any, T]]:
    """Makes an operation exclusive: nothing else decides until it has ended, also if its caller is gone."""

    async def run(fleet: OperatedFleet, /, *args: P.args, **kwargs: P.kwargs) -> T:
        async with fleet.state.deciding:
            return await operation(fleet, *args, **kwargs)

    @wraps(operation)
    async def shielded(fleet: OperatedFleet, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.shield(asyncio.ensure_future(run(fleet, *args, **kwargs)))

    return shielded


async def write(fleet: OperatedFleet, record: R) -> R:
    """Writes a record to the journal, and returns it as stored. Raises OperationRefused."""
    try:
        return await fleet.state.records.record(record)
    except JournalUnwritable as error:
        fact = f"the journal cannot be written: {error.strerror}"
        if isinstance(error, JournalLost):
            raise OperationRefused(
                "journal-lost", fact, "corewright down, then corewright up SPEC", status=507
            ) from None
        hint = "free disk space; running replicas are not affected"
        raise OperationRefused("journal-unwritable", fact, hint, status=507) from None


def missing_object(id: str, name: str, names: Sequence[str]) -> OperationRefused:
    """Returns the refusal of an operation on an unknown object; ``id`` is its kind with "-unknown"."""
    kind = id.removesuffix("-unknown")
    hint = f"existing {kind}s: {', '.join(names) or 'none'}"
    return OperationRefused(id, f"there is no {kind} {name}", hint, status=404)


def model_of(fleet: OperatedFleet, name: str) -> ModelSpec:
    """Returns a model of the running spec. Raises OperationRefused."""
    spec = fleet.state.current.spec
    model = spec.model(name)
    if model is None:
        raise missing_object("model-unknown", name, [candidate.name for candidate in spec.models])
    return model


def view_of(fleet: OperatedFleet, target: str) -> ReplicaView:
    """Returns the replica that a drain names. Raises OperationRefused."""
    view = fleet.state.views.get(target)
    if view is None:
        targets = ", ".join([host.name for host in fleet.state.hosts] + sorted(fleet.state.views))
        fact = f"there is no host or replica {target}"
        raise OperationRefused("target-unknown", fact, f"hosts and replicas: {targets}", status=404)
    return view


def is_host(fleet: OperatedFleet, target: str) -> bool:
    """Returns whether a drain names a host."""
    return any(host.name == target for host in fleet.state.hosts)


def refuse_on_hold(fleet: OperatedFleet) -> None:
    """Refuses changes of models or replicas while the newest revision is unknown."""
    hold = fleet.state.hold
    if hold is not None:
        raise OperationRefused(hold.id, hold.what, hold.hint)


def refuse_frozen(fleet: OperatedFleet, verb: str) -> None:
    """Refuses to replace replicas while the fleet is on hold or its rollout does not proceed."""
    refuse_on_hold(fleet)
    if fleet.state.frozen:
        now = rollout_state(fleet.state)[0]
        fact = f"the rollout is {now}, so a {verb} would replace nothing"
        raise OperationRefused("rollout-paused", fact, "run corewright rollout resume or rollout undo first")


def refuse_changed(fleet: OperatedFleet, check_index: int | None, hint: str = "preview the change again") -> None:
    """Refuses a change if the fleet's index is no longer that of its preview."""
    index = fleet.state.records.state.index
    if check_index is not None and check_index != index:
        fact = f"the fleet's index is {index}, not {check_index}: the fleet has changed since the preview"
        raise OperationRefused("index-changed", fact, hint)


def refuse_over_max(model: ModelSpec, count: int | None) -> None:
    """Refuses more replicas of a model than its spec allows."""
    if count is not None and count > model.replicas.max:
        fact = f"{model.name}: {count} replicas are more than the spec's max of {model.replicas.max}"
        raise OperationRefused("scale-over-max", fact, "raise replicas.max in the spec and apply it")
