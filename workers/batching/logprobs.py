"""Log probabilities of tokens, chosen or of a prompt, and of the most probable alternatives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec.structs

from workers.messages.requests import TokenLogprobs

if TYPE_CHECKING:
    import torch

IMPOSSIBLE = -9999.0  # OpenAI's value for a probability of (almost) 0; JSON has no -inf


def token_logprobs(
    logits: torch.Tensor,
    tokens: Sequence[int | None],
    counts: Sequence[int | None],
    token_bytes: Callable[[int], bytes],
) -> list[TokenLogprobs | None]:
    """Returns the logprobs of each row's token and ``counts`` best ids; ``logits`` are float32 ``[rows, vocab_size]``.

    The logits are the model's own: temperature, penalties, bias and guide do not change the logprobs, as with OpenAI
    and vLLM. Equally probable ids are in ascending order, so the greedy token is the first of them. None for a row
    that needs none (``counts`` is None) or has no token.
    """
    import torch

    rows = [
        row for row, (token, n) in enumerate(zip(tokens, counts, strict=True)) if token is not None and n is not None
    ]
    results: list[TokenLogprobs | None] = [None] * len(tokens)
    if not rows:
        return results
    with torch.inference_mode():
        for row, logprobs in zip(rows, logits[rows].log_softmax(-1), strict=True):
            results[row] = _scored(logprobs, tokens[row] or 0, counts[row] or 0, token_bytes)
    return results


def prompt_logprobs(
    logits: torch.Tensor, ids: Sequence[int], count: int, token_bytes: Callable[[int], bytes]
) -> Iterator[TokenLogprobs]:
    """Yields the logprobs of some tokens of a prompt, and of ``count`` best ids in the place of each. ``logits`` are
    float32 ``[len(ids), vocab_size]``."""
    import torch

    with torch.inference_mode():
        for id, logprobs in zip(ids, logits.log_softmax(-1), strict=True):
            rank = int((logprobs >= logprobs[id]).sum())
            yield msgspec.structs.replace(_scored(logprobs, id, count, token_bytes), rank=rank)


def first_of_prompt(id: int, token_bytes: Callable[[int], bytes]) -> TokenLogprobs:
    """Returns the entry of a prompt's first token, which has no logprob."""
    id, _, text, raw = _described(id, 0.0, token_bytes)
    return TokenLogprobs(id, None, text, raw, [])


def _scored(logprobs: torch.Tensor, token: int, count: int, token_bytes: Callable[[int], bytes]) -> TokenLogprobs:
    best = _best(logprobs, min(count, len(logprobs)))
    top = [_described(alternative, value, token_bytes) for alternative, value in best]
    return TokenLogprobs(*_described(token, float(logprobs[token]), token_bytes), top)


def _best(logprobs: torch.Tensor, n: int) -> list[tuple[int, float]]:
    if not n:
        return []
    threshold = logprobs.topk(n).values[-1]
    ids = (logprobs >= threshold).nonzero()[:, 0]  # ascending, with all that tie for the last place
    values, order = logprobs[ids].sort(descending=True, stable=True)
    return list(zip(ids[order[:n]].tolist(), values[:n].tolist(), strict=True))


def _described(token: int, logprob: float, token_bytes: Callable[[int], bytes]) -> tuple[int, float, str, list[int]]:
    raw = token_bytes(token)
    return token, max(logprob, IMPOSSIBLE), raw.decode(errors="replace"), list(raw)
