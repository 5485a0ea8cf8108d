"""Greedy verification of drafted tokens: the correct guesses of a step, and one token more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def agreed(logits: Any, drafts: Sequence[Sequence[int]]) -> list[list[int | None]]:
    """Returns the model's own tokens for each row of ``logits`` ``[len(drafts), k + 1, vocab_size]`` float32.

    A row has 1 to k + 1 tokens: the correct guesses, and the model's own token after the last of them. None, which
    ends a row, stands for logits that are not finite.
    """
    best = logits.argmax(dim=-1)
    finite = logits.gather(-1, best[..., None])[..., 0].isfinite().tolist()  # NaN and +inf count as largest
    runs: list[list[int | None]] = []
    for tokens, usable, guesses in zip(best.tolist(), finite, drafts, strict=True):
        run: list[int | None] = []
        for index, (token, ok) in enumerate(zip(tokens, usable, strict=True)):
            run.append(token if ok else None)
            if not ok or index == len(guesses) or token != guesses[index]:
                break
        runs.append(run)
    return runs
