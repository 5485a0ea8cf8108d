"""Thinking budgets: end the reasoning of an answer after a number of tokens, by its mark in the chat template."""

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
    """The token ids that begin and end reasoning."""

    begin: list[int]
    end: list[int]


def reasoning_marks(tokenizer: Tokenizer) -> ReasoningMarks | None:
    """Returns the marks of a model's reasoning; None without a chat template that has known ones."""
    template = tokenizer.chat_template(tools=False) or ""
    for begin, end in MARKS:
        if begin in template and end in template:
            return ReasoningMarks(*(tokenizer.encode(mark, add_special_tokens=False) for mark in (begin, end)))
    return None


def start_budget(request: GenerateRequest, marks: ReasoningMarks | None) -> ReasoningBudget | None:
    """Returns the budget of a request; None for one that its answer cannot use up. Under a guide, a model cannot
    reason."""
    budget = request.reasoning_budget
    if budget is None or budget >= request.max_tokens or marks is None or request.guide is not None:
        return None
    return ReasoningBudget(budget, marks, request.prompt_ids)


class ReasoningBudget:
    """The reasoning of one answer, and what is left of its budget. Used by one thread at a time."""

    def __init__(self, budget: int, marks: ReasoningMarks, prompt_ids: Sequence[int]) -> None:
        self._left = budget
        self._marks = marks
        self._last: list[int] = []  # as many tokens as a mark has
        self._is_open = False
        for token in prompt_ids[-PROMPT_END_TOKENS:]:
            self._follow(token)

    @property
    def forced(self) -> int | None:
        """The only id that may come next: the next one of the end's mark, once the budget is used up."""
        if not self._is_open or self._left > 0:
            return None
        end = self._marks.end
        last = self._last
        return end[next(n for n in range(len(end) - 1, -1, -1) if last[len(last) - n :] == end[:n])]

    def record(self, token: int) -> None:
        """Counts a token of the answer."""
        self._left -= self._is_open
        self._follow(token)

    def _follow(self, token: int) -> None:
        begin, end = self._marks
        self._last = [*self._last, token][-max(len(begin), len(end)) :]
        mark = end if self._is_open else begin
        if self._last[-len(mark) :] == mark:
            self._is_open = not self._is_open
