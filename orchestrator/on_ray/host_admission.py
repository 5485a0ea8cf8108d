"""Leaves out the machines of a joined cluster that cannot be hosts, by what they report about themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from orchestrator.fleet.host_greeting import unfit
from orchestrator.on_ray.actor_death import cause_of_death
from orchestrator.on_ray.cluster_nodes import ClusterNodes
from orchestrator.on_ray.host_actors import HostActors
from orchestrator.on_ray.host_survey import GREETING_S
from orchestrator.on_ray.own_greeting import greeting
from orchestrator.on_ray.ray_nodes import RayNode
from orchestrator.process.awake_clock import AwakeClock

log = logging.getLogger(__name__)


class HostAdmission:
    """Judges each new host once. Used from one event loop."""

    def __init__(self, nodes: ClusterNodes, actors: HostActors, clock: AwakeClock, emulated: Collection[str]) -> None:
        """``emulated`` are the instance types whose machines have no devices."""
        self._nodes = nodes
        self._actors = actors
        self._clock = clock
        self._emulated = emulated
        self._greeted: dict[str, asyncio.Task[None]] = {}  # by node id

    def greet(self) -> None:
        """Ask the machines that are new hosts for their versions."""
        used = set(self._nodes.labels.values())
        for node in self._nodes.all:
            if node.alive and node.label in used and node.id not in self._greeted:
                self._greeted[node.id] = asyncio.get_running_loop().create_task(self._judge(node))

    async def _judge(self, node: RayNode) -> None:
        """Leave the machine out if it cannot be a host."""
        while True:
            try:
                reply = await self._clock.within((await self._actors.of(node)).greeting.remote(), GREETING_S)
                break
            except (RayError, asyncio.TimeoutError) as error:
                if isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError):
                    reply = f"corewright does not run there: {cause_of_death(error)}"
                    break
                log.warning("%s does not report its version: %s", node.label, error)
            await asyncio.sleep(GREETING_S)
            if not any(other.id == node.id and other.alive for other in self._nodes.all):
                return
        reason = unfit(reply, greeting(), emulated=node.instance in self._emulated)
        if reason is not None:
            log.error("%s is left out: %s", node.label, reason)
            self._nodes.unfit[node.id] = reason
            self._actors.forget(node)
