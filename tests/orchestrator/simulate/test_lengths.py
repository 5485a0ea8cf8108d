"""The lengths of a generated load."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.simulate.lengths import Lengths


def test_the_chat_lengths_are_close_to_the_published_trace() -> None:
    """Splitwise reports medians of 1,020 prompt and 129 output tokens; the whole trace's means are 1,155 and 211."""
    pairs = Lengths.parse("chat").pairs
    prompts, outputs = [prompt for prompt, _ in pairs], [output for _, output in pairs]
    assert len(pairs) == 239
    assert statistics.median(prompts) == pytest.approx(1020, rel=0.05)
    assert statistics.mean(prompts) == pytest.approx(1155, rel=0.1)
    assert statistics.median(outputs) == pytest.approx(129, rel=0.25)
    assert statistics.mean(outputs) == pytest.approx(211, rel=0.1)


@settings(deadline=None)
@given(st.integers(2, 5000))
def test_lengths_are_cut_to_fit(max_len: int) -> None:
    """Prompt and answer together fit, and neither is empty; what fits already stays."""
    chat = Lengths.parse("chat")
    cut = chat.within(max_len)
    assert all(prompt > 0 and output > 0 and prompt + output <= max_len for prompt, output in cut.pairs)
    kept = [old == new for old, new in zip(chat.pairs, cut.pairs, strict=True)]
    assert kept == [sum(pair) <= max_len for pair in chat.pairs]
    assert cut.capped == kept.count(False)


@pytest.mark.parametrize("wrong", ["", "code", "12", "12:", ":5", "0:5", "5:0", "-1:5", "1.5:5", "1:99999999999"])
def test_invalid_lengths_are_rejected_with_the_valid_forms(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"PROMPT:OUTPUT|at least 1"):
        Lengths.parse(wrong)
