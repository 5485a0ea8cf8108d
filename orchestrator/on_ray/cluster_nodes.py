"""The Ray nodes of a fleet's cluster, and the planner's hosts on them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from functools import partial

import ray

from orchestrator.fleet.effects import Loss
from orchestrator.fleet.gateway_places import ClusterMachine
from orchestrator.fleet.host_binding import lost_hosts
from orchestrator.fleet.machine_claims import MachineClaims
from orchestrator.on_ray.head import Head, retried
from orchestrator.on_ray.ray_nodes import RayNode, host_labels, ray_nodes
from orchestrator.process.awake_clock import AwakeClock
from workers.host.task_boundary import task_boundary

log = logging.getLogger(__name__)

RETURN_S = 30.0  # after a loss of the head, nodes register again one by one
WAIT_S = 0.5  # between two lists while a node is waited for


class ClusterNodes:
    """The nodes as Ray's head last listed them: the list stays while the head is away. Used from one event loop."""

    def __init__(self, head: Head, clock: AwakeClock, claims: MachineClaims | None) -> None:
        """``claims`` are those of the fleet on a cluster that others started; None: on its own Ray."""
        self.names: list[str] = []  # the planner's hosts
        self.kept: frozenset[str] | None = None  # those that are used; None: all
        self.labels: dict[str, str] = {}  # of their nodes, by name
        self.unfit: dict[str, str] = {}  # why nodes are left out, by id
        self.here: str = ray.get_runtime_context().get_node_id()
        self.all: list[RayNode] = retried(ray_nodes)
        self._last: dict[str, str] = {}  # by label, the id of its last living node
        self._head = head
        self._clock = clock
        self._claims = claims
        self._settled_at = clock() + (RETURN_S if claims is not None else 0.0)
        self._refreshing = asyncio.Lock()

    def add(self, names: Iterable[str]) -> None:
        """Add hosts, in the planner's order. Blocks. Raises an error of Ray."""
        self.names.extend(names)
        self._use(self.all, retried(partial(self._bind, self.all, self.settling)))

    async def refresh(self) -> bool:
        """Read the list again. Returns False if the head has not replied."""
        replied = False
        async with self._refreshing:
            with task_boundary(log, "the list of Ray's nodes stays as it was", level=logging.DEBUG):
                self._use(*await self._head.ask(partial(self._read, self.settling), "nodes"))
                replied = True
        return replied

    def _read(self, keep: bool) -> tuple[list[RayNode], dict[str, str]]:
        nodes = ray_nodes()
        return nodes, self._bind(nodes, keep)

    def _use(self, nodes: list[RayNode], labels: dict[str, str]) -> None:
        self.all, self.labels = nodes, labels
        self._last |= {node.label: node.id for node in nodes if node.alive}

    def _bind(self, nodes: list[RayNode], keep: bool) -> dict[str, str]:
        if self._claims is None:
            return host_labels(self.names)
        names = [name for name in self.names if self.kept is None or name in self.kept]
        return self._claims.bind(names, [node for node in nodes if node.id not in self.unfit], keep=keep)

    @property
    def settling(self) -> bool:
        """True if nodes that are missing may still register, since the controller has just started."""
        return self._clock() < self._settled_at

    def of(self, host: str | None) -> RayNode | None:
        """Returns the node of a host, preferably a living one; without ``host``, the node of this process."""
        label = None if host is None else self.labels.get(host)
        nodes = [node for node in self.all if (node.id == self.here if host is None else node.label == label)]
        return max(nodes, key=lambda node: (node.alive, node.id == self._last.get(node.label)), default=None)

    def used(self) -> frozenset[str]:
        """Returns the labels of the nodes that the fleet uses: those of its hosts, and that of this process."""
        return frozenset({*self.labels.values(), *(node.label for node in self.all if node.id == self.here)})

    def left_out(self) -> dict[str, str]:
        """Returns why living nodes are left out, by instance type."""
        out = [node for node in self.all if node.alive and node.id in self.unfit]
        return {node.instance: f"{node.label} is left out: {self.unfit[node.id]}" for node in out if node.instance}

    def machines(self) -> list[ClusterMachine]:
        """Returns the living nodes that are not left out, as places of gateways."""
        hosts = {label: name for name, label in self.labels.items()}
        living = (node for node in self.all if node.alive and node.id not in self.unfit)
        return [node.machine(hosts.get(node.label)) for node in living]

    def living(self, host: str | None) -> RayNode | None:
        """Returns the node of a host if it is alive."""
        node = self.of(host)
        return node if node is not None and node.alive else None

    async def wait_living(self, host: str) -> RayNode | None:
        """Returns the living node of a host, and waits for one while nodes may still register."""
        while (node := self.living(host)) is None:
            await self.refresh()
            if (node := self.living(host)) is not None or not self.settling:
                return node
            await asyncio.sleep(WAIT_S)
        return node

    def lost(self) -> Mapping[str, Loss]:
        """Returns the hosts without a living node, and why."""
        living = {node.label for node in self.all if node.alive and node.id not in self.unfit}
        names = lost_hosts(self.names, self.labels, living, settling=self.settling)
        return {name: self._loss(name) for name in names}

    def _loss(self, name: str) -> Loss:
        node = self.of(name)
        if node is None:
            return Loss("no machine of the cluster is free for it")
        return Loss(self.unfit[node.id]) if node.id in self.unfit else node.loss or Loss("its Ray node is gone")
