"""Decides which request of a model gets which slot, which requests wait, and which are refused. Pure.

Gateway and simulator use it alike: callers pass the time, and carry out the `Effects`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from orchestrator.dispatch.fair_queue import FairQueue, Order, QueuedRequest, QueueFull
from orchestrator.dispatch.replica_choice import LEAST_PREFIX, Candidate, Chain, PrefixIndex, Sessions, chain, choose
from orchestrator.dispatch.wait_prediction import FIRST_SERVICE_S, MEAN_SHARE, predicted_wait_s

TIMER_S = 0.001  # a timer may fire this much before its time
WINDOW_S = 60.0  # of the peaks that the headroom follows
MOST_CLASSES = 64  # priorities that are counted; clients choose the numbers


class Entry(QueuedRequest, kw_only=True):
    """A request with the dispatcher's record of it. Only `Dispatcher` changes the record."""

    session: str = ""  # requests of one session prefer one replica
    prompt_ids: Sequence[int] = ()  # where an engine may cache prefixes
    chain: Chain | None = None  # digests of the prompt's blocks; None until they are needed
    affinity: str = ""  # why its replica was preferred: session or prefix
    canary: bool = False  # it goes to the canary version
    waits: bool = False  # it is in a line
    held_since: float | None = None  # since then it waits for a first replica, at most hold_s
    in_headroom: bool = False  # it is counted there
    charged: int = -1  # tokens of the answer that its tenant was charged for; -1 before the prompt is charged
    carried: int = -1  # the part of ``charged`` that was charged to earlier lines


class Full(NamedTuple):
    """The queue is full, with so many ``waiting``."""

    cause: QueueFull
    waiting: int


class Unreachable(NamedTuple):
    """The predicted wait is longer than the deadline allows."""

    wait_s: float
    allowed_s: float


class Expired(NamedTuple):
    """The deadline has passed in the queue."""

    waited_s: float


class NotStarted(NamedTuple):
    """The model had no replica, or none that could be reached, for ``hold_s``."""

    waited_s: float


Refusal = Full | Unreachable | Expired | NotStarted


@dataclass(frozen=True, kw_only=True)
class QueueSettings:
    """The settings of a model's queue."""

    max_queue: int = 256  # waiting requests of one version
    max_queue_bytes: int = 1 << 40
    max_wait_s: float | None = None  # a request is refused if its first token cannot come within this time
    queue_order: Order = "fair"
    hold_s: float = math.inf  # the longest wait for a first replica
    canary: float | None = None  # the share of the requests that goes to the canary version; None without one
    canaries: Sequence[str] = ()  # the ids of the replicas of that version


E = TypeVar("E", bound=Entry)
E_co = TypeVar("E_co", bound=Entry, covariant=True)
E_contra = TypeVar("E_contra", bound=Entry, contravariant=True)


class Link(Candidate, Protocol[E_co]):
    """The requests of this gateway at one replica."""

    id: str
    prefixes: PrefixIndex | None  # for an engine with a prefix cache

    @property
    def live(self) -> int: ...
    @property
    def progress(self) -> Iterable[tuple[E_co, int]]:
        """Its requests, with the tokens that each has so far."""
        ...

    @property
    def bounds(self) -> Iterable[float]:
        """The seconds until each request is over at the latest; infinite where that is unknown."""
        ...


L = TypeVar("L", bound=Link[Any])
L_co = TypeVar("L_co", bound=Link[Any], covariant=True)
L_contra = TypeVar("L_contra", bound=Link[Any], contravariant=True)


class Links(Protocol[L_co]):
    """The links of this gateway to the replicas of the model."""

    def __iter__(self) -> Iterator[L_co]: ...
    @property
    def slots(self) -> int:
        """The slots of all replicas."""
        ...

    @property
    def prefix_block(self) -> int:
        """The tokens per block of the engines' prefix cache; 0 without one."""
        ...

    @property
    def reachable(self) -> bool:
        """Returns whether the model has replicas that are connected, or may be in a moment."""
        ...


