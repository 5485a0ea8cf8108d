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
        known = self._classes.get(priority)
        if known is None:
            if len(self._classes) >= MOST_CLASSES:
                return False
            known = self._classes[priority] = _Class(now)
        known.came(now)
        return True

    def went(self, priority: int, now: float) -> None:
        """One of them is over."""
        self._classes[priority].went(now)
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

    __slots__ = ("_before", "_peak", "_since", "now")

    def __init__(self, since: float) -> None:
        self.now = 0  # in the queue or in a slot
        self._since = since  # the beginning of this window
        self._peak = 0  # the most at once within it
        self._before = 0  # and within the last

    def came(self, now: float) -> None:
        self._turn(now)
        self.now += 1
        self._peak = max(self._peak, self.now)

    def went(self, now: float) -> None:
        self._turn(now)
        self.now -= 1

    def missing(self, now: float) -> int:
        """How many fewer there are than there have been lately."""
        self._turn(now)
        return max(self._peak, self._before) - self.now

    def _turn(self, now: float) -> None:
        windows = (now - self._since) // WINDOW_S
        if windows >= 1:
            self._before = self._peak if windows == 1 else self.now
            self._peak = self.now
            self._since += windows * WINDOW_S
