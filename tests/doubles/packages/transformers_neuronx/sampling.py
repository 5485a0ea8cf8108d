"""Sampling on the device."""

from __future__ import annotations

from typing import Any

import torch

NAME = "transformers_neuronx.sampling."
DEVICE_TOP_K = 256  # the most that is looked at on the device


def drawn_on_device(logits: torch.Tensor, config: Any, lines: list[int]) -> torch.Tensor:
    """Ids ``[rows, 1]``. Where ``config`` is by batch line, its lists are indexed by the line."""
    ids = []
    for row, line in enumerate(lines):
        top_k, top_p, temperature = (
            value[line] if isinstance(value, list) else value
            for value in (config.top_k, config.top_p, config.temperature)
        )
        if not config.do_sample or top_k == 1:
            ids.append(logits[row].argmax())
            continue
        assert 0 < top_k <= DEVICE_TOP_K, f"top_k {top_k} is not in 1 to {DEVICE_TOP_K}"
        ids.append(_draw(logits[row] / temperature, top_k, top_p))
    return torch.stack(ids)[:, None]


def _draw(scores: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    values, ids = torch.topk(scores, min(top_k, len(scores)))
    weights = values.softmax(-1)
    keep = weights.cumsum(-1) - weights < top_p
    return ids[torch.multinomial(weights * keep, 1)][0]
