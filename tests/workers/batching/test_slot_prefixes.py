"""What slots hold, and that the batcher never lets a prompt begin with anything else."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import invariant

from tests.searches import search
from tests.workers.batching.prefix_traffic import PrefixTraffic
from tests.workers.batching.test_batcher import Received, request, run_out
from workers.batching.batcher import Batcher
from workers.batching.slots import SlotError, SlotPrefixes, Slots
from workers.engines.echo.engine import EchoEngine, echo_tokens
from workers.messages.engine_protocol import EngineSpec, Reuse
from workers.messages.wire import FrameReader, Welcome
from workers.text.tokenizer import ByteTokenizer

BLOCK = 4
tokens = st.lists(st.sampled_from([0, 1, 70_000]), max_size=20)


def holding(*held: Sequence[int]) -> SlotPrefixes:
    """Slots filled in their order, the first one least recently; an empty list is an empty slot."""
    prefixes = SlotPrefixes(len(held), BLOCK)
    for slot, ids in enumerate(held):
        prefixes.hold(slot, ids)
    return prefixes


def alike(first: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(first, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(other)))


@given(st.lists(tokens, min_size=1, max_size=4), tokens.filter(bool), st.data())
def test_place_reuses_the_longest_common_prefix(held: list[list[int]], prompt: list[int], data: st.DataObject) -> None:
    """The slot is free, no slot has more of the prompt but its last token, and less than a block is nothing."""
    free = data.draw(st.sets(st.sampled_from(range(len(held))), min_size=1))
    reuse = holding(*held).place(prompt, free)
    most = max(alike(ids, prompt[:-1]) for ids in held)
    assert reuse.slot in free
    assert reuse.count == (most if most >= BLOCK else 0)
    source = reuse.slot if reuse.source is None else reuse.source
    assert held[source][: reuse.count] == prompt[: reuse.count]


def test_a_conversation_continues_in_its_slot() -> None:
    """Also where the answer's last tokens came back as others."""
    held = list(range(20))
    assert holding([], held, held[:10]).place([*held, 50, 51], [0, 1, 2]) == Reuse(1, 20)
    assert holding([], held, held[:10]).place([*held[:17], 50, 51], [0, 1, 2]) == Reuse(1, 17)


def test_a_shared_prefix_is_copied() -> None:
    """From a free slot of which more than a block would be lost, and from a live one, to the emptiest free slot."""
    held = list(range(20))
    assert holding(held, [], [7]).place([*held[:16], 50], [0, 1, 2]) == Reuse(1, 16, 0)
    assert holding(held, [7], [8]).place([*held, 50], [1, 2]) == Reuse(1, 20, 0)


def test_the_least_recently_used_slot_is_taken_first() -> None:
    """An empty slot comes first; where the source is that slot, nothing is copied."""
    held = list(range(20))
    prefixes = holding(held, [7], [8])
    assert prefixes.place([9, 9], [0, 1, 2]) == Reuse(0)
    assert prefixes.place([*held[:10], 50], [0, 1, 2]) == Reuse(0, 10)
    prefixes.hold(0, held)
    assert prefixes.place([*held[:10], 50], [0, 1, 2]) == Reuse(1, 10, 0)
    prefixes.hold(2, [])
    assert prefixes.place([9, 9], [0, 1, 2]) == Reuse(2)


def test_of_equal_prefixes_the_slot_that_loses_least_is_taken() -> None:
    """A free one before a live one, and one that holds nothing else before one that does."""
    held = list(range(20))
    assert holding(held, held).place([*held, 50], [1]) == Reuse(1, 20)
    assert holding([*held, 7, 7, 7, 7], held, []).place([*held, 50], [0, 1, 2]) == Reuse(1, 20)


def test_the_last_prompt_token_is_always_processed() -> None:
    """Of a prompt that a slot holds to its end and beyond."""
    assert holding(list(range(20))).place(list(range(12)), [0]) == Reuse(0, 11)


def test_a_dropped_slot_holds_nothing() -> None:
    """No prompt reuses it."""
    prefixes = holding(list(range(20)))
    assert prefixes.place(list(range(20)), [0]) == Reuse(0, 19)
    prefixes.hold(0, [])
    assert prefixes.place(list(range(20)), [0]) == Reuse(0)


@pytest.mark.parametrize(("slot", "message"), [(1, "slot 1 is live already"), (2, "slot 2 does not exist")])
def test_only_a_free_slot_can_be_taken(slot: int, message: str) -> None:
    """A certain one, or SlotError; the others are the lowest still."""
    slots: Slots[str] = Slots(2)
    assert slots.take("a", 1) == 1
    with pytest.raises(SlotError, match=message):
        slots.take("b", slot)
    assert (slots.free(), slots.take("b"), slots.free()) == ([0], 0, [])


def test_a_welcome_without_a_block_means_no_prefix_cache() -> None:
    """The welcome of an earlier version is read as before."""
    fields: dict[str, Any] = {"version": "1", "package": "", "slots": 1, "max_len": 8, "max_prompt": 8, "vocab_size": 9}
    body = msgspec.msgpack.encode({"type": "Welcome"} | fields)
    (welcome,) = FrameReader().feed(len(body).to_bytes(4, "big") + body)
    assert welcome == Welcome(**fields)
    assert welcome.prefix_block == 0


