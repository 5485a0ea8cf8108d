"""How probable the model found a token, and which ones it found most probable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from workers.messages.requests import TokenLogprobs

if TYPE_CHECKING:
    import torch

IMPOSSIBLE = -9999.0  # OpenAI's number for the logarithm of (almost) nothing; JSON has no -inf


def token_logprobs(
    logits: torch.Tensor,
    tokens: Sequence[int | None],
    wanted: Sequence[int | None],
    token_bytes: Callable[[int], bytes],
) -> list[TokenLogprobs | None]:
    """For each row of ``logits`` ``[rows, vocab_size]`` float32 its token's logprob and the ``wanted`` best ids.

    The logits are the model's own, so neither temperature nor penalties, bias or guide show in the logprobs, as in
    OpenAI's and vLLM's answers. Equally probable ids come in their order, so the greedy token is the first of them.
    None for a row that wants none (``wanted`` is None) or has no token.
    """
    import torch

    asked = [
        row for row, (token, n) in enumerate(zip(tokens, wanted, strict=True)) if token is not None and n is not None
    ]
    found: list[TokenLogprobs | None] = [None] * len(tokens)
    if not asked:
        return found
    with torch.inference_mode():
        for row, logprobs in zip(asked, logits[asked].log_softmax(-1), strict=True):
            token = tokens[row] or 0
            best = _best(logprobs, min(wanted[row] or 0, len(logprobs)))
            id, logprob, text, raw = _described(token, float(logprobs[token]), token_bytes)
            top = [_described(other, value, token_bytes) for other, value in best]
            found[row] = TokenLogprobs(id, logprob, text, raw, top)
    return found


def _best(logprobs: torch.Tensor, n: int) -> list[tuple[int, float]]:
    if not n:
        return []
    least = logprobs.topk(n).values[-1]
    ids = (logprobs >= least).nonzero()[:, 0]  # ascending, and all of those that tie for the last place
    values, order = logprobs[ids].sort(descending=True, stable=True)
    return list(zip(ids[order[:n]].tolist(), values[:n].tolist(), strict=True))


def _described(token: int, logprob: float, token_bytes: Callable[[int], bytes]) -> tuple[int, float, str, list[int]]:
    raw = token_bytes(token)
    return token, max(logprob, IMPOSSIBLE), raw.decode(errors="replace"), list(raw)
