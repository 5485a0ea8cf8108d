"""Packs replicas onto the cores of hosts, and makes room for one more.

A tenant is placed, in this order:

1. on the best-fitting free range of the grid;
2. on a range of the grid whose tenants are all new, and fit elsewhere;
3. on any free legal range;
4. on the range whose running tenants cost least to move, within the number of moves allowed, if all of them fit
   elsewhere (smaller tenants may be moved for them in turn); the cheapest range of each host is tried, and with few
   hosts every range after that;
5. on the range whose tenants of a lower grade matter least; those that fit nowhere else are displaced.

Each step succeeds completely or changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from placements.planner.board import Board, Grade, Space, Tenant
from placements.planner.eviction_prices import EvictionPrices
from placements.planner.free_ranges import FreeRanges

TRIES = (24, 6, 3, 2, 1)
"""Hosts whose cheapest range is tried: for a tenant, for the tenants that it evicts, for those that they evict, ..."""

SMALL = 24
"""Number of hosts up to which every range is tried for a tenant without room, not only the cheapest of each host."""

MOST_EMPTIED = 40
"""Ranges that are tried then, cheapest first."""

MOST_CLEARED = 500
"""Ranges that `Packer.clear` tries."""

MOST_ORDERED = 1000
"""Replicas that are placed again in other orders, summed over all orders."""

MOST_LATE = 6
"""Replicas of a degree that fragments others which are tried last."""


class Packer(Board):
    """A board on which tenants are placed, and make room for others."""

    def __init__(self, spaces: Sequence[Space], moves: int | None) -> None:
        super().__init__(spaces, moves)
        self.free = FreeRanges(self)
        self.prices = EvictionPrices(self, self.free)
        self._hopeless: set[tuple[object, ...]] = set()

    def hope_again(self) -> None:
        """Lets `place` retry tenants that found no room before."""
        self._hopeless.clear()

    def place_all(self, rivals: Sequence[Tenant]) -> list[Tenant]:
        """Places tenants of one grade, largest first, to serve the most cores. Returns those without room.

        Degrees that do not divide each other (8 and 12 on inf2) fragment each other's ranges: then the last tenants of
        the larger degree are also tried after all others, and the order that serves most cores wins.
        """
        self.begin()
        self.prices.expect(rivals)
        best: list[Tenant] = list(rivals)
        missing = self._place_each(best)
        orders = _orders(rivals)[: MOST_ORDERED // len(rivals)] if missing else []
        least = sum(tenant.size for tenant in missing)
        for trial in orders:
            self._restart()
            missing_cores = sum(tenant.size for tenant in self._place_each(trial))
            if missing_cores < least:
                least, best = missing_cores, trial
        if orders:
            self._restart()
            missing = self._place_each(best)
        self.begin()
        return missing

    def _place_each(self, tenants: Sequence[Tenant]) -> list[Tenant]:
        return [tenant for tenant in tenants if not self.place(tenant)]

    def _restart(self) -> None:
        self.undo()
        self.hope_again()

    def clear(self, tenant: Tenant) -> bool:
        """Places a tenant as `place` does, but tries every legal range of every host and displaces nothing."""
        return self.enter(tenant) or self._empty_any(tenant, MOST_CLEARED)

    def _empty_any(self, tenant: Tenant, most: int) -> bool:
        """Step 4 over every legal range of every host, whichever tenants are there."""
        options: list[tuple[float, int, int, int]] = []
        for kind in sorted(tenant.demand.kinds):
            for host in self.kinds.get(kind, ()):
                space = self.spaces[host]
                for start in _bits(space.grid.possible(tenant.size)):
                    mask = ((1 << tenant.size) - 1) << start
                    evicted = [other for other in space.tenants if other.mask & mask]
                    if not any(other.fixed for other in evicted):
                        cost = sum(other.cost for other in evicted if other.at_home)
                        options.append((cost, sum(other.size for other in evicted), host, start))
        options.sort()
        return any(self._swap(tenant, host, start, 0, strict=False) for *_, host, start in options[:most])

    def squeeze_in(self, tenant: Tenant) -> bool:
        """Places a tenant on any free legal range, without moving anything."""
        spot = self.free.spot(tenant) or self.free.odd_spot(tenant)
        if spot is None:
            return False
        self.put(tenant, *spot)
        self.begin()
        return True

    def take(self, tenant: Tenant, hosts: Sequence[int], first: int) -> bool:
        """Places a tenant on these cores of the first host where they are free."""
        for host in hosts:
            mask = ((1 << tenant.size) - 1) << first
            if self.spaces[host].free & mask == mask and self.admits(tenant, host):
                self.put(tenant, host, first)
                self.begin()
                return True
        return False

    def place_at(self, tenant: Tenant, hosts: Sequence[int], first: int) -> bool:
        """Places a tenant on these cores of the first host where their holders can be moved or displaced."""
        for host in hosts:
            if self._displace_at(tenant, tenant.grade, host, first, 0):
                self.begin()
                return True
        return False

    def place(self, tenant: Tenant) -> bool:
        """Places a tenant, or changes nothing. Displaced tenants are added to ``displaced``."""
        key = (tenant.size, tenant.demand.kinds, None if tenant.demand.plain else tenant.model)
        if key in self._hopeless:
            return False
        if self.enter(tenant) or (self.prices.search_all_hosts() and self.enter(tenant)):
            return True
        if self.moves != 0 and len(self.spaces) <= SMALL and self._empty_any(tenant, MOST_EMPTIED):
            return True
        if self._displace(tenant, tenant.grade, 0):
            return True
        self._hopeless.add(key)
        return False

    def enter(self, tenant: Tenant, depth: int = 0, skip: int = 0) -> bool:
        """Steps 1 to 4. ``depth`` is the depth of nested evictions; step 4 skips ``skip`` ranges."""
        spot = self.free.spot(tenant)
        if spot is not None:
            self.put(tenant, *spot)
            return True
        if depth >= len(TRIES):
            return False
        spared = True
        for cost, host, start in self.prices.candidates(tenant, TRIES[depth]):
            if cost > 0 and spared:
                spared = False
                spot = self.free.odd_spot(tenant)
                if spot is not None:
                    self.put(tenant, *spot)
                    return True
            if cost > 0 and skip > 0:
                skip -= 1
            elif self._swap(tenant, host, start, depth):
                return True
        spot = self.free.odd_spot(tenant) if spared else None
        if spot is not None:
            self.put(tenant, *spot)
        return spot is not None

    def _swap(self, tenant: Tenant, host: int, start: int, depth: int, *, strict: bool = True) -> bool:
        """Empties a range for the tenant, and places the evicted tenants elsewhere."""
        mark = self.mark()
        space = self.spaces[host]
        mask = ((1 << tenant.size) - 1) << start
        leaving = [other for other in space.tenants if other.mask & mask]
        for other in leaving:
            if other.fixed or (strict and other.size >= tenant.size and not self._may_leave(other, tenant)):
                return False
        if self.moves is not None and self.moved + sum(other.at_home for other in leaving) > self.moves:
            return False
        for other in leaving:
            self.remove(other)
        if space.free & mask != mask or not self.admits(tenant, host):
            self.undo_to(mark)
            return False
        self.put(tenant, host, start)
        leaving.sort(key=largest_first)
        if not (self.within_moves() and all(self.enter(other, depth + 1) for other in leaving) and self.within_moves()):
            self.undo_to(mark)
            return False
        return True

    def _may_leave(self, other: Tenant, tenant: Tenant) -> bool:
        """Returns whether a tenant of equal size fits hosts that the other does not, or lies off the grid."""
        if other.size > tenant.size:
            return False
        grid = self.spaces[other.host].grid
        return bool(other.demand.kinds - tenant.demand.kinds) or not grid.starts(other.size) >> other.first & 1

    def _displace(self, tenant: Tenant, grade: Grade, depth: int) -> bool:
        """Places the tenant on a range held by tenants of a lower grade, the least important ones."""
        lower = sorted({other.grade for space in self.spaces for other in space.tenants if other.grade > grade})
        if not lower or depth >= len(TRIES):
            return False
        options: list[tuple[tuple[int, ...], int, bool, int, int]] = []
        for kind in sorted(tenant.demand.kinds):
            for host in self.kinds.get(kind, ()):
                options.extend(self._displaceable(tenant, grade, host, lower))
        options.sort()
        return any(self._displace_at(tenant, grade, host, start, depth) for *_, host, start in options[: TRIES[depth]])

    def _displaceable(
        self, tenant: Tenant, grade: Grade, host: int, lower: Sequence[Grade]
    ) -> Iterator[tuple[tuple[int, ...], int, bool, int, int]]:
        """Yields (displaced cores by grade, the most important first; cores that move; off the grid; host; start)."""
        space = self.spaces[host]
        on_grid = space.grid.starts(tenant.size)
        for start in _bits(space.grid.possible(tenant.size)):
            mask = ((1 << tenant.size) - 1) << start
            lost = dict.fromkeys(lower, 0)
            moving = 0
            for other in space.tenants:
                if not other.mask & mask:
                    continue
                if other.fixed:
                    break
                if other.grade > grade:
                    lost[other.grade] += other.size
                elif other.size < tenant.size:
                    moving += other.size
                else:
                    break
            else:
                yield tuple(lost.values()), moving, not on_grid >> start & 1, host, start

    def _displace_at(self, tenant: Tenant, grade: Grade, host: int, start: int, depth: int) -> bool:
        """Places the tenant on these cores: tenants of a lower grade are displaced, others are placed elsewhere."""
        mark = self.mark()
        space = self.spaces[host]
        mask = ((1 << tenant.size) - 1) << start
        leaving = [other for other in space.tenants if other.mask & mask]
        if any(other.fixed for other in leaving):
            return False
        for other in leaving:
            self.remove(other)
        for other in sorted(space.tenants, key=_least_first):
            if other.grade <= grade or self.admits(tenant, host):
                break
            if not other.fixed and self._eases(other, tenant, space):
                self.remove(other)
                leaving.append(other)
        displaced = [other for other in leaving if other.grade > grade]
        for other in displaced:
            self.forget_home(other)
        if space.free & mask != mask or not self.admits(tenant, host):
            self.undo_to(mark)
            return False
        self.put(tenant, host, start)
        moving = sorted((other for other in leaving if other.grade <= grade), key=largest_first)
        settled = self.within_moves() and all(
            self.enter(other, 1) or self._displace(other, grade, depth + 1) for other in moving
        )
        if not (settled and self.within_moves()):
            self.undo_to(mark)
            return False
        self.displaced.extend(displaced)
        self._hopeless.clear()
        return True

    def _eases(self, other: Tenant, tenant: Tenant, space: Space) -> bool:
        """Returns whether removing another tenant frees a resource that the tenant lacks on the host."""
        wants, holds = tenant.demand, other.demand
        if wants.most and other.model == tenant.model and space.count(tenant.model) >= wants.most:
            return True
        if wants.memory and holds.memory and wants.memory[space.kind] > space.memory:
            return holds.memory[space.kind] > 0
        return bool(wants.insists and holds.cpus and wants.cpus[space.kind] > space.cpus)


def _orders(rivals: Sequence[Tenant]) -> list[list[Tenant]]:
    """Returns other orders to try: the last tenants of a degree that fragments a smaller one come after all others."""
    sizes = {tenant.size for tenant in rivals}
    orders: list[list[Tenant]] = []
    for size in sorted(sizes, reverse=True):
        if any(1 < other < size and size % other for other in sizes):
            own = [tenant for tenant in rivals if tenant.size == size]
            for late in range(1, min(len(own), MOST_LATE) + 1):
                last = own[-late:]
                orders.append([tenant for tenant in rivals if tenant not in last] + last)
    return orders


def largest_first(tenant: Tenant) -> tuple[int, int, int]:
    """Sort key of evicted tenants: the order in which they are placed again."""
    return (-tenant.size, tenant.model, tenant.replica)


def _least_first(tenant: Tenant) -> tuple[object, ...]:
    priority, exceeds, new = tenant.grade
    return (-priority, not exceeds, not new, tenant.size, -tenant.model, -tenant.replica)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1
