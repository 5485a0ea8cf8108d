"""How long, and how often, a source that does not answer is asked again."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

SILENT_S = 3.0  # without one byte, then it is told
Wait = Callable[[threading.Event, float], bool]  # True: the event was set meanwhile


def _wait(stop: threading.Event, seconds: float) -> bool:
    return stop.wait(seconds)


def _to_nobody(silent_s: float, why: str) -> None:
    """Who wants to know gives another."""


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with jitter, for as long as nothing arrives. All in seconds."""

    seconds: float = 120.0  # without one byte from the source, then it is given up
    first_s: float = 0.05  # the longest wait before the second attempt
    longest_s: float = 5.0  # the longest wait at all
    clock: Callable[[], float] = time.monotonic
    wait: Wait = _wait
    told: Callable[[float, str], None] = _to_nobody
    """For how long nothing has come, in seconds, and why the last attempt failed; 0 seconds: something has come."""

    def begin(self) -> Retry:
        return Retry(self)

    def pause_s(self, attempt: int, chance: float) -> float:
        """Before another attempt, when ``attempt`` (from 0) has failed; ``chance``: between 0 and 1, so that those who
        failed together do not come back together."""
        longest = min(self.longest_s, self.first_s * 2.0 ** min(attempt, 30))
        return longest * (0.5 + 0.5 * chance)


class Retry:
    """The patience of one fetch. All of its threads share it: while one of them gets something, the source is there."""

    def __init__(self, patience: RetryPolicy) -> None:
        self._patience = patience
        self._since = patience.clock()
        self._told = False

    def arrived(self) -> None:
        """Something came from the source just now."""
        self._since = self._patience.clock()
        if self._told:
            self._told = False
            self._patience.told(0.0, "")

    @property
    def silent_s(self) -> float:
        """Since something came last, or since the beginning."""
        return self._patience.clock() - self._since

    def again(self, attempt: int, stop: threading.Event, why: str = "") -> bool:
        """Wait before another attempt; False: the source has been away for too long. Returns soon when ``stop`` is
        set. ``why`` the last one failed is told where nothing has come for ``SILENT_S``, and may hold no secret."""
        silent_s = self.silent_s
        if silent_s >= self._patience.seconds:
            return False
        if silent_s >= SILENT_S:
            self._told = True
            self._patience.told(silent_s, why)
        self._patience.wait(stop, self._patience.pause_s(attempt, random.random()))  # no secret hangs on it
        return True
