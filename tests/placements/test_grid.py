from __future__ import annotations

import pytest

from placements.facts.core_range import CoreRange
from placements.planner.grid import grid_of, windows

WHOLE = (1 << 24) - 1


def mask(*ranges: str) -> int:
    """The cores of these ranges as bits."""
    return sum(1 << core for text in ranges for core in CoreRange.parse(text))


def starts(bits: int) -> list[int]:
    return [core for core in range(bits.bit_length()) if bits >> core & 1]


@pytest.mark.parametrize(
    ("family", "cores", "degree", "expected"),
    [
        ("inf2", 24, 8, [0, 8, 16]),
        ("inf2", 24, 12, [0, 12]),
        ("inf2", 12, 8, [0]),
        ("inf2", 24, 6, [0, 6, 12, 18]),  # only by allow_degrees
        ("trn1", 32, 16, [0, 16]),
        ("trn2", 64, 32, [0, 32]),
        ("trn2", 4, 64, []),
    ],
)
def test_an_empty_host_has_the_preferred_starts(family: str, cores: int, degree: int, expected: list[int]) -> None:
    """Multiples of the degree."""
    assert starts(grid_of(family, cores, (1 << cores) - 1).starts(degree)) == expected


@pytest.mark.parametrize(
    ("usable", "degree", "expected"),
    [
        (["2-13"], 4, [2, 6, 10]),  # 4-7 and 8-11 would be one fewer
        (["2-17"], 8, [2, 10]),
        (["1-23"], 8, [8, 16]),  # as many as any others
        (["0-5", "7-17"], 4, [0, 8, 12]),
        (["1-2"], 2, []),  # two halves of devices
        (["4-19"], 12, [4]),  # neither at 0 nor at 12, but on consecutive devices
        (["2-23"], 12, [12]),
        (["2-15"], 8, [8]),  # 12, which fits at 2 or 4 only, does not shift the others
    ],
)
def test_a_grid_has_the_maximum_number_of_ranges(usable: list[str], degree: int, expected: list[int]) -> None:
    """Preferred starts if they cost none, else shifted ones."""
    assert starts(grid_of("inf2", 24, mask(*usable)).starts(degree)) == expected


@pytest.mark.parametrize(
    ("free", "degree", "expected"),
    [
        (["0-23"], 1, (4, 0)),  # every larger degree loses a range
        (["0-11", "14-23"], 2, (0, 14)),  # inside no free range of 4
        (["0-15", "20-23"], 4, (0, 20)),
        (["4-7", "8-15"], 1, (2, 4)),  # a range of 4, not one of 8
        (["3", "8-15"], 1, (0, 3)),
        (["0-3"], 8, None),
    ],
)
def test_the_best_range_is_in_the_smallest_suitable_free_range(
    free: list[str], degree: int, expected: tuple[int, int] | None
) -> None:
    assert grid_of("inf2", 24, WHOLE).best(mask(*free), degree) == expected


@pytest.mark.parametrize(
    ("free", "degree", "expected"),
    [
        (["2-9", "12-23"], 8, 2),  # the shortest run
        (["2-13"], 8, 2),  # at an end of it
        (["3-10"], 8, None),  # begins on no device
        (["3-10"], 4, 4),
        (["7-22"], 12, 8),
        (["1-12"], 12, None),
    ],
)
def test_off_the_grid_a_range_is_at_an_end_of_the_shortest_run(
    free: list[str], degree: int, expected: int | None
) -> None:
    """Any legal start."""
    assert grid_of("inf2", 24, WHOLE).anywhere(mask(*free), degree) == expected


def test_windows_are_all_starts_of_free_runs() -> None:
    """For any alignment."""
    assert starts(windows(mask("1-6", "9"), 3)) == [1, 2, 3, 4]
