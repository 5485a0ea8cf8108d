"""HostIndex: hosts in the order of a rank that changes with what lies on them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

Rank = tuple[float, ...]


class HostIndex:
    """Hosts in the order of a rank that is computed anew for those that have changed."""

    def __init__(self, hosts: Sequence[int], rank: Callable[[int], Rank | None]) -> None:
        self._rank = rank
        self._current: dict[int, Rank | None] = {}
        self._heap: list[tuple[Rank, int]] = []
        for host in hosts:
            found = self._current[host] = rank(host)
            if found is not None:
                self._heap.append((found, host))
        heapq.heapify(self._heap)
        self.changed: set[int] = set()

    def _refresh(self) -> None:
        for host in self.changed:
            if host in self._current:
                found = self._rank(host)
                if found != self._current[host]:
                    self._current[host] = found
                    if found is not None:
                        heapq.heappush(self._heap, (found, host))
        self.changed.clear()

    def __len__(self) -> int:
        """Hosts that have a rank."""
        self._refresh()
        return sum(rank is not None for rank in self._current.values())

    def first(self) -> tuple[Rank, int] | None:
        """The rank and number of the best host."""
        self._refresh()
        heap = self._heap
        while heap and self._current[heap[0][1]] != heap[0][0]:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def ranked(self, most: int, usable: Callable[[int], bool] | None = None) -> list[tuple[Rank, int]]:
        """The best ``most`` hosts that are ``usable``, best first."""
        if most == 1 and usable is None:
            top = self.first()
            return [] if top is None else [top]
        found: list[tuple[Rank, int]] = []
        held: list[tuple[Rank, int]] = []
        while len(found) < most:
            top = self.first()
            if top is None:
                break
            heapq.heappop(self._heap)
            held.append(top)
            self._current[top[1]] = None  # so that a second entry of it is not taken for good
            if usable is None or usable(top[1]):
                found.append(top)
        for entry in held:
            self._current[entry[1]] = entry[0]
            heapq.heappush(self._heap, entry)
        return found
