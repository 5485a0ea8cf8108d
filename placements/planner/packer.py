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

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from placements.planner.grid import Grid, windows
from placements.planner.host_index import HostIndex, Rank
from placements.planner.tenants import NEVER, Grade, Space, Tenant

TRIES = (24, 6, 3, 2, 1)
"""Hosts whose cheapest range is tried: for a tenant, for the tenants that it evicts, for those that they evict, ..."""

LARGE = 300
"""Number of hosts beyond which only ranges of the grid are emptied: there are enough to choose from."""

SMALL = 24
"""Number of hosts up to which every range is tried for a tenant without room, not only the cheapest of each host."""

MOST_EMPTIED = 40
"""Ranges that are tried then, cheapest first."""

MOST_CLEARED = 500
"""Ranges that `Packer.clear` tries."""

MOST_OWN = 24
"""Models with their own index of free ranges, because hosts lack memory or CPUs for them or spread excludes hosts."""

MOST_ORDERED = 1000
"""Replicas that are placed again in other orders, summed over all orders."""

MOST_LATE = 6
"""Replicas of a degree that fragments others which are tried last."""


class Packer:
    """Hosts and their tenants. ``moves`` limits the running tenants that may be moved; None: any number."""

    def __init__(self, spaces: Sequence[Space], moves: int | None) -> None:
        self.spaces = spaces
        self.moves = moves
        self.moved = 0  # running tenants placed elsewhere, without those displaced by a higher grade
        self.spent = 0.0  # cost of these moves
        self.displaced: list[Tenant] = []
        self._kinds: dict[int, list[int]] = {}
        for host, space in enumerate(spaces):
            self._kinds.setdefault(space.kind, []).append(host)
        self._free: dict[tuple[int, int], HostIndex] = {}
        self._waiting: Counter[int] = Counter()  # tenants to be placed, by size
        self._further: dict[int, float] = {}
        self._prices: dict[int, dict[int, float]] = {}
        self._sizes: set[int] = set()  # of all tenants
        self._scarcities: dict[int, list[tuple[int, float]]] = {}
        self._own: dict[tuple[int, int], HostIndex] = {}
        self._odd: dict[tuple[int, int], HostIndex | None] = {}
        self._evict: dict[tuple[int, int], HostIndex] = {}
        self._indices: list[HostIndex] = []
        self._log: list[tuple[Tenant, int, int, int]] = []  # (tenant, host, first, home) as before
        self._begun = 0  # number of displaced tenants when the log began
        self._hopeless: set[tuple[object, ...]] = set()
        self._large = self._partly = len(spaces) > LARGE

    # Places

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
        for index in self._indices:
            index.changed.add(host)

    def settle(self, tenant: Tenant) -> None:
        """Adds a tenant at its ``host`` and ``first``, before anything is placed."""
        space, demand = self.spaces[tenant.host], tenant.demand
        self._sizes.add(tenant.size)
        space.free &= ~(((1 << tenant.size) - 1) << tenant.first)
        space.tenants.append(tenant)
        if demand.memory:
            space.memory -= demand.memory[space.kind]
        if demand.cpus:
            space.cpus -= demand.cpus[space.kind]

    def begin(self) -> None:
        """Commits all changes; `undo` returns to this state."""
        self._log.clear()
        self._begun = len(self.displaced)

    def undo(self) -> None:
        """Reverts all changes since `begin`."""
        self._undo((0, self._begun))

    @property
    def touched(self) -> list[Tenant]:
        """The tenants that were placed or removed since `begin`."""
        return list(dict.fromkeys(entry[0] for entry in self._log))

    def hope_again(self) -> None:
        """Lets `place` retry tenants that found no room before."""
        self._hopeless.clear()

    @property
    def large(self) -> bool:
        """Whether there are too many hosts to search all of them."""
        return self._large

    def _mark(self) -> tuple[int, int]:
        return len(self._log), len(self.displaced)

    def _undo(self, mark: tuple[int, int]) -> None:
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

    # What a host admits

    def admits(self, tenant: Tenant, host: int) -> bool:
        """Whether memory, CPUs and spread allow the tenant on the host now."""
        demand, space = tenant.demand, self.spaces[host]
        if demand.memory and demand.memory[space.kind] > space.memory + 1e-9:
            return False
        if demand.insists and demand.cpus[space.kind] > space.cpus:
            return False
        return not demand.most or space.count(tenant.model) < demand.most

    def _filter(self, tenant: Tenant) -> Callable[[int], bool] | None:
        return None if tenant.demand.plain else lambda host: self.admits(tenant, host)

    def _free_index(self, size: int, kind: int) -> HostIndex:
        index = self._free.get((size, kind))
        if index is None:
            index = self._free[size, kind] = HostIndex(self._kinds[kind], lambda host: self.free_rank(host, size))
            self._indices.append(index)
        return index

    def free_rank(self, host: int, size: int) -> Rank | None:
        """Returns (on an idle pin, larger free ranges that it breaks up, host, start) of the host's best range."""
        space = self.spaces[host]
        best = space.grid.best(space.free & ~space.idle, size)
        if best is not None:
            return (0, best[0], host, best[1])
        best = space.grid.best(space.free, size) if space.idle else None
        return None if best is None else (1, best[0], host, best[1])

    def _own_index(self, tenant: Tenant, kind: int) -> HostIndex | None:
        """Returns an index of the hosts that admit a model, for the first few models that ask for it, else None."""
        key = (tenant.model, kind)
        index = self._own.get(key)
        if index is None and len(self._own) < MOST_OWN:

            def rank(host: int) -> Rank | None:
                return self.free_rank(host, tenant.size) if self.admits(tenant, host) else None

            index = self._own[key] = HostIndex(self._kinds[kind], rank)
            self._indices.append(index)
        return index

    def _evict_index(self, size: int, kind: int) -> HostIndex:
        """Returns an index by `_cheapest`; of many hosts only the least crowded ones, until they prove too few."""
        index = self._evict.get((size, kind))
        if index is None:
            hosts = self._kinds[kind]
            if self._partly and len(hosts) > LARGE:
                crowded = ((self._crowding(host, size), host) for host in hosts)
                hosts = [host for _, host in heapq.nsmallest(max(LARGE, len(hosts) // 3), crowded)]
            index = self._evict[size, kind] = HostIndex(hosts, lambda host: self._cheapest(host, size))
            self._indices.append(index)
        return index

    def _crowding(self, host: int, size: int) -> float:
        """Estimates how many tenants a range of that size would evict."""
        room, small = self.spaces[host].grid.cores, 1
        for tenant in self.spaces[host].tenants:
            if tenant.size < size:
                small += 1
            else:
                room -= tenant.size
        return NEVER if room < size else small / room

    def _search_all_hosts(self) -> bool:
        """Extends the search to all hosts; False if it was not limited."""
        if not self._partly:
            return False
        self._partly = False
        self._forget_prices()
        return True

    def _cheapest(self, host: int, size: int) -> Rank | None:
        """Returns (cost, off the grid, cores in use, start) of the range that is cheapest to empty."""
        space = self.spaces[host]
        grid = space.grid
        possible = grid.possible(size)
        if not possible:
            return None
        starts = grid.starts(size)
        owner = grid.owner(size) if self._large else None
        step = grid.step(size)
        prices = self._prices.get(size) or self._prices_of(size)
        cost: dict[int, float] = {}
        for tenant in space.tenants:
            first, length = tenant.first, tenant.size
            price = prices[length] if length in prices and not tenant.fixed else NEVER
            if length == size and starts >> first & 1 and len(tenant.demand.kinds) < 2:
                price = NEVER
            if tenant.at_home:
                price += tenant.cost
            if owner is not None:
                low, high = owner[first], owner[first + length - 1]
                cost[low] = cost[low] + price if low in cost else price
                if high != low:
                    for start in range(low + size if low >= 0 else high, high + 1, size):
                        cost[start] = cost.get(start, 0.0) + price
                continue
            low = first - size + 1
            for start in range(-(-low // step) * step if low > 0 else 0, first + length, step):
                cost[start] = cost[start] + price if start in cost else price
        cost.pop(-1, None)
        best: Rank | None = None
        used = ~space.free
        scarce = self._scarce(size)
        for start, price in cost.items():
            if scarce and price < NEVER:
                price += _worth(space.free & (((1 << size) - 1) << start), grid, scarce)
            if (best is None or price <= best[0]) and price < NEVER and possible >> start & 1:
                cores = (used >> start & ((1 << size) - 1)).bit_count()
                rank = (price, not starts >> start & 1, cores, start)
                if best is None or rank < best:
                    best = rank
        return best

    def _prices_of(self, size: int) -> dict[int, float]:
        """Returns the cost of evicting a tenant of each size for one of ``size``: equal sizes as a last resort, larger
        ones never."""
        prices = {smaller: self._further_cost(smaller) for smaller in sorted(self._sizes) if smaller < size}
        self._prices[size] = prices
        prices[size] = float(size)
        return prices

    def _scarce(self, size: int) -> list[tuple[int, float]]:
        """Returns the smaller sizes with too few free ranges, and the cost of one more range of each, largest first."""
        scarcities = self._scarcities.get(size)
        if scarcities is None:
            sizes = sorted((smaller for smaller in self._waiting if smaller < size), reverse=True)
            scarcities = [(smaller, cost) for smaller in sizes if (cost := self._further_cost(smaller)) > 0]
            self._scarcities[size] = scarcities
        return scarcities

    def _further_cost(self, size: int) -> float:
        """Returns the cost of making room for one evicted tenant: 0 while more ranges are free than tenants wait."""
        cost = self._further.get(size)
        if cost is None:
            if self._large:  # a lower bound: one on each host that has any
                free = sum(len(self._free_index(size, kind)) for kind in self._kinds)
            else:
                free = sum((windows(space.free, size) & space.grid.starts(size)).bit_count() for space in self.spaces)
            cost = 0.0
            short = self._waiting[size] - free
            if short >= 0:
                prices = sorted(
                    rank[0] for kind in self._kinds for rank, _ in self._evict_index(size, kind).ranked(short + 1)
                )
                cost = prices[min(short + 1, len(prices)) - 1] if prices else float(size)
            self._further[size] = cost
        return cost

    # Making room

    def place_all(self, rivals: Sequence[Tenant]) -> list[Tenant]:
        """Places tenants of one grade, largest first, to serve the most cores. Returns those without room.

        Degrees that do not divide each other (8 and 12 on inf2) fragment each other's ranges: then the last tenants of
        the larger degree are also tried after all others, and the order that serves most cores wins.
        """
        self.begin()
        self._expect(rivals)
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

    def _expect(self, rivals: Sequence[Tenant]) -> None:
        """Updates the waiting tenants, on which scarcity and thus the price of each range depend."""
        self._waiting = Counter(tenant.size for tenant in rivals)
        self._sizes.update(self._waiting)
        self._forget_prices()

    def _forget_prices(self) -> None:
        for cache in (self._prices, self._further, self._scarcities):
            cache.clear()
        for index in self._evict.values():
            self._indices.remove(index)
        self._evict.clear()

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
            for host in self._kinds.get(kind, ()):
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
        spot = self.free_spot(tenant) or self.odd_spot(tenant)
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
        if self.enter(tenant) or (self._search_all_hosts() and self.enter(tenant)):
            return True
        if self.moves != 0 and len(self.spaces) <= SMALL and self._empty_any(tenant, MOST_EMPTIED):
            return True
        if self._displace(tenant, tenant.grade, 0):
            return True
        self._hopeless.add(key)
        return False

    def enter(self, tenant: Tenant, depth: int = 0, skip: int = 0) -> bool:
        """Steps 1 to 4. ``depth`` is the depth of nested evictions; step 4 skips ``skip`` ranges."""
        spot = self.free_spot(tenant)
        if spot is not None:
            self.put(tenant, *spot)
            return True
        if depth >= len(TRIES):
            return False
        spared = True
        for cost, host, start in self._candidates(tenant, depth):
            if cost > 0 and spared:
                spared = False
                spot = self.odd_spot(tenant)
                if spot is not None:
                    self.put(tenant, *spot)
                    return True
            if cost > 0 and skip > 0:
                skip -= 1
            elif self._swap(tenant, host, start, depth):
                return True
        spot = self.odd_spot(tenant) if spared else None
        if spot is not None:
            self.put(tenant, *spot)
        return spot is not None

    def free_spot(self, tenant: Tenant) -> tuple[int, int] | None:
        """Returns (host, first core) of the best-fitting free range of the grid."""
        best: tuple[tuple[float, ...], int, int] | None = None
        for kind in tenant.demand.kinds:
            if kind not in self._kinds:
                continue
            index = self._free_index(tenant.size, kind)
            top = index.first()
            if top is not None and not tenant.demand.plain and not self.admits(tenant, top[1]):
                own = self._own_index(tenant, kind)
                some = index.ranked(1, self._filter(tenant)) if own is None else own.ranked(1)
                top = some[0] if some else None
            if top is not None:
                candidate = (top[0][:3], top[1], int(top[0][3]))
                if best is None or candidate < best:
                    best = candidate
        return None if best is None else (best[1], best[2])

    def odd_spot(self, tenant: Tenant) -> tuple[int, int] | None:
        """Returns a free legal range off the grid."""
        best: tuple[tuple[float, ...], int, int] | None = None
        for kind in tenant.demand.kinds:
            if kind not in self._kinds:
                continue
            index = self._odd_index(tenant.size, kind)
            if index is None:
                continue
            for rank, host in index.ranked(1, self._filter(tenant)):
                candidate = (rank[:2], host, int(rank[2]))
                if best is None or candidate < best:
                    best = candidate
        return None if best is None else (best[1], best[2])

    def _odd_index(self, size: int, kind: int) -> HostIndex | None:
        """Returns an index of ranges off the grid; None if every legal range is on the grid."""
        index = self._odd.get((size, kind))
        if index is None and (size, kind) not in self._odd:
            hosts = [host for host in self._kinds[kind] if self.spaces[host].grid.has_others(size)]
            if hosts:
                index = HostIndex(hosts, lambda host: self._odd_rank(host, size))
                self._indices.append(index)
            self._odd[size, kind] = index
        return index

    def _odd_rank(self, host: int, size: int) -> Rank | None:
        space = self.spaces[host]
        if not windows(space.free, size) & space.grid.legal(size):
            return None
        start = space.grid.anywhere(space.free & ~space.idle, size)
        if start is not None:
            return (0, host, start)
        start = space.grid.anywhere(space.free, size)
        return None if start is None else (1, host, start)

    def _candidates(self, tenant: Tenant, depth: int) -> Iterator[tuple[float, int, int]]:
        """Yields (cost, host, start) of ranges to empty, cheapest first."""
        tried = 0
        for most in (1, TRIES[depth]):
            options: list[tuple[float, float, float, int, int]] = []
            for kind in tenant.demand.kinds:
                if kind in self._kinds:
                    index = self._evict_index(tenant.size, kind)
                    ranked = index.ranked(most, self._filter(tenant))
                    options.extend((rank[0], rank[1], rank[2], host, int(rank[3])) for rank, host in ranked)
            options.sort()
            for cost, _, _, host, start in options[tried:most]:
                yield cost, host, start
            tried = most

    def _swap(self, tenant: Tenant, host: int, start: int, depth: int, *, strict: bool = True) -> bool:
        """Empties a range for the tenant, and places the evicted tenants elsewhere."""
        mark = self._mark()
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
            self._undo(mark)
            return False
        self.put(tenant, host, start)
        leaving.sort(key=largest_first)
        if not (
            self._within_moves() and all(self.enter(other, depth + 1) for other in leaving) and self._within_moves()
        ):
            self._undo(mark)
            return False
        return True

    def _may_leave(self, other: Tenant, tenant: Tenant) -> bool:
        """Whether a tenant of equal size fits hosts that the other does not, or lies off the grid."""
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
            for host in self._kinds.get(kind, ()):
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
        mark = self._mark()
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
            self._forget_home(other)
        if space.free & mask != mask or not self.admits(tenant, host):
            self._undo(mark)
            return False
        self.put(tenant, host, start)
        moving = sorted((other for other in leaving if other.grade <= grade), key=largest_first)
        settled = self._within_moves() and all(
            self.enter(other, 1) or self._displace(other, grade, depth + 1) for other in moving
        )
        if not (settled and self._within_moves()):
            self._undo(mark)
            return False
        self.displaced.extend(displaced)
        self._hopeless.clear()
        return True

    def _eases(self, other: Tenant, tenant: Tenant, space: Space) -> bool:
        """Whether removing another tenant frees a resource that the tenant lacks on the host."""
        wants, holds = tenant.demand, other.demand
        if wants.most and other.model == tenant.model and space.count(tenant.model) >= wants.most:
            return True
        if wants.memory and holds.memory and wants.memory[space.kind] > space.memory:
            return holds.memory[space.kind] > 0
        return bool(wants.insists and holds.cpus and wants.cpus[space.kind] > space.cpus)

    def _forget_home(self, tenant: Tenant) -> None:
        """Treats a displaced tenant as new, so that its next place is not a move."""
        if tenant.home >= 0:
            self._log.append((tenant, -1, -1, tenant.home))
            tenant.home = -1
            self.moved -= 1
            self.spent -= tenant.cost

    def _within_moves(self) -> bool:
        return self.moves is None or self.moved <= self.moves


def _worth(free: int, grid: Grid, scarce: Sequence[tuple[int, float]]) -> float:
    """Returns the value of the free ranges in ``free`` to waiting tenants."""
    worth = 0.0
    for size, cost in scarce:
        legal = grid.legal(size)
        starts = windows(free, size) & legal
        while starts:
            start = (starts & -starts).bit_length() - 1
            free &= ~(((1 << size) - 1) << start)
            worth += cost
            starts = windows(free, size) & legal
    return worth


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
