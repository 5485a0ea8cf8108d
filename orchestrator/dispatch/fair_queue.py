"""The queue of one model: what waits for a slot, and who is next. Pure, without a clock of its own.

The next request is one of the lowest ``priority``; with ``order="fair"`` one of the tenant with the lowest virtual
token counter, and of one tenant the one that came first. The counter is that of Sheng et al., "Fairness in Serving
Large Language Models" (OSDI 24): each tenant is charged W_PROMPT for a token of its prompts and W_OUTPUT for a token of
its answers, over its weight; a tenant that comes back after a pause is lifted to the lowest counter of those that wait,
so that nobody saves up service. Each priority has counters of its own: what is lifted in one must not cost a tenant its
share in another. With ``order="deadline"`` the next is instead the one whose deadline ends first.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from typing import Generic, Literal, Protocol, TypeVar

W_PROMPT = 1.0  # what a token of a prompt is charged; both weights are those of the paper's experiments
W_OUTPUT = 2.0
REMEMBERED = 1024  # tenants without a request here, and priorities, whose counters are kept at the most
RECENT = 1024  # requests over which the mean charge of a request is taken, about
PACE_COUNT = 8  # requests of a tenant that must have left for their pace to count
PACE_S = 60.0  # after so long the older half of them counts no more: there may have been other replicas

Order = Literal["fair", "deadline"]


class QueuedRequest(Protocol):
    """What waits. While it does, only its size may change, and `Line.bytes` by as much."""

    @property
    def tenant(self) -> str:
        """Whose it is: the id of an API key, or "" where there are no keys."""
        ...

    @property
    def priority(self) -> int:
        """Lower goes first; 0 is the default, as vLLM has it."""
        ...

    @property
    def arrived_at(self) -> float:
        """Monotonic seconds."""
        ...

    @property
    def deadline(self) -> float | None:
        """By when it should have its first token, on the same clock."""
        ...

    @property
    def size(self) -> int:
        """Bytes that it holds."""
        ...

    @property
    def tokens(self) -> int:
        """Of its prompt."""
        ...


W = TypeVar("W", bound=QueuedRequest)


class QueueFull(Exception):
    """Nothing more may wait: of ``dimension``, ``used`` is taken, and ``asked`` more would exceed ``limit``."""

    def __init__(self, dimension: Literal["count", "bytes"], used: int, asked: int, limit: int) -> None:
        what = "requests" if dimension == "count" else "bytes of requests"
        super().__init__(f"{used} {what} wait; {asked} more would exceed {limit}")
        self.dimension = dimension
        self.used = used
        self.asked = asked
        self.limit = limit


class FairQueue(Generic[W]):
    """Requests in the order in which they get slots. Times are only compared, never read.

    ``max_count``, ``max_bytes`` and weights may change at any time; what waits already stays.
    """

    def __init__(self, max_count: int, max_bytes: int, *, order: Order = "fair") -> None:
        self.max_count = max_count
        self.max_bytes = max_bytes
        self.order: Order = order
        self.bytes = 0
        self._count = 0
        self._weights: dict[str, float] = {}
        self._classes: dict[int, _Fair[W] | _Earliest[W]] = {}
        self._urgent: list[int] = []  # the priorities of which something waits, in their order

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[W]:
        """In no promised order."""
        return chain.from_iterable(list(self._classes[priority]) for priority in list(self._urgent))

    @property
    def tenants(self) -> int:
        """How many have something that waits; one that waits with two priorities counts twice."""
        return sum(self._classes[priority].tenants for priority in self._urgent)

    def set_weight(self, tenant: str, weight: float) -> None:
        """Its share, against 1.0 of every other. Tokens that were charged stay charged. Raises ValueError."""
        if not 0 < weight < math.inf:
            raise ValueError(f"the weight of a tenant is a number above 0, not {weight}")
        self._weights[tenant] = weight
        for group in self._classes.values():
            group.set_weight(tenant, weight)

    def full(self, item: W) -> QueueFull | None:
        """Why ``item`` may not wait, if it may not."""
        if self._count >= self.max_count:
            return QueueFull("count", self._count, 1, self.max_count)
        if self.bytes + item.size > self.max_bytes:
            return QueueFull("bytes", self.bytes, item.size, self.max_bytes)
        return None

    def push(self, item: W) -> None:
        """Raises QueueFull."""
        if self._count >= self.max_count or self.bytes + item.size > self.max_bytes:
            full = self.full(item)
            assert full is not None
            raise full
        self._class(item.priority).push(item)
        self._count += 1
        self.bytes += item.size

    def pass_by(self, item: W) -> None:
        """It gets a slot without waiting, whatever the bounds are: its tenant's counter is lifted as by ``push``."""
        group = self._classes.get(item.priority)
        if group is None:
            group = self._classes[item.priority] = self._new_class()
        group.pass_by(item)

    def put_back(self, item: W) -> None:
        """One that was popped, and got no slot, goes before all others of its priority and tenant; bounds do not count.
        What it was charged is taken back by ``served`` with the same tokens, negative."""
        self._class(item.priority).put_back(item)
        self._count += 1
        self.bytes += item.size

    def peek(self) -> W | None:
        return self._classes[self._urgent[0]].peek() if self._count else None

    def pop(self) -> W:
        """Raises IndexError when nothing waits."""
        if not self._count:
            raise IndexError("nothing waits")
        priority = self._urgent[0]
        group = self._classes[priority]
        item = group.pop()
        self._count -= 1
        self.bytes -= item.size
        if not group.count:
            self._settle(priority, group)
        return item

    def remove(self, item: W) -> bool:
        """Its client left. Says whether it was there."""
        group = self._classes.get(item.priority)
        if group is None or not group.remove(item):
            return False
        self._count -= 1
        self.bytes -= item.size
        if not group.count:
            self._settle(item.priority, group)
        return True

    def make_room(self, item: W) -> list[W]:
        """Those that left, so that ``item`` may wait: without this, who floods the line keeps all others out of it. An
        empty list when it may wait anyhow, or when nobody is to leave for it.

        1. the last of the least urgent priority, if that is less urgent than the item's
        2. the last of the tenant that holds the most of the item's own priority for its weight, if that is more than
           the item's tenant would hold (only in fair order)
        """
        left: list[W] = []
        while self.full(item) is not None:
            lowest = self._urgent[-1] if self._urgent else item.priority
            victim = None
            if lowest > item.priority:  # 1
                victim = self._classes[lowest].last()
            elif lowest == item.priority and self._urgent:  # 2
                victim = self._classes[lowest].greediest(item)
            if victim is None:
                break
            self.remove(victim)
            left.append(victim)
        if left and self.full(item) is not None:  # it is too large for all of them: nobody has to leave
            for victim in reversed(left):
                self._restore(victim)
            return []
        return left

    def served(self, tenant: str, prompt_tokens: int = 0, output_tokens: int = 0, priority: int = 0) -> None:
        """Charge the tenant: its prompt when it gets a slot, its answer as tokens come. ``priority`` is that of the
        request. Negative tokens take back what was charged."""
        group = self._classes.get(priority)
        if group is None:
            group = self._classes[priority] = self._new_class()
        group.served(tenant, W_PROMPT * prompt_tokens + W_OUTPUT * output_tokens)

    def counter(self, tenant: str, priority: int = 0) -> float:
        """The tenant's virtual token counter; 0 for one that is not known."""
        group = self._classes.get(priority)
        return 0.0 if group is None else group.counter(tenant)

    def ahead_of(self, item: W) -> int:
        """How many would get a slot before it, as far as is known now; it waits, or is about to be pushed.

        In fair order a request of another tenant counts if that tenant's counter, plus the mean charge of a request for
        each one before it, is not above what the item's tenant will have then.
        """
        more_urgent = self._urgent[: bisect_left(self._urgent, item.priority)]
        ahead = sum(self._classes[priority].count for priority in more_urgent)
        group = self._classes.get(item.priority)
        return ahead + (0 if group is None else group.ahead_of(item))

    def own_wait_s(self, item: W, now: float) -> float:
        """Seconds that ``item``, about to be pushed, would wait at the pace at which requests of its tenant got slots
        lately; 0.0 while nobody knows. Tenants that share with it need not wait here themselves to go before it:
        those that ask again and again take their shares each time.
        """
        group = self._classes.get(item.priority)
        return 0.0 if group is None else group.own_wait_s(item, now)

    def clear(self) -> list[W]:
        """All that waited, in their order."""
        return [self.pop() for _ in range(self._count)]

    # Inside

    def _class(self, priority: int) -> _Fair[W] | _Earliest[W]:
        """The one that something is put into now."""
        group = self._classes.get(priority)
        if group is None:
            group = self._classes[priority] = self._new_class()
        if not group.count:
            insort(self._urgent, priority)
        return group

    def _new_class(self) -> _Fair[W] | _Earliest[W]:
        if len(self._classes) >= REMEMBERED:  # clients choose the number
            for priority in [each for each, group in self._classes.items() if not group.count]:
                del self._classes[priority]
        return _Fair(self._weights) if self.order == "fair" else _Earliest()

    def _settle(self, priority: int, group: _Fair[W] | _Earliest[W]) -> None:
        """Nothing waits in it now."""
        if not group.count:
            del self._urgent[bisect_left(self._urgent, priority)]

    def _restore(self, item: W) -> None:
        """One that was removed from the end goes there again."""
        self._class(item.priority).restore(item)
        self._count += 1
        self.bytes += item.size


