"""Replaces the host actors of another version of corewright, host after host: the second step of an upgrade."""

from __future__ import annotations

import asyncio
import logging

from orchestrator.fleet.effects import ClusterClient
from orchestrator.state.fleet_state import FleetState
from workers.host.task_boundary import task_boundary

log = logging.getLogger(__name__)

RETRY_S = 30.0  # after a host actor that does not start


class HostUpgrade:
    """The host actors that a controller of another version has left, on the event loop of its successor."""

    def __init__(self, state: FleetState, cluster: ClusterClient) -> None:
        self._state = state
        self._cluster = cluster
        self._replacing: asyncio.Task[None] | None = None
        self._due = float("-inf")  # when the next one may be replaced
        self.problem: str | None = None  # why it does not go on

    def round(self) -> None:
        """Start to replace the next one, unless the last one has failed a moment ago."""
        others, now = self._cluster.other_host_actors(), self._state.clock()
        is_busy = self._replacing is not None and not self._replacing.done()
        if others and not is_busy and now >= self._due:
            self._due = now + RETRY_S
            self._replacing = asyncio.get_running_loop().create_task(self._replace(min(others)))

    async def _replace(self, machine: str) -> None:
        reason: str | None = "Ray does not reply"
        with task_boundary(log, "the host actor of %s is not replaced; it is retried", machine):
            reason = await self._cluster.replace_host_actor(machine)
        before, self.problem = self.problem, None
        if reason is None:
            self._due = float("-inf")
            return
        self.problem = f"the host actor on {machine} does not start: {reason}"
        if self.problem != before:
            self._state.records.event("error", "HostActorNotStarted", f"on {machine}: {reason}; the old one stays")

    def retry(self) -> None:
        """Go on now: the cause of the problem may be corrected."""
        self._due, self.problem = float("-inf"), None

    def stop(self) -> None:
        """Cancel a replacement."""
        if self._replacing is not None:
            self._replacing.cancel()
