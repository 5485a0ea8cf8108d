"""The order of fair shares between tenants among waiting requests of one priority. Pure."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic

from orchestrator.dispatch.queued_request import W

REMEMBERED = 1024  # most idle tenants, and most priorities, whose counters are kept
RECENT = 1024  # the mean charge of a request is taken over about this many requests
PACE_COUNT = 8  # requests of a tenant that must have left before their pace is used
PACE_S = 60.0  # after this time the older half is dropped: the replicas may have changed


@dataclass(slots=True, eq=False)
class _TenantQueue(Generic[W]):
    """The waiting requests of one tenant in one priority, and the tenant's charges."""

    tenant: str
    weight: float
    counter: float = 0.0
    waiting: OrderedDict[int, W] = field(default_factory=OrderedDict)  # by id(): requests need not be hashable
    entry: tuple[float, float, int, _TenantQueue[W]] | None = None  # its valid entry in the heap
    left: int = 0  # requests that got a slot since the queue was last empty
    sample: tuple[float, int] | None = None  # a time since then, and the value of ``left`` at that time

    def wait_s(self, now: float) -> float:
        """Returns how long one more request would wait at the recent pace; 0.0 while the pace is unknown."""
        if not self.waiting:
            self.sample = None
            return 0.0
        if self.sample is None or (self.sample[1] == self.left and now - self.sample[0] > PACE_S):
            self.sample = now, self.left
            return 0.0
        at, before = self.sample
        count = self.left - before
        if count >= 2 * PACE_COUNT or (count > 1 and now - at > PACE_S):  # drop the older half
            self.sample = (at + now) / 2, (before + self.left) // 2
        return (len(self.waiting) + 1) * (now - at) / count if count >= PACE_COUNT else 0.0


