from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.searches import search
from workers.batching.batcher import Batcher
from workers.batching.step_loop import BatcherClosed
from workers.engines.echo.engine import EchoEngine, echo_tokens
from workers.messages.engine_protocol import EngineSpec
from workers.messages.requests import FinishReason, GenerateRequest, TokenEvent
from workers.text.tokenizer import ByteTokenizer

DEADLINE_S = 10.0


class RecordingEngine(EchoEngine):
    """The echo engine, which also records its calls, and can fail or lack continuous batching."""

    def __init__(self, slots: int = 4, max_len: int = 64, **changes: Any) -> None:
        super().__init__(slots, max_len)
        self.changes = changes
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.prompts: list[list[Sequence[int]]] = []
        self.failure: Exception | None = None
        self.load()

    @property
    def spec(self) -> EngineSpec:
        return replace(super().spec, **self.changes)

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[int]:
        self.calls.append(("prefill", tuple(slots)))
        self.prompts.append(list(prompts))
        if self.failure is not None:
            raise self.failure
        return super().prefill(slots, prompts)

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> list[int]:
        self.calls.append(("decode", tuple(slots)))
        if self.failure is not None:
            raise self.failure
        return super().decode(slots, tokens, positions)


class Received:
    """The events of a batcher, by request and by step."""

    def __init__(self) -> None:
        self.steps: list[list[TokenEvent]] = []
        self.by_id: defaultdict[str, list[TokenEvent]] = defaultdict(list)
        self.finished = threading.Event()  # set at every finish; cleared by who waits

    def __call__(self, events: list[TokenEvent]) -> None:
        self.steps.append(events)
        for event in events:
            self.by_id[event.id].append(event)
            if event.finish is not None:
                self.finished.set()

    def ids(self, id: str) -> list[int]:
        return [token for event in self.by_id[id] for token in event.token_ids]

    def text(self, id: str) -> str:
        return "".join(event.text for event in self.by_id[id])

    def finish(self, id: str) -> FinishReason | None:
        """The one finish; fails when there are several, or when it is not the last event."""
        finishes = [event.finish for event in self.by_id[id] if event.finish is not None]
        assert len(finishes) <= 1
        assert not finishes or self.by_id[id][-1].finish is finishes[0]
        return finishes[0] if finishes else None


def setup(**engine: Any) -> tuple[RecordingEngine, Batcher, Received]:
    recording = RecordingEngine(**engine)
    received = Received()
    ticks = itertools.count()
    return recording, Batcher(recording, ByteTokenizer(), received, clock=lambda: float(next(ticks))), received


def request(id: str, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 4, **fields: Any) -> GenerateRequest:
    return GenerateRequest(id=id, prompt_ids=list(prompt), max_tokens=max_tokens, **fields)


def run_out(batcher: Batcher) -> None:
    while batcher.step():
        pass


def test_every_request_gets_its_own_answer_and_one_finish() -> None:
    """40 requests of all lengths through 4 slots: each exactly its echo, as ids and as text, ended by its length."""
    _, batcher, received = setup()
    requests = {str(i): ([i, *range(i % 17)], 1 + i % 13) for i in range(40)}
    for id, (prompt, n) in requests.items():
        batcher.submit(request(id, prompt, n))
    run_out(batcher)
    for id, (prompt, n) in requests.items():
        expected = echo_tokens(prompt, n)
        assert (received.ids(id), received.text(id)) == (expected, bytes(expected).decode())
        assert received.finish(id) is FinishReason.LENGTH


def test_one_list_of_events_for_each_step() -> None:
    """A step emits once, one event for each request that progressed, and nothing is emitted without a step."""
    engine, batcher, received = setup()
    batcher.submit(request("a"))
    batcher.submit(request("b", max_tokens=2))
    assert received.steps == []
    run_out(batcher)
    assert [[event.id for event in step] for step in received.steps] == [["a", "b"], ["a", "b"], ["a"], ["a"]]
    assert len(engine.calls) == 4


def test_a_free_slot_is_taken_while_others_decode() -> None:
    """A waiting request joins as soon as a slot is free, into the lowest one."""
    engine, batcher, _ = setup(slots=2)
    for id, max_tokens in (("a", 2), ("b", 5), ("c", 2)):
        batcher.submit(request(id, max_tokens=max_tokens))
    run_out(batcher)
    assert engine.calls == [
        ("prefill", (0, 1)),
        ("decode", (0, 1)),
        ("prefill", (0,)),
        ("decode", (0, 1)),
        ("decode", (1,)),
        ("decode", (1,)),
    ]


