"""The preferred starts of ranges on a host, for each degree, so that ranges do not fragment the cores.

The degrees of a family divide each other (except 12 on inf2). On a run of usable cores, a grid is a set of starts for
each degree such that every range of a larger degree consists of whole ranges of each smaller one, with as many ranges
of each degree as the run can hold. So counting decides what fits on a grid: a set of replicas has room if and only if,
for each degree s, the replicas of degree s and above, counted in ranges of s, do not exceed the grid's ranges of s.

Sets of cores are bit masks: bit i stands for core i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from placements.facts.core_range import CoreRange, contiguous
from placements.facts.topology import DEGREES, alignment


@dataclass(frozen=True, eq=False)
class Grid:
    """The grid of hosts of one family with the same usable cores. Created by `grid_of`, which shares instances."""

    family: str
    cores: int  # of the host
    usable: int  # cores that are not reserved, quarantined or pinned
    _starts: dict[int, int] = field(default_factory=dict, repr=False)
    _legal: dict[int, int] = field(default_factory=dict, repr=False)
    _possible: dict[int, int] = field(default_factory=dict, repr=False)
    _owner: dict[int, list[int]] = field(default_factory=dict, repr=False)

    def starts(self, degree: int) -> int:
        """Returns the grid's starts of a degree."""
        mask = self._starts.get(degree)
        if mask is None:
            mask = self._starts[degree] = _grid_starts(self, degree)
        return mask

    def legal(self, degree: int) -> int:
        """Returns all starts that the hardware allows, of usable cores or not."""
        mask = self._legal.get(degree)
        if mask is None:
            mask = self._legal[degree] = multiples(alignment(self.family, degree).legal, self.cores - degree + 1)
        return mask

    def step(self, degree: int) -> int:
        """Returns the alignment of legal starts."""
        return alignment(self.family, degree).legal

    def possible(self, degree: int) -> int:
        """Returns all legal starts of ranges of usable cores."""
        mask = self._possible.get(degree)
        if mask is None:
            mask = self._possible[degree] = self.legal(degree) & windows(self.usable, degree)
        return mask

    def owner(self, degree: int) -> list[int]:
        """Returns, for each core, the start of the grid's range that contains it, or -1."""
        owners = self._owner.get(degree)
        if owners is None:
            owners = self._owner[degree] = [-1] * self.cores
            for start in range(self.cores):
                if self.starts(degree) >> start & 1:
                    owners[start : start + degree] = [start] * degree
        return owners

    def has_others(self, degree: int) -> bool:
        """Returns whether there are legal ranges of usable cores off the grid."""
        return bool(self.possible(degree) & ~self.starts(degree))

    def best(self, free: int, degree: int) -> tuple[int, int] | None:
        """Returns (level, start) of the best-fitting free range: inside the smallest free range of a larger degree.

        ``level`` counts the larger degrees that lose a free range. None if no range of the grid is free.
        """
        fits = windows(free, degree) & self.starts(degree)
        if not fits:
            return None
        level = 0
        for larger in _larger(self.family, degree, self.cores):
            larger_free = windows(free, larger) & self.starts(larger)
            if not larger_free:
                break
            outside = fits & ~(larger_free * ((1 << larger) - 1))
            if outside:
                fits = outside
                break
            level += 1
        return level, (fits & -fits).bit_length() - 1

    def anywhere(self, free: int, degree: int) -> int | None:
        """Returns the start of a free legal range, on or off the grid: at an end of the shortest fitting free run."""
        fits = windows(free, degree) & self.legal(degree)
        best: tuple[int, bool, int] | None = None
        while fits:
            start = (fits & -fits).bit_length() - 1
            fits &= fits - 1
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
    """Returns the shared grid of such hosts."""
    return Grid(family, cores, usable)


def windows(free: int, length: int) -> int:
    """Returns the starts of all runs of ``length`` free cores."""
    done = 1
    while done * 2 <= length:
        free &= free >> done
        done *= 2
    return free & (free >> (length - done)) if done < length else free


@lru_cache(maxsize=4096)
def multiples(step: int, end: int) -> int:
    """Returns the mask of 0, step, 2 x step ... below ``end``."""
    return sum(1 << start for start in range(0, max(0, end), step))


@lru_cache(maxsize=4096)
def _larger(family: str, degree: int, cores: int) -> tuple[int, ...]:
    """Returns the family's larger documented degrees, ascending, each a multiple of the one before."""
    degrees: list[int] = []
    last = degree
    for tp, row in sorted(DEGREES[family].items()):
        if row.documented and last < tp <= cores and tp % last == 0:
            degrees.append(tp)
            last = tp
    return tuple(degrees)


@lru_cache(maxsize=256)
def _shifted(family: str, cores: int, degree: int) -> Mapping[int, tuple[int, int]]:
    """Returns degree -> (legal, preferred) alignment, for the degrees that shift off the preferred one together.

    These are the documented degrees, which divide each other; any other one, such as 12 on inf2, shifts alone.
    """
    table = {tp: row for tp, row in DEGREES[family].items() if tp <= cores and row.documented}
    if degree not in table:
        table = {degree: alignment(family, degree)}
    return {tp: (row.legal, row.preferred) for tp, row in table.items() if row.legal < row.preferred}


def _grid_starts(grid: Grid, degree: int) -> int:
    row = alignment(grid.family, degree)
    preferred = multiples(row.preferred, grid.cores - degree + 1) & windows(grid.usable, degree)
    if row.legal == row.preferred:
        return preferred
    starts = 0
    for run in contiguous(core for core in range(grid.cores) if grid.usable >> core & 1):
        if _preferred_is_enough(grid, run, degree):
            starts |= preferred & (((1 << len(run)) - 1) << run.first)
            continue
        base = -(-run.first // row.legal) * row.legal
        for start in range(base, run.last + 2 - degree, degree):
            starts |= 1 << start
    return starts


def _preferred_is_enough(grid: Grid, run: CoreRange, degree: int) -> bool:
    """Returns whether the preferred starts in this run hold as many ranges as the legal starts do, of the degree and of
    every one that shifts with it. On cores 2-13, those of degree 4 would hold two ranges instead of three."""

    def held(degree: int, step: int) -> int:
        return max(0, (run.last + 1 - -(-run.first // step) * step) // degree)

    shifted = _shifted(grid.family, grid.cores, degree).items()
    return all(held(degree, preferred) >= held(degree, legal) for degree, (legal, preferred) in shifted)
