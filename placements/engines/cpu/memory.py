"""What a replica of the cpu engine costs."""

from __future__ import annotations

from collections.abc import Sequence

from placements.engines.memory import GIB, EngineCosts
from placements.engines.vllm.capabilities import VllmNeuron
from placements.facts.checkpoints import Checkpoint
from placements.spec.schema import ModelSpec

SCORE_FAMILIES = frozenset({"bloom", "gptj"})
"""The families whose attention scores the CPU engine holds for all heads: transformers 5 has no fused attention for
them. For the others it holds the mask, which is the same for all heads."""

SCORE_BYTES = 16
"""Of each score: its number in fp32 before and after the softmax, with its mask (13 to 16 were measured)."""

CPU_COMPILE_GIB = 3.0
"""torch.compile without the model: two g++ processes at once, and torch's own graphs. Not measured for large models: a
conservative guess."""


class CpuCosts(EngineCosts):
    """The costs of the cpu engine: its weights, KV cache and prompts are in the host's memory."""

    def host_gib(
        self, model: ModelSpec, held: Sequence[Checkpoint], length: int, width: int, release: VllmNeuron | None
    ) -> tuple[float, float]:
        """Weights, KV cache, and what the longest prompt needs while it is processed, which a load does not try.
        Tensors are mapped from the files and converted one by one."""
        sizes = sum(each.parameters for each in held) * width
        if model.kind == "generate":
            tokens = model.max_batch * length
            sizes += sum(2 * each.layers * each.kv_heads * each.head_dim * tokens for each in held) * width
            sizes += max(_longest_prompt(model, each, length, width) for each in held)
        return sizes / GIB, sizes / GIB

    def compilers(self, model: ModelSpec, checkpoint: Checkpoint, prefill: int, decode: int) -> int:
        """None of Neuron."""
        return 0

    def compile_gib(self, model: ModelSpec, held: Sequence[Checkpoint], width: int, compilers: int) -> float:
        """What torch.compile needs, if the model enables it."""
        return CPU_COMPILE_GIB if model.engine_options.get("compile") is True else 0.0


def _longest_prompt(model: ModelSpec, checkpoint: Checkpoint, length: int, width: int) -> int:
    """Returns the bytes that the CPU engine needs for a prefill of as many tokens as it ever processes at once, for one
    layer: the numbers of the feed-forward layer and of the residual stream in fp32, and the attention's scores or mask.
    The peaks of 14 shapes were 0.5 to 1.0 of it, with experts 1.5 (tests/placements/test_host_memory.py)."""
    longest = max(model.buckets.prefill, default=length)
    chunk = model.engine_options.get("prefill_chunk")
    chunk = min(longest, chunk) if isinstance(chunk, int) else longest
    numbers = longest * (3 * checkpoint.ffn + 6 * checkpoint.hidden)
    score = SCORE_BYTES * checkpoint.heads if checkpoint.model_type in SCORE_FAMILIES else 1 + width
    return 4 * numbers + chunk * longest * score


COSTS = CpuCosts()
