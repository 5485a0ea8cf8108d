"""Reserves slots for requests of more urgent priorities, since a taken slot is never preempted. Pure."""

from __future__ import annotations

WINDOW_S = 60.0
MOST_CLASSES = 64  # priorities that are counted; clients choose the numbers


class Headroom:
    """Counts the requests of one model by priority, with the recent peak of each.

    A less urgent request leaves free as many slots as the more urgent ones had at their peak within the last one to two
    ``WINDOW_S`` and do not have now, but never more than half of all slots: an urgent request should not wait for an
    answer to end, and a waiting request should not wait for ever for urgent ones that may not come. Nothing is reserved
    where all requests have the same priority.
    """

    def __init__(self) -> None:
        self.mixed = False  # requests of several priorities have arrived recently
        self._classes: dict[int, _Class] = {}

    @property
    def present(self) -> int:
        """The requests in the queue or in a slot now, of the counted priorities."""
        return sum(group.now for group in self._classes.values())

    def add(self, priority: int, now: float) -> bool:
        """Counts a request that enters the queue or a slot; ``now`` in monotonic seconds. Returns whether it was
        counted: only then call ``remove`` for it."""
        group = self._classes.get(priority)
        if group is None:
            if len(self._classes) >= MOST_CLASSES:
                return False
            group = self._classes[priority] = _Class(now)
            self.mixed = len(self._classes) > 1
        elif now >= group.window_end:
            group.turn(now)
        group.now = present = group.now + 1
        if present > group.peak:
            group.peak = present
        return True

    def remove(self, priority: int, now: float) -> None:
        """Uncounts a request that is over."""
        group = self._classes[priority]
        if now >= group.window_end:
            group.turn(now)
        group.now -= 1
        if self.mixed:
            self._forget(now)

    def reserved(self, priority: int, slots: int, now: float) -> int:
        """Returns how many of the model's ``slots`` a request of the priority must leave free."""
        if not self.mixed:
            return 0
        missing = sum(group.missing(now) for other, group in self._classes.items() if other < priority)
        return min(missing, slots // 2)

    def _forget(self, now: float) -> None:
        for priority in [p for p, group in self._classes.items() if not group.now and not group.missing(now)]:
            del self._classes[priority]
        self.mixed = len(self._classes) > 1


class _Class:
    """The requests of one priority."""

    __slots__ = ("_before", "now", "peak", "window_end")

    def __init__(self, since: float) -> None:
        self.now = 0  # in the queue or in a slot
        self.peak = 0  # the most at once within this window
        self.window_end = since + WINDOW_S
        self._before = 0  # the most at once within the last window

    def missing(self, now: float) -> int:
        """Returns how far the current count is below the recent peak."""
        if now >= self.window_end:
            self.turn(now)
        return max(self.peak, self._before) - self.now

    def turn(self, now: float) -> None:
        """Begins the window that holds ``now``."""
        windows = (now - self.window_end) // WINDOW_S + 1
        self._before = self.peak if windows == 1 else self.now
        self.peak = self.now
        self.window_end += windows * WINDOW_S
