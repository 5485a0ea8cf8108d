"""The rate limits of one API key: token buckets for requests and tokens, and a limit on concurrent requests. Pure.

A bucket holds one minute's quota and refills continuously. A request reserves 1 request and the most tokens that it can
use: its prompt and its longest answer. When it ends, the unused tokens are returned. So t minutes after a key's first
request, it has used at most (1 + t) times its limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from orchestrator.access.keys import Allowance

MINUTE_S = 60.0
DEBT = 10.0  # capacities: the largest debt of a bucket, whatever was used
EXACT = 1e-9  # of a capacity: tolerance for sums of floats


class KeyCounts(NamedTuple):
    """The unrefilled usage of one key at ``at`` (monotonic seconds). All zeros: a key without requests."""

    at: float = 0.0
    requests: float = 0.0
    tokens: float = 0.0


Limit = Literal["requests per minute", "tokens per minute", "requests at a time"]


@dataclass(frozen=True, slots=True)
class Exceeded:
    """The limit that a refused request exceeds."""

    what: Limit
    limit: int
    used: int
    requested: int
    wait_s: float | None  # until the request would fit; None: never, or unknown

    @property
    def ever(self) -> bool:
        """Returns whether the same request can succeed later."""
        return self.requested <= self.limit


class Remaining(NamedTuple):
    """One bucket, as response headers report it."""

    limit: int
    remaining: int
    reset_s: float  # until the bucket is full


def refill(counts: KeyCounts, quota: Allowance, now: float) -> KeyCounts:
    """Returns the counts at ``now``, or at their own time if that is later."""
    at, requests, tokens = counts
    now = max(now, at)
    elapsed = now - at
    used_requests = _used(requests, quota.requests_per_minute, elapsed)
    return KeyCounts(now, used_requests, _used(tokens, quota.tokens_per_minute, elapsed))


def reserve(counts: KeyCounts, quota: Allowance, live: int, tokens: int, now: float) -> KeyCounts | Exceeded:
    """Returns the counts with one more request of at most ``tokens`` tokens, or the limit that it exceeds.

    ``live`` is the number of the key's concurrent requests.

    1. more tokens than the capacity of the bucket -> refused for good
    2. the limit of concurrent requests is reached -> refused
    3. a bucket does not hold enough               -> refused, with the longer wait
    4. else                                        -> reserved in both buckets
    """
    now_used = refill(counts, quota, now)
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
    return KeyCounts(  # 4
        now_used.at,
        0.0 if quota.requests_per_minute is None else now_used.requests + 1,
        0.0 if per_minute is None else now_used.tokens + tokens,
    )


def settle(counts: KeyCounts, quota: Allowance, reserved: int, used: int, reserved_at: float, now: float) -> KeyCounts:
    """Returns the counts after a request that reserved ``reserved`` tokens at ``reserved_at`` and used ``used``.

    After a minute nothing is returned: the bucket has refilled the whole reservation. Tokens used beyond it are owed.
    """
    now_used = refill(counts, quota, now)
    per_minute = quota.tokens_per_minute
    if per_minute is None or (used <= reserved and now - reserved_at >= MINUTE_S):
        return now_used
    tokens = min(max(0.0, now_used.tokens + used - reserved), DEBT * per_minute)
    return now_used._replace(tokens=tokens)


def charge(counts: KeyCounts, quota: Allowance, requests: float, tokens: float, now: float) -> KeyCounts:
    """Returns the counts after what the key has used elsewhere; negative ``tokens`` were returned there."""
    now_used = refill(counts, quota, now)
    return KeyCounts(
        now_used.at,
        _charged(now_used.requests, quota.requests_per_minute, requests),
        _charged(now_used.tokens, quota.tokens_per_minute, tokens),
    )


def _charged(used: float, per_minute: int | None, more: float) -> float:
    return 0.0 if per_minute is None else min(max(0.0, used + more), DEBT * per_minute)


def remaining(counts: KeyCounts, quota: Allowance, now: float) -> tuple[Remaining | None, Remaining | None]:
    """Returns what remains of requests and of tokens; None without a limit."""
    now_used = refill(counts, quota, now)
    return (
        _remaining(now_used.requests, quota.requests_per_minute),
        _remaining(now_used.tokens, quota.tokens_per_minute),
    )


def duration(seconds: float) -> str:
    """Formats a duration as OpenAI's headers do: `12ms`, `8.64s`, `6m0s`, `1h0m0s`. Rounds up."""
    ms = math.ceil(round(seconds * 1000, 6))
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text


def _used(used: float, per_minute: int | None, elapsed: float) -> float:
    if per_minute is None:
        return 0.0
    remainder = min(used, DEBT * per_minute) - elapsed * per_minute / MINUTE_S
    return max(0.0, remainder)


def _wait_s(used: float, per_minute: int | None, requested: int) -> float:
    """Returns the seconds until the bucket holds ``requested``."""
    if per_minute is None:
        return 0.0
    missing = used + requested - per_minute
    return missing * MINUTE_S / per_minute if missing > per_minute * EXACT else 0.0


def _remaining(used: float, per_minute: int | None) -> Remaining | None:
    if per_minute is None:
        return None
    unused = math.floor(max(0.0, per_minute - used) + per_minute * EXACT)
    return Remaining(per_minute, unused, used * MINUTE_S / per_minute)
