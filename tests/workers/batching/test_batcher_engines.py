"""The batcher with engines that are not plain: lock-step ones, those that sample, and those that speculate."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.batching.test_batcher import Received, RecordingEngine, request, run_out, setup
from workers.batching.batcher import Batcher
from workers.engines.echo.engine import echo_tokens
from workers.messages.engine_protocol import DeviceSampling
from workers.messages.requests import FinishReason
from workers.text.tokenizer import ByteTokenizer

MAX_LEN = 64


@given(sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=12))
def test_a_lock_step_batch_fits_into_a_slot(sizes: list[tuple[int, int]]) -> None:
    """All rows share a position, so the longest prompt and the longest answer of a batch fit together."""
    engine, batcher, received = setup(slots=3, max_len=MAX_LEN, continuous=False)
    lengths = [(prompt, min(answer, MAX_LEN - prompt)) for prompt, answer in sizes]
    for number, (prompt, answer) in enumerate(lengths):
        batcher.submit(request(str(number), [number] * prompt, answer))
    run_out(batcher)
    batches = [[lengths[prompt[0]] for prompt in batch] for batch in engine.prompts]
    assert all(max(p for p, _ in batch) + max(n for _, n in batch) <= MAX_LEN for batch in batches)
    assert [len(received.ids(str(number))) for number in range(len(lengths))] == [answer for _, answer in lengths]


def test_a_lock_step_batch_keeps_the_order_of_arrival() -> None:
    """One that does not fit waits for the next batch, and no later one overtakes it."""
    engine, batcher, _ = setup(slots=3, max_len=MAX_LEN, continuous=False)
    for number, (prompt, answer) in enumerate([(10, 10), (60, 4), (10, 10)]):
        batcher.submit(request(str(number), [number] * prompt, answer))
    run_out(batcher)
    assert [[prompt[0] for prompt in batch] for batch in engine.prompts] == [[0], [1], [2]]


class DeviceSampler(RecordingEngine):
    """Remembers how each slot was to be sampled when it was prefilled."""

    def __init__(self, **engine: Any) -> None:
        super().__init__(**engine, device_top_k=256)
        self.told: dict[int, DeviceSampling] = {}
        self.sampled: list[DeviceSampling] = []

    def sample_by(self, slots: Sequence[int], how: Sequence[DeviceSampling]) -> None:
        self.told.update(zip(slots, how, strict=True))

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[int]:
        self.sampled += [self.told.pop(slot) for slot in slots]
        return super().prefill(slots, prompts)


def with_engine(engine: RecordingEngine) -> tuple[Batcher, Received]:
    received = Received()
    ticks = itertools.count()
    return Batcher(engine, ByteTokenizer(), received, clock=lambda: float(next(ticks))), received


def test_each_slot_is_sampled_by_its_requests_parameters() -> None:
    """Before its prefill, and never with a top_k of 0, which some devices take for "any token"."""
    engine = DeviceSampler()
    batcher, received = with_engine(engine)
    batcher.submit(request("greedy", temperature=0.0, top_p=0.5, top_k=7))
    batcher.submit(request("plain"))
    batcher.submit(request("cut", temperature=0.7, top_p=0.9, top_k=40))
    run_out(batcher)
    assert engine.sampled == [
        DeviceSampling(top_k=1, top_p=1.0, temperature=1.0),
        DeviceSampling(top_k=256, top_p=1.0, temperature=1.0),
        DeviceSampling(top_k=40, top_p=0.9, temperature=0.7),
    ]
    assert received.finish("cut") is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"top_k": 257}, "top_k must be at most 256"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"min_p": 0.1}, "min_p is not supported"),
        ({"seed": 1}, "seed is not supported"),
        ({"logit_bias": {3: 1.0}}, "logit_bias, penalties"),
    ],
)
def test_parameters_that_the_device_lacks_are_refused(fields: dict[str, Any], word: str) -> None:
    """At the door and with its name; greedy requests do not look at the numbers of sampling."""
    batcher, _ = with_engine(DeviceSampler())
    with pytest.raises(ValueError, match=word):
        batcher.submit(request("a", **fields))
    if "logit_bias" not in fields:
        batcher.submit(request("b", **fields, temperature=0.0))


class Runner(RecordingEngine):
    """Gives 1 to run_k + 1 tokens in a step, by chance."""

    def __init__(self, run_k: int, seed: int, **engine: Any) -> None:
        super().__init__(**engine, run_k=run_k)
        self.run_k = run_k
        self.random = random.Random(seed)

    def decode_runs(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> list[list[int]]:
        assert max(positions) + self.run_k + 1 <= self.spec.max_len
        columns, last = [], list(tokens)
        before = [dict(self._rows)]
        for ahead in range(self.run_k + 1):
            last = super().decode(slots, last, [position + ahead for position in positions])
            columns.append(last)
            before.append(dict(self._rows))
        runs = [list(run)[: self.random.randint(1, self.run_k + 1)] for run in zip(*columns, strict=True)]
        self._rows = {slot: before[len(run)][slot] for slot, run in zip(slots, runs, strict=True)}
        return runs


@given(
    sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=12),
    run_k=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_runs_give_the_tokens_of_single_steps(sizes: list[tuple[int, int]], run_k: int, seed: int) -> None:
    """No token too many, none lost, and the slot's last position is reached."""
    batcher, received = with_engine(Runner(run_k, seed, slots=3, max_len=MAX_LEN))
    lengths = [(prompt, min(answer, MAX_LEN - prompt)) for prompt, answer in sizes]
    for number, (prompt, answer) in enumerate(lengths):
        batcher.submit(request(str(number), [number] * prompt, answer, temperature=0.0))
    run_out(batcher)
    expected = [echo_tokens([number] * prompt, answer) for number, (prompt, answer) in enumerate(lengths)]
    assert [received.ids(str(number)) for number in range(len(lengths))] == expected
    stats = batcher.stats
    assert stats.accepted <= stats.drafted


