"""Slots share blocks of a common beginning, and no block that a slot writes belongs to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from tests.searches import search
from tests.workers.batching.prefix_traffic import PrefixTraffic
from workers.engines.echo.engine import EchoEngine, echo_tokens
from workers.engines.nxd_inference.block_engine import BlockPool
from workers.messages.engine_protocol import EngineSpec, Reuse

SIZE, SLOTS, MAX_LEN = 4, 3, 32
LEAST = SLOTS * MAX_LEN // SIZE
STARTS = (4, 8, 12, 20)


class BlockEcho(EchoEngine):
    """The echo engine with the tokens of every block. It fails where a reused prefix differs from a prompt's, or a
    block of several slots would be written."""

    def __init__(self, blocks: int = LEAST) -> None:
        super().__init__(SLOTS, MAX_LEN)
        self.prefixes = BlockPool(SIZE, blocks, SLOTS, MAX_LEN, STARTS)
        self.cells: list[int | None] = [None] * (blocks * SIZE)
        self.read = self.saved = 0  # tokens of prompts
        self.load()

    @property
    def spec(self) -> EngineSpec:
        return replace(super().spec, keeps_idle_slots=True, prefix_block=SIZE, shares_blocks=True)

    def held(self, slot: int, count: int) -> list[int | None]:
        table = self.prefixes.table(slot, count)
        return [self.cells[table[place // SIZE] * SIZE + place % SIZE] for place in range(count)]

    def write(self, slot: int, place: int, token: int) -> None:
        block = self.prefixes.table(slot, place + 1)[place // SIZE]
        assert self.prefixes._owners[block] == 1
        assert not self.prefixes.is_shared(block)
        self.cells[block * SIZE + place % SIZE] = token

    def prefill_from(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], starts: Sequence[int]) -> list[int]:
        for slot, prompt, start in zip(slots, prompts, starts, strict=True):
            assert start in (0, *STARTS)
            assert start < len(prompt)
            assert self.held(slot, start) == list(prompt[:start])
            for place in range(start, len(prompt)):
                if not self.prefixes.is_shared(self.prefixes.table(slot, len(prompt))[place // SIZE]):
                    self.write(slot, place, prompt[place])
            assert self.held(slot, len(prompt)) == list(prompt)
            self.read += len(prompt) - start
            self.saved += start
        return [echo_tokens(prompt, 1)[0] for prompt in prompts]

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[int]:
        return self.prefill_from(slots, prompts, [0] * len(prompts))

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> list[int]:
        for slot, token, position in zip(slots, tokens, positions, strict=True):
            self.write(slot, position, token)
        return [
            echo_tokens([token for token in self.held(slot, position + 1) if token is not None], 1)[0]
            for slot, position in zip(slots, positions, strict=True)
        ]


class PromptsShareBlocks(PrefixTraffic):
    """With few blocks and with many."""

    longest = 22

    @initialize(blocks=st.sampled_from([LEAST, LEAST + 3, 4 * LEAST]))
    def start(self, blocks: int) -> None:
        self.serve(BlockEcho(blocks))

    @invariant()
    def every_block_has_one_place(self) -> None:
        pool = self.engine.prefixes
        owned = [block for table in pool._tables for block in table]
        assert [owned.count(block) for block in range(len(pool._owners))] == pool._owners
        assert sorted([*set(owned), *pool._empty, *pool._unowned]) == list(range(len(pool._owners)))
        assert all(pool._keys[block] is not None for block in pool._unowned)
        assert {key: block for block, key in enumerate(pool._keys) if key is not None} == pool._by_key

    @invariant()
    def a_lookup_returns_the_cached_beginning(self) -> None:
        pool = self.engine.prefixes
        for prompt in self.prompts[-3:]:
            cached = [self.engine.cells[block * SIZE : (block + 1) * SIZE] for block in pool._cached(prompt)]
            assert [token for block in cached for token in block] == prompt[: len(cached) * SIZE]
            assert len(cached) * SIZE < len(prompt)
            start = pool.place(prompt, [0]).count
            assert start == max(each for each in (0, *STARTS) if each <= len(cached) * SIZE)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "engine"):
            assert not any(self.engine.prefixes._owners)


TestPromptsShareBlocks = PromptsShareBlocks.TestCase
TestPromptsShareBlocks.settings = search(25, cost=3, stateful_step_count=30)


def pool(blocks: int = LEAST, starts: Sequence[int] = STARTS) -> BlockPool:
    return BlockPool(SIZE, blocks, SLOTS, MAX_LEN, starts)


def filled(blocks: BlockPool, slot: int, ids: Sequence[int]) -> list[int]:
    """The blocks of a prompt that was prefilled in the slot, and has left."""
    blocks.take(Reuse(slot), ids)
    table = list(blocks.table(slot, len(ids)))
    blocks.leave(slot, ids)
    return table


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=22)


@given(st.lists(st.tuples(st.integers(0, SLOTS - 1), PROMPTS), max_size=12))
def test_a_lookup_equals_a_naive_one(prompts: list[tuple[int, list[int]]]) -> None:
    """Where there are blocks enough: the longest beginning of full blocks that any prompt had."""
    blocks = pool(40 * LEAST, range(SIZE, MAX_LEN, SIZE))
    known: set[tuple[int, ...]] = {()}
    for slot, prompt in prompts:
        longest = max(len(each) for each in known if each == tuple(prompt[: len(each)]) and len(each) < len(prompt))
        assert blocks.place(prompt, [slot]) == Reuse(slot, longest)
        filled(blocks, slot, prompt)
        known |= {tuple(prompt[:end]) for end in range(SIZE, len(prompt) + 1, SIZE)}


def test_two_live_slots_share_a_beginning() -> None:
    """And each writes its own end."""
    blocks, prompt = pool(), list(range(20))
    blocks.take(Reuse(0), prompt)
    first = list(blocks.table(0, 20))
    blocks.hold(0, prompt)
    reuse = blocks.place([*prompt[:14], 99], [1, 2])
    assert reuse == Reuse(1, 12)
    blocks.take(reuse, [*prompt[:14], 99])
    second = blocks.table(1, 15)
    assert second[:3] == first[:3]
    assert not {*second[3:]} & {*first}


def test_a_prompt_is_never_cached_wholly() -> None:
    """The answer begins with the logits of its last token."""
    blocks = pool()
    filled(blocks, 0, list(range(12)))
    assert blocks.place(list(range(12)), [0]).count == 8
    assert blocks.place(list(range(13)), [0]).count == 12


def test_a_prefix_is_as_long_as_a_prefill_can_skip() -> None:
    """The other cached blocks are still not stored twice."""
    blocks = pool(starts=(8,))
    table = filled(blocks, 0, list(range(20)))
    prompt = [*range(20), 7]
    reuse = blocks.place(prompt, [2])
    assert reuse == Reuse(2, 8)
    blocks.take(reuse, prompt)
    assert blocks.table(2, 21)[:5] == table


def test_the_least_recently_used_block_is_emptied_first() -> None:
    """Empty blocks are used first; then the end of a prompt is emptied before its beginning."""
    blocks = pool(LEAST)
    old, new = list(range(100, 108)), list(range(200, 232))
    filled(blocks, 0, old)
    for slot in range(SLOTS):
        blocks.take(Reuse(slot), [1])
    for slot in range(SLOTS - 1):
        blocks.table(slot, MAX_LEN)
    blocks.table(2, MAX_LEN - 2 * SIZE)
    assert blocks.place([*old, 1], [2]).count == 8
    blocks.table(2, MAX_LEN - SIZE)
    assert blocks.place([*old, 1], [2]).count == 4
    blocks.table(2, MAX_LEN)
    assert blocks.place([*old, 1], [2]).count == 0
    assert blocks.place(new, [2]).count == 0


def test_the_blocks_of_a_failed_request_are_not_reused() -> None:
    """Its content is unknown."""
    blocks, prompt = pool(), list(range(12))
    blocks.take(Reuse(0), prompt)
    blocks.table(0, 12)
    blocks.hold(0, prompt)
    blocks.leave(0, [])
    assert blocks.place([*prompt, 1], [0]).count == 0


def test_too_few_blocks_are_refused() -> None:
    """A request could otherwise run out of them while it is answered."""
    with pytest.raises(ValueError, match="3 slots of 32 tokens need 24 blocks"):
        pool(LEAST - 1)
