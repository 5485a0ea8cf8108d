"""The record of measured times adds up in any order, forgets old days, and may be lost."""

from __future__ import annotations

from functools import reduce
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.process.speed_record import DAY_S, KEPT_DAYS, MOST_ENTRIES, SpeedEntry, SpeedRecord, merged
from placements.facts.topology import MeasuredConstants
from placements.resources.measured_times import LEAST_REQUESTS, PACE, Times, length_class, note, speeds_of

TIMES = st.dictionaries(
    st.integers(0, 5), st.dictionaries(st.integers(-240, 239), st.integers(1, 1000), max_size=4), max_size=4
)
ENTRIES = st.builds(
    SpeedEntry, st.sampled_from(["1.0", "1.1"]), st.integers(0, 2 * KEPT_DAYS), st.sampled_from("ab"), TIMES
)
TODAY = 20_000 * DAY_S + 5.0


def paces(count: int, seconds: float) -> Times:
    times: Times = {}
    for _ in range(count):
        note(times, PACE, seconds)
    return times


@given(st.lists(ENTRIES, max_size=8), st.randoms())
def test_entries_add_up_in_any_order_and_grouping(entries: list[SpeedEntry], random: object) -> None:
    """Entries of days that are too old by the newest are dropped in each case."""
    other = list(entries)
    random.shuffle(other)  # type: ignore[attr-defined]
    one_by_one = reduce(lambda sum_, entry: merged([*sum_.values(), entry]), other, merged([]))
    assert one_by_one == merged(entries)


def test_the_record_is_bounded() -> None:
    """The newest days stay."""
    entries = [SpeedEntry("1.0", 100 + i % 2, str(i), paces(1, 0.01)) for i in range(3 * MOST_ENTRIES)]
    kept = merged(entries)
    assert len(kept) == MOST_ENTRIES
    assert {day for day, _, _ in kept} == {101}


@given(st.floats(1e-4, 1e3))
def test_a_pace_is_kept_within_its_class(seconds: float) -> None:
    """That is within 2.5 %."""
    speeds, requests = speeds_of(paces(LEAST_REQUESTS, seconds))
    assert (speeds["step_ms"], requests) == (pytest.approx(seconds * 1000, rel=0.026, abs=1e-3), LEAST_REQUESTS)


def test_a_prefill_is_a_line_through_the_times_of_its_lengths() -> None:
    """A prompt of 1024 tokens takes as long as measured."""
    times: Times = {}
    for tokens in (64, 128, 256, 512, 1024, 2048):
        for _ in range(10):
            note(times, length_class(tokens), 0.01 + tokens * 1e-4)
    speeds, _ = speeds_of(times)
    assert speeds["prefill_base_ms"] + 1024 * speeds["prefill_token_ms"] == pytest.approx(112.4, rel=0.05)


def test_a_record_is_read_back(tmp_path: Path) -> None:
    """Without the times of another version of corewright."""
    path = tmp_path / "speeds.json"
    first = SpeedRecord(path, "1.0", TODAY)
    first.add({"tp_degree": 2}, paces(50, 0.02), TODAY)
    first.add({"tp_degree": 2}, paces(50, 0.02), TODAY)
    first.write(first.content(TODAY))
    again, later = SpeedRecord(path, "1.0", TODAY), SpeedRecord(path, "1.1", TODAY)
    assert [(own.requests, own.shape) for own in again.measured()] == [(100, {"tp_degree": 2})]
    assert again.measured() == first.measured()
    assert later.measured() == ()


def test_constants_are_the_newest_of_each_engine_and_the_worst_of_all(tmp_path: Path) -> None:
    """By machine, and apart from speeds."""
    path = tmp_path / "speeds.json"
    first = SpeedRecord(path, "1.0", TODAY)
    first.add_constants("inf2", "vllm", {"host_gib": 3.0, "hbm_gib": 0.25}, TODAY)
    first.add_constants("inf2", "vllm", {"host_gib": 2.0}, TODAY + DAY_S)
    first.add_constants("inf2", "nxd-inference", {"host_gib": 1.0, "hbm_gib": 0.5}, TODAY)
    first.add_constants("inf2", "", {"read_bytes_s": 9e8}, TODAY)
    first.add_constants("inf2", "", {"read_bytes_s": 2e8}, TODAY)
    first.write(first.content(TODAY + DAY_S))
    again = SpeedRecord(path, "1.0", TODAY + DAY_S)
    assert again.constants() == {"inf2": MeasuredConstants(hbm_gib=0.5, host_gib=2.0, read_bytes_s=2e8)}
    assert (again.measured(), SpeedRecord(path, "1.1", TODAY).constants()) == ((), {})


def test_old_days_are_forgotten(tmp_path: Path) -> None:
    """Once there are newer ones."""
    record = SpeedRecord(tmp_path / "speeds.json", "1.0", TODAY)
    record.add({"tp_degree": 2}, paces(50, 0.02), TODAY)
    record.add({"tp_degree": 4}, paces(50, 0.02), TODAY + KEPT_DAYS * DAY_S)
    assert [own.shape for own in record.measured()] == [{"tp_degree": 4}]


@pytest.mark.parametrize("content", [b"", b"[{}]", b"\xff", b'[{"software": 1}]'])
def test_a_damaged_record_is_measured_again(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """With a line in the log."""
    path = tmp_path / "speeds.json"
    path.write_bytes(content)
    assert SpeedRecord(path, "1.0", TODAY).measured() == ()
    assert "cannot be read" in caplog.text


def test_days_by_a_wrong_clock_are_dropped(tmp_path: Path) -> None:
    """They would displace all later ones."""
    path = tmp_path / "speeds.json"
    wrong = SpeedRecord(path, "1.0", TODAY)
    wrong.add({}, paces(50, 0.02), TODAY + 99 * DAY_S)
    wrong.write(wrong.content(TODAY))
    assert SpeedRecord(path, "1.0", TODAY).measured() == ()
