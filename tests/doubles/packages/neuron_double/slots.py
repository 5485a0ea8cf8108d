"""A causal language model of plain transformers with one KV cache for each slot, written where the caller says."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, __version__

DTYPES = {
    **dict.fromkeys(("fp32", "f32", "float32"), torch.float32),
    **dict.fromkeys(("fp16", "f16", "float16"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
}
FP8 = torch.float8_e4m3fn


class SlotModel:
    """Reads and writes one slot at a time. What is stored in a slot is used as it is, stale or overwritten."""

    def __init__(
        self,
        path: str | Path,
        slots: int,
        max_len: int,
        dtype: str | torch.dtype = "float32",
        *,
        quantize: str | None = None,
        quantize_kv: str | None = None,
        config: Any = None,
        sees_first_only: bool = False,
    ) -> None:
        """``quantize``, ``quantize_kv``: None, "int8" or "fp8", each computed in ``dtype`` from rounded values.

        ``config`` replaces that of the checkpoint. With ``sees_first_only`` every token attends to position 0 alone.
        """
        kind = DTYPES[dtype] if isinstance(dtype, str) else dtype
        named: dict[str, Any] = {"dtype" if int(__version__.split(".")[0]) >= 5 else "torch_dtype": kind}
        if config is not None:
            named["config"] = config
        self._sees_first_only = sees_first_only
        self.model: Any = AutoModelForCausalLM.from_pretrained(str(path), **named).eval()
        self.config: Any = self.model.config
        self.slots, self.max_len = slots, max_len
        self.vocab_size = int(self.config.vocab_size)
        self._takes_positions = "position_ids" in inspect.signature(self.model.forward).parameters
        self._quantize_kv = quantize_kv
        # [slot][layer] -> keys and values, each [kv_heads, max_len, head_dim]; made when first written
        self._stored: list[dict[int, list[torch.Tensor]]] = [{} for _ in range(slots)]
        if quantize:
            quantize_weights(self.model, quantize)

    @torch.inference_mode(False)  # what is stored is written again later, perhaps outside of the caller's mode
    @torch.no_grad()
    def run(self, slot: int, tokens: Sequence[int], position: int) -> torch.Tensor:
        """Write ``tokens`` from ``position`` on, reading what stands before it: float32 logits [len(tokens), vocab].

        Raises IndexError for a slot or a position that does not exist.
        """
        end = position + len(tokens)
        if not 0 <= slot < self.slots or position < 0 or end > self.max_len or not tokens:
            raise IndexError(f"slot {slot} of {self.slots}, positions {position} to {end} of {self.max_len}")
        cache = DynamicCache()
        if position:
            for layer, (keys, values) in sorted(self._written(slot).items()):
                cache.update(keys[None, :, :position].clone(), values[None, :, :position].clone(), layer)
        more = {"position_ids": torch.arange(position, end)[None]} if self._takes_positions else {}
        mask = torch.ones(1, end, dtype=torch.long)
        if self._sees_first_only:
            mask[:, 1:] = 0
        out = self.model(
            input_ids=torch.tensor([list(tokens)]),
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **more,
        )
        for layer, pair in enumerate(_layers(out.past_key_values)):
            stored = self._stored[slot].get(layer)
            if stored is None:
                stored = [
                    torch.zeros(states.shape[1], self.max_len, states.shape[3], dtype=states.dtype) for states in pair
                ]
                self._stored[slot][layer] = stored
            for cells, states in zip(stored, pair, strict=True):
                cells[:, position:end] = rounded(states[0, :, position:end], self._quantize_kv)
        logits: torch.Tensor = out.logits[0].float()
        return logits

    def garble(self, slot: int, position: int, token: int = 0) -> None:
        """What a device does to a slot that is not in a decode: run with ``token`` at ``position``."""
        self.run(slot, [token], position)

    def copy(self, source: int, target: int) -> None:
        """``target`` holds what ``source`` holds."""
        self._stored[target] = {
            layer: [tensor.clone() for tensor in pair] for layer, pair in self._stored[source].items()
        }

    def clear(self, slot: int | None = None) -> None:
        """Zeros in one slot, or in all."""
        for index in range(self.slots) if slot is None else [slot]:
            self._stored[index] = {}

    def _written(self, slot: int) -> dict[int, list[torch.Tensor]]:
        """What is stored in the slot; a device's cache is all zeros before anything is written."""
        if not self._stored[slot]:
            self.run(slot, [0], 0)
            for pair in self._stored[slot].values():
                for tensor in pair:
                    tensor.zero_()
        return self._stored[slot]


def _layers(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every layer, [1, kv_heads, length, head_dim], of transformers 4.47 and 5."""
    if hasattr(cache, "layers"):
        return [(layer.keys, layer.values) for layer in cache.layers]
    return list(zip(cache.key_cache, cache.value_cache, strict=True))


def rounded(tensor: torch.Tensor, to: str | None) -> torch.Tensor:
    """Cast directly to int8 or fp8 and back, without a scale, as the KV caches of both packages are."""
    if to is None:
        return tensor
    if to == "int8":
        return tensor.clamp(-128, 127).trunc()  # as XLA converts
    return tensor.to(FP8).to(tensor.dtype)


def quantize_weights(model: Any, to: str) -> None:
    """Round the weights of every linear layer but the head: int8 with one scale for each output channel, or fp8."""
    head = model.get_output_embeddings()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if module is head or weight is None or type(module).__name__ not in ("Linear", "Conv1D"):
            continue
        inputs = 1 if isinstance(module, torch.nn.Linear) else 0  # GPT-2's Conv1D is [in, out]
        most = 127 if to == "int8" else torch.finfo(FP8).max
        with torch.no_grad():
            scale = weight.float().abs().amax(dim=inputs, keepdim=True).clamp(min=1e-12) / most
            scaled = weight.float() / scale
            scaled = scaled.round() if to == "int8" else scaled.to(FP8).float()
            weight.copy_((scaled * scale).to(weight.dtype))
