"""Thinking budgets: the reasoning of an answer ends after a number of tokens, with its mark in the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workers.messages.requests import GenerateRequest
from workers.text.tokenizer import Tokenizer

MARKS = (  # around reasoning, in the templates of Qwen3 and many others, Mistral, Seed-OSS, gpt-oss and Gemma 4
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
    ("<|channel>thought", "<channel|>"),
)
PROMPT_END_TOKENS = 64  # of a prompt, where the template may have begun the reasoning


class ReasoningMarks(NamedTuple):
    """The token ids that begin reasoning, and the one that ends it."""

    begin: list[int]
    end: int


def reasoning_marks(tokenizer: Tokenizer) -> ReasoningMarks | None:
    """Returns the marks of a model's reasoning; None if its chat template has no known marks, or if the end has several
    tokens. A model could write such an end with other tokens, and would then end its reasoning twice."""
    template = tokenizer.chat_template(tools=False) or ""
    for begin, end in MARKS:
        if begin in template and end in template:
            first, last = (tokenizer.encode(mark, add_special_tokens=False) for mark in (begin, end))
            return ReasoningMarks(first, last[0]) if len(last) == 1 else None
    return None


def start_budget(
    request: GenerateRequest, marks: ReasoningMarks | None, eos_ids: frozenset[int]
) -> ReasoningBudget | None:
    """Returns the budget of a request; None if the answer cannot exhaust it. If a constraint applies from the first
    token, the model cannot reason. The prompt up to the last of ``eos_ids`` does not belong to the answer."""
    budget, guide = request.reasoning_budget, request.guide
    if budget is None or budget >= request.max_tokens or marks is None or (guide and not guide.markers.close):
        return None
    return ReasoningBudget(budget, marks, request.prompt_ids, eos_ids)


class ReasoningBudget:
    """The reasoning of one answer, and the rest of its budget. Used by one thread at a time."""

    def __init__(self, budget: int, marks: ReasoningMarks, prompt_ids: Sequence[int], eos_ids: frozenset[int]) -> None:
        self._left = budget
        self._marks = marks
        self._last: list[int] = []  # the last tokens, as many as ``begin`` has
        self._is_open = False
        for token in prompt_ids[-PROMPT_END_TOKENS:]:
            self._follow(token)
            self._is_open = self._is_open and token not in eos_ids  # a user's text may name the begin

    @property
    def forced(self) -> int | None:
        """The only id that may come next, that of the end, once the budget is used up; else None."""
        return self._marks.end if self._is_open and self._left <= 0 else None

    def record(self, token: int) -> None:
        """Counts a token of the answer."""
        self._left -= self._is_open
        self._follow(token)

    def _follow(self, token: int) -> None:
        begin, end = self._marks
        self._last = [*self._last, token][-len(begin) :]
        self._is_open = self._last == begin or (self._is_open and token != end)
