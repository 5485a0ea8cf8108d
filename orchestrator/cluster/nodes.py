"""The Ray nodes of a fleet's cluster, the planner's hosts on them, and requests for more of them.

A request is a pending placement group for each host that has no machine. It has an owner and can be withdrawn alone,
unlike Ray's `request_resources`, of which the cluster has one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.cluster.calls import Head, retried
from orchestrator.cluster.machine_claims import MachineClaims, Member, lost_hosts
from orchestrator.cluster.ray_names import CORE_RESOURCE, HOST_ACTOR, INSTANCE_LABEL, core_resources, ray_name
from orchestrator.control.effects import Loss
from orchestrator.messages.gateway_places import ClusterMachine, GatewayPlace
from orchestrator.process.awake_clock import AwakeClock
from placements.facts.topology import Host
from workers.host.task_boundary import task_boundary

log = logging.getLogger(__name__)

CONTROLLER = "controller"  # the name of the actor
HOST_LABEL = "corewright-host"  # of a Ray node: the host that it represents; default: its address
IDLE_TERMINATION = 4  # Ray's number of this cause of a node's death
HEAD_RESOURCE = "node:__internal_head__"
HEAD = {HEAD_RESOURCE: 0.001}  # a share of the resource that Ray gives the head, and each new head
RETURN_S = 30.0  # after a loss of the head, nodes register again one by one
WAIT_S = 0.5  # between two lists while a node is waited for
NO_NODE_TYPE = (
    "no node type of Ray's autoscaler can start a machine with the label corewright-instance={}: none has it with the "
    "resources of its cores, or max_workers is reached"
)
STATUS_S = 3  # deadline of the autoscaler's status


def host_label(index: int) -> str:
    """Returns the Ray node label of the planner's host ``index``."""
    return f"emu-{index}"


def host_labels(names: Iterable[str]) -> dict[str, str]:
    """Returns the label of each host, given the names in the planner's order."""
    return {name: host_label(index) for index, name in enumerate(names)}


def here() -> NodeAffinitySchedulingStrategy:
    """Returns the strategy that schedules only on the Ray node of this process."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def own_interpreter() -> dict[str, Any]:
    """Returns the option that runs an actor in this process's interpreter, at the same path on the actor's machine,
    instead of that of Ray there. The actors that it starts inherit the option."""
    return {"runtime_env": {"py_executable": sys.executable}}


@dataclass(frozen=True)
class RayNode(Member):
    """A Ray node as Ray last reported it."""

    id: str
    address: str  # of the machine: emulated hosts share one
    loss: Loss | None = None  # of a dead one
    is_head: bool = False
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def url_host(self) -> str:
        """The address as in a URL."""
        return f"[{self.address}]" if ":" in self.address else self.address

    def machine(self, host: str | None) -> ClusterMachine:
        """Returns it as a place of gateways; ``host`` is the planner's."""
        return ClusterMachine(GatewayPlace(self.label, self.id), self.address, host, self.is_head, self.labels)


def ray_nodes() -> list[RayNode]:
    """Returns every node that Ray knows, including dead ones. Takes 2 ms."""
    return [_ray_node(node) for node in ray.nodes()]


def draining_nodes() -> dict[str, float | None]:
    """Returns the nodes that Ray drains, with the Unix time of their end; None: there is no deadline. Blocks while
    Ray's head is away."""
    draining = ray._private.state.state.get_draining_nodes()
    return {id: deadline_ms / 1000 if deadline_ms else None for id, deadline_ms in draining.items()}


def _ray_node(node: dict[str, Any]) -> RayNode:
    resources, address = node["Resources"], node["NodeManagerAddress"]
    return RayNode(
        label=node["Labels"].get(HOST_LABEL, address),
        instance=node["Labels"].get(INSTANCE_LABEL),
        alive=node["Alive"],
        cores=sum(CORE_RESOURCE.fullmatch(name) is not None for name in resources),
        cpus=int(resources.get("CPU", 0)),
        id=node["NodeID"],
        address=address,
        loss=None if node["Alive"] else loss_of(node.get("DeathReason", 0), node.get("DeathReasonMessage", "")),
        is_head=HEAD_RESOURCE in resources,
        labels=node["Labels"],
    )


