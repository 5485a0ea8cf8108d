"""The graph of an encoder: transformers' model, then pooling and dense layers. One module, so that a trace has it all.

Pooling and activations are those of sentence-transformers; tests compare both on ragged batches."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workers.engines.encoder.layout import Dense, EncoderLayout, Pooling

if TYPE_CHECKING:
    from collections.abc import Sequence


def pooled(hidden: Tensor, mask: Tensor, attended: Tensor, modes: Sequence[Pooling]) -> Tensor:
    """Returns ``[rows, len(modes) x hidden]`` of ``[rows, length, hidden]``. Both masks are ``[rows, length]`` with
    padding on the right: ``mask`` is of the tokens to pool, ``attended`` of all tokens. The last token is always the
    last one attended to."""
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    parts = []
    for mode in modes:
        if mode == "cls":
            first = mask.to(torch.int32).argmax(dim=1)
            parts.append(_row_tokens(hidden, first))
        elif mode == "lasttoken":
            parts.append(_row_tokens(hidden, attended.to(torch.int64).sum(dim=1) - 1))
        elif mode == "max":
            parts.append(hidden.masked_fill(weights == 0, float("-inf")).max(dim=1).values)
        elif mode == "weightedmean":
            positions = torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype, device=hidden.device)
            by_place = weights * positions.view(1, -1, 1)
            parts.append((hidden * by_place).sum(dim=1) / by_place.sum(dim=1).clamp(min=1e-9))
        else:
            count = weights.sum(dim=1).clamp(min=1e-9)
            parts.append((hidden * weights).sum(dim=1) / (count if mode == "mean" else count.sqrt()))
    return torch.cat(parts, dim=-1)


def _row_tokens(hidden: Tensor, places: Tensor) -> Tensor:
    return hidden.gather(1, places.to(torch.int64).view(-1, 1, 1).expand(-1, 1, hidden.shape[-1])).squeeze(1)


class EmbeddingGraph(nn.Module):
    """Token ids to vectors: ``[rows, length]`` to float32 ``[rows, width]``."""

    def __init__(self, model: Any, layout: EncoderLayout) -> None:
        """The dense layers are created without their weights."""
        super().__init__()
        self.model = model
        self._modes = layout.pooling
        self._takes_types = "token_type_ids" in inspect.signature(model.forward).parameters
        self.after = nn.ModuleList(
            nn.Sequential(nn.Linear(part.inputs, part.outputs, part.bias), getattr(nn, part.activation)())
            if isinstance(part, Dense)
            else _Normalized()
            for part in layout.after
        )

    def forward(self, ids: Tensor, attended: Tensor, mask: Tensor, types: Tensor) -> Tensor:
        given = {"token_type_ids": types} if self._takes_types else {}
        hidden = self.model(input_ids=ids, attention_mask=attended, return_dict=False, **given)[0]
        vectors = pooled(hidden, mask, attended, self._modes).float()
        for part in self.after:
            vectors = part(vectors)
        return vectors


class ScoreGraph(nn.Module):
    """Token ids to scores: ``[rows, length]`` to float32 ``[rows, labels]``, after the activation."""

    def __init__(self, model: Any, activation: str) -> None:
        super().__init__()
        self.model = model
        self.activation = nn.Softmax(dim=-1) if activation == "Softmax" else getattr(nn, activation)()
        self._takes_types = "token_type_ids" in inspect.signature(model.forward).parameters

    def forward(self, ids: Tensor, attended: Tensor, mask: Tensor, types: Tensor) -> Tensor:
        given = {"token_type_ids": types} if self._takes_types else {}
        logits = self.model(input_ids=ids, attention_mask=attended, return_dict=False, **given)[0]
        scores: Tensor = self.activation(logits.float())
        return scores


class _Normalized(nn.Module):
    def forward(self, vectors: Tensor) -> Tensor:
        return nn.functional.normalize(vectors, p=2, dim=-1)
