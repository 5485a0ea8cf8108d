"""Calls to Ray: to its head and to actors, with deadlines; its errors in few words; and its key-value store.

Calls to Ray's head block while it is away: for half a minute and longer (Ray 2.60).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.experimental.internal_kv import internal_kv_get_gcs_client

from orchestrator.process.awake_clock import AwakeClock

log = logging.getLogger(__name__)

T = TypeVar("T")

THREADS = 32
REPLY_S = 3.0  # the head replies within milliseconds; a round of the controller waits no longer
START_S = 60.0  # deadline of the calls without which the controller cannot start
RETRY_S = 0.5
KV_S = 5.0  # for a call of the key-value store, which takes a millisecond
CRASHED = "its process ended without an error: killed by a signal (out of memory?), or crashed"
DISCONNECTED = "the connection to its process was closed"  # Ray does not know why, or has lost the connection only


class CallFailed(Exception):
    """The actor's method raised an error, which is the text."""


class ActorUnavailable(Exception):
    """The actor does not reply: it restarts, its node is lost, or the call timed out."""


class CallLate(ActorUnavailable):
    """There is no reply within the time limit: the actor's process may hang."""


def answer(call: Callable[[], Any], timeout_s: float | None = None) -> Any:
    """Returns the result of the remote call that ``call`` makes. Blocks. Raises CallFailed, ActorUnavailable, or
    CallLate after ``timeout_s``."""
    try:
        return ray.get(call(), timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        raise CallFailed(str(error.cause)) from error
    except ray.exceptions.GetTimeoutError as error:
        raise CallLate(f"no reply within {timeout_s:.0f} s") from error
    except RayError as error:
        if "creation task" in str(error):  # it is not restarted
            raise CallFailed(str(error).strip().splitlines()[-1]) from error
        raise ActorUnavailable(str(error).splitlines()[0]) from error


def cause_of_death(error: RayError) -> str:
    """Returns Ray's cause of an actor's death, without its advice and frames."""
    text = str(error)
    if "killed by `ray.kill`" in text:
        return "it was killed"
    if "SYSTEM_ERROR" in text:  # Ray noticed only the closed connection
        return CRASHED
    if "is not schedulable" in text:
        return "its host is lost"
    if "temporarily unavailable" in text:  # the connection was closed before Ray knows the cause
        return DISCONNECTED
    if "creation task" in text:
        return text.strip().splitlines()[-1]
    return text.splitlines()[0] if text else type(error).__name__


def _settle(future: Future[T], call: Callable[[], T]) -> None:
    """Run the call, and set its outcome."""
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - it is raised where the call is awaited
        future.set_exception(error)
    else:
        future.set_result(result)


def within(call: Callable[[], T], timeout_s: float) -> T:
    """Returns the result of a blocking call to Ray. Raises its error, or TimeoutError; its thread then goes on."""
    future: Future[T] = Future()
    threading.Thread(target=_settle, args=(future, call), name="call to Ray", daemon=True).start()
    try:
        return future.result(timeout_s)
    except TimeoutError:
        if future.done():
            raise  # the call's own error
        raise TimeoutError(f"Ray's head has not replied for {timeout_s:.0f} s") from None


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
            _settle(*self._queue.get())

    def _note(self, *, is_away: bool) -> None:
        if is_away != self._is_away:
            self._is_away = is_away
            log.warning("Ray's head does not reply" if is_away else "Ray's head replies again")


class RayKeyValues:
    """A ``machine_claims.KeyValues`` of the cluster that this process is connected to, which the GCS keeps; with a GCS
    store it survives the head.

    Each call blocks for at most ``KV_S``, and raises an error of Ray if the head does not reply.
    """

    def get(self, namespace: str, keys: Sequence[str]) -> Mapping[str, bytes]:
        if not keys:
            return {}
        stored = _gcs().internal_kv_multi_get([key.encode() for key in keys], namespace.encode(), KV_S)
        return {key.decode(): value for key, value in stored.items()}

    def put(self, namespace: str, key: str, value: bytes, *, overwrite: bool = True) -> bool:
        return bool(_gcs().internal_kv_put(key.encode(), value, overwrite, namespace.encode(), KV_S))

    def delete(self, namespace: str, key: str) -> None:
        _gcs().internal_kv_del(key.encode(), False, namespace.encode(), KV_S)

    def keys(self, namespace: str, prefix: str) -> Sequence[str]:
        return [key.decode() for key in _gcs().internal_kv_keys(prefix.encode(), namespace.encode(), KV_S)]


def _gcs() -> Any:
    return internal_kv_get_gcs_client()