class _TenantQueue(Generic[W]):
    """What waits of one tenant in one priority, and what the tenant was charged."""

    __slots__ = ("counter", "entry", "left", "seen", "tenant", "waiting", "weight")

    def __init__(self, tenant: str, weight: float) -> None:
        self.tenant = tenant
        self.weight = weight
        self.counter = 0.0
        self.waiting: OrderedDict[int, W] = OrderedDict()  # by id(): what waits need not be hashable
        self.entry: tuple[float, float, int, _TenantQueue[W]] | None = None  # its valid one in the heap
        self.left = 0  # requests that got a slot since something waits
        self.seen: tuple[float, int] | None = None  # a time since then, and how many had left

    def wait_s(self, now: float) -> float:
        """How long one more would wait at the pace at which requests left lately; 0.0 while nobody knows."""
        if not self.waiting:
            self.seen = None
            return 0.0
        if self.seen is None or (self.seen[1] == self.left and now - self.seen[0] > PACE_S):
            self.seen = now, self.left
            return 0.0
        at, before = self.seen
        count = self.left - before
        if count >= 2 * PACE_COUNT or (count > 1 and now - at > PACE_S):  # the older half counts no more
            self.seen = (at + now) / 2, (before + self.left) // 2
        return (len(self.waiting) + 1) * (now - at) / count if count >= PACE_COUNT else 0.0


