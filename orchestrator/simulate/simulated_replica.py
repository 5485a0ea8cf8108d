"""The requests of a simulation, and its replicas, which take the steps of the real batchers on the virtual clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush

from orchestrator.dispatch.dispatcher import Entry
from orchestrator.dispatch.replica_choice import Pace, PrefixIndex
from orchestrator.simulate.scenario import Arrival, SimModel
from orchestrator.simulate.virtual_clock import Clock
from workers.batching.encode_queue import EncodeQueue, WaitingInput, shares
from workers.messages.encoder_protocol import EncodeInput

NEVER = math.inf
_ROUNDING = 1e-9  # of a step: tolerance for rounding errors


class SimRequest(Entry):
    """A request as the dispatcher sees it. Times are of the virtual clock.

    Only the replica uses ``output_tokens``: a router must not, unless it is an oracle.
    """

    number: int  # counts the requests of the run
    output_tokens: int
    gateway: int = 0
    link: SimLink | None = None  # once it was sent
    sent_at: float = 0.0  # to a replica
    first_at: float = 0.0  # its first token
    timer: int = 0  # for the end of its wait; 0: none
    work_s: float = 0.0  # seconds of an encoder that it needs in full batches

    @classmethod
    def of(cls, arrival: Arrival, number: int, now: float) -> SimRequest:
        """Returns a new request; its size is that of a prompt in ASCII."""
        _, _, tokens, output_tokens, key, priority, session = arrival
        request = cls(key, priority, now, None, 4 * tokens, tokens, number, output_tokens)
        if session:
            request.session = session
        return request


@dataclass(slots=True, eq=False)
class SimReplica:
    """A replica with its slots and steps.

    1. A prefill is a step of its own: meanwhile no slot of this replica decodes.
    2. A prompt that arrives during a decode is prefilled after it. A prompt for a slot that has just become free waits
       for the next decode, which has started already if another slot is live.
    3. After a prefill every live request gets a decode before the next prefill (step 2a of the batcher).
    4. A decode takes the same time whatever is in the slots: the batch is static.
    5. Waiting requests are prefilled together as far as step 2c of the batcher allows.
    6. Requests beyond the slots wait here, in their order. Gateways never send so many; alternative routers do.

    Between two prefills it is enough to count decodes: the decode with which a request ends is known after its
    prefill. So a step costs nothing unless a request ends with it.
    """

    model: SimModel
    index: int = 0
    live: int = 0  # sent, not ended
    due: float = NEVER  # when `advance` must be called next
    began: list[SimRequest] = field(default_factory=list)  # requests with their first token in the last `advance`
    ended: list[SimRequest] = field(default_factory=list)  # requests that ended in it
    busy: deque[SimLink] = field(default_factory=deque)  # links of gateways to notify of a free slot, in their order
    prefill: list[SimRequest] = field(default_factory=list)
    base: float = 0.0  # the end of the last prefill, or of the last decode at which a request ended
    slots: int = field(init=False)
    step_s: float = field(init=False)
    _waiting: deque[SimRequest] = field(default_factory=deque)
    _live: int = 0  # in slots
    _ends: list[tuple[int, int, SimRequest]] = field(default_factory=list)  # heap: last decode, number of the request
    _decodes: int = 0  # ended decodes at `base`

    def __post_init__(self) -> None:
        self.slots = self.model.slots
        self.step_s = max(self.model.speed.step_s, 1e-6)

    @property
    def waiting(self) -> int:
        """The number of requests without a slot."""
        return len(self._waiting)

    def progress(self, now: float) -> Iterator[tuple[SimRequest, int]]:
        """Yields the requests that have tokens, and how many."""
        decodes = self._decodes
        if not self.prefill:
            decodes += int((now - self.base) / self.step_s + _ROUNDING)
        for last, _, request in self._ends:
            yield request, request.output_tokens - last + decodes

    def send(self, request: SimRequest, now: float) -> None:
        """Accepts a request; may move ``due`` to an earlier time."""
        request.sent_at = now
        self.live += 1
        self._waiting.append(request)
        if self.prefill:
            return
        if not self._live:
            self._start_prefill(now)
        elif self._live < self.slots:
            step_s = self.step_s
            due = self.base + (int((now - self.base) / step_s + _ROUNDING) + 1) * step_s
            if due < self.due:
                self.due = due

    def advance(self, now: float) -> None:
        """Performs the steps until ``due`` and sets ``began`` and ``ended``."""
        ended: list[SimRequest] = []
        self.ended = ended
        if self.prefill:
            self._finish_prefill(now, ended)
            if self._live and (not self._waiting or self._live == self.slots):
                self.due = now + (self._ends[0][0] - self._decodes) * self.step_s
                return
            if self._live:  # 3
                self.due = now + self.step_s
                return
        else:
            self.began = []
            self._decodes += round((now - self.base) / self.step_s)
            self.base = now
            ends, decodes = self._ends, self._decodes
            while ends and ends[0][0] <= decodes:
                ended.append(heappop(ends)[2])
            self._live -= len(ended)
            self.live -= len(ended)
        if self._waiting and self._live < self.slots:
            self._start_prefill(now)
        elif self._live:
            self.due = now + (self._ends[0][0] - self._decodes) * self.step_s
        else:
            self.due = NEVER

    def take_all(self) -> list[SimRequest]:
        """Stops the replica immediately and returns the requests that it has not answered."""
        lost = [*self.prefill, *self._waiting, *(request for _, _, request in self._ends)]
        self.prefill, self._ends = [], []
        self._waiting.clear()
        self._live = self.live = 0
        self.due = NEVER
        return sorted(lost, key=lambda request: request.number)

    def _start_prefill(self, now: float) -> None:
        """Starts a prefill of the first waiting request and those that may join it (2c)."""
        waiting, model = self._waiting, self.model
        first = waiting.popleft()
        joining = [first]
        tokens = prompt = first.tokens
        room = self.slots - self._live
        while waiting and len(joining) < room:
            longest = max(prompt, waiting[0].tokens)
            if (len(joining) + 1) * model.padded(longest) > model.prefill_tokens:
                break
            prompt = longest
            joining.append(waiting.popleft())
            tokens += joining[-1].tokens
        self._live += len(joining)
        self.prefill = joining
        if model.buckets:
            prompt = model.padded(prompt)
            tokens = prompt * len(joining)
        speed = model.speed
        self.due = now + speed.prefill_base_s + (speed.prefill_token_s + speed.prefill_square_s * prompt) * tokens

    def _finish_prefill(self, now: float, ended: list[SimRequest]) -> None:
        """Ends the prefill: each of its requests has a token."""
        self.began = began = self.prefill
        self.prefill = []
        self.base = now
        for request in began:
            request.first_at = now
            if request.output_tokens <= 1:
                self._live -= 1
                self.live -= 1
                ended.append(request)
            else:
                heappush(self._ends, (self._decodes + request.output_tokens - 1, request.number, request))


@dataclass(slots=True, eq=False)
class SimEncoder(SimReplica):
    """A replica whose batches are those of the real queue.

    1. A batch starts when it is full, or ``gather_s`` after the arrival of the request that has waited longest.
    2. It takes the time of its longest input for each row, or for all rows if the engine fills them up.
    3. A request ends with the batch of its last input. ``prefill`` are the requests of the batch that runs.
    """

    _queue: EncodeQueue = field(init=False)
    _batch: list[WaitingInput] = field(default_factory=list)  # that runs
    _batch_s: float = 0.0
    _open: dict[str, tuple[SimRequest, int]] = field(default_factory=dict)  # by number, with its missing inputs

    def __post_init__(self) -> None:
        SimReplica.__post_init__(self)
        assert self.model.encoder is not None
        self._queue = EncodeQueue(self.model.encoder)

    @property
    def waiting(self) -> int:
        """No request is without a slot."""
        return 0

    def progress(self, now: float) -> Iterator[tuple[SimRequest, int]]:
        """Yields nothing: a request has no tokens before its end."""
        yield from ()

    def send(self, request: SimRequest, now: float) -> None:
        """Accepts a request; may move ``due`` to an earlier time."""
        request.sent_at = now
        self.live += 1
        inputs = [_input(length) for length in self.model.inputs(request.tokens)]
        self._open[str(request.number)] = (request, len(inputs))
        self._queue.add(str(request.number), inputs, now)
        if not self._batch:
            self.due = now + self._wait_s(now)

    def advance(self, now: float) -> None:
        """Ends the batch that runs, if any, starts the next, and sets ``began`` and ``ended``."""
        self.began = self.ended = []
        if self._batch:
            self.ended = self.began = self._finish(now)
        wait_s = self._wait_s(now)
        if wait_s > 0.0:
            self.due = now + wait_s
            return
        self._batch = self._queue.take()
        self.prefill = [self._open[request][0] for request in {place.request for place in self._batch}]
        self._batch_s = self.model.batch_s([place.length for place in self._batch])
        self.due = now + self._batch_s

    def take_all(self) -> list[SimRequest]:
        """Stops the replica immediately and returns the requests that it has not answered."""
        lost = [request for request, _ in self._open.values()]
        self._open, self._batch, self.prefill = {}, [], []
        self.live, self.due = 0, NEVER
        return sorted(lost, key=lambda request: request.number)

    def _wait_s(self, now: float) -> float:
        """Returns the seconds until the next batch."""
        oldest = self._queue.oldest_at()
        if oldest is None:
            return NEVER
        return 0.0 if len(self._queue) >= self._queue.spec.rows else max(0.0, oldest + self.model.gather_s - now)

    def _finish(self, now: float) -> list[SimRequest]:
        batch, self._batch, self.prefill = self._batch, [], []
        ended = []
        for place, share in zip(batch, shares(self._queue.spec, batch), strict=True):
            request, missing = self._open.pop(place.request)
            request.work_s += self._batch_s * share
            if missing > 1:
                self._open[place.request] = (request, missing - 1)
            else:
                request.first_at = now
                ended.append(request)
        self._queue.charge(batch, self._batch_s)
        self.live -= len(ended)
        self.base = now
        return ended


@lru_cache(maxsize=4096)
@dataclass(slots=True, eq=False)
class SimLink:
    """The requests of one gateway on a replica (see `orchestrator.gateway.serving.replica_link`)."""

    replica: SimReplica
    gateway: int
    clock: Clock
    idle: bool = True  # it has had no token since it had no request
    live: int = 0
    prefilling: int = 0  # requests without a token
    pace: float = 0.0  # seconds per token, the value of ``tracked``
    tracked: Pace = field(default_factory=Pace)
    prefixes: PrefixIndex | None = None  # prompts have no tokens here
    id: str = field(init=False)
    free_slots: int = field(init=False)  # 0 between a BUSY and the next free slot

    def __post_init__(self) -> None:
        self.id = str(self.replica.index)
        self.free_slots = self.replica.slots

    @property
    def stepped_at(self) -> float:
        """The end of the replica's last step, as the gateway sees it by the tokens; -inf while it is idle."""
        if self.idle:
            return -math.inf
        replica = self.replica
        base, step_s = replica.base, replica.step_s
        return base if replica.prefill else base + (self.clock.now - base) // step_s * step_s

    @property
    def progress(self) -> Iterator[tuple[SimRequest, int]]:
        """Its requests, with the tokens that each has so far."""
        return (item for item in self.replica.progress(self.clock.now) if item[0].link is self)

    @property
    def bounds(self) -> list[float]:
        """Not known: traces have no max_tokens."""
        return [math.inf] * self.live


def _input(length: int) -> EncodeInput:
    return EncodeInput([0] * length)