class Effects(Protocol[E_contra, L_contra]):
    """The effects of the dispatcher, which its caller carries out."""

    def send(self, entry: E_contra, link: L_contra, /) -> bool:
        """Returns False if the replica had no slot after all."""
        ...

    def wait(self, entry: E_contra, delay_s: float | None, /) -> None:
        """Called when a request waits: `Dispatcher.waited` must be called after ``delay_s``, instead of at an earlier
        call's time. None: the wait has no limit."""
        ...

    def refuse(self, entry: E_contra, refusal: Refusal, /) -> None:
        """Called with a request that has waited, and gets no slot."""
        ...


class Dispatcher(Generic[E, L]):
    """The waiting requests of one model in one gateway: a line for the model, and a second one for a canary version,
    whose requests are drawn at random. Times are in seconds of one monotonic clock."""

    def __init__(self, settings: QueueSettings, links: Links[L], effects: Effects[E, L]) -> None:
        self.mean_service_s = FIRST_SERVICE_S  # of one request in a slot; an exponential average
        self.headroom = Headroom()
        self.blocked: Callable[[E], bool] | None = None  # whether a waiting request may not be sent yet
        self._settings = settings
        self._links = links
        self._effects = effects
        self._weights: dict[str, float] = {}  # of the tenants with requests so far
        self._shared = False  # more than one tenant has sent requests: only then are tokens counted
        self._sessions: Sessions[str] = Sessions()
        self._random = random.Random()
        self._open_lines()

    @property
    def waiting(self) -> int:
        return sum(line.count for line in self.lines)

    @property
    def entries(self) -> Iterator[E]:
        """The waiting requests, in no particular order."""
        return (entry for line in self.lines for entry in line)

    def longest_wait_s(self, now: float) -> float:
        """Returns the longest wait of the waiting requests; 0.0 without any."""
        return now - min((entry.arrived_at for entry in self.entries), default=now)

    def update(self, settings: QueueSettings) -> None:
        """Applies new settings; waiting requests keep their places. To be called before lost links are removed."""
        before, self._settings = self._settings, settings
        for line in self.lines:
            line.max_count, line.max_bytes = settings.max_queue, settings.max_queue_bytes
        if (before.queue_order, before.canary is None) == (settings.queue_order, settings.canary is None):
            return
        waiting = [entry for line in self.lines for entry in line.clear()]
        for entry in (*waiting, *(entry for link in self._links for entry, _ in link.progress)):
            entry.carried = entry.charged
        self._open_lines()
        for entry in sorted(waiting, key=lambda entry: entry.arrived_at, reverse=True):
            self._line_for(entry).put_back(entry)

    # A request

    def submit(self, entry: E, weight: float, now: float) -> Refusal | None:
        """Sends a new request to a free slot, or queues it. Returns why it gets neither. ``weight`` is its tenant's.

        1. it is next, and a replica has a slot for it  -> sent
        2. its deadline would pass in the queue         -> refused
        3. the queue is full                            -> refused, unless others may be evicted for it
        4. else                                         -> queued
        """
        if self._weights.get(entry.tenant) != weight:
            self._weights[entry.tenant] = weight
            self._shared = len(self._weights) > 1
            for line in self.lines:
                line.set_weight(entry.tenant, weight)
        line = self._own if self._canary is None else self._line_for(entry)
        entry.in_headroom = self.headroom.add(entry.priority, now)
        limit_s = self._settings.max_wait_s
        if limit_s is not None:
            entry.deadline = now + limit_s if entry.deadline is None else min(entry.deadline, now + limit_s)
        if (not line.count or entry.priority < line.urgent[0]) and self._send(entry, line, now):  # 1
            return None
        refusal = self._refusal(entry, line, now)
        if refusal is not None:  # 2, 3
            self.over(entry, now)
            return refusal
        line.push(entry)  # 4
        entry.waits = True
        if self.headroom.mixed or self.blocked is not None:  # else requests before it wait for any slot, as it does
            self.pump(now)
        if entry.waits:
            self._wait(entry, now)
        return None

    def waited(self, entry: E, now: float) -> None:
        """Ends the wait of a request whose time is over."""
        if not entry.waits:
            return
        late = entry.deadline is not None and now >= entry.deadline - TIMER_S
        if not late and self._links.reachable:  # no longer held: it waits for a slot as the others do
            entry.held_since = None
            self._wait(entry, now)
            return
        self.withdraw(entry, now)
        waited_s = now - entry.arrived_at
        self._effects.refuse(entry, Expired(waited_s) if late else NotStarted(waited_s))

    def withdraw(self, entry: E, now: float) -> None:
        """Removes a waiting request."""
        self.line_of(entry).remove(entry)
        self.over(entry, now)

    def resized(self, entry: E, growth: int) -> None:
        """Records that a waiting request has grown by that many bytes, and has another prompt."""
        self.line_of(entry).bytes += growth
        entry.chain = None

    def put_back(self, entries: Sequence[E], now: float, *, lost: bool) -> None:
        """Returns sent requests to the heads of their lines, the first one foremost, and takes their charges back:
        their replica was lost, or else had no slot for them. Then continues with all that wait."""
        for entry in reversed(entries):
            line = self.line_of(entry)
            if lost:  # the prompt stays charged; so does what was charged to earlier lines
                answer = entry.charged - max(0, entry.carried)
                if answer > 0:
                    line.charge(entry.tenant, output_tokens=-answer, priority=entry.priority)
                entry.charged, entry.carried = min(entry.charged, 0), min(entry.carried, 0)
            else:
                if entry.carried < 0 <= entry.charged:
                    line.charge(entry.tenant, prompt_tokens=-entry.tokens, priority=entry.priority)
                entry.charged = entry.carried = -1
            line.put_back(entry)
            entry.waits = True
        self.pump(now)
        for entry in entries:
            if entry.waits:
                self._wait(entry, now)

    def ended(self, entry: E, held_s: float, produced: int, now: float, answered: bool = True) -> None:
        """Records that a request has left its slot, which it held for ``held_s``. To be followed by ``pump``."""
        if answered:  # refused and cancelled requests would bias the mean
            self.mean_service_s += MEAN_SHARE * (held_s - self.mean_service_s)
        if entry.charged >= 0:
            self.charge(entry, produced)
        self.over(entry, now)

    def over(self, entry: E, now: float) -> None:
        """Records that a request is neither in a line nor in a slot any more; may be called more than once."""
        entry.waits = False
        if entry.in_headroom:
            entry.in_headroom = False
            self.headroom.remove(entry.priority, now)

    # All requests

    def pump(self, now: float) -> None:
        """Sends waiting requests to free slots."""
        for line in self.lines:
            if not line.count:
                continue
            if self._shared and line.tenants > 1:  # the tokens of live requests decide which tenant is next
                for link in self._links:
                    for entry, produced in link.progress:
                        if produced > entry.charged >= 0:
                            self.charge(entry, produced)
            while (first := line.peek()) is not None:
                if self.blocked is not None and self.blocked(first):
                    break
                if not self._send(first, line, now):
                    break  # the rest of the line is not more urgent

    def hold(self, now: float) -> None:
        """Holds the waiting requests from now on, as if they had just arrived: the last replica is gone, or cannot be
        reached. Those that are held already keep their time."""
        for entry in list(self.entries):
            self._wait(entry, now)

    def clear(self, now: float) -> list[E]:
        """Removes and returns all waiting requests, in order."""
        entries = [entry for line in self.lines for entry in line.clear()]
        for entry in entries:
            self.over(entry, now)
        return entries

    def next_place_s(self, waiting: int) -> float:
        """Returns the predicted time until a line of so many has one place more."""
        if not waiting or not self._links.slots:
            return math.inf
        return self.predicted_wait_s(waiting) - self.predicted_wait_s(waiting - 1)

    def predicted_wait_s(self, ahead: int, own_wait_s: float = 0.0) -> float:
        """Returns the predicted wait of a request with ``ahead`` others before it, no less than ``own_wait_s``: that at
        its tenant's own pace."""
        bounds = [bound for link in self._links for bound in link.bounds]
        return max(predicted_wait_s(ahead, self._links.slots, self.mean_service_s, bounds), own_wait_s)

    def line_of(self, entry: E) -> FairQueue[E]:
        """Returns the line in which the request waits, or would wait."""
        return self._canary if entry.canary and self._canary is not None else self._own

    def charge(self, entry: E, produced: int) -> None:
        """Charges the tenant for the tokens since the last charge."""
        new = produced - entry.charged
        if new > 0 and entry.charged >= 0:
            entry.charged = produced
            self.line_of(entry).charge(entry.tenant, 0, new, entry.priority)

    # Inside

    def _open_lines(self) -> None:
        settings = self._settings
        lines: list[FairQueue[E]] = [
            FairQueue(settings.max_queue, settings.max_queue_bytes, order=settings.queue_order, weights=self._weights)
            for _ in range(1 if settings.canary is None else 2)
        ]
        self.lines = tuple(lines)
        self._own, self._canary = lines[0], None if settings.canary is None else lines[1]

    def _line_for(self, entry: E) -> FairQueue[E]:
        """Draws the version of a request and returns the version's line."""
        canary = self._settings.canary
        entry.canary = canary is not None and self._random.random() < canary
        return self.line_of(entry)

    def _refusal(self, entry: E, line: FairQueue[E], now: float) -> Refusal | None:
        """Returns why the request may not wait; makes room for it in a full line, if it may."""
        slots = self._links.slots
        own_wait_s = line.own_wait_s(entry, now) if slots else 0.0
        if entry.deadline is not None and slots:
            reserved = self.headroom.reserved(entry.priority, slots, now)
            wait_s = self.predicted_wait_s(line.ahead_of(entry) + reserved, own_wait_s)
            if wait_s > entry.deadline - now:
                return Unreachable(wait_s, entry.deadline - now)
        full = line.refusal(entry)
        if full is None:
            return None
        victims = line.make_room(entry)
        refusal = Full(full, line.count)
        for victim in victims:
            self.over(victim, now)
            self._effects.refuse(victim, refusal)
        return None if victims else refusal

    def _wait(self, entry: E, now: float) -> None:
        """Starts the wait of a request, or a new part of it."""
        if entry.held_since is None and not self._links.reachable:
            entry.held_since = now
        until = math.inf if entry.deadline is None else entry.deadline
        if entry.held_since is not None:
            until = min(until, entry.held_since + self._settings.hold_s)
        self._effects.wait(entry, None if until == math.inf else max(0.0, until - now))

    def link_for(self, entry: E, now: float) -> L | None:
        """Returns the link for a request; None while it must wait. Alternative routers override it."""
        links: Iterable[L] = self._links
        if self._canary is not None:
            canaries = self._settings.canaries
            links = [link for link in self._links if (link.id in canaries) is entry.canary] or list(self._links)
        home = self._sessions.get(entry.session, entry.arrived_at) if entry.session else None
        block = self._links.prefix_block
        affinity = _affinity(entry, home, block) if home is not None or block else None
        link = choose(links, affinity)
        if link is None:
            return None
        if self.headroom.mixed:
            free = sum(link.free_slots for link in links)
            slots = free + sum(link.live for link in links)
            if free <= self.headroom.reserved(entry.priority, slots, now):
                return None  # half of the slots are taken: retried when one is free again
        if affinity is not None and affinity(link):
            entry.affinity = "prefix" if entry.chain else "session"
        return link

    def _send(self, entry: E, line: FairQueue[E], now: float) -> bool:
        """Sends the next request of its line, or a new one; returns False while it must wait."""
        while (link := self.link_for(entry, now)) is not None:
            if not self._effects.send(entry, link):
                continue
            if entry.waits:
                line.pop()
                entry.waits = False
            elif self._shared:
                line.pass_by(entry)
            if self._shared and entry.charged < 0:
                entry.charged = 0
                line.charge(entry.tenant, entry.tokens, 0, entry.priority)
            if entry.session:
                self._sessions.put(entry.session, link.id, entry.arrived_at)
            if entry.chain and link.prefixes is not None:
                link.prefixes.add(entry.chain)
            return True
        return False


