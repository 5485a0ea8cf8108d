"""Which bounds hold at a time, in every time zone and when clocks go forward and back."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.scaling.schedules import Bounds, bounds, is_active
from placements.spec.schema import ModelSpec, Replicas
from placements.spec.sections import Scaling, Schedule
from tests.searches import search

BERLIN = "Europe/Berlin"


def at(text: str, zone: str = "UTC", fold: int = 0) -> float:
    """Seconds since the epoch of what a clock of that zone shows."""
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).timestamp()


def schedule(start: str, end: str, zone: str = BERLIN, least: int | None = 2, most: int | None = None) -> Schedule:
    return Schedule(start=start, end=end, timezone=zone, min=least, max=most)


WORK = schedule("0 8 * * MON-FRI", "0 18 * * MON-FRI")


@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        ("2026-11-20 07:59:59", False),  # a Friday
        ("2026-11-20 08:00:00", True),
        ("2026-11-20 17:59:59.9", True),
        ("2026-11-20 18:00:00", False),
        ("2026-11-21 12:00:00", False),
        ("2026-11-23 08:00:00", True),
        ("2026-07-06 08:00:00", True),  # summer time
        ("2026-07-06 18:00:00", False),
    ],
)
def test_a_schedule_is_active_from_its_start_to_its_end_in_its_time_zone(moment: str, expected: bool) -> None:
    """Including the first moment, excluding the last."""
    assert is_active(WORK, at(moment, BERLIN)) is expected


def test_the_zone_decides_and_not_the_machine() -> None:
    """Eight o'clock in Tokyo is not eight o'clock in Berlin."""
    tokyo = schedule("0 8 * * *", "0 9 * * *", "Asia/Tokyo")
    assert is_active(tokyo, at("2026-11-20 08:30", "Asia/Tokyo"))
    assert not is_active(tokyo, at("2026-11-20 08:30", BERLIN))


def test_a_schedule_may_pass_midnight() -> None:
    """Its end is before its start on the clock, and on the next day."""
    night = schedule("0 22 * * *", "0 6 * * *")
    assert [is_active(night, at(f"2026-11-20 {hour:02}:30", BERLIN)) for hour in (21, 22, 23, 0, 5, 6)] == [
        *(False, True, True, True, True, False)
    ]


def test_times_in_the_skipped_hour_happen_at_its_end() -> None:
    """On 29 March 2026 clocks in Berlin go from 02:00 to 03:00."""
    early = schedule("30 2 * * *", "0 4 * * *")
    assert not is_active(early, at("2026-03-29 01:59:59", BERLIN))
    assert is_active(early, at("2026-03-29 03:00", BERLIN))
    assert not is_active(early, at("2026-03-29 04:00", BERLIN))


def test_times_in_the_repeated_hour_happen_once() -> None:
    """On 25 October 2026 clocks in Berlin go from 03:00 to 02:00: a schedule that started at the first 02:30
    continues.
    """
    early = schedule("30 2 * * *", "0 4 * * *")
    assert not is_active(early, at("2026-10-25 02:29", BERLIN))
    moments = [at("2026-10-25 02:30", BERLIN) + minutes * 60 for minutes in range(150)]
    assert [is_active(early, moment) for moment in moments] == [True] * 150
    assert not is_active(early, moments[-1] + 60)


def test_an_end_in_the_repeated_hour_ends_once() -> None:
    """It does not start again when the clock shows the hour for the second time."""
    late = schedule("0 20 * * *", "30 2 * * *")
    first = at("2026-10-25 02:30", BERLIN)
    assert is_active(late, first - 1)
    assert not any(is_active(late, first + minutes * 60) for minutes in range(240))


@search(25)
@given(
    st.datetimes(datetime(2020, 1, 1), datetime(2030, 1, 1)),
    st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "UTC"]),
    st.integers(0, 23),
    st.integers(1, 22),
)
def test_a_daily_schedule_is_active_about_as_long_as_specified(
    moment: datetime, zone: str, hour: int, hours: int
) -> None:
    """Over a day and a half from any moment, in any zone: at most off by the hour of a change."""
    daily = schedule(f"0 {hour} * * *", f"0 {(hour + hours) % 24} * * *", zone)
    begin = moment.replace(tzinfo=timezone.utc, second=0, microsecond=0)
    quarters = [begin + timedelta(minutes=15 * n) for n in range(24 * 4)]
    held = sum(is_active(daily, quarter.timestamp()) for quarter in quarters) / 4
    assert abs(held - hours) <= 1.25


def test_a_schedule_before_its_first_start_is_not_active() -> None:
    """The leap day before last year is a start too; an impossible date never is."""
    assert is_active(schedule("0 0 29 2 *", "0 0 1 1 *", "UTC"), at("2024-06-01"))
    assert not is_active(schedule("0 0 29 2 *", "0 0 1 1 *", "UTC"), at("2025-06-01"))


def test_a_schedule_with_equal_start_and_end_is_always_active() -> None:
    assert is_active(schedule("0 0 * * *", "0 0 * * *"), at("2026-11-20 12:00"))


ALWAYS = ("0 0 * * *", "0 0 * * *", "UTC")


@pytest.mark.parametrize(
    ("replicas", "schedules", "expected"),
    [
        ((1, 4), [], (1, 4)),
        ((1, 6), [(2, 5), (3, None)], (3, 5)),
        ((1, 6), [(3, None), (None, 1)], (3, 3)),
        ((1, 2), [(3, None)], (2, 2)),
        ((2, 4), [(0, None)], (0, 4)),
    ],
)
def test_of_several_schedules_the_largest_min_and_the_smallest_max_apply(
    replicas: tuple[int, int], schedules: list[tuple[int | None, int | None]], expected: tuple[int, int]
) -> None:
    """And min precedes max, replicas.max both; without a schedule the bounds are the spec's."""
    model = ModelSpec(
        name="m",
        source="./m",
        replicas=Replicas(min=replicas[0], max=replicas[1]),
        scaling=Scaling(schedules=tuple(schedule(*ALWAYS, *limits) for limits in schedules)),
    )
    assert bounds(model, 0.0) == Bounds(*expected)
