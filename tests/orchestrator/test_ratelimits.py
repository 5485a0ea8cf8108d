"""The limits of a key in time: what is let through, what is told, and what comes back."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from orchestrator.access.rate_limits import Counts, Exceeded, Remaining, duration, refill, remaining, reserve, settle

NOW = 5000.0


@dataclass(frozen=True)
class Limits:
    """Of one key."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None


def take(counts: Counts, limits: Limits, tokens: int = 1, now: float = NOW, live: int = 0) -> Counts:
    outcome = reserve(counts, limits, live, tokens, now)
    assert isinstance(outcome, Counts)
    return outcome


def refusal(counts: Counts, limits: Limits, tokens: int = 1, now: float = NOW, live: int = 0) -> Exceeded:
    outcome = reserve(counts, limits, live, tokens, now)
    assert isinstance(outcome, Exceeded)
    return outcome


def test_a_minutes_requests_may_come_at_once_and_the_next_when_its_part_of_a_minute_is_over() -> None:
    """Not all at the end of the minute."""
    limits, counts = Limits(requests_per_minute=60), Counts()
    for _ in range(60):
        counts = take(counts, limits)
    assert refusal(counts, limits) == Exceeded("requests per minute", 60, 60, 1, pytest.approx(1.0))
    assert refusal(counts, limits, now=NOW + 0.9).wait_s == pytest.approx(0.1)
    assert take(counts, limits, now=NOW + 1.0).requests == pytest.approx(60)


def test_who_waits_just_as_told_is_let_through() -> None:
    """Although 9 requests in 60 s are no whole number of anything in a float."""
    limits, now = Limits(requests_per_minute=9), 1_000_001.0
    wait_s = refusal(Counts(now, 9), limits, now=now).wait_s
    assert wait_s is not None
    take(Counts(now, 9), limits, now=now + wait_s)


def test_the_limit_that_holds_longer_is_the_one_that_is_told() -> None:
    """And nothing is taken from the other one."""
    limits = Limits(requests_per_minute=6, tokens_per_minute=600)
    busy = Counts(NOW, requests=6, tokens=600)
    assert refusal(busy, limits, tokens=50) == Exceeded("requests per minute", 6, 6, 1, 10.0)
    assert refusal(busy, limits, tokens=150) == Exceeded("tokens per minute", 600, 600, 150, 15.0)
    assert refusal(Counts(NOW, requests=0, tokens=600), limits, tokens=150).wait_s == 15.0


def test_a_request_of_more_than_a_minutes_tokens_never_passes() -> None:
    """One of just a minute's does, when the bucket is full."""
    limits = Limits(tokens_per_minute=100)
    never = refusal(Counts(), limits, tokens=101)
    assert (never.what, never.wait_s, never.ever) == ("tokens per minute", None, False)
    assert take(Counts(), limits, tokens=100).tokens == 100


def test_so_many_at_a_time_and_no_more() -> None:
    """Whatever the buckets hold."""
    limits = Limits(max_concurrent=2)
    take(Counts(), limits, live=1)
    assert refusal(Counts(), limits, live=2) == Exceeded("requests at a time", 2, 2, 1, None)
    assert refusal(Counts(), limits, live=2).ever


def test_what_was_reserved_and_not_used_comes_back_at_once() -> None:
    """The request itself counts."""
    limits = Limits(requests_per_minute=60, tokens_per_minute=1000)
    counts = take(Counts(), limits, tokens=900)
    after = settle(counts, limits, 900, 120, NOW, NOW + 3)
    assert after.tokens == pytest.approx(120 - 50)  # with what three seconds have refilled
    assert remaining(after, limits, NOW + 3)[0] == Remaining(60, 60, 0.0)
    assert settle(counts, limits, 900, 0, NOW, NOW + 50).tokens == 0  # and never more than all


