"""Chooses the replica of a request. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

PACE_SHARE = 0.05  # of the newest request in a pace
PACE_STEPS = 4  # a pace is rounded to a quarter power of two


class Candidate(Protocol):
    """What the choice depends on, counted by the gateway itself: reports from the replica would come too late."""

    @property
    def free_slots(self) -> int: ...
    @property
    def prefilling(self) -> int:
        """The requests that were sent there and have no token yet."""
        ...

    @property
    def pace(self) -> float:
        """The seconds per token there, as measured by Pace; 0.0 while unknown."""
        ...


class Pace:
    """The speed of a replica: the decode time of its requests over their tokens, without the prompt and the first
    token. Newer requests weigh more.

    The value is rounded, so that noise does not separate equal replicas: otherwise the seemingly fastest one is filled
    up, and its prompts stop more decodes than they would elsewhere (benchmarks/routing.py: 3 % of the p99 of TTFT).
    """

    __slots__ = ("_seconds", "_tokens", "value")

    def __init__(self) -> None:
        self.value = 0.0  # seconds per token; 0.0 while unknown
        self._seconds = 0.0
        self._tokens = 0.0

    def ended(self, seconds: float, tokens: int) -> None:
        """Records a request that ended ``seconds`` after its first token, with ``tokens`` after that one."""
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
    """Returns the replica of the next request; None while no slot is free (late binding: it waits in the queue).

    1. only replicas with a free slot
    2. the fewest prompts in prefill: a prefill stops all decodes of its replica
    3. the highest ``affinity`` (0 to 1): the replica has the prompt's prefix, or the request's session
    4. the fastest; an unmeasured replica counts as the fastest, so that it gets measured
    5. the earliest last step, by ``stepped_at``: its current step ends soonest, and prompts are read between steps
    6. the most free slots; a tie goes to the first, and candidates of the gateway's own machine come first
    """
    ties: list[C] = []
    lowest = math.inf
    for candidate in candidates:
        if candidate.free_slots > 0:  # 1
            prefilling = candidate.prefilling
            if prefilling < lowest:  # 2
                ties, lowest = [candidate], prefilling
            elif prefilling == lowest:
                ties.append(candidate)
    if len(ties) < 2:
        return ties[0] if ties else None
    best, least = ties[0], (math.inf, 0.0, 0.0, 0)
    for candidate in ties:
        rank = (
            0.0 if affinity is None else -affinity(candidate),  # 3
            candidate.pace,  # 4
            0.0 if stepped_at is None else stepped_at(candidate),  # 5
            -candidate.free_slots,  # 6
        )
        if rank < least:
            best, least = candidate, rank
    return best
