"""What a replica of NxD Inference costs."""

from __future__ import annotations

from placements.engines.memory import NxdCosts
from placements.engines.nxd_inference.kv_blocks import kv_blocks
from placements.spec.schema import ModelSpec


class NxdInferenceCosts(NxdCosts):
    """The costs on NxD Inference, whose KV cache is in blocks with a prefix cache."""

    def kv_tokens(self, model: ModelSpec, length: int) -> int:
        """The tokens of its blocks."""
        if model.engine_options.get("prefix_cache") is True:
            return kv_blocks(model.engine_options, model.max_batch, length).tokens
        return super().kv_tokens(model, length)


COSTS = NxdInferenceCosts()
