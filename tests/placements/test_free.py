from __future__ import annotations

from placements.facts.core_range import CoreRange
from placements.planner.free_cores import FreeCores, runs
from tests.placements.fleets import PLAIN, host


def free(*ranges: str) -> FreeCores:
    """A host of 24 cores where only these are free."""
    wanted = {core for text in ranges for core in CoreRange.parse(text)}
    return FreeCores.of(host(), set(range(24)) - wanted)


def test_runs_are_the_longest_free_ranges() -> None:
    """Neighbouring free cores are one run."""
    assert [str(run) for run in runs(free("0-2", "5", "22-23"))] == ["0-2", "5", "22-23"]


def test_a_full_host_and_a_plain_one_have_no_runs() -> None:
    """Nothing free, nothing found."""
    assert (runs(free()), runs(FreeCores.of(PLAIN))) == ((), ())


def test_used_cores_are_no_longer_free() -> None:
    """A range with one used core is not free, and one beyond the host never was."""
    rest = free("0-7").without(CoreRange(2, 3))
    assert [rest.holds(CoreRange.parse(text)) for text in ("0-1", "1-2", "4-7", "24-25")] == [True, False, True, False]
