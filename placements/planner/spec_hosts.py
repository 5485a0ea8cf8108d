"""The hosts of a spec: its entries expanded to hosts to plan for, and grouped with the bounds of their number."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from placements.facts.cpu_layout import CpuLayout
from placements.facts.topology import TOPOLOGIES, Host, Machine, Topology
from placements.spec.schema import HostsSpec, Reserve, Spec

DEFAULT_EMULATION = "inf2.48xlarge"
"""The emulated instance type if neither the spec nor the machine names one."""

RESERVED_SHARE = 0.04
"""The default share of a real host's vCPUs that is reserved for the system, rounded up: 8 of 192."""


def hosts_for(spec: Spec, machine: Machine) -> tuple[Host, ...]:
    """Returns the hosts to plan for, named "<instance>/<i>" with i counted over all hosts of that type.

    ``instance``: the topology of the type, independent of this machine, unless this is a machine of the type: then with
    the CPUs that this process may use. ``emulate``: the topology's cores with this machine's CPUs, divided among the
    emulated hosts on this machine by physical core. Both have what was measured on such machines. Without ``hosts``:
    this machine if its type is known, with the cores of its devices, else one emulated inf2.48xlarge. An entry with
    ``max`` has that many hosts, whether their machines exist or not. Returns () if the spec's ``hosts`` could not be
    read.
    """
    if "hosts" in spec.broken:
        return ()
    wishes = spec.hosts or (_default_hosts(machine),)
    emulated = sum(wish.most for wish in wishes if wish.instance is None)
    hosts: list[Host] = []
    numbers: Counter[str] = Counter()
    at = 0  # emulated hosts so far
    layout = machine.layout
    cpus = machine.cpus if layout is None else layout.ordered(machine.cpus)
    for wish in wishes:
        name = wish.instance or wish.emulate or DEFAULT_EMULATION
        observed = layout if wish.instance == machine.instance else None
        real = machine.cpus if observed or not spec.hosts else tuple(range(TOPOLOGIES[name].vcpus))
        for _ in range(wish.most):
            host_name = f"{name}/{numbers[name]}"
            numbers[name] += 1
            if wish.instance is not None:
                hosts.append(host_for(host_name, wish, real, observed))
            else:
                share = cpus
                if not machine.joined:
                    share = share[at * len(share) // emulated : (at + 1) * len(share) // emulated]
                at += 1
                hosts.append(host_for(host_name, wish, tuple(sorted(share or cpus)), layout))
    return tuple(_with_measured(host, machine) for host in hosts)


def _with_measured(host: Host, machine: Machine) -> Host:
    measured = machine.measured.get(host.machine)
    if measured is None or host.topology is None:
        return host
    return replace(host, topology=replace(host.topology, measured=measured))


def prices(spec: Spec, hosts: Sequence[Host]) -> dict[str, float]:
    """Returns the price of one core hour on each host, by name."""
    each = [wish.price_per_core_hour for wish in spec.hosts for _ in range(wish.most)]
    return {host.name: each[i] if i < len(each) else 0.0 for i, host in enumerate(hosts)}


def _default_hosts(machine: Machine) -> HostsSpec:
    topology = TOPOLOGIES.get(machine.instance or "")
    if topology is None:
        return HostsSpec(emulate=DEFAULT_EMULATION)
    return HostsSpec(instance=machine.instance, reserve=Reserve(cores=_absent_cores(machine, topology)))


def _absent_cores(machine: Machine, topology: Topology) -> tuple[int, ...]:
    """Returns the cores of the devices that the machine does not have, by their ids on the instance type."""
    if machine.joined or not machine.devices:
        return ()
    return tuple(core for core in range(topology.cores) if core // topology.cores_per_device not in machine.devices)


def default_reserve(vcpus: int) -> int:
    """Returns the vCPUs reserved for the system on a real host: 4 %, rounded up, at least 1."""
    return max(1, math.ceil(vcpus * RESERVED_SHARE))


def host_for(name: str, wish: HostsSpec, cpus: tuple[int, ...], layout: CpuLayout | None = None) -> Host:
    """Returns a host of an entry, with these CPUs of the machine or of the type."""
    topology = TOPOLOGIES[wish.instance or wish.emulate or DEFAULT_EMULATION].at_lnc(wish.lnc)
    vcpus, memory = wish.reserve.vcpus, None
    if wish.instance is not None:
        vcpus = default_reserve(len(cpus)) if vcpus is None else vcpus
        memory = max(0.0, topology.memory_gib - wish.reserve.memory_gib)
    cores = frozenset(wish.reserve.cores)
    return Host(name, topology, cpus, vcpus or 0, cores, wish.instance is None, memory, layout)


@dataclass(frozen=True)
class HostGroup:
    """Hosts of one type, interchangeable, of which the fleet uses ``min`` to all."""

    hosts: tuple[Host, ...]
    min: int
    elastic: bool = False  # the spec has ``max``: hosts beyond ``min`` are used only if replicas need them
    price_per_core_hour: float = 0.0

    @property
    def price(self) -> float:
        """The price of one host per hour."""
        return self.price_per_core_hour * self.hosts[0].cores

    @property
    def instance(self) -> str:
        """The instance type."""
        topology = self.hosts[0].topology
        return "" if topology is None else topology.instance


def host_groups(spec: Spec, hosts: Sequence[Host]) -> tuple[HostGroup, ...]:
    """Returns the groups of ``hosts``, which are those of `hosts_for`."""
    groups, first = [], 0
    for entry in spec.hosts or (HostsSpec(count=max(1, len(hosts))),):
        own, first = tuple(hosts[first : first + entry.most]), first + entry.most
        if own:
            groups.append(HostGroup(own, entry.least, entry.max is not None, entry.price_per_core_hour))
    return tuple(groups)


def least_hosts(groups: Sequence[HostGroup]) -> tuple[Host, ...]:
    """Returns the hosts that the fleet keeps, used or not."""
    return tuple(host for group in groups for host in group.hosts[: group.min])


def kept_hosts(groups: Sequence[HostGroup], used: Collection[str]) -> tuple[Host, ...]:
    """Returns the hosts of a fleet that uses these of the hosts that come and go: at least ``min`` of each group."""
    kept: list[Host] = []
    for group in groups:
        wanted = {host.name for host in group.hosts if not group.elastic or host.name in used}
        others = [host.name for host in group.hosts if host.name not in wanted]
        wanted.update(others[: max(0, group.min - len(wanted))])
        kept += [host for host in group.hosts if host.name in wanted]
    return tuple(kept)
