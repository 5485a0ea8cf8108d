"""The second phase of joining a Ray cluster: which of its machines can be the hosts of a spec."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from orchestrator.fleet.host_binding import Member, bind_hosts
from orchestrator.fleet.host_greeting import HostGreeting, unfit
from orchestrator.fleet.node_declaration import NodeDeclaration
from orchestrator.process.failure import Failed
from placements.facts.topology import TOPOLOGIES, Host, Topology
from placements.planner.spec_hosts import DEFAULT_EMULATION


def survey(
    hosts: Sequence[Host],
    members: Sequence[Member],
    greetings: Mapping[str, HostGreeting | str],
    own: HostGreeting,
    taken: Collection[str] = (),
    elastic: bool = False,
) -> Iterator[str]:
    """Yields a line for the machines of each type, each machine that is left out, and each host without a machine.

    ``members`` are the machines of the cluster, ``greetings`` their reports by label, ``own`` that of this process,
    and ``taken`` the machines of other fleets. Raises Failed if no machine can be a host, unless the spec is
    ``elastic``, or if one has fewer core resources than its instance type has cores.
    """
    usable: list[Member] = []
    emulated = emulated_types(hosts)
    for member in members:
        topology = TOPOLOGIES.get(member.instance or "")
        if not member.alive or topology is None:
            continue
        if not member.cores:
            yield f"{member.label} is left out: it has no core resources; {_start_hint(topology)}"
            continue
        if member.cores < topology.cores:
            message = f"{member.label} has {member.cores} core resources, and an {member.instance} has {topology.cores}"
            raise Failed("core-resources-missing", message, _start_hint(topology))
        reason = unfit(greetings.get(member.label, "it has not answered"), own, emulated=topology.instance in emulated)
        if reason is None:
            usable.append(member)
        else:
            yield f"{member.label} is left out: {reason}"
    if not usable and not elastic:
        message = "no machine of the Ray cluster can be a host: it needs core resources and the label "
        message += "corewright-instance, and this version of corewright"
        raise Failed("no-hosts-on-cluster", message, _start_hint(hosts[0].topology if hosts else None))
    for instance, count in Counter(member.instance for member in usable).items():
        kind = ", emulated" if instance in emulated else ""
        yield f"{instance}: {count} machine{'s' if count > 1 else ''}{kind}, corewright {own.version} in {own.folder}"
    bound = bind_hosts((host.name for host in hosts), {}, usable, taken)
    for host in hosts:
        if host.name not in bound:
            then = "one is requested when it is needed" if elastic else "it counts as lost until one joins"
            yield f"{host.name}: no machine of the Ray cluster is free for it; {then}"


def emulated_types(hosts: Sequence[Host]) -> frozenset[str]:
    """Returns the instance types that the spec emulates."""
    return frozenset(host.topology.instance for host in hosts if host.emulated and host.topology is not None)


def _start_hint(topology: Topology | None) -> str:
    """Returns how a machine becomes a host."""
    declaration = NodeDeclaration(topology or TOPOLOGIES[DEFAULT_EMULATION])
    command = f"ray start --address=HEAD:6379 {declaration.arguments}"
    return f"start its Ray node with what `corewright node-resources` prints there: {command}"
