"""The form of the attention kernel in 0.9."""

from __future__ import annotations

import torch
from neuronxcc.nki._private_kernels.attention import attend


def attention_cte(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    *,
    causal_mask: bool,
    tp_out: bool,
    tp_q: bool,
    tp_k: bool,
) -> torch.Tensor:
    """Returns ``[rows, width, tokens]``; ``tp_q`` and ``tp_k``: queries and keys are ``[rows, tokens, width]``, with
    fewer rows of keys than of queries."""
    assert tp_out
    queries, keys = (queries.transpose(1, 2) if tp_q else queries), (keys.transpose(1, 2) if tp_k else keys)
    copies = len(queries) // len(keys)
    keys, values = keys.repeat_interleave(copies, 0), values.repeat_interleave(copies, 0)
    return attend(queries, keys, values, scale, causal_mask)


attention_cte.on_cpu = True  # type: ignore[attr-defined]