class FairOrder(Generic[W]):
    """The requests of one priority, ordered by virtual token counters.

    The heap has one valid entry for each tenant with waiting requests: (counter, arrival of its first, number, lane).
    Counters grow while the entry stays; an entry with an outdated counter is replaced when it reaches the top.
    """

    def __init__(self, weights: dict[str, float]) -> None:
        self.count = 0
        self._weights = weights
        self._lanes: dict[str, _TenantQueue[W]] = {}
        self._heap: list[tuple[float, float, int, _TenantQueue[W]]] = []
        self._number = 0
        self._last: _TenantQueue[W] | None = None  # the tenant whose request left last, while the queue is empty
        self._floor = 0.0  # no waiting tenant is below it
        self._charged = 0.0  # for about the last RECENT requests, not divided by weights
        self._popped = 0

    def __iter__(self) -> Iterator[W]:
        return chain.from_iterable(lane.waiting.values() for lane in list(self._holding()))

    @property
    def tenants(self) -> int:
        return sum(1 for _ in self._holding())

    def set_weight(self, tenant: str, weight: float) -> None:
        if tenant in self._lanes:
            self._lanes[tenant].weight = weight

    def counter(self, tenant: str) -> float:
        lane = self._lanes.get(tenant)
        return 0.0 if lane is None else lane.counter

    def push(self, item: W) -> None:
        lane = self._lanes.get(item.tenant) or self._new_lane(item.tenant)
        waiting = lane.waiting
        if waiting:
            waiting[id(item)] = item
        else:
            lane.sample = None
            self._lift(lane)
            waiting[id(item)] = item
            self._enter(lane)
        self.count += 1

    def pass_by(self, item: W) -> None:
        lane = self._lanes.get(item.tenant) or self._new_lane(item.tenant)
        if not lane.waiting:
            self._lift(lane)
        if not self.count:
            self._last = lane
        self._count_one()

    def restore(self, item: W) -> None:
        lane = self._lanes.get(item.tenant) or self._new_lane(item.tenant)
        lane.waiting[id(item)] = item
        if len(lane.waiting) == 1:
            self._enter(lane)
        self.count += 1

    def put_back(self, item: W) -> None:
        """A tenant whose only request was popped is lifted no higher than the floor, so that it keeps its place."""
        lane = self._lanes.get(item.tenant) or self._new_lane(item.tenant)
        if not lane.waiting and lane.counter < self._floor:
            lane.counter = self._floor
        lane.waiting[id(item)] = item
        lane.waiting.move_to_end(id(item), last=False)
        self._enter(lane, front=True)
        self.count += 1

    def peek(self) -> W | None:
        lane = self._top()
        return None if lane is None else next(iter(lane.waiting.values()))

    def pop(self) -> W:
        lane = self._top()
        assert lane is not None
        if lane.counter > self._floor:
            self._floor = lane.counter
        _, item = lane.waiting.popitem(last=False)
        lane.left += 1
        self.count -= 1
        if lane.waiting:
            heapq.heapreplace(self._heap, self._entry(lane))
        else:
            heapq.heappop(self._heap)
            lane.entry = None
            self._last = lane
        self._count_one()
        return item

    def remove(self, item: W) -> bool:
        lane = self._lanes.get(item.tenant)
        if lane is None or id(item) not in lane.waiting:
            return False
        first = next(iter(lane.waiting)) == id(item)
        del lane.waiting[id(item)]
        self.count -= 1
        if not lane.waiting:
            lane.entry = None
            self._last = lane
        elif first:  # its entry holds the arrival of the first
            self._enter(lane)
        return True

    def last(self) -> W:
        """Returns the request that arrived last."""
        return max(
            (next(reversed(lane.waiting.values())) for lane in self._holding()), key=lambda item: item.arrived_at
        )

    def greediest(self, item: W) -> W | None:
        """Returns the last request of the tenant that has the most here for its weight; None unless that is more than
        the item's tenant would have."""
        mine = self._lanes.get(item.tenant)
        held = 0 if mine is None else len(mine.waiting)
        most = max(self._holding(), key=lambda lane: len(lane.waiting) / lane.weight)
        if most is mine or len(most.waiting) / most.weight <= (held + 1) / self._weights.get(item.tenant, 1.0):
            return None
        return next(reversed(most.waiting.values()))

    def charge(self, tenant: str, amount: float) -> None:
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = self._new_lane(tenant)
        lane.counter += amount / lane.weight
        self._charged += amount
        if amount < 0 and lane.waiting:
            self._enter(lane)

    def ahead_of(self, item: W) -> int:
        mine = self._lanes.get(item.tenant)
        before = 0
        if mine is not None:
            before = len(mine.waiting)
            if id(item) in mine.waiting:
                before = list(mine.waiting).index(id(item))
        mean = max(0.0, self._charged) / max(1, self._popped)
        counter = 0.0 if mine is None else mine.counter
        if mine is None or not mine.waiting:  # the push will lift it
            counter = max(counter, min((lane.counter for lane in self._holding()), default=0.0))
        then = counter + before * mean / self._weights.get(item.tenant, 1.0)
        ahead = before
        for lane in self._holding():
            if lane is not mine and lane.counter <= then:
                share = (then - lane.counter) * lane.weight
                ahead += min(len(lane.waiting), int(share / mean) + 1) if mean > 0 else len(lane.waiting)
        return ahead

    def own_wait_s(self, item: W, now: float) -> float:
        if len(self._lanes) < 2:
            return 0.0  # the only tenant: `ahead_of` counts all that goes before
        lane = self._lanes.get(item.tenant)
        return 0.0 if lane is None else lane.wait_s(now)

    def _count_one(self) -> None:
        """Counts a request that got a slot, for the mean charge."""
        self._popped += 1
        if self._popped >= 2 * RECENT:
            self._popped //= 2
            self._charged /= 2

    def _lift(self, lane: _TenantQueue[W]) -> None:
        """Lifts the counter to the lowest one of the waiting tenants, or to that of the tenant that left last."""
        first = self._top()
        lowest = first if first is not None else self._last
        if lowest is not None and lane.counter < lowest.counter:
            lane.counter = lowest.counter

    def _holding(self) -> Iterator[_TenantQueue[W]]:
        """Yields the tenants with waiting requests."""
        return (entry[3] for entry in self._heap if entry[3].entry is entry)

    def _top(self) -> _TenantQueue[W] | None:
        """Returns the tenant whose request is next."""
        heap = self._heap
        while heap:
            entry = heap[0]
            lane = entry[3]
            if lane.entry is not entry:  # outdated: the tenant left, or has a newer entry
                heapq.heappop(heap)
            elif entry[0] != lane.counter:  # the tenant was charged
                heapq.heapreplace(heap, self._entry(lane))
            else:
                return lane
        return None

    def _entry(self, lane: _TenantQueue[W], front: bool = False) -> tuple[float, float, int, _TenantQueue[W]]:
        self._number += 1
        number = -self._number if front else self._number
        lane.entry = lane.counter, next(iter(lane.waiting.values())).arrived_at, number, lane
        return lane.entry

    def _enter(self, lane: _TenantQueue[W], front: bool = False) -> None:
        heapq.heappush(self._heap, self._entry(lane, front))
        if len(self._heap) > 2 * len(self._lanes) + 16:  # clients that leave invalidate entries
            self._heap = [entry for entry in self._heap if entry[3].entry is entry]
            heapq.heapify(self._heap)

    def _new_lane(self, tenant: str) -> _TenantQueue[W]:
        if len(self._lanes) >= REMEMBERED:
            for each in [lane for lane in self._lanes.values() if not lane.waiting and lane.counter <= self._floor]:
                del self._lanes[each.tenant]  # it would be lifted above its counter anyhow
        lane = self._lanes[tenant] = _TenantQueue(tenant, self._weights.get(tenant, 1.0))
        return lane
