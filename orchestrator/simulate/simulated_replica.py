"""The simulated replica: static slots, with the steps of `workers.batching.batcher` on the virtual clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from orchestrator.simulate.simulated_model import SimModel
from orchestrator.simulate.simulated_request import SimRequest

if TYPE_CHECKING:
    from orchestrator.simulate.simulated_link import SimLink

NEVER = math.inf
_ROUNDING = 1e-9  # of a step: tolerance for rounding errors


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
        self.step_s = max(self.model.step_s, 1e-6)

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
        self.due = now + model.prefill_base_s + (model.prefill_token_s + model.prefill_square_s * prompt) * tokens

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
