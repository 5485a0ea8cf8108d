"""The queue of one model: requests that wait for a slot, in the order in which they get one. Pure, without a clock.

The next request has the lowest ``priority`` number. With ``order="fair"`` it belongs to the tenant with the lowest
virtual token counter, and within a tenant it is the one that arrived first. The counter is that of Sheng et al.,
"Fairness in Serving Large Language Models" (OSDI 24): each tenant is charged W_PROMPT for a prompt token and W_OUTPUT
for an output token, divided by its weight. A tenant that returns after a pause is lifted to the lowest counter of the
waiting tenants, so that idle time earns no credit. Each priority has its own counters: a lift in one must not cost a
tenant its share in another. With ``order="deadline"`` the next request is the one with the earliest deadline.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort, insort_left, insort_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, Literal, NamedTuple, TypeVar

import msgspec

W_PROMPT = 1.0  # charge for a prompt token; both weights are those of the paper's experiments
W_OUTPUT = 2.0

REMEMBERED = 1024  # most idle tenants, and most priorities, whose counters are kept
RECENT = 1024  # the mean charge of a request is taken over about this many requests
PACE_COUNT = 8  # requests of a tenant that must have left before their pace is used
PACE_S = 60.0  # after this time the older half is dropped: the replicas may have changed


Order = Literal["fair", "deadline"]


class QueuedRequest(msgspec.Struct, eq=False):
    """A request that may wait. While it waits, only its prompt may change, and `FairQueue.bytes` with it."""

    tenant: str  # the id of its API key, or "" without keys
    priority: int  # lower goes first; the default is 0, as in vLLM
    arrived_at: float  # monotonic seconds
    deadline: float | None  # the latest time for its first token, on the same clock
    size: int  # bytes
    tokens: int  # of its prompt


W = TypeVar("W", bound=QueuedRequest)


class QueueFull(NamedTuple):
    """The queue is full: ``used`` of ``dimension`` are taken, and ``needed`` more would exceed ``limit``."""

    dimension: Literal["count", "bytes"]
    used: int
    needed: int
    limit: int

    def __str__(self) -> str:
        unit = "requests" if self.dimension == "count" else "bytes of requests"
        return f"{self.used} {unit} are waiting; {self.needed} more would exceed the limit of {self.limit}"


class FairQueue(Generic[W]):
    """Requests in the order in which they get slots. Times are only compared; no clock is read.

    ``max_count``, ``max_bytes`` and weights may change at any time; requests that already wait stay.
    """

    def __init__(
        self,
        max_count: int,
        max_bytes: int,
        *,
        order: Order = "fair",
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """``weights`` are those of tenants, see ``set_weight``."""
        self.max_count = max_count
        self.max_bytes = max_bytes
        self.order: Order = order
        self.bytes = 0
        self.count = 0  # of waiting requests
        self._weights = dict(weights or {})
        self._classes: dict[int, FairOrder[W] | DeadlineOrder[W]] = {}
        self.urgent: list[int] = []  # the priorities with waiting requests, in order

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[W]:
        """Yields the waiting requests in no particular order."""
        return chain.from_iterable(list(self._classes[priority]) for priority in list(self.urgent))

    @property
    def tenants(self) -> int:
        """The tenants with waiting requests; one that waits with two priorities counts twice."""
        return sum(self._classes[priority].tenants for priority in self.urgent)

    def set_weight(self, tenant: str, weight: float) -> None:
        """Sets the tenant's share, above 0 and relative to the default of 1.0. Earlier charges stay."""
        self._weights[tenant] = weight
        for group in self._classes.values():
            group.set_weight(tenant, weight)

    def refusal(self, item: W) -> QueueFull | None:
        """Returns why ``item`` does not fit into the queue; None when it does."""
        if self.count >= self.max_count:
            return QueueFull("count", self.count, 1, self.max_count)
        if self.bytes + item.size > self.max_bytes:
            return QueueFull("bytes", self.bytes, item.size, self.max_bytes)
        return None

    def push(self, item: W) -> None:
        """Adds ``item``, for which ``refusal`` has returned None."""
        self._enter(item).push(item)

    def pass_by(self, item: W) -> None:
        """Accounts for an ``item`` that gets a slot without waiting: lifts its tenant's counter as ``push`` does."""
        self._class(item.priority).pass_by(item)

    def put_back(self, item: W) -> None:
        """Returns a popped ``item`` that got no slot to the head of its priority and tenant, regardless of the limits.
        The caller takes its charge back: ``charge`` with the same tokens, negative."""
        self._enter(item).put_back(item)

    def peek(self) -> W | None:
        return self._classes[self.urgent[0]].peek() if self.count else None

    def pop(self) -> W:
        """Removes and returns the next request. Raises IndexError when the queue is empty."""
        if not self.count:
            raise IndexError("the queue is empty")
        group = self._classes[self.urgent[0]]
        item = group.pop()
        self._leave(item, group)
        return item

    def remove(self, item: W) -> bool:
        """Removes ``item``, whose client left. Returns whether it was in the queue."""
        group = self._classes.get(item.priority)
        if group is None or not group.remove(item):
            return False
        self._leave(item, group)
        return True

    def make_room(self, item: W) -> list[W]:
        """Evicts requests so that ``item`` fits, and returns them: one client that floods the queue must not starve
        others. Returns an empty list when ``item`` fits anyway, or when no request may be evicted for it.

        1. the last request of the least urgent priority, if that is less urgent than the item's
        2. in fair order, the last request of the tenant that holds the most of the item's priority for its weight, if
           that is more than the item's tenant would hold
        """
        evicted: list[W] = []
        while self.refusal(item) is not None:
            lowest = self.urgent[-1] if self.urgent else item.priority
            victim = None
            if lowest > item.priority:  # 1
                victim = self._classes[lowest].last()
            elif lowest == item.priority and self.urgent:  # 2
                victim = self._classes[lowest].greediest(item)
            if victim is None:
                break
            self.remove(victim)
            evicted.append(victim)
        if evicted and self.refusal(item) is not None:  # too large even so: restore them all
            for victim in reversed(evicted):  # each to the end from which it was removed
                self._enter(victim).restore(victim)
            return []
        return evicted

    def charge(self, tenant: str, prompt_tokens: int = 0, output_tokens: int = 0, priority: int = 0) -> None:
        """Charges the tenant: for the prompt when a request gets a slot, for the answer as tokens arrive. ``priority``
        is the request's. Negative tokens refund a charge."""
        self._class(priority).charge(tenant, W_PROMPT * prompt_tokens + W_OUTPUT * output_tokens)

    def counter(self, tenant: str, priority: int = 0) -> float:
        """Returns the tenant's virtual token counter; 0 for an unknown tenant."""
        group = self._classes.get(priority)
        return 0.0 if group is None else group.counter(tenant)

    def ahead_of(self, item: W) -> int:
        """Returns how many requests would get a slot before ``item``, which waits or is about to be pushed.

        In fair order a request of another tenant counts if that tenant's counter, plus the mean charge for each request
        before it, does not exceed what the item's tenant will have by then.
        """
        more_urgent = self.urgent[: bisect_left(self.urgent, item.priority)]
        ahead = sum(self._classes[priority].count for priority in more_urgent)
        group = self._classes.get(item.priority)
        return ahead + (0 if group is None else group.ahead_of(item))

    def own_wait_s(self, item: W, now: float) -> float:
        """Returns the seconds that ``item``, about to be pushed, would wait at its tenant's recent pace of getting
        slots; 0.0 while the pace is unknown. ``ahead_of`` cannot see this wait: tenants that send their next request
        only after the last answer take their share each time, though they have nothing in the queue now.
        """
        group = self._classes.get(item.priority)
        return 0.0 if group is None else group.own_wait_s(item, now)

    def clear(self) -> list[W]:
        """Removes and returns all requests, in order."""
        return [self.pop() for _ in range(self.count)]

    # Inside

    def _class(self, priority: int) -> FairOrder[W] | DeadlineOrder[W]:
        """Returns the group of the priority."""
        group = self._classes.get(priority)
        if group is None:
            if len(self._classes) >= REMEMBERED:  # clients choose the number
                self._classes = {each: group for each, group in self._classes.items() if group.count}
            group = FairOrder(self._weights) if self.order == "fair" else DeadlineOrder()
            self._classes[priority] = group
        return group

    def _enter(self, item: W) -> FairOrder[W] | DeadlineOrder[W]:
        """Counts an item that is about to wait, and returns the group of its priority."""
        group = self._class(item.priority)
        if not group.count:
            insort(self.urgent, item.priority)
        self.count += 1
        self.bytes += item.size
        return group

    def _leave(self, item: W, group: FairOrder[W] | DeadlineOrder[W]) -> None:
        """Uncounts an item that has left its group."""
        self.count -= 1
        self.bytes -= item.size
        if not group.count:
            del self.urgent[bisect_left(self.urgent, item.priority)]


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


