"""Waits for the answers of actors; Ray's many errors become the two that a caller can act on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray


class CallFailed(Exception):
    """The actor's method raised; the text is its error."""


class ActorUnavailable(Exception):
    """The actor gives no answer now: it restarts, its node is lost, or the time is up."""


def answer(call: Callable[[], Any], timeout_s: float | None = None) -> Any:
    """Returns what the remote call that ``call`` makes returns. Blocks; raises CallFailed or ActorUnavailable."""
    try:
        return ray.get(call(), timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        raise CallFailed(str(error.cause)) from error
    except ray.exceptions.RayError as error:
        raise ActorUnavailable(str(error).splitlines()[0]) from error


def is_connected() -> bool:
    """Returns whether this process is connected to a Ray cluster."""
    return bool(ray.is_initialized())
