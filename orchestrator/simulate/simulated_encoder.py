"""The simulated replica of an encoder: the queue of `workers.batching.encode_batcher` on the virtual clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from orchestrator.simulate.simulated_replica import NEVER, SimReplica
from orchestrator.simulate.simulated_request import SimRequest
from workers.batching.encode_queue import EncodeQueue, WaitingInput, shares
from workers.messages.encoder_protocol import EncodeInput


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
def _input(length: int) -> EncodeInput:
    return EncodeInput([0] * length)
