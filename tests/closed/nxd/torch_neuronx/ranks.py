"""The ranks of one call: threads that wait for each other at each collective.

A graph is the same for all ranks, as on the device: it reads from its weights which rank it is. While a graph is
traced there is one rank, and a collective gets its own value from each of the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

DEADLINE_S = 60.0  # of a collective: ranks that do not meet have different programs


class Ranks:
    """As many ranks as a model has cores, and what they exchange."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._threads = ThreadPoolExecutor(count, "rank")
        self._barrier = threading.Barrier(count)
        self._parts: list[Any] = [None] * count

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Returns the results of ``work`` for each rank. Raises what the first rank raised that failed by itself."""
        if self._count == 1:
            return [self._turn(0, work)]
        self._barrier.reset()
        turns = [self._threads.submit(self._turn, rank, work) for rank in range(self._count)]
        errors = [error for error in (turn.exception() for turn in turns) if error is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
        return [turn.result() for turn in turns]

    def _turn(self, rank: int, work: Callable[[int], Any]) -> Any:
        _current.place = (self, rank)
        try:
            with torch.inference_mode():
                return work(rank)
        except BaseException:
            self._barrier.abort()
            raise
        finally:
            _current.place = None

    def exchange(self, rank: int, value: torch.Tensor) -> list[torch.Tensor]:
        """Returns the values of all ranks."""
        self._parts[rank] = value.clone()
        self._barrier.wait(DEADLINE_S)
        values = list(self._parts)
        self._barrier.wait(DEADLINE_S)
        return values


_current = threading.local()


def exchange(value: torch.Tensor, groups: Sequence[Sequence[int]] | None) -> tuple[list[torch.Tensor], int]:
    """Returns the values of the ranks in this rank's group, and its place in the group."""
    place = getattr(_current, "place", None)
    if place is None:  # a trace
        return [value] * len(groups[0] if groups else [0]), 0
    ranks, rank = place
    values = ranks.exchange(rank, value)
    group = next(list(group) for group in groups or [range(len(values))] if rank in group)
    return [values[member] for member in group], group.index(rank)
