"""Slots that hold tokens, and what transformers computes from them: there is no KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, __version__


class TokenSlots:
    """The tokens of each slot, and the logits of transformers after them."""

    def __init__(self, path: str, slots: int, dtype: torch.dtype) -> None:
        named: dict[str, Any] = {"dtype" if int(__version__.split(".")[0]) >= 5 else "torch_dtype": dtype}
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, **named).eval()
        self._tokens: list[list[int | None]] = [[] for _ in range(slots)]

    @torch.inference_mode()
    def run(self, rows: Sequence[tuple[int, Sequence[int], int]]) -> list[torch.Tensor]:
        """Writes ``tokens`` of each ``(slot, tokens, position)``, and forgets what the slot holds behind them.

        Returns float32 logits ``[len(tokens), vocab]`` for each row; NaN after positions that were never written.
        Raises IndexError for a slot that does not exist.
        """
        held = []
        for slot, tokens, position in rows:
            before = self._tokens[slot][:position]
            self._tokens[slot] = [*before, *[None] * (position - len(before)), *tokens]
            held.append(self._tokens[slot])
        width = max(len(tokens) for tokens in held)
        ids = torch.tensor([[token or 0 for token in tokens] + [0] * (width - len(tokens)) for tokens in held])
        logits = self.model(ids).logits.float()
        return [
            logits[row, len(tokens) - len(new) : len(tokens)] * (float("nan") if None in tokens else 1)
            for row, (tokens, (_, new, _)) in enumerate(zip(held, rows, strict=True))
        ]
