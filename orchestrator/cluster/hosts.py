"""The host actors of a fleet: found or started, admitted or left out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from functools import partial
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.cluster.calls import Head, cause_of_death
from orchestrator.cluster.host_actor import HostActor
from orchestrator.cluster.nodes import ClusterNodes, RayNode
from orchestrator.cluster.survey import GREETING_S
from orchestrator.fleet.cluster_names import HOST_ACTOR
from orchestrator.fleet.host_greeting import own_greeting, unfit
from orchestrator.process.awake_clock import AwakeClock
from workers.artifacts.store.store_settings import StoreSettings
from workers.host.orphans import NODE_VARIABLE, mark_of
from workers.host.task_boundary import task_boundary

log = logging.getLogger(__name__)


class HostActors:
    """The handles of a fleet's host actors. Used from one event loop."""

    def __init__(self, head: Head, namespace: str, store: StoreSettings, home: str, fleet: str | None) -> None:
        """``fleet``, on a cluster that others started, distinguishes its replicas from those of other fleets."""
        self._head = head
        self._namespace = namespace
        self._store = store
        self._home = home
        self._fleet = fleet
        self._actors: dict[str, Any] = {}  # by node id

    async def of(self, node: RayNode) -> Any:
        """Returns the node's actor. Raises an error of Ray, or asyncio.TimeoutError while the head is away."""
        if node.id not in self._actors:
            self._actors[node.id] = await self._head.ask(partial(self._start, node), f"host/{node.id}")
        return self._actors[node.id]

    async def prepare(self, node: RayNode) -> None:
        """Start the node's actor before the first call, if the head replies."""
        with task_boundary(log, "the host actor of %s is not started yet", node.label, level=logging.WARNING):
            await self.of(node)

    def known(self, node: RayNode) -> Any:
        """Returns the node's actor if it was called before, or None."""
        return self._actors.get(node.id)

    def forget(self, node: RayNode) -> None:
        """Find the node's actor again at its next call."""
        self._actors.pop(node.id, None)

    def environment(self, node: RayNode) -> dict[str, str]:
        """Returns the variables of replicas by which a later node of the machine recognizes them."""
        mark = self._mark(node)
        return {} if mark is None else {NODE_VARIABLE: mark}

    def _mark(self, node: RayNode) -> str | None:
        return None if self._fleet is None else mark_of(self._fleet, node.label, node.id)

    def _start(self, node: RayNode) -> Any:
        return HostActor.options(  # type: ignore[attr-defined]
            name=f"{HOST_ACTOR}{node.label}",
            namespace=self._namespace,
            get_if_exists=True,
            lifetime="detached",
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        ).remote(self._store, self._home, self._mark(node))


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
        reason = unfit(reply, own_greeting(), emulated=node.instance in self._emulated)
        if reason is not None:
            log.error("%s is left out: %s", node.label, reason)
            self._nodes.unfit[node.id] = reason
            self._actors.forget(node)
