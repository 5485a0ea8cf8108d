"""The physical CPU cores of a machine, the NUMA nodes of its CPUs and devices, and the CPUs of each NeuronCore."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from placements.facts.core_range import CoreRange
from placements.facts.tables import read_table

PhysicalCore = tuple[int, ...]
"""The ids of the CPUs of one physical core, ascending; CPUs of one physical core are siblings."""


@dataclass(frozen=True)
class CpuLayout:
    """The physical cores of a machine, and the NUMA nodes of its physical cores and Neuron devices."""

    cores: tuple[PhysicalCore, ...]  # ascending
    nodes: tuple[int, ...]  # NUMA node of each physical core
    device_nodes: tuple[int | None, ...] = ()  # by n of /dev/neuron<n>; None, or beyond the end: unknown

    @classmethod
    def published(cls, device_nodes: Sequence[int], node_cpus: Sequence[str]) -> CpuLayout:
        """Returns a layout whose nodes have two lists of CPUs, like "0-23,96-119", of which the i-th are siblings."""
        threads = [[CoreRange.parse(part) for part in text.split(",")] for text in node_cpus]
        cores = [list(zip(*own, strict=True)) for own in threads]
        nodes = tuple(node for node, own in enumerate(cores) for _ in own)
        return cls(tuple(core for own in cores for core in own), nodes, tuple(device_nodes))

    def ordered(self, cpus: Sequence[int]) -> tuple[int, ...]:
        """Returns those of ``cpus`` that are in the layout, siblings next to each other."""
        usable = set(cpus)
        return tuple(cpu for core in self.cores for cpu in core if cpu in usable)


LAYOUTS: Mapping[str, CpuLayout] = {
    instance: CpuLayout.published(**row) for instance, row in read_table("facts/cpu_layouts.json").items()
}
"""The layouts that AWS publishes, by instance type (AWS Neuron SDK docs, commit db1586c3,
neuron-runtime/explore/runtime-performance-tips.rst). The page lists the CPUs of each node; that they are siblings in
this order is read from the two lists of each node, as EC2 has two vCPUs on a physical core of these types."""


@lru_cache(maxsize=256)
def cpus_of_neuron_cores(
    layout: CpuLayout, cpus: tuple[int, ...], reserve: int, neuron_cores: int, cores_per_device: int
) -> tuple[PhysicalCore, ...]:
    """Returns the physical cores that are available to replicas, in the order of the NeuronCores.

    Of P physical cores and C NeuronCores, those from floor(a*P/C) to floor((b+1)*P/C) - 1 are for the range a-b.

    1. All physical cores in use have the same number of CPUs: the number with which most CPUs are used. Physical cores
       of which ``cpus`` has fewer are dropped.
    2. The system gets ``reserve`` CPUs, rounded up to whole physical cores. Replicas keep at least one, unless
       ``reserve`` is all of ``cpus``.
    3. Each place in the order gets a physical core of the NUMA node of its device. In each node, the first physical
       cores beyond this need are for the system.
    4. If a node has too few, or the node of a device is unknown, the remaining places get the last of these.
    """
    usable = set(cpus)
    # 1.
    cores = [tuple(cpu for cpu in core if cpu in usable) for core in layout.cores]
    counts = Counter(map(len, cores))
    size = max(counts, key=lambda size: (size * sum(counts[n] for n in counts if n >= size), size), default=0)
    of_node: dict[int, list[PhysicalCore]] = {}
    for node, core in zip(layout.nodes, cores, strict=True):
        if 0 < size <= len(core):
            of_node.setdefault(node, []).append(core[:size])
    # 2.
    total = sum(map(len, of_node.values()))
    if not total or reserve >= len(cpus):
        return ()
    count = max(1, total - -(-max(0, reserve) // size))
    # 3.
    devices = [((place + 1) * neuron_cores - 1) // count // cores_per_device for place in range(count)]
    known = len(layout.device_nodes)
    wanted = [layout.device_nodes[device] if device < known else None for device in devices]
    needs = Counter(wanted)
    spare: list[PhysicalCore] = []
    own = {}
    for node, free in of_node.items():
        unneeded = max(0, len(free) - needs[node])
        spare += free[:unneeded]
        own[node] = iter(free[unneeded:])
    order = [next(own[node], None) if node in own else None for node in wanted]
    # 4.
    rest = iter(sorted(spare)[len(spare) - order.count(None) :])
    return tuple(core or next(rest) for core in order)
