"""Runs each job of a host once for all its waiters: a fetch of an artifact, a compilation ahead of time."""

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
FAILED_HINT = "the next start repeats it; the log of the host's actor has details"

LEASE_S = 30.0  # a waiter that has not polled for so long is gone; a restarted controller polls within ten seconds
WATCH_S = 1.0
PERMANENT = frozenset(
    {"pickle-refused", "remote-code-refused", "name-unsafe", "layout-unknown", "revision-without-hub"}
)
"""Errors that only a change of the spec fixes."""

End = TypeVar("End")
Work = Callable[[Progress, threading.Event], End]
"""Runs in a thread. Raises SourceError, and Stopped soon after the event is set."""


@dataclass
class _Flight(Generic[End]):
    progress: Progress
    waiters: dict[str, float] = field(default_factory=dict)  # waiter -> time of its last poll
    stop: threading.Event = field(default_factory=threading.Event)
    outcome: End | Failure | None = None


class SingleFlight(Generic[End]):
    """Jobs by key, each running for as long as it has waiters. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._flights: dict[Hashable, _Flight[End]] = {}  # those with waiters
        self._changed = threading.Condition()
        self._watching = False

    def join(
        self, waiter: str, key: Hashable, name: str, work: Work[End], wait_s: float
    ) -> End | Failure | FetchStatus:
        """Returns the outcome of job ``key``; its status if it still runs after ``wait_s``, so call again.

        Starts ``work`` if the key has no waiters yet. Each waiter gets the outcome once; a later call starts anew.
        """
        with self._changed:
            flight = self._flights.get(key)
            if flight is None or (flight.outcome is not None and waiter not in flight.waiters):
                flight = self._begin(key, name, work)
            flight.waiters[waiter] = self._clock()
            self._changed.wait_for(lambda: flight.outcome is not None, wait_s)
            if flight.outcome is None:
                return flight.progress.status()
            self._leave(waiter, key, flight)
            return flight.outcome

    def leave(self, waiter: str) -> None:
        """Removes a waiter from all jobs, and stops the jobs that have no other waiters."""
        with self._changed:
            for key, flight in list(self._flights.items()):
                if waiter in flight.waiters:
                    self._leave(waiter, key, flight)

    def _begin(self, key: Hashable, name: str, work: Work[End]) -> _Flight[End]:
        flight: _Flight[End] = _Flight(Progress(name))
        self._flights[key] = flight
        threading.Thread(target=self._fly, args=(name, flight, work), name="flight", daemon=True).start()
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._watch, name="flights", daemon=True).start()
        return flight

    def _fly(self, name: str, flight: _Flight[End], work: Work[End]) -> None:
        outcome: End | Failure
        try:
            outcome = work(flight.progress, flight.stop)
        except Stopped:
            outcome = Failure("fetch-cancelled", f"{name} was cancelled: no replica needs it any longer")
        except SourceError as error:
            reaction = Reaction.STOP if error.id in PERMANENT else Reaction.RETRY
            outcome = Failure(error.id, error.what, error.hint, reaction)
        except BaseException as error:  # a panic of a Rust library is not an Exception, and waiters need an outcome
            log.exception("%s failed", name)
            outcome = Failure("fetch-failed", f"{name}: {type(error).__name__}: {error}", FAILED_HINT)
        with self._changed:
            flight.outcome = outcome
            self._changed.notify_all()

    def _leave(self, waiter: str, key: Hashable, flight: _Flight[End]) -> None:
        flight.waiters.pop(waiter, None)
        if flight.waiters:
            return
        if self._flights.get(key) is flight:
            del self._flights[key]
        if flight.outcome is None:
            flight.stop.set()

    def _watch(self) -> None:
        while True:
            time.sleep(WATCH_S)
            self.drop_expired_waiters()

    def drop_expired_waiters(self) -> None:
        """Drops waiters that have not polled within the lease."""
        now = self._clock()
        with self._changed:
            for key, flight in list(self._flights.items()):
                for waiter in [name for name, at in flight.waiters.items() if now - at > LEASE_S]:
                    self._leave(waiter, key, flight)
