"""What a replica of vLLM costs."""

from __future__ import annotations

from placements.engines.memory import PROCESS_GIB, LoadedReplica, NxdCosts
from placements.engines.vllm.capabilities import kv_tokens
from placements.spec.schema import ModelSpec

VLLM_GIB = 1.2
"""The processes of vLLM beside the one with the model, its API server and EngineCore: 0.56 to 0.64 and 0.53 to 0.61
GiB (measured with vLLM 0.32 on CPU)."""


class VllmCosts(NxdCosts):
    """The costs of vLLM, whose plugin up to vllm-neuron 0.5 runs on NxD Inference."""

    def kv_tokens(self, model: ModelSpec, length: int) -> int:
        """Whole slots, or blocks with a prefix cache."""
        return kv_tokens(model.engine_options, model.max_batch, length)

    def host_gib(self, replica: LoadedReplica) -> tuple[float, float]:
        """With two more processes; with its later plugin also a process for each further core."""
        serving, loading = super().host_gib(replica)
        has_workers = replica.release is not None and replica.release.back_end == "neuron"
        others = VLLM_GIB + ((replica.model.tp_degree - 1) * PROCESS_GIB if has_workers else 0.0)
        return serving + others, loading + others


COSTS = VllmCosts()