def test_between_two_prefills_the_live_requests_get_a_decode() -> None:
    """A queue of prompts slows live requests down but cannot stop them."""
    engine, batcher, _ = setup(slots=4, max_len=64)
    batcher.submit(request("live", max_tokens=20))
    batcher.step()
    for i in range(3):
        batcher.submit(request(f"long{i}", prompt=[i] * 60, max_tokens=4))
    run_out(batcher)
    kinds = [kind for kind, _ in engine.calls]
    assert kinds.count("prefill") == 4
    assert not any(pair == ("prefill", "prefill") for pair in itertools.pairwise(kinds))


def test_a_prefill_is_never_longer_than_the_longest_prompt() -> None:
    """Short prompts are processed together, long ones alone: padded, a step holds at most the largest bucket."""
    engine, batcher, _ = setup(slots=16, max_len=64)
    lengths = [3, 3, 3, 3, 3, 40, 40, 17, 17, 17]
    for i, length in enumerate(lengths):
        batcher.submit(request(str(i), prompt=[i] * length, max_tokens=1))
    run_out(batcher)
    assert [[len(prompt) for prompt in step] for step in engine.prompts] == [
        [3, 3, 3, 3],
        [3],
        [40],
        [40],
        [17, 17],
        [17],
    ]


def test_a_lock_step_engine_is_filled_only_when_empty() -> None:
    """Without continuous batching the next requests wait until the last slot is free, and then come all at once."""
    engine, batcher, received = setup(slots=2, continuous=False)
    for i, max_tokens in enumerate((2, 5, 3, 4)):
        batcher.submit(request(str(i), prompt=[9] * 50, max_tokens=max_tokens))
    run_out(batcher)
    assert [slots for kind, slots in engine.calls if kind == "prefill"] == [(0, 1), (0, 1)]
    assert [len(received.ids(str(i))) for i in range(4)] == [2, 5, 3, 4]


def test_a_cancelled_request_frees_its_slot_in_the_next_step() -> None:
    """The slot's next owner is prefilled in the step that emits CANCELLED; no other request changes."""
    engine, batcher, received = setup(slots=2)
    for id in ("a", "b", "c"):
        batcher.submit(request(id, [ord(id)], 6))
    batcher.step()
    batcher.step()
    batcher.cancel("a")
    batcher.step()
    assert engine.calls[-1] == ("prefill", (0,))
    assert [(event.id, event.finish) for event in received.steps[-1]] == [("a", FinishReason.CANCELLED), ("c", None)]
    run_out(batcher)
    assert received.ids("a") == echo_tokens([ord("a")], 6)[:2]
    assert (received.ids("b"), received.ids("c")) == (echo_tokens([ord("b")], 6), echo_tokens([ord("c")], 6))


def test_a_waiting_request_is_cancelled_without_a_slot() -> None:
    """It gets its CANCELLED event and never reaches the engine."""
    engine, batcher, received = setup(slots=1)
    batcher.submit(request("a", [1], 3))
    batcher.submit(request("b", [2], 3))
    batcher.cancel("b")
    run_out(batcher)
    assert received.finish("b") is FinishReason.CANCELLED
    assert engine.prompts == [[[1]]]


def test_cancelling_an_unknown_id_does_nothing() -> None:
    """A cancel may cross the last event on its way."""
    _, batcher, received = setup()
    batcher.cancel("nobody")
    assert not batcher.step()
    assert received.steps == []


