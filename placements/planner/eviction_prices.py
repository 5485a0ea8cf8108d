"""The prices of emptying ranges for a tenant: what their tenants cost elsewhere."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence

from placements.planner.board import NEVER, Board, HostIndex, Rank, Tenant
from placements.planner.free_ranges import FreeRanges
from placements.planner.grid import Grid, windows

LARGE = 300
"""Number of hosts beyond which only ranges of the grid are emptied: there are enough to choose from."""


class EvictionPrices:
    """The prices of the ranges of a board. They depend on the tenants that still wait for a place."""

    def __init__(self, board: Board, free: FreeRanges) -> None:
        self._board = board
        self._free = free
        self._waiting: Counter[int] = Counter()  # tenants to be placed, by size
        self._further: dict[int, float] = {}
        self._prices: dict[int, dict[int, float]] = {}
        self._scarcities: dict[int, list[tuple[int, float]]] = {}
        self._evict: dict[tuple[int, int], HostIndex] = {}
        self.large = len(board.spaces) > LARGE  # too many hosts to search all of them
        self._partly = self.large

    def expect(self, rivals: Sequence[Tenant]) -> None:
        """Updates the waiting tenants, on which scarcity and thus the price of each range depend."""
        self._waiting = Counter(tenant.size for tenant in rivals)
        self._board.sizes.update(self._waiting)
        self._forget()

    def search_all_hosts(self) -> bool:
        """Extends the search to all hosts; False if it was not limited."""
        if not self._partly:
            return False
        self._partly = False
        self._forget()
        return True

    def candidates(self, tenant: Tenant, hosts: int) -> Iterator[tuple[float, int, int]]:
        """Yields (cost, host, start) of ranges to empty, cheapest first: one of each of the ``hosts`` cheapest."""
        tried = 0
        for most in (1, hosts):
            options: list[tuple[float, float, float, int, int]] = []
            for kind in tenant.demand.kinds:
                if kind in self._board.kinds:
                    index = self._evict_index(tenant.size, kind)
                    ranked = index.ranked(most, self._board.admitting(tenant))
                    options.extend((rank[0], rank[1], rank[2], host, int(rank[3])) for rank, host in ranked)
            options.sort()
            for cost, _, _, host, start in options[tried:most]:
                yield cost, host, start
            tried = most

    def _forget(self) -> None:
        for cache in (self._prices, self._further, self._scarcities):
            cache.clear()
        for index in self._evict.values():
            self._board.indices.remove(index)
        self._evict.clear()

    def _evict_index(self, size: int, kind: int) -> HostIndex:
        """Returns an index by `_cheapest`; of many hosts only the least crowded ones, until they prove too few."""
        index = self._evict.get((size, kind))
        if index is None:
            hosts = self._board.kinds[kind]
            if self._partly and len(hosts) > LARGE:
                crowded = ((self._crowding(host, size), host) for host in hosts)
                hosts = [host for _, host in heapq.nsmallest(max(LARGE, len(hosts) // 3), crowded)]
            index = self._evict[size, kind] = HostIndex(hosts, lambda host: self._cheapest(host, size))
            self._board.indices.append(index)
        return index

    def _crowding(self, host: int, size: int) -> float:
        """Estimates how many tenants a range of that size would evict."""
        room, small = self._board.spaces[host].grid.cores, 1
        for tenant in self._board.spaces[host].tenants:
            if tenant.size < size:
                small += 1
            else:
                room -= tenant.size
        return NEVER if room < size else small / room

    def _cheapest(self, host: int, size: int) -> Rank | None:
        """Returns (cost, off the grid, cores in use, start) of the range that is cheapest to empty."""
        space = self._board.spaces[host]
        grid = space.grid
        possible = grid.possible(size)
        if not possible:
            return None
        starts = grid.starts(size)
        owner = grid.owner(size) if self.large else None
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
        prices = {smaller: self._further_cost(smaller) for smaller in sorted(self._board.sizes) if smaller < size}
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
            if self.large:  # a lower bound: one on each host that has any
                free = sum(len(self._free.index(size, kind)) for kind in self._board.kinds)
            else:
                free = sum(
                    (windows(space.free, size) & space.grid.starts(size)).bit_count() for space in self._board.spaces
                )
            cost = 0.0
            short = self._waiting[size] - free
            if short >= 0:
                prices = sorted(
                    rank[0] for kind in self._board.kinds for rank, _ in self._evict_index(size, kind).ranked(short + 1)
                )
                cost = prices[min(short + 1, len(prices)) - 1] if prices else float(size)
            self._further[size] = cost
        return cost


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
