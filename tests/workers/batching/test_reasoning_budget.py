"""Thinking budgets: the reasoning of an answer ends after a number of tokens."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer as FastTokenizer

from tests.checkpoints import EOS_ID, save_tokenizer
from tests.workers.tables import TableEngine, answers, table
from workers.batching.reasoning_budget import ReasoningBudget, start_budget
from workers.messages.requests import AnswerConstraint, AnswerMarkers, GenerateRequest, ReasoningLimit
from workers.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

LIMIT = ReasoningLimit(2, "<think>", "</think>")


def forced(budget: ReasoningBudget, tokens: list[int]) -> list[int | None]:
    """Returns the ids that are forced before each token and after the last one."""
    ids = [budget.forced]
    for token in tokens:
        budget.record(token)
        ids.append(budget.forced)
    return ids


@pytest.mark.parametrize(
    ("opened", "tokens", "ids"),
    [
        (True, [9, 9, 3, 9], [None, None, 3, None, None]),  # the prompt has begun it
        (False, [1, 2, 9, 9, 3], [None, None, None, None, 3, None]),  # the answer begins it
        (False, [9, 9, 9, 9], [None] * 5),  # nothing begins it
        (True, [3, 9, 9], [None] * 4),  # it ends within the budget
        (True, [9, 9, 3, 1, 2, 3], [None, None, 3, None, None, 3, None]),  # it begins once more
    ],
)
def test_only_the_end_may_follow_a_budget_that_is_used_up(
    opened: bool, tokens: list[int], ids: list[int | None]
) -> None:
    """The reasoning may begin anywhere. All reasoning in the answer shares the budget."""
    assert forced(ReasoningBudget(msgspec.structs.replace(LIMIT, opened=opened), [1, 2], 3), tokens) == ids


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    fast = FastTokenizer.from_file(str(path / "tokenizer.json"))
    fast.add_tokens(["</think>"])
    fast.save(str(path / "tokenizer.json"))
    return load_tokenizer("cpu", str(path))


def request(id: str, limit: ReasoningLimit | None, **fields: Any) -> GenerateRequest:
    """A request whose prompt ends in the reasoning."""
    fields = {"max_tokens": 40, "seed": 1, "ignore_eos": True, **fields}
    return GenerateRequest(id=id, prompt_ids=[9, 9], reasoning_limit=limit, **fields)


def test_some_requests_have_no_budget(tokenizer: Tokenizer) -> None:
    """Those that cannot exhaust it, that cannot reason, or whose end of the reasoning has several tokens."""
    assert start_budget(request("a", LIMIT), tokenizer) is not None
    assert start_budget(request("a", None), tokenizer) is None
    assert start_budget(request("a", LIMIT, max_tokens=2), tokenizer) is None
    assert start_budget(request("a", LIMIT), ByteTokenizer()) is None
    for markers, is_limited in ((AnswerMarkers(), False), (AnswerMarkers(close="</think>"), True)):
        guide = AnswerConstraint("{}", markers=markers)
        assert (start_budget(request("a", LIMIT, guide=guide), tokenizer) is not None) is is_limited


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("budget", "length"), [(0, 0), (5, 5), (100, None), (None, None)])
def test_a_batcher_ends_the_reasoning(
    temperature: float, budget: int | None, length: int | None, tokenizer: Tokenizer
) -> None:
    """A request without a budget runs in the same batch. A budget that `max_tokens` never reaches has no effect."""
    limit = None if budget is None else msgspec.structs.replace(LIMIT, tokens=budget, opened=True)
    requests = [request("a", limit, temperature=temperature), request("b", None, temperature=temperature)]

    got = answers(TableEngine(table(tokenizer.vocab_size, spread=2.0), eos=[EOS_ID]), requests, tokenizer)

    if length is None:
        assert got.ids("a") == got.ids("b")
    else:
        (end,) = tokenizer.encode("</think>", add_special_tokens=False)
        assert got.ids("a")[: length + 1] == [*got.ids("b")[:length], end]
    assert (len(got.ids("a")), len(got.ids("b"))) == (40, 40)
