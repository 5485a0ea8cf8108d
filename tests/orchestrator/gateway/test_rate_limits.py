"""The rate limits of a key: which requests pass, what a refusal reports, and what is refunded."""

from __future__ import annotations

import math

import pytest

from orchestrator.access.keys import Allowance
from orchestrator.gateway.key_limits import Exceeded, KeyCounts, Remaining, duration, refill, remaining, reserve, settle

NOW = 5000.0


def take(counts: KeyCounts, limits: Allowance, tokens: int = 1, now: float = NOW, live: int = 0) -> KeyCounts:
    outcome = reserve(counts, limits, live, tokens, now)
    assert isinstance(outcome, KeyCounts)
    return outcome


def refusal(counts: KeyCounts, limits: Allowance, tokens: int = 1, now: float = NOW, live: int = 0) -> Exceeded:
    outcome = reserve(counts, limits, live, tokens, now)
    assert isinstance(outcome, Exceeded)
    return outcome


def test_a_minutes_requests_may_come_at_once_then_one_at_a_time() -> None:
    """The next one after its part of a minute, not all at the end of the minute."""
    limits, counts = Allowance(requests_per_minute=60), KeyCounts()
    for _ in range(60):
        counts = take(counts, limits)
    assert refusal(counts, limits) == Exceeded("requests per minute", 60, 60, 1, pytest.approx(1.0))  # type: ignore[arg-type]
    assert refusal(counts, limits, now=NOW + 0.9).wait_s == pytest.approx(0.1)
    assert take(counts, limits, now=NOW + 1.0).requests == pytest.approx(60)


def test_a_retry_after_the_reported_time_is_accepted() -> None:
    """Although 9 requests in 60 s have no exact float."""
    limits, now = Allowance(requests_per_minute=9), 1_000_001.0
    wait_s = refusal(KeyCounts(now, 9), limits, now=now).wait_s
    assert wait_s is not None
    take(KeyCounts(now, 9), limits, now=now + wait_s)


def test_the_longest_limit_is_reported() -> None:
    """And the other one is not charged."""
    limits = Allowance(requests_per_minute=6, tokens_per_minute=600)
    busy = KeyCounts(NOW, requests=6, tokens=600)
    assert refusal(busy, limits, tokens=50) == Exceeded("requests per minute", 6, 6, 1, 10.0)
    assert refusal(busy, limits, tokens=150) == Exceeded("tokens per minute", 600, 600, 150, 15.0)
    assert refusal(KeyCounts(NOW, requests=0, tokens=600), limits, tokens=150).wait_s == 15.0


def test_a_request_of_more_than_a_minutes_tokens_never_passes() -> None:
    """One of just a minute's does, when the bucket is full."""
    limits = Allowance(tokens_per_minute=100)
    never = refusal(KeyCounts(), limits, tokens=101)
    assert (never.limit_name, never.wait_s, never.ever) == ("tokens per minute", None, False)
    assert take(KeyCounts(), limits, tokens=100).tokens == 100


def test_concurrent_requests_are_limited() -> None:
    """Whatever the buckets hold."""
    limits = Allowance(max_concurrent=2)
    take(KeyCounts(), limits, live=1)
    assert refusal(KeyCounts(), limits, live=2) == Exceeded("requests at a time", 2, 2, 1, None)
    assert refusal(KeyCounts(), limits, live=2).ever


def test_an_unused_reservation_is_returned_at_once() -> None:
    """The request itself counts."""
    limits = Allowance(requests_per_minute=60, tokens_per_minute=1000)
    counts = take(KeyCounts(), limits, tokens=900)
    after = settle(counts, limits, 900, 120, NOW, NOW + 3)
    assert after.tokens == pytest.approx(120 - 50)  # with what three seconds have refilled
    assert remaining(after, limits, NOW + 3)[0] == Remaining(60, 60, 0.0)
    assert settle(counts, limits, 900, 0, NOW, NOW + 50).tokens == 0  # and never more than all


def test_after_a_minute_no_reservation_is_returned() -> None:
    """By then the bucket has been refilled by the whole reservation."""
    limits = Allowance(tokens_per_minute=1000)
    counts = take(take(KeyCounts(), limits, tokens=1000), limits, tokens=1000, now=NOW + 60)
    assert settle(counts, limits, 1000, 10, NOW, NOW + 60).tokens == 1000


def test_usage_beyond_the_reservation_is_charged_as_debt() -> None:
    """At most ten minutes' worth."""
    limits = Allowance(tokens_per_minute=1000)
    counts = take(KeyCounts(), limits, tokens=1000)
    owing = settle(counts, limits, 1000, 1500, NOW, NOW)
    assert refusal(owing, limits, tokens=1).wait_s == pytest.approx(30.06)
    assert settle(counts, limits, 1000, 1500, NOW, NOW + 60).tokens == 500
    assert settle(counts, limits, 1000, 10**9, NOW, NOW).tokens == 10_000


def test_a_changed_limit_applies_from_the_next_request_on() -> None:
    """Usage stays; a new limit starts full, a removed one is forgotten."""
    counts = take(KeyCounts(), Allowance(requests_per_minute=2), tokens=500)
    assert refusal(take(counts, Allowance(requests_per_minute=2)), Allowance(requests_per_minute=2)).wait_s == 30.0
    assert take(counts, Allowance(requests_per_minute=1000)).requests == 2
    assert take(counts, Allowance(tokens_per_minute=500), tokens=500) == KeyCounts(NOW, 0.0, 500.0)


def test_counts_far_too_high_last_ten_minutes() -> None:
    """A debt is bounded, whatever was used."""
    limits = Allowance(requests_per_minute=60, tokens_per_minute=60)
    assert refill(KeyCounts(NOW, 1e300, math.inf), limits, NOW) == KeyCounts(NOW, 600, 600)
    assert refill(KeyCounts(NOW, 1e300, 1e300), limits, NOW + 600) == KeyCounts(NOW + 600)


def test_an_earlier_time_refills_nothing() -> None:
    """The later one counts: a request is settled by the time at which its answer ended."""
    ahead = KeyCounts(NOW + 0.001, 60, 60)
    assert refill(ahead, Allowance(requests_per_minute=60, tokens_per_minute=60), NOW) == ahead


def test_a_client_gets_reliable_whole_numbers() -> None:
    """The remaining amount is rounded down, and a full bucket resets in 0."""
    limits = Allowance(requests_per_minute=60, tokens_per_minute=6000)
    assert remaining(KeyCounts(NOW, 0.5, 100.5), limits, NOW) == (Remaining(60, 59, 0.5), Remaining(6000, 5899, 1.005))
    assert remaining(KeyCounts(), limits, NOW) == (Remaining(60, 60, 0.0), Remaining(6000, 6000, 0.0))
    rounded, _ = remaining(KeyCounts(NOW, 1.0000000000001), Allowance(requests_per_minute=60), NOW)
    assert rounded == Remaining(60, 59, pytest.approx(1.0))  # type: ignore[arg-type]
    assert remaining(KeyCounts(NOW, 99, 99), Allowance(requests_per_minute=60), NOW) == (Remaining(60, 0, 99.0), None)


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
def test_a_duration_has_the_format_of_openais_headers(seconds: float, text: str) -> None:
    """Rounded up to a millisecond: a client that waits so long is not too early."""
    assert duration(seconds) == text
