"""What a replica of transformers-neuronx costs."""

from __future__ import annotations

from placements.engines.memory import EngineCosts
from placements.engines.transformers_neuronx.capabilities import FAMILIES, Family
from placements.facts.checkpoints import Checkpoint
from placements.spec.schema import ModelSpec

TNX_SCRATCH_GIB = 0.5
"""512 MB, one page of the runtime, in two reports of its users: Llama-3-70B on 12 cores and Llama-2-7B on 2, which ran
out of memory."""


class TnxCosts(EngineCosts):
    """The costs on transformers-neuronx, which embeds on the host unless ``on_device_embedding`` is set."""

    def embeddings(self, model: ModelSpec, checkpoint: Checkpoint) -> tuple[int, int]:
        """A tied head is a matrix of its own."""
        groups = checkpoint.groups
        embeddings = groups.head or groups.embedding
        if not self.embeds_on_host(model, checkpoint):  # add_pre_layer_parameter(..., sharding=1), also of positions
            embeddings += groups.embedding + groups.positions
        return embeddings, groups.small

    def embeds_on_host(self, model: ModelSpec, checkpoint: Checkpoint) -> bool:
        """GPT-J and GPT-NeoX ignore the option."""
        return model.engine_options.get("on_device_embedding") is not True or _family(checkpoint).serial

    def compilers(self, model: ModelSpec, checkpoint: Checkpoint, prefill: int, decode: int) -> int:
        """One for each graph, at most ``compiler.workers``. Families with continuous batching have one decode graph by
        default; in serial families one graph serves both."""
        if _family(checkpoint).serial:
            prefill, decode = 0, 1
        elif not model.buckets.decode and model.max_batch > 1 and _family(checkpoint).continuous:
            decode = 1
        return min(prefill + decode, model.compiler.workers or prefill + decode)


def _family(checkpoint: Checkpoint) -> Family:
    return FAMILIES.get(checkpoint.model_type, Family())


COSTS = TnxCosts(scratch_gib=TNX_SCRATCH_GIB)
