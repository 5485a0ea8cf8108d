"""What a replica of the cpu engine costs."""

from __future__ import annotations

from placements.engines.memory import GIB, EngineCosts, LoadedReplica
from placements.facts.checkpoints import Checkpoint
from placements.spec.schema import ModelSpec

SCORE_FAMILIES = frozenset({"bloom", "gptj"})
"""The families whose attention scores the CPU engine holds for all heads: transformers 5 has no fused attention for
them. For the others it holds the mask, which is the same for all heads."""

SCORE_BYTES = 16
"""Bytes of each attention score: fp32 before and after the softmax, and its mask (13 to 16 were measured)."""

CPU_COMPILE_GIB = 3.0
"""torch.compile without the model: two g++ processes at once, and torch's own graphs. Not measured for large models: a
conservative guess."""


class CpuCosts(EngineCosts):
    """The costs of the cpu engine: its weights, KV cache and prompts are in the host's memory."""

    def host_gib(self, replica: LoadedReplica) -> tuple[float, float]:
        """Weights, KV cache, and what the longest prompt needs while it is processed, which a load does not try.
        Tensors are mapped from the files and converted one by one."""
        model, held, width, sizes = replica.model, replica.checkpoints, replica.width, 0
        if model.kind == "generate":
            tokens = model.max_batch * replica.length
            sizes = sum(2 * each.layers * each.kv_heads * each.head_dim * tokens for each in held) * width
            sizes += max(_longest_prompt(model, each, replica.length, width) for each in held)
        total = replica.weights_gib + sizes / GIB
        return total, total

    def compile_gib(self, replica: LoadedReplica, compilers: int) -> float:
        """What torch.compile needs, if the model enables it."""
        return CPU_COMPILE_GIB if replica.model.engine_options.get("compile") is True else 0.0


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


COSTS = CpuCosts(compiles=False)
