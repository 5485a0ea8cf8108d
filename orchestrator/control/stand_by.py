"""Keeps the hosts ready for starts: a warm process of each engine, and spare workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from orchestrator.control.effects import ClusterClient
from orchestrator.control.fleet_state import FleetState
from workers.host.task_boundary import task_boundary

log = logging.getLogger(__name__)

PERIOD_S = 15.0  # a warm process may end at any time


class StandBy:
    """The readiness of one fleet's hosts. Used from the controller's event loop."""

    def __init__(self, state: FleetState, cluster: ClusterClient) -> None:
        self._state = state
        self._cluster = cluster
        self._updates: dict[str, asyncio.Task[None]] = {}  # by host
        self._due: dict[str, float] = {}  # by host, on the state's clock

    def round(self) -> None:
        """Update the hosts that are due."""
        now, names = self._state.clock(), [host.name for host in self._state.living_hosts]
        due = [name for name in names if self._due.get(name, now) <= now and name not in self._updates]
        engines = self._warm_engines() if due else {}
        for name in due:
            self._due[name] = now + PERIOD_S
            self._updates[name] = asyncio.get_running_loop().create_task(self._update(name, engines))

    async def _update(self, host: str, engines: Mapping[str, str | None]) -> None:
        try:
            with task_boundary(log, "%s is not kept ready for starts; this is retried", host, level=logging.WARNING):
                await self._cluster.stand_by(host, engines)
        finally:
            del self._updates[host]

    def _warm_engines(self) -> dict[str, str | None]:
        """Returns the Python of each engine that is to have a warm process. With `engine: auto`, hosts decide about
        the engine: running replicas have it."""
        state, current = self._state, self._state.current
        engines = {current.engines[model.name] for model in current.spec.models}
        engines |= {state.configs[id].model.engine for id in state.views if id in state.configs}
        return current.spec.warm_engines(engines)

    def stop(self) -> None:
        """Stop the updates."""
        for update in self._updates.values():
            update.cancel()
