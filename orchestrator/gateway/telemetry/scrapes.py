"""One page of `/metrics` for all who ask for it at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

PAUSES = 9  # times as long as the last page took, no page is made: at most a tenth of the time is spent on them
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
Page = tuple[bytes, str]  # and its content type


class Scrapes:
    """Makes pages one after the other, with pauses, so that scrapes cannot stall streams, however many come. No page is
    older than the question that it answers. Used from one event loop."""

    def __init__(self, make: Callable[[bool], Awaitable[Page]]) -> None:
        """``make`` gives the page in OpenMetrics or in Prometheus' text format."""
        self._make = make
        self._next: dict[bool, asyncio.Task[Page]] = {}  # that have not begun
        self._turn = asyncio.Lock()
        self._not_before = 0.0

    async def page(self, openmetrics: bool) -> Page:
        """The next page of that format. Raises what ``make`` raises."""
        task = self._next.get(openmetrics)
        if task is None:
            task = self._next[openmetrics] = asyncio.get_running_loop().create_task(self._in_turn(openmetrics))
        return await asyncio.shield(task)  # the others still wait for it

    async def _in_turn(self, openmetrics: bool) -> Page:
        async with self._turn:
            await asyncio.sleep(self._not_before - time.monotonic())
            del self._next[openmetrics]
            began = time.monotonic()
            try:
                return await self._make(openmetrics)
            finally:
                ended = time.monotonic()
                pause = max(SHORTEST_PAUSE_S, min(PAUSES * (ended - began), LONGEST_PAUSE_S))
                self._not_before = ended + pause
