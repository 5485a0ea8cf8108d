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
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from placements.grid import Grid, windows

if TYPE_CHECKING:
    from placements.plan import Running

TRIES = (24, 6, 3, 2, 1)
"""How many ranges are tried for a tenant, for those that give way to it, for those that give way to them, and so on."""

LARGE = 300
"""Hosts beyond which only ranges of the grid are emptied: there are enough of them to choose from."""

MOST_ORDERED = 1000
"""How many replicas are placed again in other orders, all orders together."""

MOST_LATE = 6
"""How many replicas of a degree that does not divide well are tried last."""

ROUNDS = 300
"""How often `Packer.improve` tries."""

HOME_ROUNDS = 30_000
"""How often `Packer.bring_home` tries on one host; on n hosts an n-th of it, and at most 300 times."""

NEVER = float("inf")


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

    def ranked(self, most: int, usable: Callable[[int], bool] | None = None) -> list[tuple[tuple[float, ...], int]]:
        """The best ``most`` hosts that are ``usable``, best first."""
        if most == 1 and usable is None:
            top = self.first()
            return [] if top is None else [top]
        found: list[tuple[tuple[float, ...], int]] = []
        held: list[tuple[tuple[float, ...], int]] = []
        while len(found) < most:
            top = self.first()
            if top is None:
                break
            heapq.heappop(self._heap)
            held.append(top)
            self._current[top[1]] = None  # so that a second entry of it is not taken for good
            if usable is None or usable(top[1]):
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
        self._waiting: Counter[int] = Counter()  # tenants to be placed, by size
        self._further: dict[int, float] = {}
        self._scarcities: dict[int, list[tuple[int, float]]] = {}
        self._odd: dict[tuple[int, int], _Index | None] = {}
        self._evict: dict[tuple[int, int], _Index] = {}
        self._indices: list[_Index] = []
        self._log: list[tuple[Tenant, int, int, int]] = []  # (tenant, host, first, home) as before
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

    def _leave(self, tenant: Tenant) -> None:
        space = self.spaces[tenant.host]
        if tenant.at_home:
            tenant.at_home = False
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
        space, demand = self.spaces[tenant.host], tenant.demand
        space.free &= ~(((1 << tenant.size) - 1) << tenant.first)
        space.tenants.append(tenant)
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

    def _filter(self, tenant: Tenant) -> Callable[[int], bool] | None:
        return None if tenant.demand.plain else lambda host: self._admits(tenant, host)

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
        """Of many hosts only those where most is free, until they have proved too few."""
        index = self._evict.get((size, kind))
        if index is None:
            hosts = self._kinds[kind]
            if self._partly and len(hosts) > LARGE:
                crowded = ((self._crowding(host, size), host) for host in hosts)
                hosts = [host for _, host in heapq.nsmallest(max(LARGE, len(hosts) // 2), crowded)]
            index = self._evict[size, kind] = _Index(hosts, lambda host: self._cheapest(host, size))
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
        for index in self._evict.values():
            self._indices.remove(index)
        self._evict.clear()
        return True

    def _cheapest(self, host: int, size: int) -> tuple[float, ...] | None:
        """(cost, off the grid, cores in use, start) of the range that is emptied most cheaply."""
        space = self.spaces[host]
        grid = space.grid
        possible = grid.possible(size)
        if not possible:
            return None
        starts = grid.starts(size)
        owner = grid.owner(size) if self._large else None
        step = grid.step(size)
        further = self._further
        cost: dict[int, float] = {}
        for tenant in space.tenants:
            first, length = tenant.first, tenant.size
            if length < size and not tenant.fixed:
                price = further.get(length, -1.0)
                if price < 0:
                    price = self._further_cost(length)
            elif length > size or tenant.fixed or (starts >> first & 1 and len(tenant.demand.kinds) < 2):
                price = NEVER
            else:
                price = float(size)  # of equal size: the last resort
            if tenant.at_home:
                price += tenant.cost
            if owner is not None:
                low, high = owner[first], owner[first + length - 1]
                cost[low] = cost.get(low, 0.0) + price
                if high != low:
                    for start in range(low + size if low >= 0 else high, high + 1, size):
                        cost[start] = cost.get(start, 0.0) + price
                continue
            low = first - size + 1
            for start in range(-(-low // step) * step if low > 0 else 0, first + length, step):
                cost[start] = cost.get(start, 0.0) + price
        cost.pop(-1, None)
        best: tuple[float, ...] | None = None
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
        self._waiting = Counter(tenant.size for tenant in rivals)
        best: list[Tenant] = list(rivals)
        missing = self._place_each(best)
        orders = _orders(rivals)[: MOST_ORDERED // len(rivals)] if missing else []
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

    def improve(self, missing: Sequence[Tenant]) -> list[Tenant]:
        """Empty a few hosts of what is new there and fill them again in another order, as long as more is served.

        Where memory, CPUs or spread decide, largest first is not the best order, and there is no order that always is.
        Those that find no room in the end come back.
        """
        left = list(missing)
        if not left:
            return left
        movable = [h for h, space in enumerate(self.spaces) if any(_is_new(tenant) for tenant in space.tenants)]
        if not movable or all(tenant.demand.plain for tenant in (*left, *self._new_ones())):
            return left
        rng = random.Random(0)
        for _ in range(ROUNDS):
            if not left:
                break
            left = self._refill(left, rng, movable)
        self._log.clear()
        return left

    def _new_ones(self) -> Iterator[Tenant]:
        return (tenant for space in self.spaces for tenant in space.tenants if _is_new(tenant))

    def bring_home(self) -> None:
        """Let those that have moved back, and find other room for what took theirs, as long as no more have to move."""
        rng = random.Random(0)
        away = [one for space in self.spaces for one in space.tenants if one.home >= 0 and not one.at_home]
        for _ in range(0 if self._large else min(300, HOME_ROUNDS // len(self.spaces))):
            if not away:
                break
            tenant, skip = rng.choice(away), rng.choice((0, 0, 1, 1, 2, 3, 4, 6, 9))
            if self._bring_home(tenant, [one for one in away if one.home == tenant.home], skip):
                changed = dict.fromkeys([*away, *(entry[0] for entry in self._log)])
                away = [one for one in changed if one.home >= 0 and not one.at_home]
        self._log.clear()

    def _bring_home(self, tenant: Tenant, neighbours: Sequence[Tenant], skip: int) -> bool:
        self._log.clear()
        before, home = self.moved, self.spaces[tenant.home]
        wanted = ((1 << tenant.size) - 1) << tenant.home_first
        intruders = [one for one in home.tenants if one.mask & wanted]
        if any(one.fixed for one in intruders):
            return False
        for one in intruders:
            self.remove(one)
        for one in neighbours:
            mask = ((1 << one.size) - 1) << one.home_first
            if one.host >= 0 and home.free & mask == mask:
                self.remove(one)
                self.put(one, one.home, one.home_first)
        intruders = sorted((one for one in intruders if one.host < 0), key=_largest_first)
        if all(self._enter(one, 0, skip) for one in intruders) and self.moved <= before:
            return True
        self._undo((0, 0))
        return False

    def _refill(self, missing: list[Tenant], rng: random.Random, movable: Sequence[int]) -> list[Tenant]:
        """One try. The result is what is missing afterwards."""
        self._log.clear()
        hosts = rng.sample(movable, min(len(movable), rng.choice((1, 2, 2, 3, 4))))
        emptied = [tenant for host in hosts for tenant in self.spaces[host].tenants if _is_new(tenant)]
        for tenant in emptied:
            self.remove(tenant)
        waiting, rest = _some_of_each(missing)
        weigh, noise = rng.choice(_WEIGHTS), rng.choice((0.0, 0.3, 1.0))
        pool = [(t.grade, -weigh(t) * (1 + noise * rng.random()), t.model, t.replica, t) for t in (*emptied, *waiting)]
        pool.sort(key=lambda entry: entry[:4])
        left = []
        for *_, tenant in pool:
            rng.shuffle(hosts)
            spot = self._spot_on(tenant, hosts) or self._free_spot(tenant) or self._odd_spot(tenant)
            if spot is None:
                left.append(tenant)
            else:
                self.put(tenant, *spot)
        if not _worse(left, waiting):
            return left + rest
        self._undo((0, 0))
        return missing

    def _spot_on(self, tenant: Tenant, hosts: Sequence[int]) -> tuple[int, int] | None:
        """A free range of the grid on the first of these hosts that has one."""
        for host in hosts:
            space = self.spaces[host]
            if space.kind in tenant.demand.kinds and self._admits(tenant, host):
                found = space.grid.best(space.free, tenant.size)
                if found is not None:
                    return host, found[1]
        return None

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
        if self._enter(tenant, 0) or (self._look_everywhere() and self._enter(tenant, 0)) or self._displace(tenant):
            return True
        self._hopeless.add(key)
        return False

    def _enter(self, tenant: Tenant, depth: int, skip: int = 0) -> bool:
        spot = self._free_spot(tenant)
        if spot is not None:
            self.put(tenant, *spot)
            return True
        if depth >= len(TRIES):
            return False
        spared = True
        for cost, host, start in self._candidates(tenant, depth):
            if cost > 0 and spared:
                spared = False
                spot = self._odd_spot(tenant)
                if spot is not None:
                    self.put(tenant, *spot)
                    return True
            if cost > 0 and skip > 0:
                skip -= 1
            elif self._swap(tenant, host, start, depth):
                return True
        spot = self._odd_spot(tenant) if spared else None
        if spot is not None:
            self.put(tenant, *spot)
        return spot is not None

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

    def _odd_index(self, size: int, kind: int) -> _Index | None:
        """None where every legal range is one of the grid."""
        index = self._odd.get((size, kind))
        if index is None and (size, kind) not in self._odd:
            hosts = [host for host in self._kinds[kind] if self.spaces[host].grid.has_others(size)]
            if hosts:
                index = _Index(hosts, lambda host: self._odd_rank(host, size))
                self._indices.append(index)
            self._odd[size, kind] = index
        return index

    def _odd_rank(self, host: int, size: int) -> tuple[float, ...] | None:
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

    def _swap(self, tenant: Tenant, host: int, start: int, depth: int) -> bool:
        """Empty a range for the tenant, and find other places for those that lay there."""
        mark = self._mark()
        space = self.spaces[host]
        wanted = ((1 << tenant.size) - 1) << start
        leaving = [one for one in space.tenants if one.mask & wanted]
        for one in leaving:
            if one.fixed or (one.size >= tenant.size and not self._may_leave(one, tenant)):
                return False
        if self.moves is not None and self.moved + sum(one.at_home for one in leaving) > self.moves:
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

    def _may_leave(self, one: Tenant, tenant: Tenant) -> bool:
        """Whether a tenant of equal size can go where the other cannot, or lies off the grid."""
        if one.size > tenant.size:
            return False
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
        self, tenant: Tenant, host: int, lower: Sequence[Grade]
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
        if tenant.home >= 0:
            self._log.append((tenant, -1, -1, tenant.home))
            tenant.home = -1
            self.moved -= 1

    def _within_moves(self) -> bool:
        return self.moves is None or self.moved <= self.moves


_WEIGHTS: tuple[Callable[[Tenant], float], ...] = (
    lambda tenant: float(tenant.size),
    lambda tenant: tenant.size / (1.0 + max(tenant.demand.memory, default=0.0)),
    lambda tenant: max(tenant.demand.memory, default=0.0) + 0.01 * tenant.size,
    lambda tenant: 1.0,
)


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


def _is_new(tenant: Tenant) -> bool:
    return not tenant.fixed and not tenant.at_home


def _some_of_each(missing: Sequence[Tenant]) -> tuple[list[Tenant], list[Tenant]]:
    """A few of each model and grade, for they are alike; and the rest."""
    seen: Counter[tuple[object, ...]] = Counter()
    some: list[Tenant] = []
    rest: list[Tenant] = []
    for tenant in missing:
        key = (tenant.model, tenant.grade)
        seen[key] += 1
        (some if seen[key] <= 4 else rest).append(tenant)
    return some, rest


def _worse(left: Sequence[Tenant], before: Sequence[Tenant]) -> bool:
    """Whether more cores go without a place, at the most important grade where the two differ."""
    lost: Counter[Grade] = Counter()
    for tenant in left:
        lost[tenant.grade] += tenant.size
    for tenant in before:
        lost[tenant.grade] -= tenant.size
    return next((count > 0 for _, count in sorted(lost.items()) if count), False)


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
