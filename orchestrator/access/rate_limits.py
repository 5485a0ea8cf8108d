"""What one API key may use in time: buckets that fill all the time, places, and a request's reservation in them. Pure.

A bucket holds a minute's worth, and fills by a sixtieth of that each second. A request takes 1 of the requests, and of
the tokens what it may use at most, its prompt with what it may generate; at its end what it did not use is given back.
So from a key's first request on, never more is used than the limit, and one further limit for each minute since.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

MINUTE_S = 60.0
DEBT = 10.0  # capacities: more than this is never owed, whatever was used, or whatever stands in a file
SKEW_S = 1.0  # a time later than now by more than this is of another clock: the machine was started again
EXACT = 1e-9  # of a capacity: what the sums of floats may be off


class Quota(Protocol):
    """The limits of one key; None: without limit."""

    @property
    def requests_per_minute(self) -> int | None: ...
    @property
    def tokens_per_minute(self) -> int | None: ...
    @property
    def max_concurrent(self) -> int | None: ...


class Counts(NamedTuple):
    """What one key has used, and what time has not yet given back, at ``at`` (monotonic seconds). All zeros is a key
    that has not asked for anything."""

    at: float = 0.0
    requests: float = 0.0
    tokens: float = 0.0


Limit = Literal["requests per minute", "tokens per minute", "requests at a time"]


@dataclass(frozen=True, slots=True)
class Exceeded:
    """Why a request is refused."""

    what: Limit
    limit: int
    used: int
    asked: int
    wait_s: float | None  # until there will be enough; None: there never will, or nobody knows

    @property
    def ever(self) -> bool:
        """Whether the same request may be let through later."""
        return self.asked <= self.limit


class Remaining(NamedTuple):
    """One bucket, as a client is told of it."""

    limit: int
    remaining: int
    reset_s: float  # until the bucket is full


def refilled(counts: Counts, quota: Quota, now: float) -> Counts:
    """The counts at ``now``. What makes no sense, such as a time to come, counts as nothing used."""
    at, requests, tokens = counts
    elapsed = now - at
    if elapsed < -SKEW_S:
        return Counts(now)
    if elapsed < 0.0:  # another gateway was faster
        elapsed, now = 0.0, at
    return Counts(
        now,
        _used(requests, quota.requests_per_minute, elapsed),
        _used(tokens, quota.tokens_per_minute, elapsed),
    )


def taken(counts: Counts, quota: Quota, live: int, tokens: int, now: float) -> Counts | Exceeded:
    """The counts with one more request, which may use so many tokens, or why it is refused: then nothing is taken.
    ``live`` is how many requests of the key there are.

    1. more tokens than the bucket ever holds -> refused for good
    2. all places are taken                   -> refused
    3. a bucket does not hold enough          -> refused, by the one that takes longer
    4. else                                   -> taken from both
    """
    now_used = refilled(counts, quota, now)
    per_minute = quota.tokens_per_minute
    if per_minute is not None and tokens > per_minute:  # 1
        return Exceeded("tokens per minute", per_minute, math.ceil(now_used.tokens), tokens, None)
    places = quota.max_concurrent
    if places is not None and live >= places:  # 2
        return Exceeded("requests at a time", places, live, 1, None)
    waits = _wait_s(now_used.requests, quota.requests_per_minute, 1)
    waits_for_tokens = _wait_s(now_used.tokens, per_minute, tokens)
    if waits or waits_for_tokens:  # 3
        if waits_for_tokens > waits and per_minute is not None:
            return Exceeded("tokens per minute", per_minute, math.ceil(now_used.tokens), tokens, waits_for_tokens)
        limit = quota.requests_per_minute or 0
        return Exceeded("requests per minute", limit, math.ceil(now_used.requests), 1, waits)
    return Counts(  # 4
        now_used.at,
        0.0 if quota.requests_per_minute is None else now_used.requests + 1,
        0.0 if per_minute is None else now_used.tokens + tokens,
    )


def settled(counts: Counts, quota: Quota, reserved: int, used: int, taken_at: float, now: float) -> Counts:
    """The counts when a request that had reserved so many tokens at ``taken_at`` has ended, and what it has used.

    After a minute there is nothing to give back: the bucket has filled by the whole of the reservation. What was used
    beyond it is owed."""
    now_used = refilled(counts, quota, now)
    per_minute = quota.tokens_per_minute
    if per_minute is None or (used <= reserved and now - taken_at >= MINUTE_S):
        return now_used
    tokens = min(max(0.0, now_used.tokens + used - reserved), DEBT * per_minute)
    return now_used._replace(tokens=tokens)


def remaining(counts: Counts, quota: Quota, now: float) -> tuple[Remaining | None, Remaining | None]:
    """Of requests and of tokens; None where there is no limit."""
    now_used = refilled(counts, quota, now)
    return (
        _remaining(now_used.requests, quota.requests_per_minute),
        _remaining(now_used.tokens, quota.tokens_per_minute),
    )


def duration(seconds: float) -> str:
    """As OpenAI's headers write it: `12ms`, `8.64s`, `6m0s`, `1h0m0s`. Never less than it is."""
    ms = math.ceil(round(seconds * 1000, 6))
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    told = f"{ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{told}"
    return f"{minutes}m{told}" if minutes else told


def _used(used: float, per_minute: int | None, elapsed: float) -> float:
    if per_minute is None:
        return 0.0
    left = min(used, DEBT * per_minute) - elapsed * per_minute / MINUTE_S
    return left if left > 0.0 else 0.0  # nan is nothing


def _wait_s(used: float, per_minute: int | None, asked: int) -> float:
    """Until the bucket holds what is asked for."""
    if per_minute is None:
        return 0.0
    missing = used + asked - per_minute
    return missing * MINUTE_S / per_minute if missing > per_minute * EXACT else 0.0


def _remaining(used: float, per_minute: int | None) -> Remaining | None:
    if per_minute is None:
        return None
    left = math.floor(max(0.0, per_minute - used) + per_minute * EXACT)
    return Remaining(per_minute, left, used * MINUTE_S / per_minute)
