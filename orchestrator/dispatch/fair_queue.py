"""The queue of one model: requests that wait for a slot, in the order in which they get one. Pure, without a clock.

The next request has the lowest ``priority`` number. With ``order="fair"`` it belongs to the tenant with the lowest
virtual token counter, and within a tenant it is the one that arrived first. The counter is that of Sheng et al.,
"Fairness in Serving Large Language Models" (OSDI 24): each tenant is charged W_PROMPT for a prompt token and W_OUTPUT
for an output token, divided by its weight. A tenant that returns after a pause is lifted to the lowest counter of the
waiting tenants, so that idle time earns no credit. Each priority has its own counters: a lift in one must not cost a
tenant its share in another. With ``order="deadline"`` the next request is the one with the earliest deadline.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain
from typing import Generic, Literal, NamedTuple

from orchestrator.dispatch.deadline_order import DeadlineOrder
from orchestrator.dispatch.fair_order import REMEMBERED, FairOrder
from orchestrator.dispatch.queued_request import W

W_PROMPT = 1.0  # charge for a prompt token; both weights are those of the paper's experiments
W_OUTPUT = 2.0

Order = Literal["fair", "deadline"]


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

    def __init__(self, max_count: int, max_bytes: int, *, order: Order = "fair") -> None:
        self.max_count = max_count
        self.max_bytes = max_bytes
        self.order: Order = order
        self.bytes = 0
        self.count = 0  # of waiting requests
        self._weights: dict[str, float] = {}
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
        self._marked(item.priority).push(item)
        self.count += 1
        self.bytes += item.size

    def pass_by(self, item: W) -> None:
        """Accounts for an ``item`` that gets a slot without waiting: lifts its tenant's counter as ``push`` does."""
        self._class(item.priority).pass_by(item)

    def put_back(self, item: W) -> None:
        """Returns a popped ``item`` that got no slot to the head of its priority and tenant, regardless of the limits.
        The caller takes its charge back: ``charge`` with the same tokens, negative."""
        self._marked(item.priority).put_back(item)
        self.count += 1
        self.bytes += item.size

    def peek(self) -> W | None:
        return self._classes[self.urgent[0]].peek() if self.count else None

    def pop(self) -> W:
        """Removes and returns the next request. Raises IndexError when the queue is empty."""
        if not self.count:
            raise IndexError("the queue is empty")
        priority = self.urgent[0]
        group = self._classes[priority]
        item = group.pop()
        self.count -= 1
        self.bytes -= item.size
        if not group.count:
            del self.urgent[0]
        return item

    def remove(self, item: W) -> bool:
        """Removes ``item``, whose client left. Returns whether it was in the queue."""
        group = self._classes.get(item.priority)
        if group is None or not group.remove(item):
            return False
        self.count -= 1
        self.bytes -= item.size
        if not group.count:
            del self.urgent[bisect_left(self.urgent, item.priority)]
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
            for victim in reversed(evicted):
                self._restore(victim)
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

    def _marked(self, priority: int) -> FairOrder[W] | DeadlineOrder[W]:
        """Returns the group of the priority, and marks it as one with waiting requests."""
        group = self._class(priority)
        if not group.count:
            insort(self.urgent, priority)
        return group

    def _restore(self, item: W) -> None:
        """Returns an item that was removed from the end to the end."""
        self._marked(item.priority).restore(item)
        self.count += 1
        self.bytes += item.size
