"""The batcher of encoders answers every request once and exactly, whatever arrives, leaves or breaks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.searches import search
from workers.batching.encode_batcher import EncodeBatcher
from workers.batching.encode_queue import MAX_PADDING, EncodeQueue
from workers.batching.step_loop import BatcherClosed
from workers.messages.encoder_protocol import EncodeInput, EncoderSpec
from workers.messages.requests import FinishReason, GenerateRequest, TokenEvent

np = pytest.importorskip("numpy")

BUCKETS = (4, 8, 16)
PADDED = EncoderSpec(rows=4, buckets=BUCKETS, vocab_size=100, width=2)
RAGGED = EncoderSpec(rows=4, buckets=BUCKETS, vocab_size=100, width=2, pads_to_longest=True)


class SummingEncoder:
    """An encoder whose vectors are the sum of the ids and their number. Fails on the id 99."""

    def __init__(self, spec: EncoderSpec) -> None:
        self.spec = spec
        self.batches: list[list[int]] = []  # the lengths in each
        self.now = 0.0

    def load(self) -> None: ...

    def close(self) -> None: ...

    def encode(self, inputs: Sequence[EncodeInput]) -> Any:
        assert 0 < len(inputs) <= self.spec.rows
        self.batches.append([len(input.ids) for input in inputs])
        self.now += 1.0
        if any(99 in input.ids for input in inputs):
            raise RuntimeError("the device is lost")
        return np.array([_vector(input.ids) for input in inputs], dtype=np.float32)


def _vector(ids: Sequence[int]) -> tuple[float, float]:
    return float(sum(ids)), float(len(ids))


def _request(id: str, *inputs: Sequence[int]) -> GenerateRequest:
    return GenerateRequest(id=id, prompt_ids=[], max_tokens=0, inputs=[EncodeInput(list(ids)) for ids in inputs])


def _answers(events: Sequence[TokenEvent]) -> dict[str, list[tuple[float, ...]]]:
    """Returns the rows by request. Checks that each has one finish, in its last event."""
    data: dict[str, bytes] = {}
    ended: set[str] = set()
    for event in events:
        assert event.id not in ended
        assert event.part is not None
        data[event.id] = data.get(event.id, b"") + event.part.data
        if event.finish is not None:
            assert event.finish is FinishReason.STOP
            ended.add(event.id)
    assert ended == set(data)
    return {id: [tuple(row) for row in np.frombuffer(part, np.float32).reshape(-1, 2)] for id, part in data.items()}


ids = st.lists(st.integers(0, 98), min_size=1, max_size=16)
requests = st.lists(st.lists(ids, min_size=1, max_size=9), min_size=1, max_size=9)


@given(requests, st.sampled_from([PADDED, RAGGED]), st.data())
@search(30)
def test_each_request_is_answered_once_with_the_vectors_of_its_inputs_in_order(
    given: list[list[list[int]]], spec: EncoderSpec, data: st.DataObject
) -> None:
    """Batches run between arrivals at random."""
    engine, events = SummingEncoder(spec), list[TokenEvent]()
    batcher = EncodeBatcher(engine, events.extend, clock=lambda: engine.now)
    for number, inputs in enumerate(given):
        batcher.submit(_request(str(number), *inputs))
        for _ in range(data.draw(st.integers(0, 2))):
            batcher.step()
    while batcher.step():
        pass
    expected = {str(number): [_vector(ids) for ids in inputs] for number, inputs in enumerate(given)}
    assert _answers(events) == expected
    assert batcher.stats.tokens == sum(len(ids) for inputs in given for ids in inputs)
    assert batcher.drain()


@given(requests)
@search(30)
def test_a_batch_stays_within_one_bucket_or_within_the_padding(given: list[list[list[int]]]) -> None:
    for spec in (PADDED, RAGGED):
        queue = EncodeQueue(spec)
        for number, inputs in enumerate(given):
            queue.add(str(number), [EncodeInput(ids) for ids in inputs], 0.0)
        total = len(queue)
        while batch := queue.take():
            queue.charge(batch, 1.0)
            total -= len(batch)
            assert len(batch) <= spec.rows
            longest, tokens = batch[-1].length, sum(place.length for place in batch)
            if spec.pads_to_longest:
                assert tokens >= (1 - MAX_PADDING) * longest * len(batch) - 1e-9
        assert total == 0


def test_rows_beyond_a_bucket_are_filled_with_shorter_inputs_where_they_cost_nothing() -> None:
    queue = EncodeQueue(PADDED)
    queue.add("long", [EncodeInput([1] * 16)], 0.0)
    queue.add("short", [EncodeInput([1] * 2)], 1.0)
    assert [place.length for place in queue.take()] == [2, 16]


def test_a_request_of_one_input_overtakes_the_rest_of_a_large_one_but_not_for_ever() -> None:
    engine, events = SummingEncoder(RAGGED), list[TokenEvent]()
    batcher = EncodeBatcher(engine, events.extend, clock=lambda: engine.now)
    batcher.submit(_request("large", *[[1] * 16] * 40))
    batcher.step()
    batcher.submit(_request("small", [1] * 3))
    batcher.step()
    batcher.step()
    assert [event.id for event in events] == ["small"]  # after at most one more batch of the large one
    for number in range(30):  # one small request a batch: as much as the engine can do
        batcher.submit(_request(f"small {number}", [1] * 3))
        batcher.step()
    assert len([batch for batch in engine.batches if 16 in batch]) >= 10


@pytest.mark.parametrize(("spec", "alone"), [(PADDED, 0.25), (replace(PADDED, compiled_rows=2), 0.5), (RAGGED, 1.0)])
def test_an_answer_says_what_its_request_needs_of_an_engine_with_full_batches(spec: EncoderSpec, alone: float) -> None:
    """Each batch takes a second. An empty row of a padded batch costs as much as another, so it belongs to nobody."""
    engine, events = SummingEncoder(spec), list[TokenEvent]()
    batcher = EncodeBatcher(engine, events.extend, clock=lambda: engine.now)
    batcher.submit(_request("large", *[[1] * 16] * 12))
    batcher.submit(_request("small", *[[1] * 4] * 4))
    while batcher.step():
        pass
    batcher.submit(_request("alone", [1] * 4))
    batcher.step()
    parts = {event.id: event.part for event in events if event.part is not None}
    assert (parts["large"].work_s, parts["small"].work_s) == (3.0, 1.0)
    assert parts["alone"].work_s == alone
    assert parts["large"].batches_s == 3.0


def test_a_batch_waits_until_it_is_full_or_its_oldest_request_has_waited() -> None:
    engine, events = SummingEncoder(RAGGED), list[TokenEvent]()
    answered = threading.Event()

    def emit(new: list[TokenEvent]) -> None:
        events.extend(new)
        if sum(event.finish is not None for event in events) == 4:
            answered.set()

    batcher = EncodeBatcher(engine, emit, max_wait_s=3600.0)
    thread = threading.Thread(target=batcher.run, daemon=True)
    thread.start()
    for number in range(4):
        batcher.submit(_request(str(number), [number] * 3))
    assert answered.wait(30)
    assert engine.batches == [[3, 3, 3, 3]]
    batcher.submit(_request("last", [1]))
    assert batcher.drain(30)  # nothing more can come: it does not wait an hour
    batcher.close()
    thread.join(30)
    assert not thread.is_alive()


def test_a_cancelled_request_leaves_its_rows_to_others() -> None:
    engine, events = SummingEncoder(RAGGED), list[TokenEvent]()
    batcher = EncodeBatcher(engine, events.extend)
    batcher.submit(_request("left", *[[1] * 8] * 8))
    batcher.step()
    batcher.cancel("left")
    batcher.cancel("unknown")
    batcher.submit(_request("stays", [2] * 8))
    batcher.step()
    assert [(event.id, event.finish) for event in events] == [
        ("left", FinishReason.CANCELLED),
        ("stays", FinishReason.STOP),
    ]
    assert not batcher.step()


def test_a_failed_batch_ends_every_request_and_the_batcher() -> None:
    engine, events = SummingEncoder(RAGGED), list[TokenEvent]()
    batcher = EncodeBatcher(engine, events.extend)
    batcher.submit(_request("broken", [99]))
    batcher.submit(_request("other", [1] * 16))
    with pytest.raises(RuntimeError, match="the device is lost"):
        batcher.step()
    assert {event.id: event.finish for event in events} == dict.fromkeys(("broken", "other"), FinishReason.ERROR)
    assert "the engine failed in a batch of 1 inputs" in str(events[0].error)
    with pytest.raises(BatcherClosed):
        batcher.submit(_request("late", [1]))


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ([], "no inputs"),
        ([[]], "input 0 has 0 tokens, not 1 to 16"),
        ([[1], [1] * 17], "input 1 has 17 tokens"),
        ([[100]], "outside the vocabulary of 100"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_the_input(inputs: list[list[int]], reason: str) -> None:
    batcher = EncodeBatcher(SummingEncoder(PADDED), lambda events: None)
    with pytest.raises(ValueError, match=reason):
        batcher.submit(_request("bad", *inputs))
