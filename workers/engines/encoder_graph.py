"""The graph of an encoder: transformers' model, then pooling and dense layers. One module, so that a trace has it all.

Pooling and activations are those of sentence-transformers; tests compare both on ragged batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from workers.engines.encoder_layout import Dense, EncoderLayout, Normalize, Pooling

if TYPE_CHECKING:
    from torch import Tensor, nn


def pooled(hidden: Tensor, mask: Tensor, attended: Tensor, modes: Sequence[Pooling]) -> Tensor:
    """Returns ``[rows, len(modes) x hidden]`` of ``[rows, length, hidden]``. Both masks are ``[rows, length]`` with
    padding on the right: ``mask`` is of the tokens to pool, ``attended`` of all tokens. The last token is always the
    last one attended to."""
    import torch

    weights = mask.unsqueeze(-1).to(hidden.dtype)
    parts = []
    for mode in modes:
        if mode == "cls":
            first = mask.to(torch.int32).argmax(dim=1)
            parts.append(_row_tokens(hidden, first))
        elif mode == "lasttoken":
            last = attended.to(torch.int64).sum(dim=1) - 1
            parts.append(_row_tokens(hidden, last.clamp(min=0)))  # a row that only fills a batch has no token
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
    import torch

    return hidden.gather(1, places.to(torch.int64).view(-1, 1, 1).expand(-1, 1, hidden.shape[-1])).squeeze(1)


def embedding_graph(model: Any, layout: EncoderLayout) -> nn.Module:
    """Returns the graph from ids to vectors, float32 ``[rows, width]``. Its ``after`` has an entry for each of the
    layout's; those of dense layers are still without their weights."""
    from torch import nn

    after = nn.ModuleList(
        nn.Identity()
        if isinstance(part, Normalize)
        else nn.Sequential(nn.Linear(part.inputs, part.outputs, part.bias), getattr(nn, part.activation)())
        for part in layout.after
    )

    def finish(hidden: Tensor, attended: Tensor, mask: Tensor) -> Tensor:
        vectors = pooled(hidden, mask, attended, layout.pooling).float()
        for part, module in zip(layout.after, after, strict=True):
            vectors = module(vectors) if isinstance(part, Dense) else nn.functional.normalize(vectors, p=2, dim=-1)
        return vectors

    graph = _graph(model, finish)
    graph.after = after
    return graph


def score_graph(model: Any, activation: str) -> nn.Module:
    """Returns the graph from ids to scores, float32 ``[rows, labels]``, after the activation."""
    from torch import nn

    activate = nn.Softmax(dim=-1) if activation == "Softmax" else getattr(nn, activation)()

    def finish(logits: Tensor, attended: Tensor, mask: Tensor) -> Tensor:
        scores: Tensor = activate(logits.float())
        return scores

    return _graph(model, finish)


def _graph(model: Any, finish: Callable[[Tensor, Tensor, Tensor], Tensor]) -> nn.Module:
    """Returns a module that takes ids, attended, mask and types, each int64 ``[rows, length]``."""
    from torch import nn

    types_taken = takes_types(type(model))

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor, attended: Tensor, mask: Tensor, types: Tensor) -> Tensor:
            given = {"token_type_ids": types} if types_taken else {}
            return finish(model(input_ids=ids, attention_mask=attended, return_dict=False, **given)[0], attended, mask)

    return Graph()


def takes_types(model_class: Any) -> bool:
    """Returns whether a class of transformers takes the types of tokens."""
    return "token_type_ids" in inspect.signature(model_class.forward).parameters
