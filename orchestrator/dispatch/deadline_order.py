"""The order of earliest deadlines among waiting requests of one priority. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from operator import itemgetter
from typing import Generic

from orchestrator.dispatch.queued_request import QueuedRequest, W


class DeadlineOrder(Generic[W]):
    """The requests of one priority by deadline, those without one last; ties go to the earlier arrival."""

    def __init__(self) -> None:
        self._waiting: list[tuple[_Due, W]] = []  # in order
        self._due: dict[int, _Due] = {}  # by id()
        self._number = 0

    @property
    def count(self) -> int:
        return len(self._waiting)

    @property
    def tenants(self) -> int:
        """Counters do not matter here."""
        return 1 if self._waiting else 0

    def __iter__(self) -> Iterator[W]:
        return (item for _, item in self._waiting)

    def set_weight(self, tenant: str, weight: float) -> None:
        """Does nothing: this order has no shares."""

    def counter(self, tenant: str) -> float:
        return 0.0

    def charge(self, tenant: str, amount: float) -> None:
        """Does nothing: this order has no shares."""

    def push(self, item: W) -> None:
        self._number += 1
        self._insert(item, self._number)

    restore = push

    def pass_by(self, item: W) -> None:
        """Does nothing: this order has no shares."""

    def put_back(self, item: W) -> None:
        """Returns ``item`` by its deadline: a newer request with an earlier deadline goes first."""
        self._number += 1
        self._insert(item, -self._number)

    def peek(self) -> W | None:
        return self._waiting[0][1] if self._waiting else None

    def pop(self) -> W:
        _, item = self._waiting.pop(0)
        del self._due[id(item)]
        return item

    def remove(self, item: W) -> bool:
        due = self._due.pop(id(item), None)
        if due is not None:
            del self._waiting[self._place(due)]
        return due is not None

    def last(self) -> W:
        return self._waiting[-1][1]

    def greediest(self, item: W) -> W | None:
        return None

    def ahead_of(self, item: W) -> int:
        return self._place(self._due.get(id(item)) or _due(item, self._number + 1))

    def own_wait_s(self, item: W, now: float) -> float:
        return 0.0

    def _insert(self, item: W, number: int) -> None:
        due = self._due[id(item)] = _due(item, number)
        self._waiting.insert(self._place(due), (due, item))

    def _place(self, due: _Due) -> int:
        return bisect_left(self._waiting, due, key=itemgetter(0))


_Due = tuple[float, float, int]


def _due(item: QueuedRequest, number: int) -> _Due:
    """Returns the sort key of a request; the numbers of requests differ."""
    return math.inf if item.deadline is None else item.deadline, item.arrived_at, number
