"""Retries of requests to a source that does not answer: deadline and backoff."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

SILENT_S = 3.0  # seconds without a byte before the silence is reported
Wait = Callable[[threading.Event, float], bool]  # True: the event was set meanwhile


def _ignore_silence(silent_s: float, why: str) -> None:
    """The default: reports nothing."""


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with jitter, until nothing has arrived for too long. All times in seconds."""

    seconds: float = 120.0  # give up after this time without a byte from the source
    first_s: float = 0.05  # longest pause before the second attempt
    longest_s: float = 5.0  # longest pause
    clock: Callable[[], float] = time.monotonic
    wait: Wait = threading.Event.wait
    on_silence: Callable[[float, str], None] = _ignore_silence
    """Called with the seconds without a byte and the reason of the last failure; with 0 when bytes arrive again."""

    def begin(self) -> Retry:
        return Retry(self)

    def pause_s(self, attempt: int, chance: float) -> float:
        """Returns the pause after the failed ``attempt`` (from 0); ``chance`` in 0..1 is the jitter."""
        longest = min(self.longest_s, self.first_s * 2.0 ** min(attempt, 30))
        return longest * (0.5 + 0.5 * chance)


class Retry:
    """The retry state of one fetch, shared by its threads: bytes to any of them reset the deadline of all."""

    def __init__(self, retry_policy: RetryPolicy) -> None:
        self._retry_policy = retry_policy
        self._since = retry_policy.clock()
        self._reported = False

    def arrived(self) -> None:
        """Records that bytes or an answer arrived."""
        self._since = self._retry_policy.clock()
        if self._reported:
            self._reported = False
            self._retry_policy.on_silence(0.0, "")

    @property
    def silent_s(self) -> float:
        """Seconds since the last arrival, or since the start."""
        return self._retry_policy.clock() - self._since

    def again(self, attempt: int, stop: threading.Event, why: str = "") -> bool:
        """Pauses before another attempt; False: the deadline has passed. Returns early when ``stop`` is set.

        ``why`` the last attempt failed is reported after ``SILENT_S`` of silence and must not hold secrets.
        """
        silent_s = self.silent_s
        if silent_s >= self._retry_policy.seconds:
            return False
        if silent_s >= SILENT_S:
            self._reported = True
            self._retry_policy.on_silence(silent_s, why)
        self._retry_policy.wait(stop, self._retry_policy.pause_s(attempt, random.random()))  # not used for security
        return True
