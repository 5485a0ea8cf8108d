"""What holds for the limits of a key, however its requests come, end, and are refused."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.access.keys import Allowance
from orchestrator.gateway.key_limits import (
    DEBT,
    MINUTE_S,
    Exceeded,
    KeyCounts,
    duration,
    refill,
    remaining,
    reserve,
    settle,
)
from tests.searches import search

ROUNDING = 1.0001


@dataclass(frozen=True)
class Step:
    """After a pause, a request that reserves ``tokens``; or the end of one of those that run, which has used a part."""

    pause_s: float
    tokens: int
    ends: bool
    part: float


LIMITS = st.builds(
    Allowance,
    requests_per_minute=st.none() | st.integers(1, 600),
    tokens_per_minute=st.none() | st.integers(1, 10_000),
)
STEPS = st.lists(
    st.builds(
        Step, st.sampled_from([0.0, 0.0, 0.1, 1.0, 20.0, 70.0]), st.integers(1, 2000), st.booleans(), st.floats(0, 1)
    ),
    max_size=60,
)
USED = st.floats(0, 1e12)
COUNTS = st.builds(KeyCounts, st.floats(0, 1e9), USED, USED)


@given(limits=LIMITS, steps=STEPS, began=st.sampled_from([0.0, 1e6]))
@search(40)
def test_since_the_first_request_never_more_than_the_limit_and_one_for_each_minute(
    limits: Allowance, steps: list[Step], began: float
) -> None:
    """Requests, and tokens: those that were used, and those that are reserved by what runs."""
    now, counts, requests, used = began, KeyCounts(), 0, 0
    running: list[tuple[int, float]] = []
    for step in steps:
        now += step.pause_s
        if step.ends and running:
            reserved, at = running.pop(0)
            used += int(reserved * step.part)
            counts = settle(counts, limits, reserved, int(reserved * step.part), at, now)
            continue
        outcome = reserve(counts, limits, len(running), step.tokens, now)
        if isinstance(outcome, KeyCounts):
            counts, requests = outcome, requests + 1
            running.append((step.tokens, now))
        minutes = 1 + (now - began) / MINUTE_S
        if limits.requests_per_minute is not None:
            assert requests <= limits.requests_per_minute * minutes * ROUNDING
        if limits.tokens_per_minute is not None:
            assert used + sum(tokens for tokens, _ in running) <= limits.tokens_per_minute * minutes * ROUNDING


@given(limits=LIMITS, steps=STEPS)
@search(40)
def test_in_any_span_never_more_is_reserved_than_the_limit_and_one_for_each_minute(
    limits: Allowance, steps: list[Step]
) -> None:
    """Where nothing is given back; a burst is a minute's worth."""
    now, counts = 0.0, KeyCounts()
    takes: list[tuple[float, int]] = []
    for step in steps:
        now += step.pause_s
        outcome = reserve(counts, limits, 0, step.tokens, now)
        if isinstance(outcome, KeyCounts):
            counts = outcome
            takes.append((now, step.tokens))
    for first, (since, _) in enumerate(takes):
        for last in range(first, len(takes)):
            minutes = 1 + (takes[last][0] - since) / MINUTE_S
            span = takes[first : last + 1]
            assert len(span) <= (limits.requests_per_minute or math.inf) * minutes * ROUNDING
            assert sum(tokens for _, tokens in span) <= (limits.tokens_per_minute or math.inf) * minutes * ROUNDING


@given(limits=LIMITS, steps=STEPS, tokens=st.integers(1, 10_000))
@search(40)
def test_who_waits_as_told_is_let_through_and_who_comes_earlier_is_not(
    limits: Allowance, steps: list[Step], tokens: int
) -> None:
    """Unless it can never pass."""
    now, counts = 1e6, KeyCounts()
    for step in steps:
        now += step.pause_s
        outcome = reserve(counts, limits, 0, step.tokens, now)
        counts = outcome if isinstance(outcome, KeyCounts) else counts
    refused = reserve(counts, limits, 0, tokens, now)
    if isinstance(refused, KeyCounts):
        return
    assert (refused.wait_s is None) == (limits.tokens_per_minute is not None and tokens > limits.tokens_per_minute)
    if refused.wait_s is not None:
        assert isinstance(reserve(counts, limits, 0, tokens, now + refused.wait_s), KeyCounts)
        assert isinstance(reserve(counts, limits, 0, tokens, now + refused.wait_s * 0.99), Exceeded)


@given(limits=LIMITS, counts=COUNTS, now=st.floats(0, 1e9))
@search(40)
def test_any_usage_is_bounded_and_forgotten_after_ten_minutes(limits: Allowance, counts: KeyCounts, now: float) -> None:
    """Also at a time before the last one."""
    for bucket in remaining(counts, limits, now):
        assert bucket is None or (0 <= bucket.remaining <= bucket.limit and 0 <= bucket.reset_s <= DEBT * MINUTE_S)
    healed = refill(refill(counts, limits, now), limits, max(now, counts.at) + DEBT * MINUTE_S + 2)
    assert (healed.requests, healed.tokens) == (0.0, 0.0)


@given(st.floats(0, 1e6))
def test_a_duration_is_never_told_shorter_than_it_is(seconds: float) -> None:
    """And by less than a millisecond longer."""
    text = duration(seconds)
    parts = dict.fromkeys(("h", "m", "ms", "s"), 0.0)
    rest = text
    for unit in ("h", "ms", "m", "s"):
        if unit in rest and not (unit == "m" and "ms" in rest):
            head, _, rest = rest.partition(unit)
            parts[unit] = float(head)
    total = parts["h"] * 3600 + parts["m"] * 60 + parts["s"] + parts["ms"] / 1000
    assert seconds - 1e-6 <= total < seconds + 0.0011
