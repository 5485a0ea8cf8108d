"""Which replica a request goes to. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

PACE_SHARE = 0.05  # of the newest request in a pace
PACE_STEPS = 4  # to a factor of two, to which a pace is rounded


class Candidate(Protocol):
    """What the choice looks at, counted by the gateway itself: reports from the replica come too late."""

    @property
    def free_slots(self) -> int: ...
    @property
    def prefilling(self) -> int:
        """Requests that were sent and have not had their first token."""
        ...

    @property
    def pace(self) -> float:
        """Seconds that a token takes there, as measured by Pace; smaller is faster, 0.0 is not known yet."""
        ...


class Pace:
    """How fast a replica is: the seconds in which its requests got their tokens, the prompt and the first one left out,
    over the number of tokens. The newer count for more.

    Rounded, so that noise does not tell equal replicas apart: else the one that seems the fastest is filled up, and its
    prompts stop more decodes than they would elsewhere (benchmarks/routing.py: 3 % of the p99 of TTFT).
    """

    __slots__ = ("_seconds", "_tokens", "value")

    def __init__(self) -> None:
        self.value = 0.0  # seconds a token; 0.0: not known yet
        self._seconds = 0.0
        self._tokens = 0.0

    def ended(self, seconds: float, tokens: int) -> None:
        """A request has ended, ``seconds`` after its first token; ``tokens`` came after that one."""
        if tokens <= 0 or seconds <= 0:
            return
        self._seconds += seconds - PACE_SHARE * self._seconds
        self._tokens += tokens - PACE_SHARE * self._tokens
        self.value = 2 ** (round(math.log2(self._seconds / self._tokens) * PACE_STEPS) / PACE_STEPS)


C = TypeVar("C", bound=Candidate)


def choose(
    candidates: Iterable[C],
    affinity: Callable[[C], float] | None = None,
    stepped_at: Callable[[C], float] | None = None,
) -> C | None:
    """Where the next request goes, or None while no slot is free (late binding: it waits in the queue).

    1. only replicas with a free slot
    2. those with the fewest prompts still to be read: a prefill stops all decodes of its replica
    3. those with the highest ``affinity`` (0 to 1): they hold what the request begins with, or its session
    4. the fastest; one that is not measured yet counts as the fastest, and so is measured
    5. the one whose last tokens came first, by ``stepped_at``: its step is the nearest to its end, and a prompt is read
       between two steps
    6. of these the one with the most free slots; a tie goes to the first
    """
    available = [(candidate, free) for candidate in candidates if (free := candidate.free_slots) > 0]
    if len(available) < 2:
        return available[0][0] if available else None
    best: C | None = None
    lowest: tuple[int, float, float, float, int] = (0, 0.0, 0.0, 0.0, 0)
    for candidate, free in available:
        prefilling = candidate.prefilling
        if best is not None and prefilling > lowest[0]:
            continue
        rank = (
            prefilling,
            0.0 if affinity is None else -affinity(candidate),
            candidate.pace,
            0.0 if stepped_at is None else stepped_at(candidate),
            -free,
        )
        if best is None or rank < lowest:
            best, lowest = candidate, rank
    return best
