"""Attention of prompts, which NxD Inference uses for prompts of 4096 tokens and more, with torch."""

from __future__ import annotations

from typing import Any

import torch

SHORTEST = 512  # tokens that the kernel accepts
RUNS: list[int] = []  # the tokens of each run


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """Returns ``[rows, width, tokens]``, the shape of queries and keys; that of values is ``[rows, tokens, width]``.

    There is no mask of padding: it is on the right, where no token sees it.
    """
    tokens = queries.shape[-1]
    assert tokens >= SHORTEST
    assert queries.shape == keys.shape == values.transpose(1, 2).shape
    RUNS.append(tokens)
    outputs = []
    for query, key, value in zip(queries, keys, values, strict=True):  # one by one, since scores are large
        scores = query.float().T @ key.float() * scale
        if causal:
            scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), float("-inf"))
        outputs.append((scores.softmax(-1) @ value.float()).T)
    return torch.stack(outputs).to(queries.dtype)


def attention_isa_kernel(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    output: torch.Tensor,
    *,
    kernel_name: str,
    use_dma_transpose: bool = False,
    **others: Any,
) -> None:
    """Fill ``output``, ``[rows, width, tokens]``: the form before 0.9."""
    assert not others, others
    output.copy_(attend(queries, keys, values, scale, kernel_name.startswith("Causal")))
