"""Padding of heads, and the names of dtypes."""

from __future__ import annotations

from typing import Any

from neuron_double.bound import bound

from transformers_neuronx.constants import GQA

BYTES = {"f32": 4, "f16": 2, "bf16": 2, "s8": 1, "f8e4m3fn": 1}


@bound("transformers_neuronx.utils.parse_amp")
def parse_amp(amp: str) -> tuple[str, str]:
    if amp not in ("f32", "f16", "bf16"):
        raise AssertionError(f"unsupported amp {amp}")
    return amp, amp


@bound("transformers_neuronx.utils.round_up_to_divisor")
def round_up_to_divisor(value: int, divisor: int) -> int:
    return -(-value // divisor) * divisor


@bound("transformers_neuronx.utils.get_qkv_padding")
def get_qkv_padding(n_head: int, n_kv_head: int, tp_degree: int, neuron_config: Any = None) -> tuple[int, int]:
    """Query and KV heads as they are stored: zero heads fill up to a multiple of ``tp_degree``."""
    heads = round_up_to_divisor(n_head, tp_degree)
    chosen = getattr(neuron_config, "group_query_attention", None)
    if n_kv_head == n_head:
        return heads, heads
    if chosen is GQA.SHARD_OVER_BATCH or n_kv_head % tp_degree == 0:
        return heads, n_kv_head
    return heads, tp_degree if tp_degree % n_kv_head == 0 else heads
