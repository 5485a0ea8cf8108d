"""Makes one `/metrics` page for all scrapes that arrive at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

PAUSES = 9  # pause between pages, in multiples of the last page's time: pages take at most a tenth of the time
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
Page = tuple[bytes, str]  # body and content type


class Scrapes:
    """Makes pages one at a time, with pauses, so that many scrapes cannot stall streams. A page is never older than the
    scrape that it answers. Used from one event loop."""

    def __init__(self, make: Callable[[bool], Awaitable[Page]]) -> None:
        """``make`` returns the page in OpenMetrics (True) or in Prometheus' text format."""
        self._make = make
        self._next: dict[bool, asyncio.Task[Page]] = {}  # by format: the page that is next, not started yet
        self._turn = asyncio.Lock()
        self._not_before = 0.0

    async def page(self, openmetrics: bool) -> Page:
        """Returns the next page of that format. Raises what ``make`` raises."""
        task = self._next.get(openmetrics)
        if task is None:
            task = self._next[openmetrics] = asyncio.get_running_loop().create_task(self._in_turn(openmetrics))
        return await asyncio.shield(task)  # other scrapes still wait for it

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
