"""One replica on the virtual clock: static slots, and steps as `workers.batching.batcher` takes them."""

from __future__ import annotations

import math
from collections import deque
from heapq import heappop, heappush

from orchestrator.dispatch.replica_choice import Pace
from orchestrator.simulate.simulated_model import SimModel
from orchestrator.simulate.simulated_request import SimRequest

NEVER = math.inf
_A_BIT = 1e-9  # of a step: what rounding may lack


class SimReplica:
    """Its slots, the steps that it takes, and what the router looks at
    (`orchestrator.dispatch.replica_choice.Candidate`).

    1. A prefill is a step of its own: while prompts are read, no slot of this replica decodes.
    2. A prompt that comes while a decode runs is read when that decode has ended. One that comes for a slot that
       became free just now finds the next decode begun, if another slot is live.
    3. After a prefill every live request gets a decode before the next prefill (step 2a of the batcher).
    4. A decode takes the same time whatever is in the slots: the batch is static.
    5. Requests that wait join together as far as the batcher's 2c lets them.
    6. More requests than slots wait here, in their order. The gateways never send so many; other routers do.

    Between two prefills only the decodes count that have ended: a request that is to get ``n`` more tokens ends at a
    number of decodes, which is known as soon as its prompt is read. So a step costs nothing unless something ends with
    it.
    """

    __slots__ = (
        "_base",
        "_decodes",
        "_ends",
        "_live",
        "_measured",
        "_reading",
        "_step_s",
        "_waiting",
        "began",
        "due",
        "ended",
        "free_slots",
        "index",
        "live",
        "model",
        "pace",
        "prefilling",
        "slots",
        "told_busy",
    )

    def __init__(self, model: SimModel, index: int = 0) -> None:
        self.model = model
        self.index = index
        self.slots = model.slots
        self.free_slots = model.slots  # of the gateway's view: sent and not ended; negative when more were sent
        self.prefilling = 0  # sent, without a token
        self.pace = 0.0  # seconds a token, as the gateway measures it; 0.0: none has ended yet
        self.live = 0  # sent, not ended
        self.due = NEVER  # when `advance` must be called next
        self.began: list[SimRequest] = []  # those whose first token came with the last `advance`
        self.ended: list[SimRequest] = []  # those that ended with it
        self.told_busy: deque[int] = deque()  # the gateways that will be told when a slot is free, in their order
        self._measured = Pace()
        self._step_s = max(model.step_s, 1e-6)
        self._waiting: deque[SimRequest] = deque()
        self._reading: list[SimRequest] = []
        self._live = 0  # in slots
        self._ends: list[tuple[int, int, SimRequest]] = []  # heap: after which decode, number of the request
        self._decodes = 0  # that had ended at `_base`
        self._base = 0.0

    @property
    def waiting(self) -> int:
        """Requests that are here without a slot."""
        return len(self._waiting)

    def stepped_at(self, now: float) -> float:
        """When the last step that has ended did so, as the gateway sees it by the tokens; -inf while none runs."""
        if self._reading:
            return self._base
        if not self._live:
            return -NEVER
        step_s = self._step_s
        return self._base + (now - self._base) // step_s * step_s

    def send(self, request: SimRequest, now: float) -> None:
        """A request comes. Afterwards ``due`` may be earlier than before."""
        request.sent_at = now
        self.free_slots -= 1
        self.prefilling += 1
        self.live += 1
        self._waiting.append(request)
        if self._reading:
            return
        if not self._live:
            self._read(now)
        elif self._live < self.slots:
            step_s = self._step_s
            due = self._base + (int((now - self._base) / step_s + _A_BIT) + 1) * step_s
            if due < self.due:
                self.due = due

    def advance(self, now: float) -> None:
        """What happens at ``due``: ``began`` and ``ended`` tell of it."""
        ended: list[SimRequest] = []
        self.ended = ended
        if self._reading:
            self._have_read(now, ended)
            if self._live and (not self._waiting or self._live == self.slots):
                self.due = now + (self._ends[0][0] - self._decodes) * self._step_s
                return
            if self._live:  # 3
                self.due = now + self._step_s
                return
        else:
            self.began = []
            self._decodes += round((now - self._base) / self._step_s)
            self._base = now
            ends, decodes = self._ends, self._decodes
            while ends and ends[0][0] <= decodes:
                self._end(heappop(ends)[2], now, ended)
        if self._waiting and self._live < self.slots:
            self._read(now)
        elif self._live:
            self.due = now + (self._ends[0][0] - self._decodes) * self._step_s
        else:
            self.due = NEVER

    def take_all(self) -> list[SimRequest]:
        """The replica ends at once: what it has not answered."""
        lost = [*self._reading, *self._waiting, *(request for _, _, request in self._ends)]
        self._reading, self._ends = [], []
        self._waiting.clear()
        self._live = self.live = self.prefilling = 0
        self.free_slots, self.due = self.slots, NEVER
        return sorted(lost, key=lambda request: request.number)

    def _read(self, now: float) -> None:
        """A prefill begins: of the first that waits, and of those that may join it (2c)."""
        waiting, model = self._waiting, self.model
        first = waiting.popleft()
        joining = [first]
        prompt = first.tokens
        room = self.slots - self._live
        while waiting and len(joining) < room:
            longest = max(prompt, waiting[0].tokens)
            if (len(joining) + 1) * model.padded(longest) > model.prefill_tokens:
                break
            prompt = longest
            joining.append(waiting.popleft())
        self._live += len(joining)
        self._reading = joining
        tokens = model.padded(prompt) * len(joining) if model.buckets else sum(request.tokens for request in joining)
        self.due = now + model.prefill_base_s + model.prefill_token_s * tokens

    def _have_read(self, now: float, ended: list[SimRequest]) -> None:
        """The prefill is over: each of its requests has a token."""
        self.began = began = self._reading
        self._reading = []
        self._base = now
        self.prefilling -= len(began)
        for request in began:
            request.first_at = now
            if request.output_tokens <= 1:
                self._end(request, now, ended)
            else:
                heappush(self._ends, (self._decodes + request.output_tokens - 1, request.number, request))

    def _end(self, request: SimRequest, now: float, ended: list[SimRequest]) -> None:
        self._live -= 1
        self.live -= 1
        self.free_slots += 1
        ended.append(request)
        measured = self._measured
        measured.ended(now - request.first_at, request.output_tokens - 1)
        self.pace = measured.value
