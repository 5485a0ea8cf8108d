"""Which hosts a spec means."""

from __future__ import annotations

import math
from dataclasses import dataclass

from placements.spec import HostsSpec, Spec
from placements.topology import TOPOLOGIES, Host, Topology

DEFAULT_EMULATION = "inf2.48xlarge"
"""What is emulated when neither the spec nor the machine names an instance type."""

RESERVED_SHARE = 0.04
"""Part of a real host's vCPUs left to the system by default, rounded up: 8 of 192."""


@dataclass(frozen=True)
class Machine:
    """The machine that the command runs on, as observed by the caller."""

    cpus: tuple[int, ...]  # ids of the CPUs this process may use, ordered by NUMA node
    instance: str | None = None  # instance type when it has Neuron devices


def hosts_for(spec: Spec, machine: Machine) -> tuple[Host, ...]:
    """The hosts to plan for.

    ``instance``: from the topology alone, whatever this machine is. ``emulate``: the topology's cores with this
    machine's CPUs, divided among the emulated hosts. Without ``hosts``: this machine if its type is known, else one
    emulated inf2.48xlarge. () when the spec's ``hosts`` could not be read.
    """
    if "hosts" in spec.broken:
        return ()
    wish = spec.hosts or HostsSpec()
    if wish.instance is not None:
        topology = TOPOLOGIES[wish.instance]
        return _real(topology, wish, tuple(range(topology.vcpus)))
    here = TOPOLOGIES.get(machine.instance or "")
    if wish.emulate is None and here is not None:
        return _real(here, wish, machine.cpus)
    return _emulated(TOPOLOGIES[wish.emulate or DEFAULT_EMULATION], wish, machine.cpus)


def default_reserve(vcpus: int) -> int:
    """vCPUs left to the system on a real host: 4 %, rounded up, at least 1."""
    return max(1, math.ceil(vcpus * RESERVED_SHARE))


def _real(topology: Topology, wish: HostsSpec, cpus: tuple[int, ...]) -> tuple[Host, ...]:
    reserve = default_reserve(len(cpus)) if wish.reserve.vcpus is None else wish.reserve.vcpus
    return tuple(
        Host(f"{topology.instance}/{i}", topology, cpus, reserve, frozenset(wish.reserve.cores))
        for i in range(wish.count)
    )


def _emulated(topology: Topology, wish: HostsSpec, cpus: tuple[int, ...]) -> tuple[Host, ...]:
    hosts = []
    for i in range(wish.count):
        own = cpus[i * len(cpus) // wish.count : (i + 1) * len(cpus) // wish.count] or cpus
        name = f"{topology.instance}/{i}"
        cores = frozenset(wish.reserve.cores)
        hosts.append(Host(name, topology, own, wish.reserve.vcpus or 0, cores, emulated=True))
    return tuple(hosts)
