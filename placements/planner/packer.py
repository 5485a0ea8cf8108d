"""Packer: replicas on the cores of hosts, and how room is made for one more.

A tenant goes, in this order:

1. to a free range of the grid, the one that spoils least;
2. to a range of the grid whose tenants are all new themselves, and find other places;
3. to any free legal range;
4. to the range whose running tenants cost least to move, within the number of moves allowed, if all of them find
   another place (smaller ones may be moved for them in turn); of each host its cheapest range is tried, and on few
   hosts every range then;
5. to the range whose tenants of a lower grade matter least; those that find no other place are displaced.

Either all of a step succeeds or nothing of it is done.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from placements.planner.grid import Grid, windows
from placements.planner.host_index import HostIndex, Rank
from placements.planner.tenants import NEVER, Grade, Space, Tenant

TRIES = (24, 6, 3, 2, 1)
"""On how many hosts the cheapest range is tried for a tenant, for those that give way to it, for those that give way to
them, and so on."""

LARGE = 300
"""Hosts beyond which only ranges of the grid are emptied: there are enough of them to choose from."""

SMALL = 24
"""Hosts up to which every range is tried for a tenant that finds no room otherwise, not only each host's cheapest."""

MOST_EMPTIED = 40
"""How many ranges are tried then, cheapest first."""

MOST_CLEARED = 500
"""How many ranges `Packer.clear` tries."""

MOST_OWN = 24
"""Models whose free ranges are kept apart because hosts refuse them for want of memory or CPUs, or by spread."""

MOST_ORDERED = 1000
"""How many replicas are placed again in other orders, all orders together."""

MOST_LATE = 6
"""How many replicas of a degree that does not divide well are tried last."""


