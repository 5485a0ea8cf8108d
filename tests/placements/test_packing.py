from __future__ import annotations

from collections import Counter

import pytest

from placements.cores import CoreRange
from placements.packing import Free, admit, capacity, fits, runs, windows
from tests.placements.fleets import PLAIN, host

WHOLE = Free.of(host())


def free(*ranges: str) -> Free:
    """A host of 24 cores where only these are free."""
    wanted = {core for text in ranges for core in CoreRange.parse(text)}
    return Free.of(host(), set(range(24)) - wanted)


def test_runs_are_the_longest_free_ranges() -> None:
    """Neighbouring free cores are one run."""
    assert [str(run) for run in runs(free("0-2", "5", "22-23"))] == ["0-2", "5", "22-23"]


def test_a_full_host_and_a_plain_one_have_no_runs() -> None:
    """Nothing free, nothing found."""
    assert (runs(free()), runs(Free.of(PLAIN)), windows(Free.of(PLAIN), 1)) == ((), (), ())


@pytest.mark.parametrize(("tp", "starts"), [(8, [2, 4, 6]), (4, [2, 4, 6, 8, 10]), (12, []), (1, list(range(1, 14)))])
def test_windows_begin_at_legal_cores(tp: int, starts: list[int]) -> None:
    """In the free run 1-13 a range begins on a device, except for one core."""
    assert [window.first for window in windows(free("1-13"), tp)] == starts


@pytest.mark.parametrize(("ranges", "tp", "count"), [(["1-13"], 4, 3), (["1-13"], 8, 1), (["0-23"], 12, 2)])
def test_capacity_counts_disjoint_windows(ranges: list[str], tp: int, count: int) -> None:
    """The most replicas of one degree side by side."""
    assert capacity(free(*ranges), tp) == count


@pytest.mark.parametrize(
    ("ranges", "demand", "answer"),
    [
        (["0-23"], {8: 3}, True),
        (["0-23"], {8: 3, 1: 1}, False),
        (["2-13"], {4: 3}, True),  # only off the preferred alignment
        (["2-13"], {8: 1, 4: 1}, True),
        (["1-2"], {2: 1}, False),  # two halves of devices
        (["1-2"], {1: 2}, True),
        (["0-23"], {12: 1, 8: 1, 4: 1}, True),
        (["2-23"], {12: 1, 8: 1}, True),
        (["4-21"], {12: 1}, False),
        (["0-23"], {12: 1, 8: 2}, False),
        (["0-23"], {6: 4}, True),
        (["0-23"], {6: 3, 4: 2}, False),
        (["0-23"], {6: 2, 4: 3}, True),
        (["0-23"], {}, True),
    ],
)
def test_what_fits_one_host(ranges: list[str], demand: dict[int, int], answer: bool) -> None:
    """Degrees of one chain by counting, others by search."""
    assert fits({free(*ranges): 1}, demand) is answer


def test_a_twelve_goes_where_it_costs_the_eights_least() -> None:
    """Two hosts, one with a half gone: the 12 must take the broken one."""
    kinds = {WHOLE: 1, free("0-11", "14-17"): 1}
    assert (fits(kinds, {12: 1, 8: 3}), fits(kinds, {12: 1, 8: 4})) == (True, False)


def test_a_kind_of_host_of_which_none_is_left_holds_nothing() -> None:
    """A count of zero is no host, for the search as for counting."""
    assert (fits({WHOLE: 0}, {8: 1}), fits({WHOLE: 1, free("0-22"): 0}, {12: 1, 8: 2})) == (False, False)


@pytest.mark.parametrize(
    ("wanted", "admitted"),
    [
        ({8: 5}, {8: 3}),
        ({24: 1, 8: 3}, {24: 1}),  # the same cores: the largest degree wins
        ({12: 1, 8: 3}, {8: 3, 12: 0}),  # 24 cores beat 20
        ({12: 1, 8: 1, 4: 1}, {12: 1, 8: 1, 4: 1}),
        ({4: 7, 1: 3}, {4: 6}),
    ],
)
def test_admission_serves_most_cores(wanted: dict[int, int], admitted: dict[int, int]) -> None:
    """On one empty host of 24 cores."""
    assert admit({WHOLE: 1}, {}, wanted) == Counter(admitted)


def test_admission_costs_what_was_admitted_before_nothing() -> None:
    """A 24 finds no room beside a single core."""
    assert admit({WHOLE: 1}, {1: 1}, {24: 1, 8: 3}) == Counter({8: 2})