class DeadlineOrder(Generic[W]):
    """The requests of one priority by deadline, those without one last; ties go to the earlier arrival."""

    def __init__(self) -> None:
        self._waiting: list[W] = []  # in order

    @property
    def count(self) -> int:
        return len(self._waiting)

    @property
    def tenants(self) -> int:
        """Counters do not matter here."""
        return 1 if self._waiting else 0

    def __iter__(self) -> Iterator[W]:
        return iter(self._waiting)

    def set_weight(self, tenant: str, weight: float) -> None:
        """Does nothing: this order has no shares."""

    def counter(self, tenant: str) -> float:
        return 0.0

    def charge(self, tenant: str, amount: float) -> None:
        """Does nothing: this order has no shares."""

    def push(self, item: W) -> None:
        insort_right(self._waiting, item, key=_due)

    restore = push

    def pass_by(self, item: W) -> None:
        """Does nothing: this order has no shares."""

    def put_back(self, item: W) -> None:
        """Returns ``item`` by its deadline: a newer request with an earlier deadline goes first."""
        insort_left(self._waiting, item, key=_due)

    def peek(self) -> W | None:
        return self._waiting[0] if self._waiting else None

    def pop(self) -> W:
        return self._waiting.pop(0)

    def remove(self, item: W) -> bool:
        place = self._place(item)
        if place is not None:
            del self._waiting[place]
        return place is not None

    def last(self) -> W:
        return self._waiting[-1]

    def greediest(self, item: W) -> W | None:
        return None

    def ahead_of(self, item: W) -> int:
        place = self._place(item)
        return bisect_right(self._waiting, _due(item), key=_due) if place is None else place

    def own_wait_s(self, item: W, now: float) -> float:
        return 0.0

    def _place(self, item: W) -> int | None:
        """Returns the place of a waiting request; None if it does not wait."""
        equals = bisect_left(self._waiting, _due(item), key=_due), bisect_right(self._waiting, _due(item), key=_due)
        return next((place for place in range(*equals) if self._waiting[place] is item), None)


def _due(item: QueuedRequest) -> tuple[float, float]:
    return math.inf if item.deadline is None else item.deadline, item.arrived_at