class Packer:
    """Hosts and their tenants. ``moves`` is how many running tenants may lie elsewhere at the end; None: any number."""

    def __init__(self, spaces: Sequence[Space], moves: int | None) -> None:
        self.spaces = spaces
        self.moves = moves
        self.moved = 0  # running tenants that lie elsewhere, but for those that gave way to a higher grade
        self.spent = 0.0  # what that costs
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
        self._begun = 0  # displaced ones, when the log began
        self._hopeless: set[tuple[object, ...]] = set()
        self._large = self._partly = len(spaces) > LARGE

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
        """Take up one that lies where its ``host`` and ``first`` say, before anything is placed."""
        space, demand = self.spaces[tenant.host], tenant.demand
        self._sizes.add(tenant.size)
        space.free &= ~(((1 << tenant.size) - 1) << tenant.first)
        space.tenants.append(tenant)
        if demand.memory:
            space.memory -= demand.memory[space.kind]
        if demand.cpus:
            space.cpus -= demand.cpus[space.kind]

    def begin(self) -> None:
        """What has been done stays; `undo` goes back to here."""
        self._log.clear()
        self._begun = len(self.displaced)

    def undo(self) -> None:
        """Back to where it began."""
        self._undo((0, self._begun))

    @property
    def touched(self) -> list[Tenant]:
        """Those that were put or removed since it began."""
        return list(dict.fromkeys(entry[0] for entry in self._log))

    def hope_again(self) -> None:
        """Try even what found no room before: others lie elsewhere now."""
        self._hopeless.clear()

    @property
    def large(self) -> bool:
        """Whether there are so many hosts that not all of them are looked at."""
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

    # What a host can take

    def admits(self, tenant: Tenant, host: int) -> bool:
        """Whether memory, CPUs and spread let it in as it is."""
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
        """(on an idle pin, larger ranges that it spoils, host, start) of the host's range that spoils least."""
        space = self.spaces[host]
        found = space.grid.best(space.free & ~space.idle, size)
        if found is not None:
            return (0, found[0], host, found[1])
        found = space.grid.best(space.free, size) if space.idle else None
        return None if found is None else (1, found[0], host, found[1])

    def _own_index(self, tenant: Tenant, kind: int) -> HostIndex | None:
        """Of the hosts that admit a model, for the few models that are refused by many; None for all others."""
        key = (tenant.model, kind)
        index = self._own.get(key)
        if index is None and len(self._own) < MOST_OWN:

            def rank(host: int) -> Rank | None:
                return self.free_rank(host, tenant.size) if self.admits(tenant, host) else None

            index = self._own[key] = HostIndex(self._kinds[kind], rank)
            self._indices.append(index)
        return index

    def _evict_index(self, size: int, kind: int) -> HostIndex:
        """Of many hosts only those with the fewest tenants in the way, until they have proved too few."""
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
        """How many tenants a range of that size has to expect, roughly."""
        room, small = self.spaces[host].grid.cores, 1
        for tenant in self.spaces[host].tenants:
            if tenant.size < size:
                small += 1
            else:
                room -= tenant.size
        return NEVER if room < size else small / room

    def _look_everywhere(self) -> bool:
        """False when that has been done all along."""
        if not self._partly:
            return False
        self._partly = False
        self._forget_prices()
        return True

    def _cheapest(self, host: int, size: int) -> Rank | None:
        """(cost, off the grid, cores in use, start) of the range that is emptied most cheaply."""
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
                found = (price, not starts >> start & 1, cores, start)
                if best is None or found < best:
                    best = found
        return best

    def _prices_of(self, size: int) -> dict[int, float]:
        """What it costs that a tenant of each size gives way to one of ``size``; one of equal size does as a last
        resort, a larger one never."""
        found = {one: self._further_cost(one) for one in sorted(self._sizes) if one < size}
        self._prices[size] = found
        found[size] = float(size)
        return found

    def _scarce(self, size: int) -> list[tuple[int, float]]:
        """Smaller sizes of which too few ranges are free, and what one more of each costs, largest first."""
        found = self._scarcities.get(size)
        if found is None:
            sizes = sorted((one for one in self._waiting if one < size), reverse=True)
            found = [(one, cost) for one in sizes if (cost := self._further_cost(one)) > 0]
            self._scarcities[size] = found
        return found

    def _further_cost(self, size: int) -> float:
        """What it costs to make room for one that gives way: nothing while more ranges are free than are waited for."""
        found = self._further.get(size)
        if found is None:
            if self._large:  # at least one on each host that has any
                free = sum(len(self._free_index(size, kind)) for kind in self._kinds)
            else:
                free = sum((windows(space.free, size) & space.grid.starts(size)).bit_count() for space in self.spaces)
            found = 0.0
            short = self._waiting[size] - free
            if short >= 0:
                prices = sorted(
                    rank[0] for kind in self._kinds for rank, _ in self._evict_index(size, kind).ranked(short + 1)
                )
                found = prices[min(short + 1, len(prices)) - 1] if prices else float(size)
            self._further[size] = found
        return found

    # Making room

    def place_all(self, rivals: Sequence[Tenant]) -> list[Tenant]:
        """Place those of one grade, largest first, so that most cores are served; those that find no room come back.

        Degrees that do not divide each other (8 and 12 on inf2) spoil room for each other: then the last ones of the
        larger are tried after all others, and what serves most is kept.
        """
        self.begin()
        self._expect(rivals)
        best: list[Tenant] = list(rivals)
        missing = self._place_each(best)
        orders = _orders(rivals)[: MOST_ORDERED // len(rivals)] if missing else []
        least = sum(tenant.size for tenant in missing)
        for trial in orders:
            self._restart()
            left = sum(tenant.size for tenant in self._place_each(trial))
            if left < least:
                least, best = left, trial
        if orders:
            self._restart()
            missing = self._place_each(best)
        self.begin()
        return missing

    def _expect(self, rivals: Sequence[Tenant]) -> None:
        """What is scarce, and so what each range costs, depends on those who wait."""
        self._waiting = Counter(tenant.size for tenant in rivals)
        self._sizes.update(self._waiting)
        self._forget_prices()

    def _forget_prices(self) -> None:
        for known in (self._prices, self._further, self._scarcities):
            known.clear()
        for index in self._evict.values():
            self._indices.remove(index)
        self._evict.clear()

    def _place_each(self, tenants: Sequence[Tenant]) -> list[Tenant]:
        return [tenant for tenant in tenants if not self.place(tenant)]

    def _restart(self) -> None:
        self.undo()
        self.hope_again()

    def clear(self, tenant: Tenant) -> bool:
        """Find room for a tenant as `place` does, but look at every legal range of every host, and displace nothing."""
        return self.enter(tenant) or self._empty_any(tenant, MOST_CLEARED)

    def _empty_any(self, tenant: Tenant, most: int) -> bool:
        """Step 4 over every legal range of every host, whatever lies there."""
        found: list[tuple[float, int, int, int]] = []
        for kind in sorted(tenant.demand.kinds):
            for host in self._kinds.get(kind, ()):
                space = self.spaces[host]
                for start in _bits(space.grid.possible(tenant.size)):
                    wanted = ((1 << tenant.size) - 1) << start
                    there = [one for one in space.tenants if one.mask & wanted]
                    if not any(one.fixed for one in there):
                        cost = sum(one.cost for one in there if one.at_home)
                        found.append((cost, sum(one.size for one in there), host, start))
        found.sort()
        return any(self._swap(tenant, host, start, 0, strict=False) for *_, host, start in found[:most])

    def squeeze_in(self, tenant: Tenant) -> bool:
        """Any free legal range, without moving anything."""
        spot = self.free_spot(tenant) or self.odd_spot(tenant)
        if spot is None:
            return False
        self.put(tenant, *spot)
        self.begin()
        return True

    def take(self, tenant: Tenant, hosts: Sequence[int], first: int) -> bool:
        """Put a tenant on these very cores of the first of the hosts where they are free."""
        for host in hosts:
            wanted = ((1 << tenant.size) - 1) << first
            if self.spaces[host].free & wanted == wanted and self.admits(tenant, host):
                self.put(tenant, host, first)
                self.begin()
                return True
        return False

    def place_at(self, tenant: Tenant, hosts: Sequence[int], first: int) -> bool:
        """Put a tenant on these very cores of one of the hosts, where those that hold them may give way."""
        for host in hosts:
            if self._displace_at(tenant, tenant.grade, host, first, 0):
                self.begin()
                return True
        return False

    def place(self, tenant: Tenant) -> bool:
        """Find room for a tenant, or change nothing. What it displaces is added to ``displaced``."""
        key = (tenant.size, tenant.demand.kinds, None if tenant.demand.plain else tenant.model)
        if key in self._hopeless:
            return False
        if self.enter(tenant) or (self._look_everywhere() and self.enter(tenant)):
            return True
        if self.moves != 0 and len(self.spaces) <= SMALL and self._empty_any(tenant, MOST_EMPTIED):
            return True
        if self._displace(tenant, tenant.grade, 0):
            return True
        self._hopeless.add(key)
        return False

    def enter(self, tenant: Tenant, depth: int = 0, skip: int = 0) -> bool:
        """Steps 1 to 4. ``depth`` counts those that gave way before; ``skip`` ranges of step 4 are left out."""
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
        """(host, first core) of the free range of the grid that spoils least."""
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
                found = (top[0][:3], top[1], int(top[0][3]))
                if best is None or found < best:
                    best = found
        return None if best is None else (best[1], best[2])

    def odd_spot(self, tenant: Tenant) -> tuple[int, int] | None:
        """A free legal range off the grid."""
        best: tuple[tuple[float, ...], int, int] | None = None
        for kind in tenant.demand.kinds:
            if kind not in self._kinds:
                continue
            index = self._odd_index(tenant.size, kind)
            if index is None:
                continue
            for rank, host in index.ranked(1, self._filter(tenant)):
                found = (rank[:2], host, int(rank[2]))
                if best is None or found < best:
                    best = found
        return None if best is None else (best[1], best[2])

    def _odd_index(self, size: int, kind: int) -> HostIndex | None:
        """None where every legal range is one of the grid."""
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
        """(cost, host, start) of ranges to be emptied, cheapest first."""
        tried = 0
        for most in (1, TRIES[depth]):
            found: list[tuple[float, float, float, int, int]] = []
            for kind in tenant.demand.kinds:
                if kind in self._kinds:
                    index = self._evict_index(tenant.size, kind)
                    ranked = index.ranked(most, self._filter(tenant))
                    found.extend((rank[0], rank[1], rank[2], host, int(rank[3])) for rank, host in ranked)
            found.sort()
            for cost, _, _, host, start in found[tried:most]:
                yield cost, host, start
            tried = most

    def _swap(self, tenant: Tenant, host: int, start: int, depth: int, *, strict: bool = True) -> bool:
        """Empty a range for the tenant, and find other places for those that lay there."""
        mark = self._mark()
        space = self.spaces[host]
        wanted = ((1 << tenant.size) - 1) << start
        leaving = [one for one in space.tenants if one.mask & wanted]
        for one in leaving:
            if one.fixed or (strict and one.size >= tenant.size and not self._may_leave(one, tenant)):
                return False
        if self.moves is not None and self.moved + sum(one.at_home for one in leaving) > self.moves:
            return False
        for one in leaving:
            self.remove(one)
        if space.free & wanted != wanted or not self.admits(tenant, host):
            self._undo(mark)
            return False
        self.put(tenant, host, start)
        leaving.sort(key=largest_first)
        if not (self._within_moves() and all(self.enter(one, depth + 1) for one in leaving) and self._within_moves()):
            self._undo(mark)
            return False
        return True

    def _may_leave(self, one: Tenant, tenant: Tenant) -> bool:
        """Whether a tenant of equal size can go where the other cannot, or lies off the grid."""
        if one.size > tenant.size:
            return False
        grid = self.spaces[one.host].grid
        return bool(one.demand.kinds - tenant.demand.kinds) or not grid.starts(one.size) >> one.first & 1

    def _displace(self, tenant: Tenant, grade: Grade, depth: int) -> bool:
        """Put it where tenants of grades below ``grade`` are in the way, those that matter least."""
        lower = sorted({one.grade for space in self.spaces for one in space.tenants if one.grade > grade})
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
        """(cores displaced by grade, the most important first; cores that move; off the grid; host; start)."""
        space = self.spaces[host]
        on_grid = space.grid.starts(tenant.size)
        for start in _bits(space.grid.possible(tenant.size)):
            wanted = ((1 << tenant.size) - 1) << start
            lost = dict.fromkeys(lower, 0)
            moving = 0
            for one in space.tenants:
                if not one.mask & wanted:
                    continue
                if one.fixed:
                    break
                if one.grade > grade:
                    lost[one.grade] += one.size
                elif one.size < tenant.size:
                    moving += one.size
                else:
                    break
            else:
                yield tuple(lost.values()), moving, not on_grid >> start & 1, host, start

    def _displace_at(self, tenant: Tenant, grade: Grade, host: int, start: int, depth: int) -> bool:
        """Put it on these cores: those below ``grade`` are displaced, the others find other places."""
        mark = self._mark()
        space = self.spaces[host]
        wanted = ((1 << tenant.size) - 1) << start
        leaving = [one for one in space.tenants if one.mask & wanted]
        if any(one.fixed for one in leaving):
            return False
        for one in leaving:
            self.remove(one)
        for one in sorted(space.tenants, key=_least_first):
            if one.grade <= grade or self.admits(tenant, host):
                break
            if not one.fixed and self._eases(one, tenant, space):
                self.remove(one)
                leaving.append(one)
        displaced = [one for one in leaving if one.grade > grade]
        for one in displaced:
            self._forget_home(one)
        if space.free & wanted != wanted or not self.admits(tenant, host):
            self._undo(mark)
            return False
        self.put(tenant, host, start)
        others = sorted((one for one in leaving if one.grade <= grade), key=largest_first)
        settled = self._within_moves() and all(
            self.enter(one, 1) or self._displace(one, grade, depth + 1) for one in others
        )
        if not (settled and self._within_moves()):
            self._undo(mark)
            return False
        self.displaced.extend(displaced)
        self._hopeless.clear()
        return True

    def _eases(self, one: Tenant, tenant: Tenant, space: Space) -> bool:
        """Whether a host has more of what the tenant lacks there once that one is gone."""
        wants, holds = tenant.demand, one.demand
        if wants.most and one.model == tenant.model and space.count(tenant.model) >= wants.most:
            return True
        if wants.memory and holds.memory and wants.memory[space.kind] > space.memory:
            return holds.memory[space.kind] > 0
        return bool(wants.insists and holds.cpus and wants.cpus[space.kind] > space.cpus)

    def _forget_home(self, tenant: Tenant) -> None:
        """It begins anew, wherever there is room for it."""
        if tenant.home >= 0:
            self._log.append((tenant, -1, -1, tenant.home))
            tenant.home = -1
            self.moved -= 1
            self.spent -= tenant.cost

    def _within_moves(self) -> bool:
        return self.moves is None or self.moved <= self.moves


def _worth(free: int, grid: Grid, scarce: Sequence[tuple[int, float]]) -> float:
    """What the free ranges in ``free`` are worth to others that wait."""
    worth = 0.0
    for size, cost in scarce:
        legal = grid.legal(size)
        found = windows(free, size) & legal
        while found:
            start = (found & -found).bit_length() - 1
            free &= ~(((1 << size) - 1) << start)
            worth += cost
            found = windows(free, size) & legal
    return worth


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


def largest_first(tenant: Tenant) -> tuple[int, int, int]:
    """The order in which those that give way find other places."""
    return (-tenant.size, tenant.model, tenant.replica)


def _least_first(tenant: Tenant) -> tuple[object, ...]:
    priority, exceeds, new = tenant.grade
    return (-priority, not exceeds, not new, tenant.size, -tenant.model, -tenant.replica)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1
