"""Keeps the hosts ready for starts: a warm process of each engine, and the files of parked models in memory."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

from orchestrator.fleet.effects import ClusterClient, HostLost
from orchestrator.fleet.parked_model import ParkedModel
from orchestrator.fleet.replica_states import State
from orchestrator.state.fleet_state import FleetState
from workers.host.page_cache import CachedBytes
from workers.host.task_boundary import task_boundary

log = logging.getLogger(__name__)

PERIOD_S = 15.0  # the kernel may evict pages at any time


class StandBy:
    """The readiness of one fleet's hosts. Used from the controller's event loop."""

    def __init__(self, state: FleetState, cluster: ClusterClient) -> None:
        self._state = state
        self._cluster = cluster
        self._served = {  # where a replica of each model was ready last, and its files
            name: ParkedModel(last.host, tuple(last.folders), last.version)
            for name, (last, *_) in state.records.state.ready_starts.items()
        }
        self._updates: dict[str, asyncio.Task[None]] = {}  # by host
        self._due: dict[str, float] = {}  # by host, on the state's clock

    def round(self) -> None:
        """Note what replicas serve, and update the hosts that are due."""
        state, now = self._state, self._state.clock()
        for view in state.views.values():
            config = state.configs.get(view.id)
            if view.state is State.READY and config is not None:
                folders = tuple(source for _, source, _, _ in config.sources())
                self._served[view.model] = ParkedModel(view.host, folders, view.version)
        present = {view.model for view in state.views.values()}
        versions = state.current.versions
        known = state.parked
        state.parked = {
            name: parked
            for name, parked in self._served.items()
            if name not in present and parked.folders and parked.version == versions.get(name)
        }
        for name, parked in state.parked.items():
            if name not in known:
                self._due.pop(parked.host, None)  # with this model, now
        for host in state.living_hosts:
            if self._due.get(host.name, now) <= now and host.name not in self._updates:
                self._due[host.name] = now + PERIOD_S
                self._updates[host.name] = asyncio.get_running_loop().create_task(self._update(host.name))

    async def _update(self, host: str) -> None:
        state, current = self._state, self._state.current
        engines = {current.engines[model.name] for model in current.spec.models}
        warm: dict[str, str | None] = {
            engine: current.spec.python_for(engine) for engine in engines if current.spec.is_warm(engine)
        }
        parked = {name: model for name, model in state.parked.items() if model.host == host}
        folders = sorted({folder for model in parked.values() for folder in model.folders})
        with task_boundary(log, "%s is not kept ready for starts; this is retried", host, level=logging.WARNING):
            try:
                cached = await self._cluster.stand_by(host, warm, folders)
            except HostLost:
                cached = {}
            finally:
                del self._updates[host]
            for name, model in parked.items():
                parts = [cached.get(folder, CachedBytes(0, 0)) for folder in model.folders]
                total = CachedBytes(sum(part.cached for part in parts), sum(part.total for part in parts))
                if self._served.get(name) == model:
                    self._served[name] = dataclasses.replace(model, cached=total)

    def stop(self) -> None:
        """Stop the updates."""
        for update in self._updates.values():
            update.cancel()
