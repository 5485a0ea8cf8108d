"""Tenants of hosts' cores: replicas as the packer sees them, what they ask for, and the space that a host has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from placements.planner.grid import Grid
from placements.planner.placement import Running

NEVER = float("inf")
"""A price, or a supply, that nothing exhausts."""

Grade = tuple[int, bool, bool]
"""(-priority, beyond ``min``, not running): a tenant of a greater one never costs one of a lesser a core."""


@dataclass(eq=False, slots=True)
class Tenant:
    """A replica that holds a range, or wants one."""

    model: int  # order in the spec
    replica: int
    size: int  # cores
    grade: Grade  # lower is more important
    demand: Demand
    cost: float = 1.0  # of loading it again elsewhere
    home: int = -1  # the host where it runs; -1: it does not, or has lost its place to a higher grade
    home_first: int = -1
    fixed: bool = False  # never moved: a pin
    host: int = -1  # where it lies; -1: it has no place
    first: int = -1
    at_home: bool = False  # it lies where it runs
    ran: Running | None = None  # as it was when the planning began

    @property
    def mask(self) -> int:
        """Its cores."""
        return ((1 << self.size) - 1) << self.first


class Demand(NamedTuple):
    """What all replicas of one model ask of a host."""

    model: int
    size: int
    kinds: frozenset[int]  # kinds of host that can hold one
    memory: tuple[float, ...] = ()  # GiB by kind of host; (): not counted
    cpus: tuple[int, ...] = ()  # threads by kind of host; (): not counted
    insists: bool = False  # on a CPU for each thread; what does not insist takes turns
    most: int = 0  # replicas on one host; 0: any number

    @property
    def plain(self) -> bool:
        """Whether cores are all that it needs of a suitable host."""
        return not (self.memory or self.insists or self.most)


@dataclass(eq=False, slots=True)
class Space:
    """One host in the making."""

    kind: int
    grid: Grid
    free: int
    allowed: int  # cores that may become free: neither reserved nor quarantined
    idle: int = 0  # cores of pins that are not in use
    memory: float = NEVER
    cpus: float = NEVER
    tenants: list[Tenant] = field(default_factory=list)

    def count(self, model: int) -> int:
        """Replicas of that model."""
        return [tenant.model for tenant in self.tenants].count(model)
