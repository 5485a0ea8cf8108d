"""Which replica a request goes to. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """What the choice looks at, counted by the gateway itself: reports from the replica come too late."""

    @property
    def free_slots(self) -> int: ...
    @property
    def prefilling(self) -> int:
        """Requests that were sent and have not had their first token."""
        ...


C = TypeVar("C", bound=Candidate)


def choose(candidates: Iterable[C]) -> C | None:
    """Where the next request goes, or None while no slot is free (late binding: it waits in the queue).

    1. only replicas with a free slot
    2. those with the fewest prompts still to be read: a prefill stops all decodes of its replica
    3. of these the one with the most free slots; a tie goes to the first
    """
    best, lowest = None, (0, 0)
    for candidate in candidates:
        free = candidate.free_slots
        if free > 0:
            rank = candidate.prefilling, -free
            if best is None or rank < lowest:
                best, lowest = candidate, rank
    return best
