"""The phases of a replica's start add up to its load time."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.host.start_phases import PHASES, StartPhases, next_phase, phases_of


def test_each_phase_lasts_from_the_end_of_the_one_before() -> None:
    """A phase that ends twice is the sum."""
    times = iter([0.0, 10.0, 12.0, 13.5, 14.0])
    phases = StartPhases(lambda: next(times))
    phases.begin()
    for phase in ("imports", "weights", "imports"):
        phases.end(phase)

    assert phases.seconds == {"imports": 2.5, "weights": 1.5}


@given(st.floats(0, 1e4), st.dictionaries(st.sampled_from(PHASES[1:]), st.floats(0, 1e3), min_size=1))
def test_the_phases_add_up_to_the_load_time(load_s: float, reported: Mapping[str, float]) -> None:
    """Except where the reported ones alone, without the process, are longer: then it was paused, or waited."""
    phases = phases_of(load_s, reported)

    inside = sum(seconds for phase, seconds in reported.items() if phase != "process")
    assert min(phases.values()) >= 0.0
    assert sum(phases.values()) == pytest.approx(max(load_s, inside))


def test_an_older_replica_reports_no_phases() -> None:
    assert phases_of(4.2, {}) == {}


@pytest.mark.parametrize(
    ("ended", "usual", "phase"),
    [
        (["process"], ["actor", "process", "imports", "engine"], "imports"),
        (["process", "imports"], ["actor", "process", "imports", "engine"], "engine"),
        (["process"], ["actor", "process", "engine"], "engine"),
        (["process"], [], None),
        ([], ["actor", "process"], None),
        (["process", "of a later version"], ["process", "weights"], "weights"),
        (["process", "first_token"], ["process", "weights"], None),
    ],
)
def test_the_phase_that_runs_is_the_usual_one_after_the_ended_ones(
    ended: list[str], usual: list[str], phase: str | None
) -> None:
    assert next_phase(ended, usual) == phase
