"""The hosts and their tenants while a plan is made: demands, places, moves and undo."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
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
    idle: int = 0  # cores of unused pins, avoided so that a pin with a quarantined core finds another
    memory: float = NEVER
    cpus: float = NEVER
    tenants: list[Tenant] = field(default_factory=list)

    def count(self, model: int) -> int:
        """Returns the number of replicas of a model."""
        return [tenant.model for tenant in self.tenants].count(model)


Rank = tuple[float, ...]


class HostIndex:
    """Hosts ordered by a rank. The ranks of ``changed`` hosts are recomputed on the next query."""

    def __init__(self, hosts: Sequence[int], rank: Callable[[int], Rank | None]) -> None:
        self._rank = rank
        self._current: dict[int, Rank | None] = {}
        self._heap: list[tuple[Rank, int]] = []
        for host in hosts:
            value = self._current[host] = rank(host)
            if value is not None:
                self._heap.append((value, host))
        heapq.heapify(self._heap)
        self.changed: set[int] = set()

    def _refresh(self) -> None:
        for host in self.changed:
            if host in self._current:
                rank = self._rank(host)
                if rank != self._current[host]:
                    self._current[host] = rank
                    if rank is not None:
                        heapq.heappush(self._heap, (rank, host))
        self.changed.clear()

    def __len__(self) -> int:
        """Returns the number of hosts that have a rank."""
        self._refresh()
        return sum(rank is not None for rank in self._current.values())

    def first(self) -> tuple[Rank, int] | None:
        """Returns the rank and number of the best host."""
        self._refresh()
        heap = self._heap
        while heap and self._current[heap[0][1]] != heap[0][0]:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def ranked(self, most: int, usable: Callable[[int], bool] | None = None) -> list[tuple[Rank, int]]:
        """Returns the best ``most`` hosts that are ``usable``, best first."""
        if most == 1 and usable is None:
            top = self.first()
            return [] if top is None else [top]
        best: list[tuple[Rank, int]] = []
        popped: list[tuple[Rank, int]] = []
        while len(best) < most:
            top = self.first()
            if top is None:
                break
            heapq.heappop(self._heap)
            popped.append(top)
            self._current[top[1]] = None  # so that a second, stale entry of the host is dropped
            if usable is None or usable(top[1]):
                best.append(top)
        for entry in popped:
            self._current[entry[1]] = entry[0]
            heapq.heappush(self._heap, entry)
        return best


class Board:
    """Hosts and their tenants. ``moves`` limits the running tenants that may be moved; None: any number."""

    def __init__(self, spaces: Sequence[Space], moves: int | None) -> None:
        self.spaces = spaces
        self.moves = moves
        self.moved = 0  # running tenants placed elsewhere, without those displaced by a higher grade
        self.spent = 0.0  # cost of these moves
        self.displaced: list[Tenant] = []
        self.sizes: set[int] = set()  # of all tenants
        self.kinds: dict[int, list[int]] = {}  # kind -> hosts
        for host, space in enumerate(spaces):
            self.kinds.setdefault(space.kind, []).append(host)
        self.indices: list[HostIndex] = []  # notified of each host that changes
        self._log: list[tuple[Tenant, int, int, int]] = []  # (tenant, host, first, home) as before
        self._begun = 0  # number of displaced tenants when the log began

    def put(self, tenant: Tenant, host: int, first: int) -> None:
        """Places a tenant on these cores, which must be free."""
        self._log.append((tenant, tenant.host, tenant.first, tenant.home))
        self._take(tenant, host, first)

    def remove(self, tenant: Tenant) -> None:
        """Removes a tenant from its place."""
        self._log.append((tenant, tenant.host, tenant.first, tenant.home))
        self._leave(tenant)

    def _take(self, tenant: Tenant, host: int, first: int) -> None:
        space = self.spaces[host]
        tenant.host, tenant.first = host, first
        space.free &= ~tenant.mask
        space.tenants.append(tenant)
        self._charge(space, tenant, 1)
        if host == tenant.home and first == tenant.home_first:
            tenant.at_home = True
            self.moved -= 1
            self.spent -= tenant.cost

    def _leave(self, tenant: Tenant) -> None:
        space = self.spaces[tenant.host]
        if tenant.at_home:
            tenant.at_home = False
            self.moved += 1
            self.spent += tenant.cost
        space.free |= tenant.mask & space.allowed
        space.tenants.remove(tenant)
        self._charge(space, tenant, -1)
        tenant.host = tenant.first = -1

    def _charge(self, space: Space, tenant: Tenant, sign: int) -> None:
        demand = tenant.demand
        if demand.memory:
            space.memory -= sign * demand.memory[space.kind]
        if demand.cpus:
            space.cpus -= sign * demand.cpus[space.kind]
        host = tenant.host
        for index in self.indices:
            index.changed.add(host)

    def settle(self, tenant: Tenant) -> None:
        """Adds a tenant at its ``host`` and ``first``, before anything is placed."""
        space = self.spaces[tenant.host]
        self.sizes.add(tenant.size)
        space.free &= ~tenant.mask
        space.tenants.append(tenant)
        self._charge(space, tenant, 1)

    def begin(self) -> None:
        """Commits all changes; `undo` returns to this state."""
        self._log.clear()
        self._begun = len(self.displaced)

    def undo(self) -> None:
        """Reverts all changes since `begin`."""
        self.undo_to((0, self._begun))

    @property
    def touched(self) -> list[Tenant]:
        """The tenants that were placed or removed since `begin`."""
        return list(dict.fromkeys(entry[0] for entry in self._log))

    def mark(self) -> tuple[int, int]:
        """Returns the present state, for `undo_to`."""
        return len(self._log), len(self.displaced)

    def undo_to(self, mark: tuple[int, int]) -> None:
        """Reverts all changes since the mark."""
        while len(self._log) > mark[0]:
            tenant, host, first, home = self._log.pop()
            if tenant.home != home:
                tenant.home = home
                self.moved += 1
                self.spent += tenant.cost
                continue
            if tenant.host >= 0:
                self._leave(tenant)
            if host >= 0:
                self._take(tenant, host, first)
        del self.displaced[mark[1] :]

    def admits(self, tenant: Tenant, host: int) -> bool:
        """Returns whether memory, CPUs and spread allow the tenant on the host now."""
        demand, space = tenant.demand, self.spaces[host]
        if demand.memory and demand.memory[space.kind] > space.memory + 1e-9:
            return False
        if demand.insists and demand.cpus[space.kind] > space.cpus:
            return False
        return not demand.most or space.count(tenant.model) < demand.most

    def admitting(self, tenant: Tenant) -> Callable[[int], bool] | None:
        """Returns `admits` for the tenant; None if all suitable hosts admit it."""
        return None if tenant.demand.plain else lambda host: self.admits(tenant, host)

    def forget_home(self, tenant: Tenant) -> None:
        """Treats a displaced tenant as new, so that its next place is not a move."""
        if tenant.home >= 0:
            self._log.append((tenant, -1, -1, tenant.home))
            tenant.home = -1
            self.moved -= 1
            self.spent -= tenant.cost

    def within_moves(self) -> bool:
        """Returns whether no more running tenants are moved than allowed."""
        return self.moves is None or self.moved <= self.moves
