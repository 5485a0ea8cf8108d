"""Grid: where on a host's cores a range of each degree had better begin, so that ranges do not spoil room for others.

The degrees of a family divide each other (12 on inf2 aside). On a run of usable cores a grid is a set of starts for
each degree such that every range of a larger degree is made of whole ranges of each smaller one, and that has as many
ranges of each degree as the run can hold at all. So on a grid counting decides what fits: a set of replicas has room if
and only if for each degree s those of s and more, counted in ranges of s, are no more than the grid's ranges of s.

Sets of cores are bit masks: bit i stands for core i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

from placements.facts.topology import DEGREES, alignment


@dataclass(frozen=True, eq=False)
class Grid:
    """The grid of hosts of one family whose usable cores are the same. Made by `grid_of`, which shares them."""

    family: str
    cores: int  # of the host
    usable: int  # cores that are not reserved, quarantined, or held for good
    _starts: dict[int, int] = field(default_factory=dict, repr=False)
    _legal: dict[int, int] = field(default_factory=dict, repr=False)
    _possible: dict[int, int] = field(default_factory=dict, repr=False)
    _owner: dict[int, list[int]] = field(default_factory=dict, repr=False)

    def starts(self, degree: int) -> int:
        """The grid's starts of that degree."""
        found = self._starts.get(degree)
        if found is None:
            found = self._starts[degree] = _grid_starts(self, degree)
        return found

    def legal(self, degree: int) -> int:
        """Every start that the hardware allows, whether its cores are usable or not."""
        found = self._legal.get(degree)
        if found is None:
            found = self._legal[degree] = multiples(alignment(self.family, degree).legal, self.cores - degree + 1)
        return found

    def step(self, degree: int) -> int:
        """Legal starts are the multiples of this."""
        return alignment(self.family, degree).legal

    def possible(self, degree: int) -> int:
        """Every legal start of a range of usable cores."""
        found = self._possible.get(degree)
        if found is None:
            found = self._possible[degree] = self.legal(degree) & windows(self.usable, degree)
        return found

    def owner(self, degree: int) -> list[int]:
        """For each core the start of the grid's range that it lies in, -1 outside of all."""
        found = self._owner.get(degree)
        if found is None:
            found = self._owner[degree] = [-1] * self.cores
            for start in range(self.cores):
                if self.starts(degree) >> start & 1:
                    found[start : start + degree] = [start] * degree
        return found

    def has_others(self, degree: int) -> bool:
        """Whether there are legal ranges of usable cores beside those of the grid."""
        return bool(self.possible(degree) & ~self.starts(degree))

    def best(self, free: int, degree: int) -> tuple[int, int] | None:
        """(level, start) of the free range that spoils least: inside the smallest free range of a larger degree.

        ``level`` counts the larger degrees that lose a range. None: no range of the grid is free.
        """
        found = windows(free, degree) & self.starts(degree)
        if not found:
            return None
        level = 0
        for larger in _larger(self.family, degree, self.cores):
            whole = windows(free, larger) & self.starts(larger)
            if not whole:
                break
            outside = found & ~(whole * ((1 << larger) - 1))
            if outside:
                found = outside
                break
            level += 1
        return level, (found & -found).bit_length() - 1

    def anywhere(self, free: int, degree: int) -> int | None:
        """The start of a free legal range, off the grid too: at an end of the shortest free run that holds one."""
        found = windows(free, degree) & self.legal(degree)
        best: tuple[int, bool, int] | None = None
        while found:
            start = (found & -found).bit_length() - 1
            found &= found - 1
            below = free & ((1 << start) - 1)
            above = free >> (start + degree)
            left = start - (~below & ((1 << start) - 1)).bit_length()
            right = (~above & (above + 1)).bit_length() - 1
            rank = (left + right, bool(left and right), start)
            if best is None or rank < best:
                best = rank
        return None if best is None else best[2]


@lru_cache(maxsize=1 << 14)
def grid_of(family: str, cores: int, usable: int) -> Grid:
    """The grid of such hosts."""
    return Grid(family, cores, usable)


def windows(free: int, length: int) -> int:
    """Every start of ``length`` cores in a row that are all free."""
    done = 1
    while done * 2 <= length:
        free &= free >> done
        done *= 2
    return free & (free >> (length - done)) if done < length else free


@lru_cache(maxsize=4096)
def multiples(step: int, end: int) -> int:
    """The mask of 0, step, 2 x step ... below ``end``."""
    return sum(1 << start for start in range(0, max(0, end), step))


@lru_cache(maxsize=4096)
def _larger(family: str, degree: int, cores: int) -> tuple[int, ...]:
    """The family's degrees above this one, each a multiple of the one before, ascending."""
    found: list[int] = []
    last = degree
    for tp in sorted(DEGREES[family]):
        if last < tp <= cores and tp % last == 0:
            found.append(tp)
            last = tp
    return tuple(found)


@lru_cache(maxsize=256)
def _nested(family: str, cores: int) -> Mapping[int, tuple[int, int]]:
    """Degree -> (legal, preferred) alignment, of the degrees that divide each other and whose ranges may be shifted."""
    table = {tp: row for tp, row in DEGREES[family].items() if tp <= cores}
    return MappingProxyType({tp: (row.legal, row.preferred) for tp, row in table.items() if row.legal < row.preferred})


def _grid_starts(grid: Grid, degree: int) -> int:
    row = alignment(grid.family, degree)
    preferred = multiples(row.preferred, grid.cores - degree + 1) & windows(grid.usable, degree)
    if row.legal == row.preferred:
        return preferred
    found = 0
    for first, length in _runs(grid.usable):
        inside = preferred & (((1 << length) - 1) << first)
        if _preferred_is_enough(grid, first, length):
            found |= inside
            continue
        base = -(-first // row.legal) * row.legal
        while base + degree <= first + length:
            found |= 1 << base
            base += degree
    return found


def _preferred_is_enough(grid: Grid, first: int, length: int) -> bool:
    """Whether the preferred starts inside this run hold as many ranges of every degree as any legal ones do."""
    for degree, (legal, preferred) in _nested(grid.family, grid.cores).items():
        most = max(0, (first + length - -(-first // legal) * legal) // degree)
        held = max(0, (first + length - -(-first // preferred) * preferred) // degree)
        if held < most:
            return False
    return True


def _runs(usable: int) -> list[tuple[int, int]]:
    """(first, length) of each longest row of usable cores."""
    found = []
    at = 0
    while usable:
        skip = (usable & -usable).bit_length() - 1
        usable >>= skip
        length = (~usable & (usable + 1)).bit_length() - 1
        found.append((at + skip, length))
        usable >>= length
        at += skip + length
    return found