def test_an_engine_that_speculates_by_itself_is_greedy() -> None:
    """A sampled request is refused rather than answered greedily."""
    batcher, _ = with_engine(Runner(2, 0))
    with pytest.raises(ValueError, match="temperature must be 0"):
        batcher.submit(request("a", temperature=0.5))


def test_without_a_temperature_such_an_engine_answers_greedily() -> None:
    """OpenAI's default of 1 would have every plain request refused."""
    batcher, received = with_engine(Runner(2, 0))
    batcher.submit(request("a", [5], 4, temperature=1.0, temperature_is_default=True))
    run_out(batcher)
    assert received.ids("a") == echo_tokens([5], 4)


class Drafter(RecordingEngine):
    """Remembers which slots were drafted for, and fails then."""

    def __init__(self, **engine: Any) -> None:
        super().__init__(**engine, draft_k=2, returns="logits")
        self.drafted: list[tuple[int, ...]] = []

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> Any:
        return torch.zeros(len(slots), self.spec.vocab_size)

    def draft(self, slots: Sequence[int], *_: Any) -> list[list[int]]:
        self.drafted.append(tuple(slots))
        raise InterruptedError

    def verify(self, *_: Any) -> Any:
        raise AssertionError("not reached: ``draft`` fails first")


@pytest.mark.parametrize(("keeps", "drafted"), [(True, (1,)), (False, (0, 1))])
def test_all_live_slots_are_drafted_for_where_idle_ones_are_lost(keeps: bool, drafted: tuple[int, ...]) -> None:
    """A draft model on Neuron overwrites what is not listed, so requests that use no draft are listed too."""
    engine = Drafter(keeps_idle_slots=keeps)
    batcher, _ = with_engine(engine)
    batcher.submit(request("sampled", temperature=1.0))
    batcher.submit(request("greedy", temperature=0.0))
    batcher.step()
    with pytest.raises(InterruptedError):
        batcher.step()
    assert engine.drafted == [drafted]
