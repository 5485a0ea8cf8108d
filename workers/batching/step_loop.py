"""What all batchers have in common: requests that are accepted and end, between the steps of an engine."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from workers.messages.requests import TokenEvent

T = TypeVar("T")


class BatcherClosed(RuntimeError):
    """The batcher accepts no more requests: it is draining, closed, or its engine failed. Not the client's fault."""


def refuse_when_closed(failed: str | None, closing: bool, draining: bool) -> None:
    """Raises BatcherClosed for a batcher in one of these states."""
    reason = failed or (closing and "the replica is closing") or (draining and "the replica is draining")
    if reason:
        raise BatcherClosed(reason)


class StepLoop(ABC, Generic[T]):
    """The accepted requests, each with a state ``T``. See `Batcher` for the threads that may call the methods."""

    def __init__(self, emit: Callable[[list[TokenEvent]], None], clock: Callable[[], float] = time.monotonic) -> None:
        """``emit`` is called without any lock held; an exception of it ends the batcher."""
        self._emit = emit
        self._clock = clock
        self._changed = threading.Condition()  # guards all below
        self._accepted: dict[str, T] = {}
        self._cancelled: set[str] = set()
        self._draining = False
        self._closing = False
        self._failed: str | None = None
        self._stepping = False
        self._steps = 0
        self._tokens = 0
        self._step_started_at: float | None = None

    def cancel(self, id: str) -> None:
        """End a request before the next step, with a CANCELLED event. Unknown ids are ignored."""
        with self._changed:
            if id in self._accepted:
                self._cancelled.add(id)
                self._changed.notify_all()

    def taken(self, id: str, count: int) -> None:
        """Forwarded answers have limits; tokens and vectors have none."""

    def drain(self, timeout_s: float = 0.0) -> bool:
        """Refuse new requests and wait up to ``timeout_s`` for the accepted ones. Returns whether all have ended.

        May be called again to wait longer. Call it from another thread than the one that runs the steps.
        """
        with self._changed:
            self._draining = True
            self._changed.notify_all()  # nothing more can fill a batch
            return self._changed.wait_for(lambda: not self._accepted and not self._stepping, timeout_s)

    def close(self) -> None:
        """Refuse new requests and end all others with an ERROR event in the next step, after which ``run`` returns."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _accept(self, id: str, state: T) -> None:
        """Keeps a new request. Raises ValueError and ``BatcherClosed``. The caller holds the lock."""
        refuse_when_closed(self._failed, self._closing, self._draining)
        if id in self._accepted:
            raise ValueError(f"request {id} is already running")
        self._accepted[id] = state
        self._changed.notify_all()

    @abstractmethod
    def _end_all(self, error: str) -> list[TokenEvent]:
        """Ends every request, and returns the events of their ends. The caller holds the lock."""

    def _fail(self, reason: str) -> list[TokenEvent]:
        with self._changed:
            self._failed = reason
            self._step_started_at = None
            return self._end_all(reason)

    def _send(self, events: list[TokenEvent]) -> None:
        """Emit the events before ``drain`` can return, since its caller may end the process."""
        try:
            if events:
                self._emit(events)
        except Exception as error:
            self._fail(f"events cannot be sent: {type(error).__name__}: {error}")
            raise
        finally:
            with self._changed:
                self._stepping = False
                if not self._accepted:
                    self._changed.notify_all()
