"""The numbered hosts of one planning run, with masks of their usable cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from placements.facts.topology import Host
from placements.planner.free_cores import FreeCores
from placements.planner.grid import Grid, grid_of
from placements.planner.replica_demand import kinds_of


class HostPool:
    """Hosts, numbered in their order. Sets of cores are bit masks: bit i stands for core i."""

    def __init__(self, hosts: Sequence[Host], blocked: Mapping[str, frozenset[int]]) -> None:
        """``blocked`` holds, by host, cores that cannot be used (cordons, quarantine)."""
        self.hosts = tuple(hosts)
        self.blocked = blocked
        self.kinds = kinds_of(self.hosts)
        self.numbers = {host.name: i for i, host in enumerate(self.hosts)}
        self.cores = [host.cores for host in self.hosts]
        self.reserved = [sum(1 << core for core in host.reserved_cores) for host in self.hosts]
        self.allowed = [FreeCores.of(host, blocked.get(host.name, ())).mask for host in self.hosts]

    def family(self, host: int) -> str:
        """Returns the family of the host's instance type, or "" for a plain CPU host."""
        topology = self.hosts[host].topology
        return topology.family if topology else ""

    def grid(self, host: int, fixed: int = 0) -> Grid:
        """Returns the grid of the usable cores, without the pinned ones (``fixed``)."""
        return grid_of(self.family(host), self.cores[host], self.allowed[host] & ~fixed)