def test_a_cancel_that_crosses_the_last_token_changes_nothing() -> None:
    """The request has ended in the step that was running: one finish, and the next request is not cancelled for it."""
    engine, batcher, received = setup()
    original = engine.prefill

    def cancelled_meanwhile(slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[int]:
        batcher.cancel("a")
        return original(slots, prompts)

    engine.prefill = cancelled_meanwhile  # type: ignore[method-assign]
    batcher.submit(request("a", max_tokens=1))
    run_out(batcher)
    engine.prefill = original  # type: ignore[method-assign]
    assert received.finish("a") is FinishReason.LENGTH
    batcher.submit(request("a", max_tokens=3))
    run_out(batcher)
    assert received.by_id["a"][-1].finish is FinishReason.LENGTH


def answer_of(prompt: Sequence[int], n: int) -> str:
    return bytes(echo_tokens(prompt, n)).decode()


def test_a_stop_string_ends_the_answer_before_it() -> None:
    """The text ends before the stop string, the ids with the token that completed it, and the slot is free."""
    _, batcher, received = setup()
    text = answer_of([1, 2, 3], 20)
    batcher.submit(request("a", max_tokens=20, stop=[text[5:8]]))
    run_out(batcher)
    assert (received.text("a"), received.finish("a")) == (text[:5], FinishReason.STOP)
    assert len(received.ids("a")) == 8
    assert batcher.stats.live == 0


def test_text_that_may_become_a_stop_string_is_held_back_and_flushed_at_the_end() -> None:
    """No event shows the beginning of a stop string, unless the answer ends there."""
    _, batcher, received = setup()
    text = answer_of([1, 2, 3], 6)
    batcher.submit(request("a", max_tokens=6, stop=[text[4:6] + "never"]))
    run_out(batcher)
    assert [event.text for event in received.by_id["a"]] == [*text[:4], "", text[4:6]]
    assert received.finish("a") is FinishReason.LENGTH


def test_a_stop_id_ends_the_answer_and_is_not_in_the_text() -> None:
    """It is counted among the ids, like the EOS."""
    _, batcher, received = setup()
    ids = echo_tokens([1, 2, 3], 10)
    first = ids.index(ids[4])
    batcher.submit(request("a", max_tokens=10, stop_token_ids=[ids[4]]))
    run_out(batcher)
    assert received.ids("a") == ids[: first + 1]
    assert (received.text("a"), received.finish("a")) == (bytes(ids[:first]).decode(), FinishReason.STOP)


def test_before_min_tokens_nothing_ends_the_answer_of_an_engine_that_samples_itself() -> None:
    """The engine cannot avoid a stop id, so it is ordinary text before min_tokens."""
    _, batcher, received = setup()
    ids = echo_tokens([1, 2, 3], 10)
    batcher.submit(request("a", max_tokens=10, stop_token_ids=ids, min_tokens=4))
    run_out(batcher)
    assert received.ids("a") == ids[:5]
    assert (received.text("a"), received.finish("a")) == (bytes(ids[:4]).decode(), FinishReason.STOP)


@pytest.mark.parametrize(("ignore_eos", "length"), [(False, 3), (True, 6)])
def test_an_eos_ends_the_answer_unless_it_is_ignored(ignore_eos: bool, length: int) -> None:
    """The engine's EOS ids stop a request, ignore_eos turns them off."""
    prompt = next([i] for i in range(256) if len(set(echo_tokens([i], 3))) == 3)
    ids = echo_tokens(prompt, 6)
    _, batcher, received = setup(eos_token_ids=frozenset({ids[2]}))
    batcher.submit(request("a", prompt, 6, ignore_eos=ignore_eos))
    run_out(batcher)
    assert received.ids("a") == ids[:length]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1, 257]}, "vocabulary of 257"),
        ({"prompt": [-1]}, "vocabulary of 257"),
        ({"prompt": [1] * 61, "max_tokens": 4}, "61 prompt tokens and max_tokens 4 exceed the 64"),
        ({"prompt": [1] * 65}, "65 tokens, the limit is 64"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ["x", ""]}, "stop string"),
        ({"id": "here"}, "already running"),
        ({"min_tokens": 5}, "min_tokens must be from 0 to 4"),
        ({"stop_token_ids": [257]}, "stop_token_ids must have ids inside the vocabulary of 257"),
        ({"logprobs": 0}, "engine samples the tokens itself"),
        ({"guide": "{}"}, "engine samples the tokens itself"),
        ({"presence_penalty": 1.0}, "engine samples the tokens itself"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_the_reason(wrong: dict[str, Any], message: str) -> None:
    """ValueError names the number and the limit; the others are not disturbed."""
    _, batcher, received = setup()
    batcher.submit(request("here"))
    with pytest.raises(ValueError, match=message):
        batcher.submit(request(**({"id": "new"} | wrong)))
    run_out(batcher)
    assert received.ids("here") == echo_tokens([1, 2, 3], 4)
    assert list(received.by_id) == ["here"]


def test_a_slot_can_be_filled_to_its_last_token() -> None:
    """prompt + max_tokens == max_len is served."""
    _, batcher, received = setup(slots=1, max_len=32)
    batcher.submit(request("a", [5] * 20, 12))
    run_out(batcher)
    assert received.ids("a") == echo_tokens([5] * 20, 12)


def test_an_id_may_come_again_after_its_finish() -> None:
    """Only live and waiting ids are taken."""
    _, batcher, received = setup()
    for _ in range(2):
        batcher.submit(request("a"))
        run_out(batcher)
    assert received.ids("a") == echo_tokens([1, 2, 3], 4) * 2


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_failing_engine_ends_every_request_once_and_the_batcher(steps_before: int) -> None:
    """Live and waiting requests get an ERROR that names the cause, step raises, and nothing is accepted any more."""
    engine, batcher, received = setup(slots=2)
    for id in ("a", "b", "c"):
        batcher.submit(request(id))
    for _ in range(steps_before):
        batcher.step()
    batcher.cancel("c")
    engine.failure = RuntimeError("NRT_EXEC_BAD_STATE")
    with pytest.raises(RuntimeError, match="NRT_EXEC_BAD_STATE"):
        batcher.step()
    assert received.finish("c") is FinishReason.CANCELLED
    for id in ("a", "b"):
        assert received.finish(id) is FinishReason.ERROR
        assert "RuntimeError: NRT_EXEC_BAD_STATE" in str(received.by_id[id][-1].error)
    with pytest.raises(BatcherClosed, match="NRT_EXEC_BAD_STATE"):
        batcher.submit(request("d"))
    with pytest.raises(BatcherClosed):
        batcher.step()
    assert "NRT_EXEC_BAD_STATE" in str(batcher.stats.failed)


def test_events_that_cannot_be_sent_end_the_batcher() -> None:
    """Going on without anyone to hear it would leave clients waiting."""
    engine = RecordingEngine()

    def broken(events: list[TokenEvent]) -> None:
        raise OSError("socket gone")

    batcher = Batcher(engine, ByteTokenizer(), broken)
    batcher.submit(request("a"))
    with pytest.raises(OSError, match="socket gone"):
        batcher.step()
    assert batcher.drain(0)
    with pytest.raises(BatcherClosed, match="socket gone"):
        batcher.submit(request("b"))


def test_stats_count_live_and_waiting_requests() -> None:
    """A frozen snapshot: slots, live, waiting, steps, tokens and the times of the clock."""
    _, batcher, _ = setup(slots=2)
    for id in ("a", "b", "c"):
        batcher.submit(request(id))
    batcher.step()
    batcher.step()
    stats = batcher.stats
    assert (stats.slots, stats.live, stats.waiting, stats.prefilling) == (2, 2, 1, 0)
    assert (stats.steps, stats.tokens, stats.step_started_at) == (2, 4, None)


def test_a_running_step_can_be_seen_from_outside() -> None:
    """During a prefill, stats show its start and its requests: a stuck device is visible."""
    engine, batcher, _ = setup()
    stats = []
    original = engine.prefill

    def prefill(slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[int]:
        stats.append(batcher.stats)
        return original(slots, prompts)

    engine.prefill = prefill  # type: ignore[method-assign]
    batcher.submit(request("a"))
    batcher.step()
    assert (stats[0].prefilling, stats[0].live, stats[0].step_started_at) == (1, 1, 0.0)


@pytest.fixture
def running() -> Iterator[tuple[RecordingEngine, Batcher, Received, threading.Thread]]:
    engine, batcher, received = setup()
    thread = threading.Thread(target=batcher.run, daemon=True)
    thread.start()
    yield engine, batcher, received, thread
    batcher.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def wait_until_finished(received: Received, ids: Sequence[str]) -> None:
    while any(received.finish(id) is None for id in ids):
        assert received.finished.wait(DEADLINE_S), "no finish within the deadline"
        received.finished.clear()


def test_run_serves_what_other_threads_submit(running: Any) -> None:
    """Requests from eight threads at once get their own answers, and an idle batcher wakes up for the next."""
    _, batcher, received, _ = running
    for wave in range(2):
        prompts = {f"{wave}-{i}": [wave, i] for i in range(24)}
        requests = [request(id, prompt, 10) for id, prompt in prompts.items()]
        threads = [
            threading.Thread(target=lambda part: list(map(batcher.submit, part)), args=(requests[first::8],))
            for first in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        wait_until_finished(received, list(prompts))
        assert all(received.ids(id) == echo_tokens(prompt, 10) for id, prompt in prompts.items())


def test_draining_refuses_new_requests_and_finishes_the_accepted_ones() -> None:
    """drain is true once nothing is left, and its last event has been emitted by then."""
    _, batcher, received = setup(slots=1)
    batcher.submit(request("a"))
    batcher.submit(request("b"))
    assert not batcher.drain(0)
    with pytest.raises(BatcherClosed, match="draining"):
        batcher.submit(request("c"))
    thread = threading.Thread(target=batcher.run, daemon=True)
    thread.start()
    assert batcher.drain(DEADLINE_S)
    assert (received.finish("a"), received.finish("b")) == (FinishReason.LENGTH, FinishReason.LENGTH)
    batcher.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_drain_waits_for_the_last_event_to_be_sent() -> None:
    """Who drains may end the process next, so an answer that is finished but not yet sent counts as live."""
    entered, leave = threading.Event(), threading.Event()
    sent = []

    def slow(events: list[TokenEvent]) -> None:
        entered.set()
        assert leave.wait(DEADLINE_S)
        sent.extend(events)

    batcher = Batcher(RecordingEngine(), ByteTokenizer(), slow)
    batcher.submit(request("a", max_tokens=1))
    thread = threading.Thread(target=batcher.step)
    thread.start()
    assert entered.wait(DEADLINE_S)
    assert not batcher.drain(0)
    leave.set()
    assert batcher.drain(DEADLINE_S)
    assert [event.finish for event in sent] == [FinishReason.LENGTH]
    thread.join(DEADLINE_S)


def test_closing_ends_accepted_requests_with_an_error(running: Any) -> None:
    """Nobody is left waiting: live and waiting requests get an ERROR event before run returns."""
    engine, batcher, received, thread = running
    gate = threading.Event()
    original = engine.decode
    engine.decode = lambda *rows: (gate.wait(DEADLINE_S), original(*rows))[1]
    for i in range(6):
        batcher.submit(request(str(i), max_tokens=50))
    batcher.close()
    gate.set()
    thread.join(DEADLINE_S)
    assert [received.finish(str(i)) for i in range(6)] == [FinishReason.ERROR] * 6
    with pytest.raises(BatcherClosed, match="closing"):
        batcher.submit(request("late"))


class AnyOrderOfEvents(RuleBasedStateMachine):
    """Whatever comes in which order: no slot leaks, no live slot is left out (the echo engine raises), each request
    gets exactly its echo or, cancelled, the beginning of it, and exactly one finish, as its last event."""

    def __init__(self) -> None:
        super().__init__()
        self.engine, self.batcher, self.received = setup(slots=3, max_len=48)
        self.wanted: dict[str, tuple[list[int], int]] = {}
        self.cancelled_at: dict[str, int] = {}  # id -> steps so far

    @rule(
        prompt=st.lists(st.integers(0, 256), min_size=1, max_size=38),
        max_tokens=st.integers(1, 10),
    )
    def submit(self, prompt: list[int], max_tokens: int) -> None:
        id = str(len(self.wanted))
        self.wanted[id] = (prompt, max_tokens)
        self.batcher.submit(request(id, prompt, max_tokens))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        unfinished = [id for id in self.wanted if self.received.finish(id) is None]
        if unfinished:
            id = data.draw(st.sampled_from(unfinished))
            self.batcher.cancel(id)
            self.cancelled_at.setdefault(id, self.batcher.stats.steps)

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.batcher.step()

    @invariant()
    def answers_are_right_so_far(self) -> None:
        for id, (prompt, max_tokens) in self.wanted.items():
            expected = echo_tokens(prompt, max_tokens)
            ids, finish = self.received.ids(id), self.received.finish(id)
            assert ids == expected[: len(ids)]
            assert self.received.text(id) == bytes(ids).decode()
            assert (finish is FinishReason.LENGTH) == (len(ids) == max_tokens)
            if finish is None and id in self.cancelled_at:
                assert self.batcher.stats.steps == self.cancelled_at[id]
            if finish is not FinishReason.LENGTH and finish is not None:
                assert finish is FinishReason.CANCELLED
                assert id in self.cancelled_at

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        stats = self.batcher.stats
        unfinished = sum(self.received.finish(id) is None for id in self.wanted)
        assert stats.live + stats.waiting == unfinished
        assert stats.live <= stats.slots

    def teardown(self) -> None:
        run_out(self.batcher)
        self.answers_are_right_so_far()
        assert all(self.received.finish(id) is not None for id in self.wanted)
        assert (self.batcher.stats.live, self.batcher.stats.waiting) == (0, 0)
        for _, slots in self.engine.calls:
            assert list(slots) == sorted(set(slots))


TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
TestAnyOrderOfEvents.settings = search(30, cost=3, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow])
