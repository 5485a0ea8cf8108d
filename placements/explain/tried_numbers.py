"""Numbers that a search tries: doubling steps, and bisection."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator


def greatest(most: int, works: Callable[[int], bool]) -> int:
    """Returns the greatest number up to ``most`` that works if all smaller ones do; 0 if there is none."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not works(number))


def doubling(least: int, most: int) -> Iterator[int]:
    """Yields numbers from ``least`` to ``most`` with doubling steps: 3, 4, 6, 10, ..."""
    step, number = 1, max(1, least)
    while number < most:
        yield number
        number += step
        step *= 2
    if most > 0:
        yield most