def test_after_a_minute_there_is_nothing_to_give_back() -> None:
    """By then the bucket has filled by the whole of the reservation: what others have taken since is theirs."""
    limits = Limits(tokens_per_minute=1000)
    counts = take(take(Counts(), limits, tokens=1000), limits, tokens=1000, now=NOW + 60)
    assert settle(counts, limits, 1000, 10, NOW, NOW + 60).tokens == 1000


def test_what_was_used_beyond_the_reservation_is_owed() -> None:
    """At most ten minutes' worth."""
    limits = Limits(tokens_per_minute=1000)
    counts = take(Counts(), limits, tokens=1000)
    owing = settle(counts, limits, 1000, 1500, NOW, NOW)
    assert refusal(owing, limits, tokens=1).wait_s == pytest.approx(30.06)
    assert settle(counts, limits, 1000, 1500, NOW, NOW + 60).tokens == 500
    assert settle(counts, limits, 1000, 10**9, NOW, NOW).tokens == 10_000


def test_a_limit_that_is_changed_counts_from_the_next_request_on() -> None:
    """What was used stays used; a limit that is new begins full, one that goes is forgotten."""
    counts = take(Counts(), Limits(requests_per_minute=2), tokens=500)
    assert refusal(take(counts, Limits(requests_per_minute=2)), Limits(requests_per_minute=2)).wait_s == 30.0
    assert take(counts, Limits(requests_per_minute=1000)).requests == 2
    assert take(counts, Limits(tokens_per_minute=500), tokens=500) == Counts(NOW, 0.0, 500.0)


@pytest.mark.parametrize(
    "broken",
    [
        Counts(NOW + 3600, 60, 60),
        Counts(math.nan, 60, 60),
        Counts(math.inf, 60, 60),
        Counts(-math.inf, math.inf, math.nan),
        Counts(NOW, math.nan, -math.inf),
    ],
)
def test_counts_that_make_no_sense_are_none(broken: Counts) -> None:
    """Of a clock that has begun anew, or of a file that somebody has written into."""
    assert refill(broken, Limits(60, 60), NOW) == Counts(NOW)


def test_counts_far_too_high_last_ten_minutes() -> None:
    """Whatever stands in the file."""
    limits = Limits(60, 60)
    assert refill(Counts(NOW, 1e300, math.inf), limits, NOW) == Counts(NOW, 600, 600)
    assert refill(Counts(NOW, 1e300, 1e300), limits, NOW + 600) == Counts(NOW + 600)


def test_a_gateway_that_is_a_little_ahead_gives_nothing_twice() -> None:
    """Its time counts on."""
    ahead = Counts(NOW + 0.001, 60, 60)
    assert refill(ahead, Limits(60, 60), NOW) == ahead


def test_a_client_is_told_whole_numbers_that_it_can_rely_on() -> None:
    """What is left is rounded down, and full is 0 away."""
    limits = Limits(requests_per_minute=60, tokens_per_minute=6000)
    assert remaining(Counts(NOW, 0.5, 100.5), limits, NOW) == (Remaining(60, 59, 0.5), Remaining(6000, 5899, 1.005))
    assert remaining(Counts(), limits, NOW) == (Remaining(60, 60, 0.0), Remaining(6000, 6000, 0.0))
    assert remaining(Counts(NOW, 1.0000000000001), Limits(60), NOW)[0] == Remaining(60, 59, pytest.approx(1.0))
    assert remaining(Counts(NOW, 99, 99), Limits(60), NOW) == (Remaining(60, 0, 99.0), None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"),
        (0.0001, "1ms"),
        (0.012, "12ms"),
        (0.9995, "1s"),
        (1.0, "1s"),
        (8.64, "8.64s"),
        (59.9999, "1m0s"),
        (86.4, "1m26.4s"),
        (360.0, "6m0s"),
        (3661.5, "1h1m1.5s"),
    ],
)
def test_a_duration_is_written_as_openais_headers_write_it(seconds: float, text: str) -> None:
    """Rounded up to a millisecond: who waits so long is not too early."""
    assert duration(seconds) == text
