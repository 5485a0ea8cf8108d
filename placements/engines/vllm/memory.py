"""What a replica of vLLM costs."""

from __future__ import annotations

from collections.abc import Sequence

from placements.engines.memory import PROCESS_GIB, NxdCosts
from placements.engines.vllm.capabilities import VllmNeuron, kv_tokens
from placements.facts.checkpoints import Checkpoint
from placements.spec.schema import ModelSpec

VLLM_GIB = 1.2
"""The processes of vLLM beside the one with the model, its API server and EngineCore: 0.56 to 0.64 and 0.53 to 0.61
GiB (measured with vLLM 0.32 on CPU)."""


class VllmCosts(NxdCosts):
    """The costs of vLLM, whose plugin up to vllm-neuron 0.5 runs on NxD Inference."""

    def kv_tokens(self, model: ModelSpec, length: int) -> int:
        """Whole slots, or blocks with a prefix cache."""
        return kv_tokens(model.engine_options, model.max_batch, length)

    def host_gib(
        self, model: ModelSpec, held: Sequence[Checkpoint], length: int, width: int, release: VllmNeuron | None
    ) -> tuple[float, float]:
        """With two more processes; with its later plugin also a process for each further core."""
        serving, loading = super().host_gib(model, held, length, width, release)
        others = VLLM_GIB
        if release is not None and release.back_end == "neuron":
            others += (model.tp_degree - 1) * PROCESS_GIB
        return serving + others, loading + others


COSTS = VllmCosts()
