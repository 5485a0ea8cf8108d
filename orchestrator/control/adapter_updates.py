"""Gives running replicas the LoRA adapters of the spec, where their servers can load them without a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from orchestrator.control.decisions.replica_view import ReplicaView, backoff_s
from orchestrator.control.effects import ClusterClient, ReplicaDied
from orchestrator.control.fleet_state import FleetState
from orchestrator.control.rollout_progress import with_other_adapters
from placements.spec.schema import ModelSpec
from workers.artifacts.fetch.artifact_fetcher import FetchedArtifact, wanted_by, with_folders
from workers.host.task_boundary import task_boundary
from workers.messages.replica_config import ADAPTERS, Keys, ReplicaConfig
from workers.messages.status import Failure

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Failed:
    """Attempts that have failed in a row."""

    sources: Mapping[str, str]  # of the adapters
    count: int
    retry_at: float


class AdapterUpdates:
    """The changes of adapters of one controller, on its event loop: at most one of a model at a time.

    All hosts fetch first, then all replicas change together: a changed adapter has the same content everywhere.
    """

    def __init__(self, state: FleetState, cluster: ClusterClient, wake: Callable[[], None]) -> None:
        """``wake`` requests a round."""
        self._state = state
        self._cluster = cluster
        self._wake = wake
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by model
        self._failed: dict[str, _Failed] = {}  # by model
        self._matching: tuple[int, int] | None = None  # changes of views and revision, if no adapter differs

    def round(self) -> None:
        """Start a change for each model that needs one."""
        state = self._state
        seen = state.views.changes, state.current.number
        if seen == self._matching:
            return
        for model in state.current.spec.models:
            failed = self._failed.get(model.name)
            due = failed is None or failed.sources != model.adapter_places or state.clock() >= failed.retry_at
            if due and model.name not in self._tasks and with_other_adapters(state, model):
                task = asyncio.get_running_loop().create_task(self._change(model))
                self._tasks[model.name] = task
                task.add_done_callback(partial(self._ended, model.name))
        self._matching = None if self._tasks or self._failed else seen

    def stop(self) -> None:
        """Cancel all changes."""
        for task in list(self._tasks.values()):
            task.cancel()

    def _ended(self, model: str, _: object) -> None:
        del self._tasks[model]
        self._wake()

    async def _change(self, model: ModelSpec) -> None:
        state, views = self._state, with_other_adapters(self._state, model)
        with task_boundary(
            log,
            "the adapters of %s cannot be changed",
            model.name,
            on_error=lambda error: self._fail(model, str(error)),
        ):
            wanted = [state.pins.pinned(state.current.with_adapters(state.configs[view.id])) for view in views]
            fetched = await asyncio.gather(*map(self._fetched, wanted))
            failures = await asyncio.gather(*map(self._set, views, fetched))
            failure = next(filter(None, failures), None)
            if failure is not None:
                self._fail(model, str(failure))
            else:
                self._failed.pop(model.name, None)
                names = ", ".join(model.adapters) or "none"
                state.records.event("info", "AdaptersChanged", f"without a restart; now: {names}", model=model.name)

    def _fail(self, model: ModelSpec, reason: str) -> None:
        before = self._failed.get(model.name)
        count = 1 if before is None or before.sources != model.adapter_places else before.count + 1
        pause_s = backoff_s(count)
        self._failed[model.name] = _Failed(model.adapter_places, count, self._state.clock() + pause_s)
        message = f"{reason}; tried again in {pause_s:.0f} s"
        self._state.records.event("error", "AdaptersFailed", message, model=model.name)

    async def _fetched(self, config: ReplicaConfig) -> ReplicaConfig:
        """Returns the configuration with the adapters on its host. Raises ConnectionError."""
        landed: dict[Keys, FetchedArtifact] = {}
        for keys, artifact in wanted_by(config).items():
            if keys[0] == ADAPTERS:
                async for reply in self._cluster.fetch(artifact, config.place.host):
                    if isinstance(reply, Failure):
                        raise ConnectionError(str(reply))
                    if isinstance(reply, FetchedArtifact):
                        landed[keys] = reply
        return with_folders(config, landed)

    async def _set(self, view: ReplicaView, config: ReplicaConfig) -> Failure | None:
        """Returns the failure of a change; None also for a replica that has ended meanwhile."""
        state = self._state
        try:
            failure = await self._cluster.set_adapters(config)
        except ReplicaDied:
            return None
        current = state.views.get(view.id)
        if failure is None and current is not None and current.epoch == view.epoch:
            state.configs[view.id] = config
            state.pins.pin_adapters(config)
        return failure