class _Fair(Generic[W]):
    """One priority, by virtual token counters.

    The heap has one valid entry for each tenant with something that waits: (counter, when its first came, number,
    lane). Counters grow while the entry stays: one at the top whose counter is too low is put in its place then.
    """

    def __init__(self, weights: dict[str, float]) -> None:
        self.count = 0
        self._weights = weights
        self._lanes: dict[str, _TenantQueue[W]] = {}
        self._heap: list[tuple[float, float, int, _TenantQueue[W]]] = []
        self._number = 0
        self._last: _TenantQueue[W] | None = None  # the tenant whose request was the last to leave, when nothing waits
        self._floor = 0.0  # no tenant that waits is below it
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
            lane.seen = None
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
        """A tenant whose only request was away is lifted no higher than what was next since: it keeps its place."""
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
        elif first:  # its entry told when the first came
            self._enter(lane)
        return True

    def last(self) -> W:
        """Of all, the one that came last."""
        return max(
            (next(reversed(lane.waiting.values())) for lane in self._holding()), key=lambda item: item.arrived_at
        )

    def greediest(self, item: W) -> W | None:
        """The last of the tenant that has most here for its weight, if it has more than the item's would."""
        mine = self._lanes.get(item.tenant)
        held = 0 if mine is None else len(mine.waiting)
        most = max(self._holding(), key=lambda lane: len(lane.waiting) / lane.weight)
        if most is mine or len(most.waiting) / most.weight <= (held + 1) / self._weights.get(item.tenant, 1.0):
            return None
        return next(reversed(most.waiting.values()))

    def served(self, tenant: str, charge: float) -> None:
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = self._new_lane(tenant)
        lane.counter += charge / lane.weight
        self._charged += charge
        if charge < 0 and lane.waiting:
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
        if mine is None or not mine.waiting:  # it will be lifted
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
            return 0.0  # nobody shares with it: `ahead_of` knows all that goes before
        lane = self._lanes.get(item.tenant)
        return 0.0 if lane is None else lane.wait_s(now)

    def _count_one(self) -> None:
        """That got a slot: the mean charge is taken over those."""
        self._popped += 1
        if self._popped >= 2 * RECENT:
            self._popped //= 2
            self._charged /= 2

    def _lift(self, lane: _TenantQueue[W]) -> None:
        """To the lowest counter of those that wait, or of the tenant that was the last to."""
        first = self._top()
        lowest = first if first is not None else self._last
        if lowest is not None and lane.counter < lowest.counter:
            lane.counter = lowest.counter

    def _holding(self) -> Iterator[_TenantQueue[W]]:
        """Those with something that waits."""
        return (entry[3] for entry in self._heap if entry[3].entry is entry)

    def _top(self) -> _TenantQueue[W] | None:
        """Whose request is next."""
        heap = self._heap
        while heap:
            entry = heap[0]
            lane = entry[3]
            if lane.entry is not entry:  # it left, or has another
                heapq.heappop(heap)
            elif entry[0] != lane.counter:  # it was charged
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
        if len(self._heap) > 2 * len(self._lanes) + 16:  # clients that leave make entries invalid
            self._heap = [entry for entry in self._heap if entry[3].entry is entry]
            heapq.heapify(self._heap)

    def _new_lane(self, tenant: str) -> _TenantQueue[W]:
        if len(self._lanes) >= REMEMBERED:
            for each in [lane for lane in self._lanes.values() if not lane.waiting and lane.counter <= self._floor]:
                del self._lanes[each.tenant]  # it would be lifted above its counter anyhow
        lane = self._lanes[tenant] = _TenantQueue(tenant, self._weights.get(tenant, 1.0))
        return lane


