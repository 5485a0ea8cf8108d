"""HBM that one replica needs on each of its cores, by class."""

from __future__ import annotations

from dataclasses import dataclass

from placements.checkpoints import Checkpoint
from placements.engines import BYTES, NXD_ENGINES, Engine
from placements.spec import ModelSpec

GIB = 1 << 30

OVERHEAD_GIB = 1.6
"""Scratchpad, collectives, DMA rings and NEFF code. From the one measured case: 1604 MiB on ordinary ranks of
Llama-3.1-8B, tp 8, inf2.48xlarge (optimum-neuron, benchmark/vllm/memory_capacity_analysis.md). Probably high for small
models; ``hbm_overhead_gib`` replaces it."""

NXD_RANK0_OVERHEAD_GIB = 0.6
"""What rank 0 holds beyond that in the backends built on NeuronX Distributed: 2214 MiB against 1604 (same source)."""

USABLE_HBM = 0.95
"""The part of a core's HBM that an estimate may fill."""


@dataclass(frozen=True)
class MemoryEstimate:
    """GiB on the fullest core of a replica (rank 0)."""

    weights: float  # this core's shard
    kv: float  # this core's part of the KV cache of all slots
    rank0: float  # embedding and head that rank 0 holds unsharded (NxD engines)
    overhead: float

    @property
    def total(self) -> float:
        """All terms, in GiB."""
        return self.weights + self.kv + self.rank0 + self.overhead

    def __str__(self) -> str:
        rank0 = f" + embedding {self.rank0:.2f}" if self.rank0 else ""
        terms = f"weights {self.weights:.2f} + KV cache {self.kv:.2f}{rank0} + overhead {self.overhead:.2f}"
        return f"{terms} = {self.total:.2f} GiB"


def padded_heads(checkpoint: Checkpoint, tp_degree: int) -> int:
    """Query heads rounded up to a multiple of tp_degree; the surplus is zeros."""
    return -(-checkpoint.heads // tp_degree) * tp_degree


def padded_kv_heads(checkpoint: Checkpoint, tp_degree: int) -> int:
    """KV heads held by all cores together, copies and padding included.

    Grouped queries with kv heads that tp_degree divides stay as they are; fewer kv heads than cores, dividing
    tp_degree, are copied to one a core; anything else becomes full multi-head attention with padded heads. So the KV
    cache of a core stops shrinking once tp_degree exceeds the kv heads. (transformers-neuronx
    `utils.get_qkv_padding`, NxD Inference `get_shardable_head_counts`.)
    """
    kv = checkpoint.kv_heads
    if kv == checkpoint.heads:
        return padded_heads(checkpoint, tp_degree)
    if kv % tp_degree == 0:
        return kv
    if tp_degree % kv == 0:
        return tp_degree
    return padded_heads(checkpoint, tp_degree)


def estimate(
    model: ModelSpec, checkpoint: Checkpoint, engine: Engine | None = None, draft: Checkpoint | None = None
) -> MemoryEstimate:
    """What a replica of ``model`` needs on its fullest core; weights and KV cache of a ``draft`` beside it included.

    ``engine`` is the resolved engine, by default the one the model names; it decides the default dtype, and whether
    rank 0 holds the embeddings unsharded. The formula: (weights + KV) / tp + overhead, KV = 2 x layers x kv heads x
    head_dim x length x slots x bytes. Prefill scratch that grows with length^2 is not in it.
    """
    engine = engine or model.engine
    width = BYTES[model.dtype_on(engine)]
    tp = model.tp_degree
    slots = model.length(checkpoint) * model.max_batch
    weights = kv = 0.0
    for held in (checkpoint, draft):
        if held is not None:
            weights += held.parameters * width / tp
            kv += 2 * held.layers * padded_kv_heads(held, tp) * held.head_dim * slots * width / tp
    on_nxd = engine in NXD_ENGINES
    rank0 = checkpoint.embedding_parameters * width * (1 - 1 / tp) if on_nxd else 0.0
    overhead = model.hbm_overhead_gib
    if overhead is None:
        overhead = OVERHEAD_GIB + (NXD_RANK0_OVERHEAD_GIB if on_nxd else 0.0)
    return MemoryEstimate(weights / GIB, kv / GIB, rank0 / GIB, overhead)
