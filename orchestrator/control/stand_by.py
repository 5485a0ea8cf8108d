"""Keeps the hosts ready for starts: a warm process of each engine, and the files of parked models in memory."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import cast

from orchestrator.fleet.effects import ClusterClient
from orchestrator.fleet.parked_model import ParkedModel
from orchestrator.state.fleet_state import FleetState
from placements.facts.engines import Engine
from workers.host.page_cache import CachedBytes
from workers.host.task_boundary import task_boundary

log = logging.getLogger(__name__)

PERIOD_S = 15.0  # the kernel may evict pages at any time


class StandBy:
    """The readiness of one fleet's hosts. Used from the controller's event loop."""

    def __init__(self, state: FleetState, cluster: ClusterClient) -> None:
        self._state = state
        self._cluster = cluster
        self._reports: dict[ParkedModel, CachedBytes] = {}  # how much of it its host has in memory
        self._updates: dict[str, asyncio.Task[None]] = {}  # by host
        self._due: dict[str, float] = {}  # by host, on the state's clock

    def round(self) -> None:
        """Note which models are parked where, and update the hosts that are due."""
        state, now = self._state, self._state.clock()
        living = {host.name for host in state.living_hosts}
        present = {view.model for view in state.views.values()}
        versions, known = state.current.versions, state.parked
        served = {name: last for name, (last, *_) in state.records.state.ready_starts.items()}
        parked = {
            name: ParkedModel(last.host, tuple(last.folders), last.version)
            for name, last in served.items()
            if name not in present and last.folders and last.version == versions.get(name) and last.host in living
        }
        self._reports = {model: self._reports[model] for model in parked.values() if model in self._reports}
        state.parked = {
            name: dataclasses.replace(model, cached=self._reports.get(model)) for name, model in parked.items()
        }
        for name in parked.keys() - known.keys():
            self._due.pop(parked[name].host, None)  # with this model, now
        for host in living:
            if self._due.get(host, now) <= now and host not in self._updates:
                self._due[host] = now + PERIOD_S
                self._updates[host] = asyncio.get_running_loop().create_task(self._update(host))

    async def _update(self, host: str) -> None:
        try:
            await self._refresh(host)
        finally:
            del self._updates[host]

    async def _refresh(self, host: str) -> None:
        with task_boundary(log, "%s is not kept ready for starts; this is retried", host, level=logging.WARNING):
            # Those that started last are the last, and have precedence.
            parked = [model for model in self._state.parked.values() if model.host == host]
            folders = dict.fromkeys(folder for model in reversed(parked) for folder in model.folders)
            cached = await self._cluster.stand_by(host, self._warm_engines(), list(folders))
            for model in parked:
                parts = [cached[folder] for folder in model.folders if folder in cached]
                if len(parts) == len(model.folders):
                    total = CachedBytes(sum(part.cached for part in parts), sum(part.total for part in parts))
                    self._reports[dataclasses.replace(model, cached=None)] = total

    def _warm_engines(self) -> dict[str, str | None]:
        """Returns the Python of each engine that is to have a warm process. With `engine: auto`, hosts decide about
        the engine: running replicas have it."""
        state, current = self._state, self._state.current
        engines = {current.engines[model.name] for model in current.spec.models}
        engines |= {cast(Engine, state.configs[id].engine) for id in state.views if id in state.configs}
        return current.spec.warm_engines(engines)

    def stop(self) -> None:
        """Stop the updates."""
        for update in self._updates.values():
            update.cancel()
