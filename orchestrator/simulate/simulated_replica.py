"""The simulated replica: static slots, with the steps of `workers.batching.batcher` on the virtual clock."""

from __future__ import annotations

import math
from collections import deque
from heapq import heappop, heappush

from orchestrator.dispatch.replica_choice import Pace
from orchestrator.simulate.simulated_model import SimModel
from orchestrator.simulate.simulated_request import SimRequest

NEVER = math.inf
_ROUNDING = 1e-9  # of a step: tolerance for rounding errors


class SimReplica:
    """A replica with its slots and steps, as the router sees it (`orchestrator.dispatch.replica_choice.Candidate`).

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

    __slots__ = (
        "_base",
        "_decodes",
        "_ends",
        "_live",
        "_measured",
        "_prefill",
        "_step_s",
        "_waiting",
        "began",
        "busy_gateways",
        "due",
        "ended",
        "free_slots",
        "index",
        "live",
        "model",
        "pace",
        "prefilling",
        "slots",
    )

    def __init__(self, model: SimModel, index: int = 0) -> None:
        self.model = model
        self.index = index
        self.slots = model.slots
        self.free_slots = model.slots  # in the gateway's view: negative if more requests were sent
        self.prefilling = 0  # sent, without a token
        self.pace = 0.0  # seconds per token, as the gateway measures it; 0.0 before a request has ended
        self.live = 0  # sent, not ended
        self.due = NEVER  # when `advance` must be called next
        self.began: list[SimRequest] = []  # requests with their first token in the last `advance`
        self.ended: list[SimRequest] = []  # requests that ended in it
        self.busy_gateways: deque[int] = deque()  # gateways to notify of a free slot, in their order
        self._measured = Pace()
        self._step_s = max(model.step_s, 1e-6)
        self._waiting: deque[SimRequest] = deque()
        self._prefill: list[SimRequest] = []
        self._live = 0  # in slots
        self._ends: list[tuple[int, int, SimRequest]] = []  # heap: last decode, number of the request
        self._decodes = 0  # ended decodes at `_base`
        self._base = 0.0

    @property
    def waiting(self) -> int:
        """The number of requests without a slot."""
        return len(self._waiting)

    def stepped_at(self, now: float) -> float:
        """Returns the end of the last step, as the gateway sees it by the tokens; -inf while idle."""
        if self._prefill:
            return self._base
        if not self._live:
            return -NEVER
        step_s = self._step_s
        return self._base + (now - self._base) // step_s * step_s

    def send(self, request: SimRequest, now: float) -> None:
        """Accepts a request; may move ``due`` to an earlier time."""
        request.sent_at = now
        self.free_slots -= 1
        self.prefilling += 1
        self.live += 1
        self._waiting.append(request)
        if self._prefill:
            return
        if not self._live:
            self._start_prefill(now)
        elif self._live < self.slots:
            step_s = self._step_s
            due = self._base + (int((now - self._base) / step_s + _ROUNDING) + 1) * step_s
            if due < self.due:
                self.due = due

    def advance(self, now: float) -> None:
        """Performs the steps until ``due`` and sets ``began`` and ``ended``."""
        ended: list[SimRequest] = []
        self.ended = ended
        if self._prefill:
            self._finish_prefill(now, ended)
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
            self._start_prefill(now)
        elif self._live:
            self.due = now + (self._ends[0][0] - self._decodes) * self._step_s
        else:
            self.due = NEVER

    def take_all(self) -> list[SimRequest]:
        """Stops the replica immediately and returns the requests that it has not answered."""
        lost = [*self._prefill, *self._waiting, *(request for _, _, request in self._ends)]
        self._prefill, self._ends = [], []
        self._waiting.clear()
        self._live = self.live = self.prefilling = 0
        self.free_slots, self.due = self.slots, NEVER
        return sorted(lost, key=lambda request: request.number)

    def _start_prefill(self, now: float) -> None:
        """Starts a prefill of the first waiting request and those that may join it (2c)."""
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
        self._prefill = joining
        tokens = model.padded(prompt) * len(joining) if model.buckets else sum(request.tokens for request in joining)
        self.due = now + model.prefill_base_s + model.prefill_token_s * tokens

    def _finish_prefill(self, now: float, ended: list[SimRequest]) -> None:
        """Ends the prefill: each of its requests has a token."""
        self.began = began = self._prefill
        self._prefill = []
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
