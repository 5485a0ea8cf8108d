"""The host actors of one fleet, one on each Ray node: found by name, or started.

Those of another version of corewright, which a controller of that version has left, are used until they are replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.fleet.cluster_names import host_actor_name, host_actor_of
from orchestrator.on_ray.actor_death import cause_of_death
from orchestrator.on_ray.head import Head
from orchestrator.on_ray.host_actor import HostActor
from orchestrator.on_ray.host_survey import GREETING_S
from orchestrator.on_ray.ray_nodes import RayNode
from orchestrator.process.awake_clock import AwakeClock
from orchestrator.process.version import corewright_version
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
        self._others: dict[str, str] = {}  # the version of actors of other versions, by label of their node

    def find_others(self) -> None:
        """Find the actors of other versions. Blocks. Raises an error of Ray."""
        listed = ray.util.list_named_actors(all_namespaces=True)
        hosts = [host_actor_of(actor["name"]) for actor in listed if actor["namespace"] == self._namespace]
        self._others = {host[0]: host[1] for host in hosts if host is not None and host[1] != corewright_version()}

    @property
    def others(self) -> Mapping[str, str]:
        """The version of each actor that is to be replaced, by the label of its node."""
        return self._others

    async def replace(self, label: str, node: RayNode | None, clock: AwakeClock) -> str | None:
        """Replaces the actor of another version on the node with this label; None: that is gone. Returns why the new
        actor does not start: the old one stays then. Raises an error of Ray, or asyncio.TimeoutError."""
        if node is not None:
            new = await self._head.ask(partial(self._start, node), f"replace host/{node.id}")
            try:
                await clock.within(new.greeting.remote(), GREETING_S)
            except (RayError, asyncio.TimeoutError) as error:
                await self._head.ask(partial(self._end, label, corewright_version()), f"end host/{node.id}")
                if isinstance(error, RayActorError):
                    return cause_of_death(error)
                return str(error).partition("\n")[0] or f"it has not replied for {GREETING_S:.0f} s"
            self._actors[node.id] = new
        await self._head.ask(partial(self._end, label, self._others[label]), f"end host/{label}")
        del self._others[label]
        return None

    async def of(self, node: RayNode) -> Any:
        """Returns the node's actor. Raises an error of Ray, or asyncio.TimeoutError while the head is away."""
        if node.id not in self._actors:
            self._actors[node.id] = await self._head.ask(partial(self._find, node), f"host/{node.id}")
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

    def _find(self, node: RayNode) -> Any:
        if node.label in self._others:
            with contextlib.suppress(ValueError):  # it has ended
                return ray.get_actor(host_actor_name(node.label, self._others[node.label]), self._namespace)
        return self._start(node)

    def _end(self, label: str, version: str) -> None:
        with contextlib.suppress(ValueError):  # it has ended
            ray.kill(ray.get_actor(host_actor_name(label, version), self._namespace), no_restart=True)

    def _start(self, node: RayNode) -> Any:
        return HostActor.options(  # type: ignore[attr-defined]
            name=host_actor_name(node.label, corewright_version()),
            namespace=self._namespace,
            get_if_exists=True,
            lifetime="detached",
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        ).remote(self._store, self._home, self._mark(node))
