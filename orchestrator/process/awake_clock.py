"""A clock that stops while its event loop is not scheduled: a frozen VM, `docker pause`, SIGSTOP, a starved machine.

With an ordinary clock every deadline would pass during such a pause, although no process had the time to meet it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

BEAT_S = 0.25  # between two readings while the loop is scheduled
LATE_S = 2.0  # a longer gap between two readings is a pause; shorter ones are slow callbacks and a busy machine
AGAIN_S = 5.0  # after a pause nothing is late for this long, so that every process can answer again

T = TypeVar("T")


class AwakeClock:
    """A clock of the seconds in which its event loop was scheduled, while ``beat`` runs on that loop.

    ``raw`` is a monotonic clock. The first reading after a pause already excludes the pause.
    """

    def __init__(self, raw: Callable[[], float] = time.monotonic) -> None:
        self._raw = raw
        self._read = raw()
        self.paused_s = 0.0  # the sum of all pauses
        self._resumed_at = float("-inf")

    def __call__(self) -> float:
        raw = self._raw()
        gap, self._read = raw - self._read, raw
        if gap > LATE_S:
            self.paused_s += gap
            self._resumed_at = raw - self.paused_s
        return raw - self.paused_s

    def resumed_at(self) -> float:
        """Returns when the last pause ended, on this clock; minus infinity before the first."""
        self()
        return self._resumed_at

    async def beat(self) -> None:
        """Read the clock regularly while the loop runs."""
        self._read = self._raw()  # the time before was not a pause of the loop
        while True:
            self()
            await asyncio.sleep(BEAT_S)

    async def within(self, work: Awaitable[T], deadline_s: float) -> T:
        """Returns the result of ``work``. After ``deadline_s`` on this clock, but not in the first ``AGAIN_S`` after a
        pause, cancels ``work`` and raises asyncio.TimeoutError."""
        task = asyncio.ensure_future(work)
        until = self() + deadline_s
        try:
            while not task.done() and (remaining_s := max(until, self.resumed_at() + AGAIN_S) - self()) > 0:
                await asyncio.wait({task}, timeout=remaining_s)
            if not task.done():
                raise asyncio.TimeoutError
            return task.result()
        finally:
            task.cancel()
