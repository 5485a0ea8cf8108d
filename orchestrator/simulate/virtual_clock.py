"""The virtual clock of the simulator: an event queue that runs as fast as it can be computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Any

from orchestrator.simulate.scenario import Arrival


class Clock:
    """Runs scheduled calls in the order of their times; at the same time, in the order in which they were scheduled."""

    __slots__ = ("_calls", "_cancelled", "_count", "arriving", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.arriving = True  # whether arrivals remain
        self._calls: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = 0
        self._cancelled: set[int] = set()

    def at(self, time: float, call: Callable[[Any], None], about: Any = None) -> int:
        """Schedules ``call(about)`` for that time; never, if it is infinite. Returns a number for ``cancel``."""
        if time != math.inf:
            self._count += 1
            heappush(self._calls, (time, self._count, call, about))
        return self._count

    def cancel(self, number: int) -> None:
        """Cancels a call that has not been made."""
        self._cancelled.add(number)

    def run(self, arrivals: Iterable[Arrival], arrive: Callable[[Arrival], None]) -> None:
        """Runs until all arrivals and calls are done. An arrival precedes the calls of the same time.
        Raises ValueError if the arrivals are not in order."""
        calls, cancelled, coming = self._calls, self._cancelled, iter(arrivals)
        arrival = next(coming, None)
        self.arriving = arrival is not None
        while True:
            if arrival is not None and (not calls or arrival.at <= calls[0][0]):
                if arrival.at < self.now:
                    raise ValueError(f"an arrival at {arrival.at} s comes after one at {self.now} s")
                self.now = arrival.at
                arrive(arrival)
                arrival = next(coming, None)
                if arrival is None:
                    self.arriving = False
            elif calls:
                time, number, call, about = heappop(calls)
                if cancelled and number in cancelled:
                    cancelled.discard(number)
                    continue
                self.now = time
                call(about)
            else:
                return
