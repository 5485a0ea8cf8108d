"""What a step of several tokens a slot gives under greedy decoding: the drafted ones that are right, and one more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def agreed(logits: Any, drafts: Sequence[Sequence[int]]) -> list[list[int | None]]:
    """The target's own tokens for each row of ``logits``, a tensor ``[len(drafts), k + 1, vocab_size]`` of float32.

    As many as follow from right guesses, 1 to k + 1: the token after the last right guess is the target's own too.
    None, which ends a row, where the logits are not numbers.
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
