"""What a host does for those that wait for it, each thing once at a time: fetching an artifact, compiling ahead."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from workers.artifacts.fetch.progress import FetchStatus, Progress
from workers.artifacts.sources.listing import SourceError, Stopped
from workers.messages.status import Failure, Reaction

log = logging.getLogger(__name__)

LEASE_S = 30.0  # who has not asked for so long has gone; a controller that is started again asks within ten seconds
WATCH_S = 1.0
HOPELESS = frozenset({"pickle-refused", "remote-code-refused", "name-unsafe", "layout-unknown", "revision-without-hub"})
"""Problems that only another spec mends."""

End = TypeVar("End")
Work = Callable[[Progress, threading.Event], End]
"""Runs in a thread. Raises SourceError, and Stopped soon after the event is set."""


@dataclass
class _Flight(Generic[End]):
    progress: Progress
    waiters: dict[str, float] = field(default_factory=dict)  # and when each of them has asked last
    stop: threading.Event = field(default_factory=threading.Event)
    ended: End | Failure | None = None


class SingleFlight(Generic[End]):
    """Goes on with each for as long as somebody waits for it. Used by any number of threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._flights: dict[Hashable, _Flight[End]] = {}  # that somebody waits for
        self._changed = threading.Condition()
        self._watching = False

    def ask(self, waiter: str, key: Hashable, name: str, work: Work[End], wait_s: float) -> End | Failure | None:
        """How ``key`` ended; None while it goes on, after ``wait_s``. Who asks again as the same ``waiter`` goes on
        waiting.

        ``work`` is done where nobody waits for that key yet. Its end is told to each of those that waited; who asks
        after them begins anew.
        """
        with self._changed:
            flight = self._flights.get(key)
            if flight is None or (flight.ended is not None and waiter not in flight.waiters):
                flight = self._begin(key, name, work)
            flight.waiters[waiter] = self._clock()
            self._changed.wait_for(lambda: flight.ended is not None, wait_s)
            if flight.ended is not None:
                self._leave(waiter, key, flight)
            return flight.ended

    def leave(self, waiter: str) -> None:
        """It waits for nothing any more. What nobody else waits for is stopped."""
        with self._changed:
            for key, flight in list(self._flights.items()):
                if waiter in flight.waiters:
                    self._leave(waiter, key, flight)

    def progress(self) -> list[FetchStatus]:
        """How far each is that goes on."""
        with self._changed:
            return [flight.progress.status() for flight in self._flights.values() if flight.ended is None]

    def of(self, key: Hashable) -> Progress | None:
        """How far that one is; None where it does not go on."""
        with self._changed:
            flight = self._flights.get(key)
            return None if flight is None or flight.ended is not None else flight.progress

    def _begin(self, key: Hashable, name: str, work: Work[End]) -> _Flight[End]:
        flight: _Flight[End] = _Flight(Progress(name))
        self._flights[key] = flight
        threading.Thread(target=self._fly, args=(name, flight, work), name="flight", daemon=True).start()
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._watch, name="flights", daemon=True).start()
        return flight

    def _fly(self, name: str, flight: _Flight[End], work: Work[End]) -> None:
        ended: End | Failure
        try:
            ended = work(flight.progress, flight.stop)
        except Stopped:
            ended = Failure("nobody-waits", f"nobody waits for {name} any more")
        except SourceError as error:
            reaction = Reaction.STOP if error.id in HOPELESS else Reaction.RETRY
            ended = Failure(error.id, error.what, error.hint, reaction)
        except BaseException as error:  # a panic of a Rust library is no Exception, and many wait for an end
            log.exception("%s has failed", name)
            ended = Failure("fetch-failed", f"{name}: {type(error).__name__}: {error}")
        with self._changed:
            flight.ended = ended
            self._changed.notify_all()

    def _leave(self, waiter: str, key: Hashable, flight: _Flight[End]) -> None:
        flight.waiters.pop(waiter, None)
        if flight.waiters:
            return
        if self._flights.get(key) is flight:
            del self._flights[key]
        if flight.ended is None:
            flight.stop.set()

    def _watch(self) -> None:
        while True:
            time.sleep(WATCH_S)
            self.look()

    def look(self) -> None:
        """Stop what nobody has asked for lately."""
        now = self._clock()
        with self._changed:
            for key, flight in list(self._flights.items()):
                for waiter in [name for name, at in flight.waiters.items() if now - at > LEASE_S]:
                    self._leave(waiter, key, flight)
