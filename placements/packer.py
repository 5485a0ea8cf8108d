"""Packer: replicas on the cores of hosts, and how room is made for one more.

A tenant goes, in this order:

1. to a free range of the grid, the one that spoils least;
2. to a range of the grid whose tenants are all new themselves, and find other places;
3. to any free legal range;
4. to the range whose running tenants cost least to move, within the number of moves allowed, if all of them find
   another place (smaller ones may be moved for them in turn);
5. to the range whose tenants of a lower grade matter least; those that find no other place are displaced.

Either all of a step succeeds or nothing of it is done.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from placements.grid import Grid, windows

TRIES = (24, 6, 3, 2, 1)
"""How many ranges are tried for a tenant, for those that give way to it, for those that give way to them, and so on."""

MOST_LATE = 6
"""How many replicas of a degree that does not divide well are tried last."""

NEVER = float("inf")


@dataclass(eq=False, slots=True)
class Tenant:
    """A replica that holds a range, or wants one."""

    model: int  # order in the spec
    replica: int
    size: int  # cores
    grade: tuple[int, bool, bool]  # lower is more important
    demand: Demand
    cost: float = 1.0  # of loading it again elsewhere
    home: tuple[int, int] | None = None  # (host, first core) where it runs
    fixed: bool = False  # never moved: a pin
    host: int = -1  # -1: it has no place
    first: int = -1

    @property
    def at_home(self) -> bool:
        """Whether it runs where it lies."""
        return self.home is not None and self.home == (self.host, self.first)

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
        return sum(tenant.model == model for tenant in self.tenants)


class _Index:
    """Hosts in the order of a rank that is computed anew for those that have changed."""

    def __init__(self, hosts: Sequence[int], rank: Callable[[int], tuple[float, ...] | None]) -> None:
        self._rank = rank
        self._current: dict[int, tuple[float, ...] | None] = {}
        self._heap: list[tuple[tuple[float, ...], int]] = []
        for host in hosts:
            found = self._current[host] = rank(host)
            if found is not None:
                self._heap.append((found, host))
        heapq.heapify(self._heap)
        self.changed: set[int] = set()

    def _refresh(self) -> None:
        for host in self.changed:
            if host in self._current:
                found = self._rank(host)
                if found != self._current[host]:
                    self._current[host] = found
                    if found is not None:
                        heapq.heappush(self._heap, (found, host))
        self.changed.clear()

    def first(self) -> tuple[tuple[float, ...], int] | None:
        """The rank and number of the best host."""
        self._refresh()
        heap = self._heap
        while heap and self._current[heap[0][1]] != heap[0][0]:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def ranked(self, most: int, usable: Callable[[int], bool]) -> list[tuple[tuple[float, ...], int]]:
        """The best ``most`` hosts that are ``usable``, best first."""
        found: list[tuple[tuple[float, ...], int]] = []
        held: list[tuple[tuple[float, ...], int]] = []
        while len(found) < most:
            top = self.first()
            if top is None:
                break
            heapq.heappop(self._heap)
            held.append(top)
            self._current[top[1]] = None  # so that a second entry of it is not taken for good
            if usable(top[1]):
                found.append(top)
        for entry in held:
            self._current[entry[1]] = entry[0]
            heapq.heappush(self._heap, entry)
        return found


class Packer:
    """Hosts and their tenants. ``moves`` is how many running tenants may lie elsewhere at the end; None: any number."""

    def __init__(self, spaces: Sequence[Space], moves: int | None) -> None:
        self.spaces = spaces
        self.moves = moves
        self.moved = 0  # running tenants of no lower grade that lie elsewhere
        self.displaced: list[Tenant] = []
        self._kinds: dict[int, list[int]] = {}
        for host, space in enumerate(spaces):
            self._kinds.setdefault(space.kind, []).append(host)
        self._free: dict[tuple[int, int], _Index] = {}
        self._evict: dict[tuple[int, int], _Index] = {}
        self._indices: list[_Index] = []
        self._log: list[tuple[Tenant, int, int, tuple[int, int] | None]] = []  # (tenant, host, first, home) as before
        self._hopeless: set[tuple[object, ...]] = set()
        self._owners: dict[tuple[Grid, int], list[int]] = {}

    # Places

    def put(self, tenant: Tenant, host: int, first: int) -> None:
        """Give it these cores, which must be free."""
        self._log.append((tenant, tenant.host, tenant.first, tenant.home))
        self._take(tenant, host, first)

    def remove(self, tenant: Tenant) -> None:
        """Take it from its place."""
        self._log.append((tenant, tenant.host, tenant.first, tenant.home))
        self._leave(tenant)

    def _take(self, tenant: Tenant, host: int, first: int) -> None:
        space = self.spaces[host]
        tenant.host, tenant.first = host, first
        space.free &= ~tenant.mask
        space.tenants.append(tenant)
        self._charge(space, tenant, 1)
        if tenant.home is not None and tenant.home == (host, first):
            self.moved -= 1

    def _leave(self, tenant: Tenant) -> None:
        space = self.spaces[tenant.host]
        if tenant.at_home:
            self.moved += 1
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
        for index in self._indices:
            index.changed.add(host)

    def settle(self, tenant: Tenant) -> None:
        """Take up one that lies where its ``host`` and ``first`` say, before anything is placed."""
        space = self.spaces[tenant.host]
        space.free &= ~tenant.mask
        space.tenants.append(tenant)
        demand = tenant.demand
        if demand.memory:
            space.memory -= demand.memory[space.kind]
        if demand.cpus:
            space.cpus -= demand.cpus[space.kind]

    def _mark(self) -> tuple[int, int]:
        return len(self._log), len(self.displaced)

    def _undo(self, mark: tuple[int, int]) -> None:
        while len(self._log) > mark[0]:
            tenant, host, first, home = self._log.pop()
            if tenant.home != home:
                tenant.home = home
                self.moved += 1
                continue
            if tenant.host >= 0:
                self._leave(tenant)
            if host >= 0:
                self._take(tenant, host, first)
        del self.displaced[mark[1] :]

    # What a host can take

    def _admits(self, tenant: Tenant, host: int) -> bool:
        """Whether memory, CPUs and spread let it in as it is."""
        demand, space = tenant.demand, self.spaces[host]
        if demand.memory and demand.memory[space.kind] > space.memory + 1e-9:
            return False
        if demand.insists and demand.cpus[space.kind] > space.cpus:
            return False
        return not demand.most or space.count(tenant.model) < demand.most

    def _free_index(self, size: int, kind: int) -> _Index:
        index = self._free.get((size, kind))
        if index is None:
            spaces = self.spaces

            def rank(host: int) -> tuple[float, ...] | None:
                space = spaces[host]
                found = space.grid.best(space.free & ~space.idle, size)
                if found is not None:
                    return (0, found[0], host, found[1])
                if space.idle:
                    found = space.grid.best(space.free, size)
                    if found is not None:
                        return (1, found[0], host, found[1])
                return None

            index = self._free[size, kind] = _Index(self._kinds[kind], rank)
            self._indices.append(index)
        return index

    def _evict_index(self, size: int, kind: int) -> _Index:
        index = self._evict.get((size, kind))
        if index is None:
            index = self._evict[size, kind] = _Index(self._kinds[kind], lambda host: self._cheapest(host, size))
            self._indices.append(index)
        return index

    def _owner(self, grid: Grid, size: int) -> list[int]:
        """For each core the start of the grid's range that it lies in, -1 outside of all."""
        found = self._owners.get((grid, size))
        if found is None:
            found = self._owners[grid, size] = [-1] * grid.cores
            starts = grid.starts(size)
            for start in range(grid.cores):
                if starts >> start & 1:
                    found[start : start + size] = [start] * size
        return found

    def _cheapest(self, host: int, size: int) -> tuple[float, ...] | None:
        """(cost, running tenants, cores in use, start) of the range of the grid that is emptied most cheaply."""
        space = self.spaces[host]
        starts = space.grid.starts(size)
        if not starts:
            return None
        owner = self._owner(space.grid, size)
        cost: dict[int, float] = {}
        count: dict[int, int] = {}
        cores: dict[int, int] = {}
        for tenant in space.tenants:
            price = self._price(tenant, size, space)
            runs = tenant.home is not None and tenant.home == (tenant.host, tenant.first)
            low, high = owner[tenant.first], owner[tenant.first + tenant.size - 1]
            for start in (low, high) if high != low else (low,):
                if start >= 0:
                    cost[start] = cost.get(start, 0.0) + price
                    count[start] = count.get(start, 0) + runs
                    cores[start] = cores.get(start, 0) + tenant.size
        best: tuple[float, ...] | None = None
        for start, price in cost.items():
            if price < NEVER and starts >> start & 1:
                found = (price, count[start], cores[start], start)
                if best is None or found < best:
                    best = found
        return best

    def _price(self, tenant: Tenant, size: int, space: Space) -> float:
        """What it costs that a tenant gives way to one of ``size``. What is larger never does."""
        if tenant.fixed or tenant.size > size:
            return NEVER
        if tenant.size == size and space.grid.starts(size) >> tenant.first & 1 and len(tenant.demand.kinds) < 2:
            return NEVER
        return tenant.cost if tenant.at_home else 0.0

    # Making room

    def place_all(self, rivals: Sequence[Tenant]) -> list[Tenant]:
        """Place those of one grade, largest first, so that most cores are served; those that find no room come back.

        Degrees that do not divide each other (8 and 12 on inf2) spoil room for each other: then the last ones of the
        larger are tried after all others, and what serves most is kept.
        """
        best: list[Tenant] = list(rivals)
        missing = self._place_each(best)
        orders = _orders(rivals) if missing else []
        if not orders:
            self._log.clear()
            return missing
        least = sum(tenant.size for tenant in missing)
        for trial in orders:
            self._restart()
            left = sum(tenant.size for tenant in self._place_each(trial))
            if left < least:
                least, best = left, trial
        self._restart()
        missing = self._place_each(best)
        self._log.clear()
        return missing

    def _place_each(self, tenants: Sequence[Tenant]) -> list[Tenant]:
        return [tenant for tenant in tenants if not self.place(tenant)]

    def _restart(self) -> None:
        """Back to where the log begins."""
        self._undo((0, 0))
        self._hopeless.clear()

    def squeeze_in(self, tenant: Tenant) -> bool:
        """Any free legal range, without moving anything."""
        spot = self._free_spot(tenant) or self._odd_spot(tenant)
        if spot is None:
            return False
        self.put(tenant, *spot)
        self._log.clear()
        return True

    def place_at(self, tenant: Tenant, hosts: Sequence[int], first: int) -> bool:
        """Put a tenant on these very cores of one of the hosts, where those that hold them may give way."""
        for host in hosts:
            if self._displace_at(tenant, host, first):
                self._log.clear()
                return True
        return False

    def place(self, tenant: Tenant) -> bool:
        """Find room for a tenant, or change nothing. What it displaces is added to ``displaced``."""
        key = (tenant.size, tenant.demand.kinds, None if tenant.demand.plain else tenant.model)
        if key in self._hopeless:
            return False
        if self._enter(tenant, 0) or self._displace(tenant):
            return True
        self._hopeless.add(key)
        return False

    def _enter(self, tenant: Tenant, depth: int) -> bool:
        spot = self._free_spot(tenant)
        if spot is not None:
            self.put(tenant, *spot)
            return True
        if depth >= len(TRIES):
            return False
        candidates = self._candidates(tenant, TRIES[depth])
        gratis = [one for one in candidates if one[1] == 0]
        for _, _, host, start in gratis:
            if self._swap(tenant, host, start, depth):
                return True
        spot = self._odd_spot(tenant)
        if spot is not None:
            self.put(tenant, *spot)
            return True
        if self.moves is not None and self.moved >= self.moves:
            return False
        return any(self._swap(tenant, host, start, depth) for _, runs, host, start in candidates if runs)

    def _free_spot(self, tenant: Tenant) -> tuple[int, int] | None:
        best: tuple[tuple[float, ...], int, int] | None = None
        for kind in tenant.demand.kinds:
            if kind not in self._kinds:
                continue
            index = self._free_index(tenant.size, kind)
            top = index.first()
            if top is not None and not tenant.demand.plain and not self._admits(tenant, top[1]):
                some = index.ranked(1, lambda host: self._admits(tenant, host))
                top = some[0] if some else None
            if top is not None:
                found = (top[0][:3], top[1], int(top[0][3]))
                if best is None or found < best:
                    best = found
        return None if best is None else (best[1], best[2])

    def _odd_spot(self, tenant: Tenant) -> tuple[int, int] | None:
        """A free legal range off the grid."""
        for kind in sorted(tenant.demand.kinds):
            for host in self._kinds.get(kind, ()):
                space = self.spaces[host]
                found = windows(space.free, tenant.size) & space.grid.legal(tenant.size)
                if found and self._admits(tenant, host):
                    start = space.grid.anywhere(space.free & ~space.idle, tenant.size)
                    start = space.grid.anywhere(space.free, tenant.size) if start is None else start
                    if start is not None:
                        return host, start
        return None

    def _candidates(self, tenant: Tenant, most: int) -> list[tuple[float, int, int, int]]:
        """(cost, running tenants, host, start) of ranges to be emptied, cheapest first."""
        left = None if self.moves is None else self.moves - self.moved
        found: list[tuple[float, float, float, int, int]] = []
        for kind in tenant.demand.kinds:
            if kind not in self._kinds:
                continue
            for rank, host in self._evict_index(tenant.size, kind).ranked(
                most, lambda host: self._admits(tenant, host)
            ):
                if left is None or rank[1] <= left:
                    found.append((rank[0], rank[1], rank[2], host, int(rank[3])))
        found.sort()
        return [(cost, int(runs), host, start) for cost, runs, _, host, start in found[:most]]

    def _swap(self, tenant: Tenant, host: int, start: int, depth: int) -> bool:
        """Empty a range for the tenant, and find other places for those that lay there."""
        mark = self._mark()
        space = self.spaces[host]
        wanted = ((1 << tenant.size) - 1) << start
        leaving = [one for one in space.tenants if one.mask & wanted]
        if any(one.size == tenant.size and not self._has_other_kinds(one, tenant) for one in leaving):
            return False
        for one in leaving:
            self.remove(one)
        if space.free & wanted != wanted or not self._admits(tenant, host):
            self._undo(mark)
            return False
        self.put(tenant, host, start)
        leaving.sort(key=_largest_first)
        if not (self._within_moves() and all(self._enter(one, depth + 1) for one in leaving) and self._within_moves()):
            self._undo(mark)
            return False
        return True

    def _has_other_kinds(self, one: Tenant, tenant: Tenant) -> bool:
        """Whether a tenant of equal size can go where the other cannot, or lies off the grid."""
        grid = self.spaces[one.host].grid
        return bool(one.demand.kinds - tenant.demand.kinds) or not grid.starts(one.size) >> one.first & 1

    def _displace(self, tenant: Tenant) -> bool:
        """Put it where tenants of lower grades are in the way, those that matter least."""
        options: list[tuple[tuple[int, ...], int, int, int]] = []
        lower = sorted({one.grade for space in self.spaces for one in space.tenants if one.grade > tenant.grade})
        if not lower:
            return False
        for kind in sorted(tenant.demand.kinds):
            for host in self._kinds.get(kind, ()):
                options.extend(self._displaceable(tenant, host, lower))
        options.sort()
        return any(self._displace_at(tenant, host, start) for _, _, host, start in options[: TRIES[0]])

    def _displaceable(
        self, tenant: Tenant, host: int, lower: Sequence[tuple[int, bool, bool]]
    ) -> Iterator[tuple[tuple[int, ...], int, int, int]]:
        """(cores displaced by grade, the most important first; cores that move; host; start) of each range."""
        space = self.spaces[host]
        for start in _bits(space.grid.starts(tenant.size)):
            wanted = ((1 << tenant.size) - 1) << start
            lost = dict.fromkeys(lower, 0)
            moving = 0
            for one in space.tenants:
                if not one.mask & wanted:
                    continue
                if one.fixed:
                    break
                if one.grade > tenant.grade:
                    lost[one.grade] += one.size
                elif one.size < tenant.size:
                    moving += one.size
                else:
                    break
            else:
                yield tuple(lost.values()), moving, host, start

    def _displace_at(self, tenant: Tenant, host: int, start: int) -> bool:
        mark = self._mark()
        space = self.spaces[host]
        wanted = ((1 << tenant.size) - 1) << start
        leaving = [one for one in space.tenants if one.mask & wanted]
        if any(one.fixed for one in leaving):
            return False
        for one in leaving:
            self.remove(one)
        for one in sorted(space.tenants, key=_least_first):  # whose memory or CPUs it needs as well
            if one.grade <= tenant.grade or self._admits(tenant, host):
                break
            if not one.fixed:
                self.remove(one)
                leaving.append(one)
        displaced = [one for one in leaving if one.grade > tenant.grade]
        for one in displaced:
            self._forget_home(one)
        if space.free & wanted != wanted or not self._admits(tenant, host):
            self._undo(mark)
            return False
        self.put(tenant, host, start)
        others = sorted((one for one in leaving if one.grade <= tenant.grade), key=_largest_first)
        if not (self._within_moves() and all(self._enter(one, 1) for one in others) and self._within_moves()):
            self._undo(mark)
            return False
        self.displaced.extend(displaced)
        self._hopeless.clear()
        return True

    def _forget_home(self, tenant: Tenant) -> None:
        """It begins anew, wherever there is room for it."""
        if tenant.home is not None:
            self._log.append((tenant, -1, -1, tenant.home))
            tenant.home = None
            self.moved -= 1

    def _within_moves(self) -> bool:
        return self.moves is None or self.moved <= self.moves


def _orders(rivals: Sequence[Tenant]) -> list[list[Tenant]]:
    """Other orders to try: the last replicas of a degree that spoils room for a smaller one come after all others."""
    sizes = {tenant.size for tenant in rivals}
    orders: list[list[Tenant]] = []
    for size in sorted(sizes, reverse=True):
        if any(1 < other < size and size % other for other in sizes):
            own = [tenant for tenant in rivals if tenant.size == size]
            for late in range(1, min(len(own), MOST_LATE) + 1):
                last = own[-late:]
                orders.append([tenant for tenant in rivals if tenant not in last] + last)
    return orders


def _largest_first(tenant: Tenant) -> tuple[int, int, int]:
    return (-tenant.size, tenant.model, tenant.replica)


def _least_first(tenant: Tenant) -> tuple[object, ...]:
    priority, exceeds, new = tenant.grade
    return (-priority, not exceeds, not new, tenant.size, -tenant.model, -tenant.replica)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1
