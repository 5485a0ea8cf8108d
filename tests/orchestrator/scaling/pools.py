"""Hosts and needs of the autoscaler's input, without a spec."""

from __future__ import annotations

from collections.abc import Sequence

from placements.facts.topology import Host, Topology
from placements.planner.board import Demand
from placements.planner.capacity import Need
from placements.planner.host_pool import HostPool

KINDS = frozenset(range(16))
"""More kinds of hosts than a test has."""


def pool_of(*hosts: tuple[int, float], blocked: Sequence[frozenset[int]] = ()) -> HostPool:
    """Returns hosts of inf2 with these numbers of cores and prices, and by host the cores that cannot be used."""
    machines = [
        Host(f"{i}", Topology(f"inf2.of{cores}", "inf2", cores // 2, 2, 16, 96, 384, "ring"), (), emulated=True)
        for i, (cores, _) in enumerate(hosts)
    ]
    closed = {f"{i}": cores for i, cores in enumerate(blocked)}
    return HostPool(machines, closed, {f"{i}": price for i, (_, price) in enumerate(hosts)})


def need_of(cores: int) -> Need | None:
    """Returns the need of a model that runs on every host; None for one that uses no cores."""
    return Need(Demand(0, cores, KINDS)) if cores else None
