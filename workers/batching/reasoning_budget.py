"""Thinking budgets: the reasoning of an answer ends after a number of tokens, with its mark in the chat template."""

from __future__ import annotations

from workers.messages.requests import GenerateRequest, ReasoningLimit
from workers.text.tokenizer import Tokenizer


def start_budget(request: GenerateRequest, tokenizer: Tokenizer) -> ReasoningBudget | None:
    """Returns the budget of a request; None if the answer cannot exhaust it, if a constraint that applies from the
    first token leaves no room for reasoning, or if the end of the reasoning has several tokens. A model could write
    such an end with other tokens, and would then end its reasoning twice."""
    limit, guide = request.reasoning_limit, request.guide
    if limit is None or limit.tokens >= request.max_tokens or (guide and not guide.markers.close):
        return None
    begin, end = (tokenizer.encode(text, add_special_tokens=False) for text in (limit.open, limit.close))
    return ReasoningBudget(limit, begin, end[0]) if len(end) == 1 else None


class ReasoningBudget:
    """The reasoning of one answer, and the rest of its budget. Used by one thread at a time."""

    def __init__(self, limit: ReasoningLimit, begin: list[int], end: int) -> None:
        """``begin`` and ``end`` are the tokens of the limit's texts."""
        self._left = limit.tokens
        self._begin, self._end = begin, end
        self._last: list[int] = []  # the last tokens, as many as ``begin`` has
        self._is_open = limit.opened

    @property
    def forced(self) -> int | None:
        """The only id that may come next, that of the end, once the budget is used up; else None."""
        return self._end if self._is_open and self._left <= 0 else None

    def record(self, token: int) -> None:
        """Counts a token of the answer."""
        self._left -= self._is_open
        self._last = [*self._last, token][-len(self._begin) :]
        self._is_open = self._last == self._begin or (self._is_open and token != self._end)
