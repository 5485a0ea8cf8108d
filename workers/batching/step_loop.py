"""What all batchers have in common: requests that are accepted and end, between the steps of an engine."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Generic, TypeVar

from workers.messages.requests import TokenEvent
from workers.messages.status import ServerLoad


@dataclass(frozen=True)
class BatcherStats:
    """A snapshot of the batcher. Times are those of its clock, in seconds."""

    slots: int
    live: int  # requests that own a slot
    waiting: int  # accepted requests without a slot
    prefilling: int  # live requests whose prompt is in the current step
    steps: int  # prefills and decodes since the start
    tokens: int  # tokens produced since the start
    step_started_at: float | None  # start of the current step; None between steps
    draining: bool
    failed: str | None  # why the engine cannot go on
    drafted: int = 0  # tokens proposed by a draft model since the start
    accepted: int = 0  # of these, those that the model agreed with
    prefix_queries: int = 0  # prompt tokens looked up in the slots' KV caches since the start
    prefix_hits: int = 0  # of these, those found there and not processed again
    server: ServerLoad | None = None  # of an engine that is a server


T = TypeVar("T")  # the state of an accepted request
Work = TypeVar("Work", bound=Sized)  # what the engine does in one step


class BatcherClosed(RuntimeError):
    """The batcher accepts no more requests: it is draining, closed, or its engine failed. Not the client's fault."""


def refuse_when_closed(failed: str | None, closing: bool, draining: bool) -> None:
    """Raises BatcherClosed for a batcher in one of these states."""
    reason = failed or (closing and "the replica is closing") or (draining and "the replica is draining")
    if reason:
        raise BatcherClosed(reason)


class StepLoop(ABC, Generic[T, Work]):
    """The accepted requests, and the steps of an engine for them. See `Batcher` for the threads that may call the
    methods."""

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

    def run(self, after_step: Callable[[], None] = lambda: None) -> None:
        """Run steps until ``close``, waiting while idle. Raises the exceptions of the engine and of ``emit``.

        ``after_step`` is called after each step, on this thread.
        """
        while True:
            with self._changed:
                while (wait_s := self._wait_s()) is None or wait_s > 0:
                    self._changed.wait(wait_s)
                if self._closing and not self._accepted:
                    return
            self.step()
            after_step()

    def step(self) -> bool:
        """Run one step. Returns False with nothing to do. Raises the exceptions of the engine and of ``emit``."""
        with self._changed:
            refuse_when_closed(self._failed, False, False)
            self._stepping = True
            events = self._end_cancelled()
            if self._closing:
                events += self._end_all("the replica is closing")
            work = self._next_work()
            self._step_started_at = self._clock() if work else None
        try:
            if work:
                events += self._run_engine(work)
        except Exception as error:
            reason = f"the engine failed in {self._describe(work)}: {type(error).__name__}: {error}"
            events += self._fail(reason)
            raise
        finally:
            self._send(events)
        return bool(work or events)

    def _stats(self, *, slots: int, live: int, waiting: int = 0, prefilling: int = 0, **others: int) -> BatcherStats:
        return BatcherStats(
            slots=slots,
            live=live,
            waiting=waiting,
            prefilling=prefilling,
            steps=self._steps,
            tokens=self._tokens,
            step_started_at=self._step_started_at,
            draining=self._draining,
            failed=self._failed,
            **others,  # type: ignore[arg-type]
        )

    def _accept(self, id: str, state: T) -> None:
        """Keeps a new request. Raises ValueError and ``BatcherClosed``. The caller holds the lock."""
        refuse_when_closed(self._failed, self._closing, self._draining)
        if id in self._accepted:
            raise ValueError(f"request {id} is already running")
        self._accepted[id] = state
        self._changed.notify_all()

    # For all of these the caller holds the lock, except for ``_run_engine``.

    @abstractmethod
    def _wait_s(self) -> float | None:
        """Returns the seconds until the next step; None: until something changes."""

    @abstractmethod
    def _next_work(self) -> Work:
        """Returns what the next step does; empty: nothing."""

    @abstractmethod
    def _run_engine(self, work: Work) -> list[TokenEvent]:
        """Runs the engine once, and returns the events of the requests that progressed."""

    @abstractmethod
    def _describe(self, work: Work) -> str:
        """Returns the name of a step, such as ``a decode of 4 slots``, for an error."""

    @abstractmethod
    def _end_cancelled(self) -> list[TokenEvent]:
        """Ends the requests that were cancelled, and returns the events of their ends."""

    @abstractmethod
    def _end_all(self, error: str) -> list[TokenEvent]:
        """Ends every request, and returns the events of their ends."""

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