class KvEngine(EchoEngine):
    """The echo engine with the tokens of every slot, which fails where a reused prefix differs from them."""

    def __init__(self, slots: int = 3, max_len: int = 64) -> None:
        super().__init__(slots, max_len)
        self.kv: list[list[int]] = [[] for _ in range(slots)]
        self.read = 0  # tokens of prompts
        self.reused: list[int] = []
        self.load()

    @property
    def spec(self) -> EngineSpec:
        return replace(super().spec, keeps_idle_slots=True, prefix_block=BLOCK)

    @property
    def saved(self) -> int:
        return sum(self.reused)

    def copy_prefix(self, source: int, slot: int, count: int) -> None:
        assert count <= len(self.kv[source])
        self.kv[slot][:count] = self.kv[source][:count]

    def prefill_from(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], starts: Sequence[int]) -> list[int]:
        for slot, prompt, start in zip(slots, prompts, starts, strict=True):
            assert self.kv[slot][:start] == list(prompt[:start])
            assert start < len(prompt)
            self.kv[slot] = list(prompt)
            self.read += len(prompt) - start
        self.reused.extend(start for start in starts if start)
        return [echo_tokens(prompt, 1)[0] for prompt in prompts]

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[int]:
        return self.prefill_from(slots, prompts, [0] * len(prompts))

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> list[int]:
        for slot, token, position in zip(slots, tokens, positions, strict=True):
            assert position == len(self.kv[slot])
            self.kv[slot].append(token)
        return [echo_tokens(self.kv[slot], 1)[0] for slot in slots]


class PromptsBeginWithWhatIsThere(PrefixTraffic):
    """Each reused prefix is in its slot."""

    def __init__(self) -> None:
        super().__init__()
        self.serve(KvEngine())

    @invariant()
    def recorded_prefixes_are_in_the_kv_cache(self) -> None:
        prefixes = self.batcher._slots.prefixes
        assert isinstance(prefixes, SlotPrefixes)
        for kv, packed in zip(self.engine.kv, prefixes._held, strict=True):
            recorded = array("I", packed).tolist()
            assert kv[: len(recorded)] == recorded


TestPromptsBeginWithWhatIsThere = PromptsBeginWithWhatIsThere.TestCase
TestPromptsBeginWithWhatIsThere.settings = search(20, cost=3, stateful_step_count=30)


def served(slots: int = 3, max_len: int = 64) -> tuple[KvEngine, Batcher, Received]:
    engine, received = KvEngine(slots, max_len), Received()
    return engine, Batcher(engine, ByteTokenizer(), received), received


def test_an_answer_is_reused_but_for_its_last_token() -> None:
    """No decode has written that one."""
    engine, batcher, received = served()
    batcher.submit(request("a", [1, 2, 3], 6))
    run_out(batcher)
    batcher.submit(request("b", [1, 2, 3, *received.ids("a"), 9], 1))
    run_out(batcher)
    assert engine.reused == [8]
    assert (batcher.stats.prefix_queries, batcher.stats.prefix_hits) == (13, 8)


def test_copies_are_made_before_their_source_is_overwritten() -> None:
    """Of three that join at once, each takes the beginning of the slot that the next of them then fills."""
    engine, batcher, received = served()
    old = [list(range(10, 30)), list(range(40, 60)), list(range(70, 90))]
    for number, prompt in enumerate([*old, old[1], old[0]]):  # so slot 2 was used longest ago, then 1, then 0
        batcher.submit(request(f"old{number}", prompt, 1))
        run_out(batcher)
    engine.reused.clear()
    new = [[*old[1][:8], 1], [*old[0][:9], 2], [*old[0][:10], 3]]
    for number, prompt in enumerate(new):
        batcher.submit(request(f"new{number}", prompt, 3))
    run_out(batcher)
    assert [received.ids(f"new{number}") for number in range(3)] == [echo_tokens(prompt, 3) for prompt in new]
    assert engine.reused == [10, 9, 8]


def test_reused_tokens_do_not_count_against_a_joint_prefill() -> None:
    """Three long prompts join together where only their ends are to be read; without the cache each goes alone."""
    engine, batcher, _ = served()
    old = [[number] * 50 for number in (10, 20, 30)]
    for number, prompt in enumerate(old):
        batcher.submit(request(str(number), prompt, 1))
        run_out(batcher)
    steps = batcher.stats.steps
    for number, prompt in enumerate(old):
        batcher.submit(request(str(number), [*prompt, 1, 2], 1))
    run_out(batcher)
    assert (engine.reused, batcher.stats.steps - steps) == ([50, 50, 50], 1)


def test_a_reassigned_slot_is_not_a_source() -> None:
    """Of two that join at once, the second begins as the slot did that the first was copied to: it is read whole."""
    engine, batcher, received = served()
    old = [list(range(10, 30)), list(range(40, 60)), list(range(70, 90))]
    for number, prompt in enumerate(old):
        batcher.submit(request(f"old{number}", prompt, 1))
        run_out(batcher)
    new = [[*old[1][:8], 1], [*old[0][:8], 2]]
    for number, prompt in enumerate(new):
        batcher.submit(request(f"new{number}", prompt, 3))
    run_out(batcher)
    assert [received.ids(f"new{number}") for number in range(2)] == [echo_tokens(prompt, 3) for prompt in new]
    assert engine.reused == [8]
