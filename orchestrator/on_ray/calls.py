"""Waits for replies of actors, and maps Ray's errors to the two that a caller can handle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray


class CallFailed(Exception):
    """The actor's method raised an error, which is the text."""


class ActorUnavailable(Exception):
    """The actor does not reply: it restarts, its node is lost, or the call timed out."""


def answer(call: Callable[[], Any], timeout_s: float | None = None) -> Any:
    """Returns the result of the remote call that ``call`` makes. Blocks. Raises CallFailed or ActorUnavailable."""
    try:
        return ray.get(call(), timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        raise CallFailed(str(error.cause)) from error
    except ray.exceptions.RayError as error:
        raise ActorUnavailable(str(error).splitlines()[0]) from error


def is_connected() -> bool:
    """Returns whether this process is connected to a Ray cluster."""
    return bool(ray.is_initialized())
