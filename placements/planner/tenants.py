"""The packer's values: replicas (tenants), their demands, and the free resources of hosts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from placements.planner.grid import Grid
from placements.planner.placement import Running

NEVER = float("inf")
"""An infinite price or supply."""

Grade = tuple[int, bool, bool]
"""(-priority, beyond ``min``, not running). A tenant never displaces a tenant with a smaller grade."""


@dataclass(eq=False, slots=True)
class Tenant:
    """A replica that holds or needs a range."""

    model: int  # order in the spec
    replica: int
    size: int  # cores
    grade: Grade  # lower is more important
    demand: Demand
    cost: float = 1.0  # of moving it
    home: int = -1  # the host where it runs; -1: it does not run, or a higher grade displaced it
    home_first: int = -1
    fixed: bool = False  # never moved: a pin
    host: int = -1  # its place; -1: none
    first: int = -1
    at_home: bool = False  # its place is where it runs
    ran: Running | None = None  # as observed before planning

    @property
    def mask(self) -> int:
        """The tenant's cores."""
        return ((1 << self.size) - 1) << self.first


class Demand(NamedTuple):
    """What each replica of one model needs of a host."""

    model: int
    size: int
    kinds: frozenset[int]  # kinds of host that can hold one
    memory: tuple[float, ...] = ()  # GiB by kind of host; (): not counted
    cpus: tuple[int, ...] = ()  # threads by kind of host; (): not counted
    insists: bool = False  # on a CPU for each thread; other threads share CPUs
    most: int = 0  # replicas on one host; 0: any number

    @property
    def plain(self) -> bool:
        """Returns whether it needs only cores of a suitable host."""
        return not (self.memory or self.insists or self.most)


@dataclass(eq=False, slots=True)
class Space:
    """The free resources and the tenants of one host."""

    kind: int
    grid: Grid
    free: int
    allowed: int  # cores that may become free: neither reserved nor quarantined
    idle: int = 0  # cores of unused pins
    memory: float = NEVER
    cpus: float = NEVER
    tenants: list[Tenant] = field(default_factory=list)

    def count(self, model: int) -> int:
        """Returns the number of replicas of a model."""
        return [tenant.model for tenant in self.tenants].count(model)