def _affinity(entry: Entry, home: str | None, block: int) -> Callable[[Link[Any]], float] | None:
    """Returns the request's affinity to a replica: by its prefix in caches with blocks of ``block`` tokens, and to
    ``home``, the replica of its session. None without either."""
    if block and entry.chain is None:
        entry.chain = chain(entry.prompt_ids, block)
    blocks = entry.chain
    if home is None and not blocks:
        return None

    def affinity(link: Link[Any]) -> float:
        share = link.prefixes.share(blocks) if link.prefixes is not None and blocks else 0.0
        return max(share if share >= LEAST_PREFIX else 0.0, LEAST_PREFIX if link.id == home else 0.0)

    return affinity


class Headroom:
    """Counts the requests of one model by priority, with the recent peak of each.

    A less urgent request leaves free as many slots as the more urgent ones had at their peak within the last one to two
    ``WINDOW_S`` and do not have now, but never more than half of all slots: an urgent request should not wait for an
    answer to end, and a waiting request should not wait for ever for urgent ones that may not come. Nothing is reserved
    where all requests have the same priority.
    """

    def __init__(self) -> None:
        self.mixed = False  # requests of several priorities have arrived recently
        self._classes: dict[int, _Class] = {}

    @property
    def present(self) -> int:
        """The requests in the queue or in a slot now, of the counted priorities."""
        return sum(group.now for group in self._classes.values())

    def add(self, priority: int, now: float) -> bool:
        """Counts a request that enters the queue or a slot; ``now`` in monotonic seconds. Returns whether it was
        counted: only then call ``remove`` for it."""
        group = self._classes.get(priority)
        if group is None:
            if len(self._classes) >= MOST_CLASSES:
                return False
            group = self._classes[priority] = _Class(now)
            self.mixed = len(self._classes) > 1
        elif now >= group.window_end:
            group.turn(now)
        group.now = present = group.now + 1
        if present > group.peak:
            group.peak = present
        return True

    def remove(self, priority: int, now: float) -> None:
        """Uncounts a request that is over."""
        group = self._classes[priority]
        if now >= group.window_end:
            group.turn(now)
        group.now -= 1
        if self.mixed:
            self._forget(now)

    def reserved(self, priority: int, slots: int, now: float) -> int:
        """Returns how many of the model's ``slots`` a request of the priority must leave free."""
        if not self.mixed:
            return 0
        missing = sum(group.missing(now) for other, group in self._classes.items() if other < priority)
        return min(missing, slots // 2)

    def _forget(self, now: float) -> None:
        for priority in [p for p, group in self._classes.items() if not group.now and not group.missing(now)]:
            del self._classes[priority]
        self.mixed = len(self._classes) > 1


class _Class:
    """The requests of one priority."""

    __slots__ = ("_before", "now", "peak", "window_end")

    def __init__(self, since: float) -> None:
        self.now = 0  # in the queue or in a slot
        self.peak = 0  # the most at once within this window
        self.window_end = since + WINDOW_S
        self._before = 0  # the most at once within the last window

    def missing(self, now: float) -> int:
        """Returns how far the current count is below the recent peak."""
        if now >= self.window_end:
            self.turn(now)
        return max(self.peak, self._before) - self.now

    def turn(self, now: float) -> None:
        """Begins the window that holds ``now``."""
        windows = (now - self.window_end) // WINDOW_S + 1
        self._before = self.peak if windows == 1 else self.now
        self.peak = self.now
        self.window_end += windows * WINDOW_S
