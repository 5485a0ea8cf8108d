"""Enforces the limits of API keys: a request reserves what it may use, and returns what it did not use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec.structs

from orchestrator.access.keys import ApiKey, KeyRing
from orchestrator.access.rate_limits import (
    DEBT,
    MINUTE_S,
    Exceeded,
    KeyCounts,
    Remaining,
    charge,
    duration,
    refill,
    remaining,
    reserve,
    settle,
)
from orchestrator.fleet.key_usage import KeyUsage
from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.errors import ApiError

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
    return errors.rate_limited(exceeded.what, exceeded.limit, exceeded.used, exceeded.requested, retry_after_s)
