"""Whether a set of replicas fits into free cores, and which set serves most cores.

Free cores are bit masks; what matters about a host is only its mask, so hosts with equal masks count as one kind.

Degrees that divide each other (1, 2, 4, 8, 24, or 1, 2, 4, 12, 24) need no search: replicas of such degrees fit if and
only if, for each degree s, all replicas of s and larger ones, counted in windows of s cores, are no more than the
disjoint legal windows of s free cores. That is exact because a legal window can lie flush with an end of its free run,
where it costs every smaller degree exactly its own length. 8 beside 12, and degrees that only a spec's
``allow_degrees`` knows, are placed by a bounded search first.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from placements.cores import CoreRange
from placements.topology import Host, alignment

SEARCH_NODES = 2_000
"""Steps of one search. Beyond them "does not fit" means "not found", which `plan` mends by a last greedy pass."""

_MAX_CHOICES = 300


class Free(NamedTuple):
    """The free cores of a host: bit i of ``mask`` stands for core i."""

    family: str
    cores: int
    mask: int

    @classmethod
    def of(cls, host: Host, taken: Iterable[int] = ()) -> Free:
        """The cores of a host that are neither reserved nor ``taken``."""
        family = host.topology.family if host.topology else ""
        mask = (1 << host.cores) - 1
        for core in (*host.reserved_cores, *taken):
            if 0 <= core < host.cores:
                mask &= ~(1 << core)
        return cls(family, host.cores, mask)

    def without(self, cores: CoreRange) -> Free:
        """Less free by ``cores``."""
        return self._replace(mask=self.mask & ~bits(cores))

    def holds(self, cores: CoreRange) -> bool:
        """Whether all of ``cores`` are free."""
        wanted = bits(cores)
        return cores.last < self.cores and self.mask & wanted == wanted


def bits(cores: CoreRange) -> int:
    """The mask with these cores set."""
    return ((1 << len(cores)) - 1) << cores.first


@lru_cache(maxsize=1 << 16)
def runs(free: Free) -> tuple[CoreRange, ...]:
    """The longest contiguous free ranges, ascending."""
    found: list[CoreRange] = []
    first: int | None = None
    for core in range(free.cores + 1):
        is_free = core < free.cores and free.mask >> core & 1
        if is_free and first is None:
            first = core
        elif not is_free and first is not None:
            found.append(CoreRange(first, core - 1))
            first = None
    return tuple(found)


@lru_cache(maxsize=1 << 16)
def windows(free: Free, tp: int) -> tuple[CoreRange, ...]:
    """Every free range of ``tp`` cores that begins at a legal multiple, ascending."""
    if not free.family:
        return ()
    step = alignment(free.family, tp).legal
    ranges = (CoreRange.of_length(first, tp) for first in range(0, free.cores - tp + 1, step))
    return tuple(cores for cores in ranges if free.holds(cores))


@lru_cache(maxsize=1 << 16)
def capacity(free: Free, tp: int) -> int:
    """The most replicas of this one degree that fit side by side."""
    count, end = 0, -1
    for window in windows(free, tp):
        if window.first > end:
            count, end = count + 1, window.last
    return count


def fits(free: Mapping[Free, int], demand: Mapping[int, int]) -> bool:
    """Whether ``demand`` (degree -> replicas) fits into ``free`` (kind of host -> number of hosts) all at once."""
    sizes = sorted((tp for tp, count in demand.items() if count > 0), reverse=True)
    chain, others = _chain(sizes)
    if not others:
        return _chain_fits(free, chain, demand)
    return _search(free, [tp for tp in others for _ in range(demand[tp])], chain, demand)


def _chain(sizes: list[int]) -> tuple[list[int], list[int]]:
    """Split descending degrees into a chain of divisors, for which counting is exact, and the others."""

    def divides(chain: list[int]) -> bool:
        return all(big % small == 0 for big, small in itertools.pairwise(chain)) and all(
            tp == 1 or tp % 2 == 0 for tp in chain
        )

    if divides(sizes):
        return sizes, []
    chain = [tp for tp in sizes if tp in (1, 2, 4, 8, 24)]
    return chain, [tp for tp in sizes if tp not in chain]


def _chain_fits(free: Mapping[Free, int], chain: list[int], demand: Mapping[int, int]) -> bool:
    cores = 0
    for tp in chain:
        cores += tp * demand[tp]
        if cores > tp * sum(capacity(kind, tp) * count for kind, count in free.items()):
            return False
    return True


def _search(free: Mapping[Free, int], items: list[int], chain: list[int], demand: Mapping[int, int]) -> bool:
    """Depth first over the windows of the degrees outside the chain."""
    seen: set[tuple[int, frozenset[tuple[Free, int]]]] = set()

    def place(state: Counter[Free], depth: int) -> bool:
        if not _chain_fits(state, chain, demand):
            return False
        if depth == len(items):
            return True
        key = (depth, frozenset(state.items()))
        if key in seen or len(seen) >= SEARCH_NODES:
            return False
        seen.add(key)
        tp = items[depth]
        choices = {(kind, kind.without(window)) for kind in state for window in windows(kind, tp)}
        for kind, rest in sorted(choices, key=lambda choice: (choice[0].mask.bit_count(), choice)):
            after = state.copy()
            after[kind] -= 1
            after[rest] += 1
            after = +after  # drop what is used up
            if place(after, depth + 1):
                return True
        return False

    return place(+Counter(dict(free)), 0)  # without the kinds of which there are none left


def admit(free: Mapping[Free, int], before: Mapping[int, int], wanted: Mapping[int, int]) -> Counter[int]:
    """The part of ``wanted`` that serves most cores without costing ``before``, which is known to fit, anything.

    Among equals the one with the largest degrees.
    """
    sizes = sorted((tp for tp, count in wanted.items() if count > 0), reverse=True)
    _, others = _chain(sorted({*sizes, *(tp for tp, count in before.items() if count > 0)}, reverse=True))
    searched = [tp for tp in others if tp in sizes]
    limits = {tp: _most(free, Counter(before), tp, wanted[tp]) for tp in searched}
    choices = itertools.product(*(range(limits[tp], -1, -1) for tp in searched))
    best: Counter[int] = Counter()
    best_cores = -1
    for counts in itertools.islice(choices, _MAX_CHOICES):
        fixed = dict(zip(searched, counts, strict=True))
        total = Counter(before)
        total.update(fixed)
        if not fits(free, total):
            continue
        chosen = Counter(fixed)
        for tp in sizes:
            if tp not in fixed:
                more = _most(free, total, tp, wanted[tp])
                total[tp] += more
                chosen[tp] += more
        cores = sum(tp * count for tp, count in chosen.items())
        if cores > best_cores:
            best, best_cores = chosen, cores
    return best


def _most(free: Mapping[Free, int], before: Counter[int], tp: int, wanted: int) -> int:
    """The largest number of replicas of ``tp``, up to ``wanted``, that fits beside ``before``."""
    low, high = 0, wanted
    while low < high:
        middle = (low + high + 1) // 2
        if fits(free, before + Counter({tp: middle})):
            low = middle
        else:
            high = middle - 1
    return low
