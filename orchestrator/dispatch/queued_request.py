"""A waiting request as the queue's orders see it."""

from __future__ import annotations

from typing import TypeVar

import msgspec


class QueuedRequest(msgspec.Struct, eq=False):
    """A request that may wait. While it waits, only its prompt may change, and `FairQueue.bytes` with it."""

    tenant: str  # the id of its API key, or "" without keys
    priority: int  # lower goes first; the default is 0, as in vLLM
    arrived_at: float  # monotonic seconds
    deadline: float | None  # the latest time for its first token, on the same clock
    size: int  # bytes
    tokens: int  # of its prompt


W = TypeVar("W", bound=QueuedRequest)
