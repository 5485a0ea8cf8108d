"""Numbers that a search tries: doubling steps, and bisection."""

from __future__ import annotations

from collections.abc import Callable, Iterator


def greatest(most: int, works: Callable[[int], bool]) -> int:
    """Returns the greatest number up to ``most`` that works if all smaller ones do; 0 if there is none."""
    low = 0
    while low < most:
        middle = (low + most + 1) // 2
        if works(middle):
            low = middle
        else:
            most = middle - 1
    return low


def doubling(least: int, most: int) -> Iterator[int]:
    """Yields numbers from ``least`` to ``most`` with doubling steps: 3, 4, 6, 10, ..."""
    step, number = 1, max(1, least)
    while number < most:
        yield number
        number += step
        step *= 2
    if most > 0:
        yield most
