"""Buckets that are advised pad recorded prompts least."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.advise.buckets import STEP, BucketSet, advise_buckets
from workers.batching.buckets import ladder

PROMPTS = st.lists(st.integers(1, 9 * STEP), min_size=1, max_size=40)


@given(prompts=PROMPTS, most=st.integers(1, 5))
def test_no_other_buckets_pad_less(prompts: list[int], most: int) -> None:
    """Of all sets of as many multiples of STEP."""
    counts = {length: prompts.count(length) for length in prompts}
    advice = advise_buckets(prompts, most)
    last = advice.best[0].lengths[-1]
    multiples = range(STEP, last, STEP)
    for size, best in enumerate(advice.best, 1):
        assert len(best.lengths) == size
        others = (BucketSet.of((*lower, last), counts) for lower in combinations(multiples, size - 1))
        assert best.padding == min(other.padding for other in others)


@given(prompts=PROMPTS)
def test_more_buckets_pad_no_more(prompts: list[int]) -> None:
    paddings = [each.padding for each in advise_buckets(prompts, 9).best]
    assert paddings == sorted(paddings, reverse=True)


@given(prompts=PROMPTS, longest=st.integers(9 * STEP, 1 << 20))
def test_the_last_bucket_is_the_longest(prompts: list[int], longest: int) -> None:
    """Which holds every prompt."""
    advice = advise_buckets(prompts, 4, longest)
    assert {each.lengths[-1] for each in (*advice.best, advice.default)} == {longest}
    assert all(each.lengths == tuple(sorted(set(each.lengths))) for each in advice.best)


def test_the_fewest_buckets_that_pad_as_little_as_the_default_are_chosen() -> None:
    advice = advise_buckets([100] * 50 + [900] * 50 + [4000], 6)
    assert advice.default.lengths == ladder(STEP, 4096)
    assert advice.chosen.lengths == (128, 1024, 4096) or advice.chosen.padding < advice.default.padding
    assert len(advice.chosen.lengths) < len(advice.default.lengths)
    smaller = [each for each in advice.best if len(each.lengths) < len(advice.chosen.lengths)]
    assert all(each.padding > advice.default.padding for each in smaller)


def test_long_prompts_have_wider_steps() -> None:
    """So that a trace of prompts of all lengths takes no more than seconds."""
    advice = advise_buckets(range(1, 1 << 18, 97), 3)
    assert all(length % 512 == 0 for length in advice.best[-1].lengths)


def test_no_bucket_holds_a_longer_prompt() -> None:
    with pytest.raises(ValueError, match="no bucket holds 200 tokens"):
        advise_buckets([200], 2, 128)
