"""Waits for replies of actors, and maps Ray's errors to the two that a caller can handle."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TypeVar

import ray

T = TypeVar("T")


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
    except ray.exceptions.RayError as error:
        if "creation task" in str(error):  # it is not restarted
            raise CallFailed(str(error).strip().splitlines()[-1]) from error
        raise ActorUnavailable(str(error).splitlines()[0]) from error


def is_connected() -> bool:
    """Returns whether this process is connected to a Ray cluster."""
    return bool(ray.is_initialized())


def within(call: Callable[[], T], timeout_s: float) -> T:
    """Returns the result of a blocking call to Ray. Raises its error, or TimeoutError; its thread then goes on."""
    outcomes: queue.SimpleQueue[Callable[[], T]] = queue.SimpleQueue()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
            outcomes.put(partial(_raise, error))
        else:
            outcomes.put(lambda: result)

    threading.Thread(target=run, name="call to Ray", daemon=True).start()
    try:
        outcome = outcomes.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError(f"Ray's head has not replied for {timeout_s:.0f} s") from None
    return outcome()


def _raise(error: BaseException) -> NoReturn:
    raise error
