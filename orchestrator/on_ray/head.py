"""Calls to Ray's head, which block while it is away: for half a minute and longer (Ray 2.60)."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from ray.exceptions import RayError

from orchestrator.process.awake_clock import AwakeClock

log = logging.getLogger(__name__)

T = TypeVar("T")

THREADS = 32
REPLY_S = 3.0  # the head replies within milliseconds; a round of the controller waits no longer
START_S = 60.0  # deadline of the calls without which the controller cannot start
RETRY_S = 0.5


class Head:
    """Ray's head for one event loop, which no call blocks: each is made in a thread."""

    def __init__(self, clock: AwakeClock) -> None:
        self._clock = clock
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._threads = 0
        self._calls: dict[str, Future[Any]] = {}  # that the head has not answered, by key
        self._is_away = False

    async def ask(self, call: Callable[[], T], key: str, deadline_s: float | None = REPLY_S) -> T:
        """Returns the result of a blocking call. Raises its error, or asyncio.TimeoutError after ``deadline_s``.

        The call then goes on, and the next one with this ``key`` waits for its result: a long absence of the head
        takes one thread for each key.
        """
        running = self._calls.get(key)
        if running is None or running.done():
            running = self._calls[key] = self._begin(call)
        reply = asyncio.shield(asyncio.wrap_future(running))
        try:
            result: T = await (reply if deadline_s is None else self._clock.within(reply, deadline_s))
        except asyncio.TimeoutError:
            self._note(is_away=True)
            raise asyncio.TimeoutError(f"Ray's head has not replied for {deadline_s:.0f} s") from None
        finally:
            if running.done() and self._calls.get(key) is running:
                del self._calls[key]
        self._note(is_away=False)
        return result

    def _begin(self, call: Callable[[], T]) -> Future[T]:
        """Run the call in a thread. A pool of `concurrent.futures` would keep this process from its end while a call
        blocks: a controller would outlive its head, and keep the lock of its home."""
        future: Future[T] = Future()
        self._queue.put((future, call))
        if self._threads < THREADS:
            self._threads += 1
            threading.Thread(target=self._work, name="call to Ray's head", daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            future, call = self._queue.get()
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - it is raised where the call is awaited
                future.set_exception(error)
            else:
                future.set_result(result)

    def _note(self, *, is_away: bool) -> None:
        if is_away != self._is_away:
            self._is_away = is_away
            log.warning("Ray's head does not reply" if is_away else "Ray's head replies again")


def retried(call: Callable[[], T], deadline_s: float = START_S) -> T:
    """Returns the result of a call that the controller needs for its start, where an error would end it for good.
    Blocks. Raises the last error after ``deadline_s``."""
    until = time.monotonic() + deadline_s
    while True:
        try:
            return call()
        except RayError as error:
            if time.monotonic() > until:
                raise
            log.warning("Ray's head does not reply, and is asked again: %s", error)
        time.sleep(RETRY_S)
