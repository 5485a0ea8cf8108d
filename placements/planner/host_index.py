"""Keeps hosts ordered by a rank that changes with their replicas."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

Rank = tuple[float, ...]


class HostIndex:
    """Hosts ordered by a rank. The ranks of ``changed`` hosts are recomputed on the next query."""

    def __init__(self, hosts: Sequence[int], rank: Callable[[int], Rank | None]) -> None:
        self._rank = rank
        self._current: dict[int, Rank | None] = {}
        self._heap: list[tuple[Rank, int]] = []
        for host in hosts:
            value = self._current[host] = rank(host)
            if value is not None:
                self._heap.append((value, host))
        heapq.heapify(self._heap)
        self.changed: set[int] = set()

    def _refresh(self) -> None:
        for host in self.changed:
            if host in self._current:
                rank = self._rank(host)
                if rank != self._current[host]:
                    self._current[host] = rank
                    if rank is not None:
                        heapq.heappush(self._heap, (rank, host))
        self.changed.clear()

    def __len__(self) -> int:
        """Returns the number of hosts that have a rank."""
        self._refresh()
        return sum(rank is not None for rank in self._current.values())

    def first(self) -> tuple[Rank, int] | None:
        """Returns the rank and number of the best host."""
        self._refresh()
        heap = self._heap
        while heap and self._current[heap[0][1]] != heap[0][0]:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def ranked(self, most: int, usable: Callable[[int], bool] | None = None) -> list[tuple[Rank, int]]:
        """Returns the best ``most`` hosts that are ``usable``, best first."""
        if most == 1 and usable is None:
            top = self.first()
            return [] if top is None else [top]
        best: list[tuple[Rank, int]] = []
        popped: list[tuple[Rank, int]] = []
        while len(best) < most:
            top = self.first()
            if top is None:
                break
            heapq.heappop(self._heap)
            popped.append(top)
            self._current[top[1]] = None  # so that a second, stale entry of the host is dropped
            if usable is None or usable(top[1]):
                best.append(top)
        for entry in popped:
            self._current[entry[1]] = entry[0]
            heapq.heappush(self._heap, entry)
        return best
