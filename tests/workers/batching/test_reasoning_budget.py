"""Thinking budgets: the reasoning of an answer ends after a number of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer

from tests.checkpoints import EOS_ID, save_tokenizer
from tests.workers.tables import TableEngine, answers, table
from workers.batching.reasoning_budget import ReasoningBudget, ReasoningMarks, reasoning_marks
from workers.messages.requests import GenerateRequest
from workers.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

MARKS = ReasoningMarks([1, 2], 3)


def forced(budget: ReasoningBudget, tokens: list[int]) -> list[int | None]:
    """Returns the ids that are forced before each token and after the last one."""
    ids = [budget.forced]
    for token in tokens:
        budget.record(token)
        ids.append(budget.forced)
    return ids


@pytest.mark.parametrize(
    ("prompt", "tokens", "ids"),
    [
        ([9, 1, 2], [9, 9, 3, 9], [None, None, 3, None, None]),  # the prompt has begun it
        ([9], [1, 2, 9, 9, 3], [None, None, None, None, 3, None]),  # the answer begins it
        ([9], [9, 9, 9, 9], [None] * 5),  # nothing begins it
        ([1, 2, 9, 3], [9, 9, 9], [None] * 4),  # it has ended in the prompt
        ([1, 2, 9, 7, 9], [9, 9, 9], [None] * 4),  # the text of an earlier turn has its begin
        ([1, 2], [3, 9, 9], [None] * 4),  # it ends within the budget
        ([1, 2], [9, 9, 3, 1, 2, 3], [None, None, 3, None, None, 3, None]),  # it begins once more
    ],
)
def test_only_the_end_may_follow_a_budget_that_is_used_up(
    prompt: list[int], tokens: list[int], ids: list[int | None]
) -> None:
    """The reasoning may begin anywhere. All reasoning in the answer shares the budget."""
    assert forced(ReasoningBudget(2, MARKS, prompt, frozenset({7})), tokens) == ids


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path, "{{ '<think>' }}{{ messages[0].content }}{{ '</think>' }}")
    fast = FastTokenizer.from_file(str(path / "tokenizer.json"))
    fast.add_tokens(["</think>"])
    fast.save(str(path / "tokenizer.json"))
    return load_tokenizer("cpu", str(path))


def test_the_marks_are_those_of_the_chat_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Some models have none, or an end of several tokens."""
    marks = reasoning_marks(tokenizer)

    assert marks is not None
    assert (tokenizer.decode(marks.begin), tokenizer.decode([marks.end])) == ("<think>", "</think>")
    save_tokenizer(tmp_path, "<think></think>")
    for other in (load_tokenizer("cpu", str(tmp_path)), ByteTokenizer()):
        assert reasoning_marks(other) is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("budget", "length"), [(0, 0), (5, 5), (100, None), (None, None)])
def test_a_batcher_ends_the_reasoning(
    temperature: float, budget: int | None, length: int | None, tokenizer: Tokenizer
) -> None:
    """A request without a budget runs in the same batch. A budget that `max_tokens` never reaches has no effect."""
    marks = reasoning_marks(tokenizer)
    assert marks is not None
    limits = {"max_tokens": 40, "temperature": temperature, "seed": 1, "ignore_eos": True}
    requests = [
        GenerateRequest(id="a", prompt_ids=marks.begin, reasoning_budget=budget, **limits),  # type: ignore[arg-type]
        GenerateRequest(id="b", prompt_ids=marks.begin, **limits),  # type: ignore[arg-type]
    ]

    got = answers(TableEngine(table(tokenizer.vocab_size, spread=2.0), eos=[EOS_ID]), requests, tokenizer)

    if length is None:
        assert got.ids("a") == got.ids("b")
    else:
        assert got.ids("a")[: length + 1] == [*got.ids("b")[:length], marks.end]
    assert (len(got.ids("a")), len(got.ids("b"))) == (40, 40)
