"""The host actors of one fleet, one on each Ray node: found by name, or started."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.fleet.cluster_names import HOST_ACTOR
from orchestrator.on_ray.head import Head
from orchestrator.on_ray.host_actor import HostActor
from orchestrator.on_ray.ray_nodes import RayNode
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
