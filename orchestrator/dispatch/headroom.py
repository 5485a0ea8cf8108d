"""Slots that are kept free for requests of more urgent priorities, since a slot that is taken is not given back."""

from __future__ import annotations

WINDOW_S = 60.0
MOST_CLASSES = 64  # priorities that are looked at; clients choose them


class Headroom:
    """Counts the requests of one model by priority, and remembers how many there have been at once lately.

    A less urgent request leaves as many slots free as more urgent ones had at once within the last one to two
    ``WINDOW_S`` and have not now, though never more than half of all: what may come should not wait for an answer to
    end, and what waits should not wait for ever for what may come. Where all requests have one priority, nothing is
    kept.
    """

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}

    @property
    def mixed(self) -> bool:
        """Whether there have been several priorities lately."""
        return len(self._classes) > 1

    @property
    def present(self) -> int:
        """Requests that are in the queue or in a slot now, of the priorities that are looked at."""
        return sum(known.now for known in self._classes.values())

    def came(self, priority: int, now: float) -> bool:
        """A request of the priority is in the queue or in a slot from now on; ``now`` in monotonic seconds. Says
        whether it is counted: only then it ``went``."""
        group = self._classes.get(priority)
        if group is None:
            if len(self._classes) >= MOST_CLASSES:
                return False
            group = self._classes[priority] = _Class(now)
        elif now >= group.window_end:
            group.turn(now)
        group.now = present = group.now + 1
        if present > group.peak:
            group.peak = present
        return True

    def went(self, priority: int, now: float) -> None:
        """One of them is over."""
        group = self._classes[priority]
        if now >= group.window_end:
            group.turn(now)
        group.now -= 1
        if len(self._classes) > 1:
            self._forget(now)

    def kept(self, priority: int, slots: int, now: float) -> int:
        """How many of the model's ``slots`` a request of the priority must leave free."""
        if len(self._classes) < 2:
            return 0
        missing = sum(known.missing(now) for other, known in self._classes.items() if other < priority)
        return min(missing, slots // 2)

    def _forget(self, now: float) -> None:
        for priority in [p for p, known in self._classes.items() if not known.now and not known.missing(now)]:
            del self._classes[priority]


class _Class:
    """The requests of one priority."""

    __slots__ = ("_before", "now", "peak", "window_end")

    def __init__(self, since: float) -> None:
        self.now = 0  # in the queue or in a slot
        self.peak = 0  # the most at once within this window
        self.window_end = since + WINDOW_S
        self._before = 0  # the most at once within the last window

    def missing(self, now: float) -> int:
        """Returns how many fewer there are than there have been lately."""
        if now >= self.window_end:
            self.turn(now)
        return max(self.peak, self._before) - self.now

    def turn(self, now: float) -> None:
        """Begins the window that holds ``now``."""
        windows = (now - self.window_end) // WINDOW_S + 1
        self._before = self.peak if windows == 1 else self.now
        self.peak = self.now
        self.window_end += windows * WINDOW_S
