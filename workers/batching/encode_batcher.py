"""The batcher of an encoder: batches the inputs of all requests, and answers a request once all are encoded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from workers.batching.encode_queue import SLOTS_PER_ROW, EncodeQueue, WaitingInput, shares
from workers.batching.step_loop import BatcherStats, StepLoop
from workers.messages.encoder_protocol import EncodeEngine
from workers.messages.engine_protocol import EngineSpec
from workers.messages.requests import AnswerPart, FinishReason, GenerateRequest, TokenEvent

PART_BYTES = 2**19  # of an answer in one event, below the size of a frame
MAX_ANSWER_BYTES = 2**26


@dataclass
class _EncodedAnswer:
    rows: list[Any]  # by input; None until it is encoded
    missing: int
    work_s: float = 0.0  # see `AnswerPart`
    batches_s: float = 0.0


class EncodeBatcher(StepLoop[_EncodedAnswer, list[WaitingInput]]):
    """Drives one encoder. See `Batcher` for the threads that may call its methods; the same contract holds.

    A batch starts when it is full, or ``max_wait_s`` after the arrival of the request that has waited longest.
    """

    def __init__(
        self,
        engine: EncodeEngine,
        emit: Callable[[list[TokenEvent]], None],
        max_wait_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``engine`` is loaded. ``emit`` is called without any lock held; an exception of it ends the batcher."""
        super().__init__(emit, clock)
        self._engine = engine
        self._max_wait_s = max_wait_s
        self._limits = engine.spec
        self._queue = EncodeQueue(engine.spec)  # guarded by ``_changed``

    @property
    def spec(self) -> EngineSpec:
        """The limits of requests, in the terms of a generating engine."""
        longest = self._limits.buckets[-1]
        return EngineSpec(
            slots=SLOTS_PER_ROW * self._limits.rows,
            max_len=longest,
            prefill_buckets=self._limits.buckets,
            decode_buckets=(),
            vocab_size=self._limits.vocab_size,
            eos_token_ids=frozenset(),
            width=self._limits.width,
            labels=self._limits.labels,
        )

    @property
    def stats(self) -> BatcherStats:
        with self._changed:
            return self._stats(slots=self.spec.slots, live=len(self._accepted))

    def submit(self, request: GenerateRequest) -> None:
        """Accept a request. Raises ValueError for one that can never run, and ``BatcherClosed``."""
        self._check(request)
        with self._changed:
            count = len(request.inputs)
            self._accept(request.id, _EncodedAnswer([None] * count, count))
            self._queue.add(request.id, request.inputs, self._clock())

    def _check(self, request: GenerateRequest) -> None:
        if not request.inputs:
            raise ValueError("the request has no inputs: this model does not generate")
        longest, vocabulary = self._limits.buckets[-1], self._limits.vocab_size
        for number, input in enumerate(request.inputs):
            if not input.ids or len(input.ids) > longest:
                raise ValueError(f"input {number} has {len(input.ids)} tokens, not 1 to {longest}")
            if min(input.ids) < 0 or max(input.ids) >= vocabulary:
                raise ValueError(f"input {number} has ids outside the vocabulary of {vocabulary}")
        if len(request.inputs) * self._limits.width * 4 > MAX_ANSWER_BYTES:
            most = MAX_ANSWER_BYTES // (4 * self._limits.width)
            raise ValueError(f"the request has {len(request.inputs)} inputs, the limit is {most}")

    def warm_guides(self) -> None:
        """An encoder has none."""

    def _wait_s(self) -> float | None:
        if self._closing or self._cancelled:
            return 0.0
        oldest = self._queue.oldest_at()
        if oldest is None:
            return None
        if self._draining or len(self._queue) >= self._limits.rows:
            return 0.0
        return max(0.0, oldest + self._max_wait_s - self._clock())

    def _next_work(self) -> list[WaitingInput]:
        return self._queue.take()

    def _describe(self, batch: list[WaitingInput]) -> str:
        return f"a batch of {len(batch)} inputs"

    def _run_engine(self, batch: list[WaitingInput]) -> list[TokenEvent]:
        rows, started_at = self._engine.encode([place.input for place in batch]), self._step_started_at
        assert started_at is not None
        return self._record(batch, rows, self._clock() - started_at)

    def _record(self, batch: Sequence[WaitingInput], rows: Any, seconds: float) -> list[TokenEvent]:
        """Keeps the rows of a batch. Returns the events of the requests that are complete."""
        complete: list[tuple[str, _EncodedAnswer]] = []
        with self._changed:
            for request in {place.request for place in batch} & self._accepted.keys():
                self._accepted[request].batches_s += seconds
            for place, row, share in zip(batch, rows, shares(self._limits, batch), strict=True):
                answer = self._accepted.get(place.request)
                if answer is None:
                    continue
                answer.rows[place.index] = row
                answer.work_s += seconds * share
                answer.missing -= 1
                if not answer.missing:
                    complete.append((place.request, answer))
                    del self._accepted[place.request]
                    self._cancelled.discard(place.request)
            self._queue.charge(batch, seconds)
            self._steps += 1
            self._tokens += sum(place.length for place in batch)
            self._step_started_at = None
        return [
            event
            for request, answer in complete
            for event in encoded_events(
                request, b"".join(row.tobytes() for row in answer.rows), answer.work_s, answer.batches_s
            )
        ]

    def _end_cancelled(self) -> list[TokenEvent]:
        events = []
        for request in self._cancelled:
            self._queue.remove(request)
            del self._accepted[request]
            events.append(TokenEvent(id=request, finish=FinishReason.CANCELLED))
        self._cancelled.clear()
        return events

    def _end_all(self, error: str) -> list[TokenEvent]:
        events = [TokenEvent(id=request, finish=FinishReason.ERROR, error=error) for request in self._accepted]
        self._accepted.clear()
        self._cancelled.clear()
        self._queue = EncodeQueue(self._limits)
        return events


def encoded_events(request: str, data: bytes, work_s: float, batches_s: float) -> list[TokenEvent]:
    """Returns the answer of a request, in parts that fit into frames. For the numbers, see `AnswerPart`."""
    *parts, last = [data[start : start + PART_BYTES] for start in range(0, len(data), PART_BYTES)]
    end = AnswerPart(last, work_s=work_s, batches_s=batches_s)
    return [
        *(TokenEvent(id=request, part=AnswerPart(part)) for part in parts),
        TokenEvent(id=request, part=end, finish=FinishReason.STOP),
    ]