def loss_of(reason: int, message: str) -> Loss:
    """Returns Ray's cause of a node's death, by its number (`NodeDeathInfo.Reason`) and its text."""
    text = " ".join(message.split()).rstrip(".")
    expected = reason == IDLE_TERMINATION
    return Loss(f"its Ray node is gone: {text}" if text else "its Ray node is gone", expected)


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
        self.on_refresh: Callable[[], None] = lambda: None

    def add(self, names: Iterable[str]) -> None:
        """Add hosts, in the planner's order. Blocks. Raises an error of Ray."""
        self.names.extend(names)
        self._use(self.all, retried(partial(self._bind, self.all, self.settling)))

    async def refresh(self) -> None:
        """Read the list again, and call ``on_refresh`` if the head has replied."""
        async with self._refreshing:
            with task_boundary(log, "the list of Ray's nodes stays as it was", level=logging.DEBUG):
                self._use(*await self._head.ask(partial(self._read, self.settling), "nodes"))
                self.on_refresh()

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
    def are_joined(self) -> bool:
        """True on a cluster that others started."""
        return self._claims is not None

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


def request_machines(fleet: str, hosts: Collection[Host], others: Collection[str]) -> None:
    """Request a machine for each of the hosts, and withdraw the fleet's other requests. Blocks.

    The nodes ``others`` are none of these machines, although their cores may be free.
    """
    wanted = {request_name(fleet, host.name): host for host in hosts}
    for id, group in requests_of(fleet).items():
        if wanted.pop(group["name"], None) is None:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(id))))
    for name, host in wanted.items():
        assert host.topology is not None
        selector = {INSTANCE_LABEL: host.topology.instance}
        if others:
            selector["ray.io/node-id"] = f"!in({','.join(sorted(others))})"
        placement_group(
            [core_resources(host.topology.cores)],
            strategy="STRICT_PACK",
            name=name,
            lifetime="detached",  # the controller may be restarted
            bundle_label_selector=[selector],
        )


def request_name(fleet: str, host: str) -> str:
    """Returns the name of the placement group; `down` removes all groups that begin with the fleet's name."""
    return f"{ray_name(fleet)}/want/{host}"


def requests_of(fleet: str) -> dict[str, dict[str, Any]]:
    """Returns the placement groups that are requests of the fleet, by id. Blocks."""
    prefix, groups = request_name(fleet, ""), placement_group_table()
    return {
        id: group for id, group in groups.items() if group["name"].startswith(prefix) and group["state"] != "REMOVED"
    }


def refused_types() -> dict[str, str]:
    """Returns why the autoscaler starts no machine, by instance type. Blocks. Launches that the cloud refuses are not
    reported by Ray 2.60."""
    reply = GetClusterStatusReply()
    gcs = GcsClient(ray.get_runtime_context().gcs_address)
    reply.ParseFromString(gcs.get_cluster_status(timeout_s=STATUS_S))
    selectors = [
        constraint
        for gang in reply.autoscaling_state.infeasible_gang_resource_requests
        for request in gang.requests
        for selector in request.label_selectors
        for constraint in selector.label_constraints
    ]
    return {
        instance: NO_NODE_TYPE.format(instance)
        for constraint in selectors
        if constraint.label_key == INSTANCE_LABEL
        for instance in constraint.label_values
    }


def end_host_actors(fleet: str, used: Collection[str]) -> None:
    """End the fleet's host actors on other machines than those with these labels. Blocks.

    Ray's autoscaler removes a machine only if it is idle, and it is not while an actor lives there.
    """
    namespace = ray_name(fleet)
    for actor in ray.util.list_named_actors(all_namespaces=True):
        name = actor["name"]
        is_own = actor["namespace"] == namespace and name.startswith(HOST_ACTOR)
        if is_own and name.removeprefix(HOST_ACTOR) not in used:
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                ray.kill(ray.get_actor(name, namespace), no_restart=True)
