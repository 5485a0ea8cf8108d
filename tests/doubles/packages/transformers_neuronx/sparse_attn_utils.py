"""Sparse attention: only its configuration."""

from __future__ import annotations

from typing import Any

from neuron_double.bound import bound


class SparseAttnConfig:
    @bound("transformers_neuronx.sparse_attn_utils.SparseAttnConfig.__init__")
    def __init__(
        self,
        attn_type: str = "blk_sparse",
        causal: bool = False,
        sparse_attn_config: Any = None,
        same_mask_per_layer: bool = True,
        sparse_mask_dict: Any = None,
    ) -> None:
        self.attn_type, self.causal, self.sparse_attn_config = attn_type, causal, sparse_attn_config
        self.same_mask_per_layer, self.sparse_mask_dict = same_mask_per_layer, sparse_mask_dict or {}