class _Due(Generic[W]):
    """One that waits, in the order of deadlines."""

    __slots__ = ("item", "key")

    def __init__(self, key: tuple[float, float, int], item: W) -> None:
        self.key = key
        self.item: W | None = item  # None: it has left

    def __lt__(self, other: _Due[W]) -> bool:
        return self.key < other.key


class _Earliest(Generic[W]):
    """One priority, by deadlines; those without one come last, and among equals who arrived first."""

    def __init__(self) -> None:
        self._heap: list[_Due[W]] = []
        self._waiting: dict[int, _Due[W]] = {}  # by id()
        self._number = 0

    @property
    def count(self) -> int:
        return len(self._waiting)

    @property
    def tenants(self) -> int:
        """Nobody's counter matters here."""
        return 1 if self._waiting else 0

    def __iter__(self) -> Iterator[W]:
        return (due.item for due in self._waiting.values() if due.item is not None)

    def set_weight(self, tenant: str, weight: float) -> None:
        """Deadlines know no shares."""

    def counter(self, tenant: str) -> float:
        return 0.0

    def served(self, tenant: str, charge: float) -> None:
        """Deadlines know no shares."""

    def push(self, item: W) -> None:
        self._number += 1
        self._put(item, self._number)

    restore = push

    def pass_by(self, item: W) -> None:
        """Deadlines know no shares."""

    def put_back(self, item: W) -> None:
        """By its deadline again: what came meanwhile and is due before it goes first."""
        self._number += 1
        self._put(item, -self._number)

    def peek(self) -> W | None:
        while self._heap and self._heap[0].item is None:
            heapq.heappop(self._heap)
        return self._heap[0].item if self._heap else None

    def pop(self) -> W:
        item = self.peek()
        assert item is not None
        heapq.heappop(self._heap)
        del self._waiting[id(item)]
        return item

    def remove(self, item: W) -> bool:
        due = self._waiting.pop(id(item), None)
        if due is None:
            return False
        due.item = None
        if len(self._heap) > 2 * len(self._waiting) + 16:
            self._heap = list(self._waiting.values())
            heapq.heapify(self._heap)
        return True

    def last(self) -> W:
        item = max(self._waiting.values()).item
        assert item is not None
        return item

    def greediest(self, item: W) -> W | None:
        return None

    def ahead_of(self, item: W) -> int:
        due = self._waiting.get(id(item))
        key = self._key(item, self._number + 1) if due is None else due.key
        return sum(each.key < key for each in self._waiting.values())

    def own_wait_s(self, item: W, now: float) -> float:
        return 0.0

    def _key(self, item: W, number: int) -> tuple[float, float, int]:
        return math.inf if item.deadline is None else item.deadline, item.arrived_at, number

    def _put(self, item: W, number: int) -> None:
        due = self._waiting[id(item)] = _Due(self._key(item, number), item)
        heapq.heappush(self._heap, due)
