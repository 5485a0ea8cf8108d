"""How the daemon gets its Ray: it starts a cluster of its own on this machine, or joins one."""

from __future__ import annotations

import logging
import platform
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchestrator.fleet.host_binding import Member, bind_hosts
from orchestrator.fleet.node_declaration import NodeDeclaration
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from placements.facts.topology import TOPOLOGIES, Host, Topology
from placements.planner.spec_hosts import DEFAULT_EMULATION
from workers.host import host_facts as this_host

log = logging.getLogger(__name__)

REACH_S = 3.0  # to connect to the head's port; Ray itself would try for 20 s


class RayConnection(Protocol):
    """Ray as the daemon uses it."""

    @property
    def joined(self) -> bool:
        """Others may use the cluster, and it outlives the fleet."""

    @property
    def cpus(self) -> tuple[int, ...]:
        """The CPUs of each of its machines, once it has started."""

    previous: str | None
    """The last fleet of this home, which has ended: what it has left on a joined cluster is removed."""

    def start(self, proceed: Callable[[], None]) -> dict[str, Any]:
        """Returns Ray's addresses. Calls ``proceed`` between long steps, which raises if the fleet is to end.

        Raises Failed, or an error of Ray."""

    def stop(self) -> None:
        """Ends what is left of the fleet, and disconnects."""


@dataclass
class OwnRay:
    """A cluster of the fleet's own, with a Ray node for each emulated host."""

    home: Home
    name: str  # of the fleet
    hosts: tuple[Host, ...]
    dashboard: bool
    previous: str | None = None
    further: list[Any] = field(default_factory=list)  # the Ray nodes of the hosts except the first
    joined = False

    @property
    def cpus(self) -> tuple[int, ...]:
        return this_host.usable_cpus()

    def start(self, proceed: Callable[[], None]) -> dict[str, Any]:
        self.home.secure_ray()  # before the import of Ray, which reads its settings
        from orchestrator.on_ray import ray_nodes

        cores, cpus = max((host.cores for host in self.hosts), default=0), len(self.cpus)
        proceed()
        addresses = ray_nodes.start_ray(self.home.ray, self.name, cores=cores, cpus=cpus, dashboard=self.dashboard)
        for index, host in enumerate(self.hosts[1:], start=1):
            proceed()
            self.further.append(ray_nodes.add_node(index, cores=host.cores, cpus=cpus))
        return addresses

    def stop(self) -> None:
        from orchestrator.on_ray import ray_nodes

        ray_nodes.stop_ray(self.further)


@dataclass
class JoinedRay:
    """A cluster that was started by others. The fleet touches only what it has made there."""

    address: str  # HOST:PORT, or auto
    hosts: tuple[Host, ...]
    fleet: str
    name: str  # of the fleet
    report: Callable[[str], None]
    previous: str | None = None
    cpus: tuple[int, ...] = ()
    joined = True

    def start(self, proceed: Callable[[], None]) -> dict[str, Any]:
        self._reach()
        from orchestrator.on_ray import ray_nodes

        try:
            addresses = ray_nodes.join_ray(self.address, self.name)
        except Exception as error:  # Ray raises many types, with pages of text
            log.exception("Ray cannot be joined")
            raise _not_joined(self.address, str(error)) from None
        proceed()
        nodes = ray_nodes.ray_nodes()
        if not ray_nodes.on_head():
            message = "this machine is not the head of the Ray cluster, where the controller runs"
            hint = "run `corewright up` on the head, or `ray job submit -- corewright up ...`, which runs it there"
            raise Failed("not-on-the-head", message, hint)
        for line in survey(self.hosts, nodes):
            self.report(line)
        owner = ray_nodes.ClusterOwner(self.fleet, self.name, platform.node(), time.time())
        other = ray_nodes.claim_name(owner, self.previous)
        if other is not None:
            began = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(other.since))
            message = f"a fleet {other.name} runs on this Ray cluster since {began} UTC, started on {other.machine}"
            raise Failed(
                "fleet-already-running",
                message,
                "use another `name` in the spec, or stop the other fleet with `corewright down` there",
            )
        self.cpus = tuple(range(min(node.cpus for node in nodes if node.alive and node.cores)))
        return addresses

    def _reach(self) -> None:
        """Raises Failed if nothing listens at the address."""
        host, _, port = self.address.rpartition(":")
        if not port.isdigit():
            return  # auto
        try:
            socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
        except OSError as error:
            message = f"no Ray cluster listens at {self.address}: {error.strerror or error}"
            hint = "check the address and the firewall; `ray status --address` shows a running cluster"
            raise Failed("ray-unreachable", message, hint) from None

    def stop(self) -> None:
        from orchestrator.on_ray import ray_nodes

        ray_nodes.leave_ray(self.name, self.fleet)


def survey(hosts: Sequence[Host], nodes: Sequence[Member]) -> Iterator[str]:
    """Yields a line for each host of the spec without a machine in the cluster.

    Raises Failed if no machine can be a host, or one has fewer core resources than its instance type has cores.
    """
    members = [node for node in nodes if node.alive and node.cores and node.instance is not None]
    for member in members:
        topology = TOPOLOGIES.get(member.instance or "")
        if topology is not None and member.cores < topology.cores:
            message = f"{member.label} has {member.cores} core resources, and an {member.instance} has {topology.cores}"
            raise Failed("core-resources-missing", message, _start_hint(topology))
    if not members:
        message = "no machine of the Ray cluster has core resources and the label corewright-instance"
        raise Failed("no-hosts-on-cluster", message, _start_hint(hosts[0].topology if hosts else None))
    bound = bind_hosts((host.name for host in hosts), {}, members)
    for host in hosts:
        if host.name not in bound:
            yield f"{host.name}: no machine of the Ray cluster is free for it; it counts as lost until one joins"


def _start_hint(topology: Topology | None) -> str:
    """Returns how a machine becomes a host."""
    declaration = NodeDeclaration(topology or TOPOLOGIES[DEFAULT_EMULATION])
    command = f"ray start --address=HEAD:6379 {declaration.arguments}"
    return f"start its Ray node with what `corewright node-resources` prints there: {command}"


def _not_joined(address: str, error: str) -> Failed:
    cause = error.strip().partition("\n")[0]
    if "ersion mismatch" in error:
        hint = "use the Ray and the Python of the cluster, down to the patch version"
        return Failed("ray-version-differs", f"the Ray cluster at {address} has other versions: {cause}", hint)
    hint = "check that a node of the cluster runs here, and that RAY_AUTH_MODE and the token are the cluster's"
    return Failed("ray-not-joined", f"the Ray cluster at {address} does not admit this machine: {cause}", hint)
