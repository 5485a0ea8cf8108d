"""The limits of API keys: a request reserves what it may use, and returns what it did not use.

Each key has token buckets for requests and tokens, and a limit on concurrent requests. A bucket holds one minute's
quota and refills continuously. A request reserves 1 request and the most tokens that it can use: its prompt and its
longest answer. When it ends, the unused tokens are returned. So t minutes after a key's first request, it has used at
most (1 + t) times its limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec.structs

from orchestrator.access.keys import Allowance, ApiKey, KeyRing
from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.messages.key_usage import KeyUsage

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

    limit_name: Limit
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


UNUSED = KeyCounts()
RETRY_CONCURRENT_S = 1  # a guess: the end of a key's requests is unknown


class Grant:
    """The reservation of one request, to be settled when the request is over, however it ends."""

    __slots__ = ("_at", "_key", "_limits", "least", "reserved")

    def __init__(self, limits: KeyLimits, key: ApiKey, reserved: int, at: float) -> None:
        self._limits: KeyLimits | None = limits  # None: settled
        self._key = key
        self._at = at
        self.reserved = reserved  # tokens
        self.least = 0  # tokens that count as used, however the request ends

    def settle(self, tokens_used: int, now: float) -> None:
        """Returns the place and the unused tokens to the key; a second call does nothing. ``now`` in monotonic
        seconds."""
        limits, self._limits = self._limits, None
        if limits is not None:
            limits.release(self._key, self.reserved, max(tokens_used, self.least), self._at, now)


class KeyLimits:
    """The limits of all keys at one gateway: exact for its own requests. What keys use at the other gateways of the
    fleet is added when they have reported it, and owed if it exceeds a limit."""

    def __init__(self) -> None:
        self._counts: dict[str, KeyCounts] = {}  # by key, of all gateways
        self._live: dict[str, int] = {}  # requests of this gateway, by key
        self._used: dict[str, KeyUsage] = {}  # here since the last report, by key
        self._live_elsewhere: dict[str, int] = {}  # requests at other gateways, by key
        self._pruned_at = 0.0

    def take(self, key: ApiKey, tokens: int, now: float, *, least: int | None = None) -> Grant:
        """Reserves for one request: a place, 1 request, and ``tokens``, the prompt and all that it may generate. For a
        client that sets no maximum, ``least`` is the prompt alone: the reservation is then at most a minute's worth,
        and what the answer uses beyond it becomes debt. ``now`` in monotonic seconds.

        Raises ApiError, and reserves nothing: 429 when there is not enough now, 400 when there never will be."""
        per_minute = key.tokens_per_minute
        if least is not None and per_minute is not None and least <= per_minute < tokens:
            tokens = per_minute
        live = self._live.get(key.id, 0)
        outcome = reserve(self._counts_of(key), key, live + self._live_elsewhere.get(key.id, 0), tokens, now)
        if isinstance(outcome, Exceeded):
            raise _refusal(outcome)
        self._counts[key.id] = outcome
        self._live[key.id] = live + 1
        self._note(key.id, 1.0, tokens)
        return Grant(self, key, tokens, now)

    def release(self, key: ApiKey, reserved: int, used: int, at: float, now: float) -> None:
        """Settles a reservation of ``reserved`` tokens at ``at``, of which ``used`` were used."""
        before = self._counts_of(key)
        after = self._counts[key.id] = settle(before, key, reserved, used, at, now)
        self._note(key.id, 0.0, after.tokens - refill(before, key, now).tokens)
        live = self._live.pop(key.id, 1) - 1
        if live > 0:
            self._live[key.id] = live

    def _counts_of(self, key: ApiKey) -> KeyCounts:
        return self._counts.get(key.id, UNUSED)

    def _note(self, id: str, requests: float, tokens: float) -> None:
        self._used[id] = self._used.get(id, KeyUsage(id)).plus(requests, tokens)

    # Other gateways

    def report(self, now: float) -> list[KeyUsage]:
        """Returns what keys have used here since the last report, and their requests now. Keys without requests for
        so long that nothing can be left to count are forgotten."""
        if now - self._pruned_at >= MINUTE_S:
            self._pruned_at, oldest = now, now - DEBT * MINUTE_S
            self._counts = {id: counts for id, counts in self._counts.items() if counts.at >= oldest}
        used, self._used = self._used, {}
        return [
            msgspec.structs.replace(used.get(id, KeyUsage(id)), live=self._live.get(id, 0))
            for id in used.keys() | self._live.keys()
        ]

    def restore(self, reported: Iterable[KeyUsage]) -> None:
        """Includes a report that was not received in the next one."""
        for usage in reported:
            self._note(usage.key, usage.requests, usage.tokens)

    def charge(self, usage: Sequence[KeyUsage], ring: KeyRing, now: float) -> None:
        """Counts what keys have used at other gateways."""
        self._live_elsewhere = {item.key: item.live for item in usage if item.live}
        for item in usage:
            key = ring.by_id(item.key)
            if key is not None and (item.requests or item.tokens):
                self._counts[key.id] = charge(self._counts_of(key), key, item.requests, item.tokens, now)

    def headers(self, key: ApiKey | None, now: float) -> Sequence[tuple[bytes, bytes]]:
        """Returns OpenAI's rate limit headers for the key; empty for a key without such limits."""
        if key is None or (key.requests_per_minute is None and key.tokens_per_minute is None):
            return ()
        requests, tokens = remaining(self._counts_of(key), key, now)
        return [*_headers(b"requests", requests), *_headers(b"tokens", tokens)]


def _headers(of: bytes, bucket: Remaining | None) -> list[tuple[bytes, bytes]]:
    if bucket is None:
        return []
    return [
        (b"x-ratelimit-limit-" + of, b"%d" % bucket.limit),
        (b"x-ratelimit-remaining-" + of, b"%d" % bucket.remaining),
        (b"x-ratelimit-reset-" + of, duration(bucket.reset_s).encode()),
    ]


def _refusal(exceeded: Exceeded) -> ApiError:
    if not exceeded.ever:
        return errors.over_rate_limit(exceeded.requested, exceeded.limit)
    if exceeded.wait_s is None:
        return errors.too_many_concurrent(exceeded.limit, RETRY_CONCURRENT_S)
    retry_after_s = max(1, math.ceil(exceeded.wait_s))
    return errors.rate_limited(exceeded.limit_name, exceeded.limit, exceeded.used, exceeded.requested, retry_after_s)
