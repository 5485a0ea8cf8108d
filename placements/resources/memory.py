"""Estimates the HBM of a replica, by class, from config.json."""

from __future__ import annotations

from dataclasses import dataclass

from placements.engines.capabilities import BYTES
from placements.engines.memory import GIB, costs_of
from placements.engines.registry import HOST_ENGINES, Engine
from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import Topology
from placements.spec.schema import GroupQueryAttention, ModelSpec

COLLECTIVES_GIB = 0.16
"""Collectives (126 MiB), notifications and others (7), and 34 MiB by which the weights exceeded their formula. The
constants up to NXD_RANK0_RUNTIME_GIB come from the case that `engines.memory.SCRATCH_GIB` names; ``hbm_overhead_gib``
replaces them all. In the reports of transformers-neuronx's users that its `memory` names, collectives had 367 and 518
MB."""

CODE_LAYER_GIB = 7 / 1024
"""NEFF code, for each layer: 228 MiB for 32 layers. In those reports, 234 MB for 32 and 482 MB for 80 layers."""

RING_SHARE = 0.113
"""DMA rings, for each byte of weights: their descriptors are prepared when a NEFF is loaded, about as many as there are
weights to read. 220 MiB with 1948 MiB of weights, and 1.47 GB with 12.7 GB when Llama-3-70B ran out of memory.
Descriptors that are generated during execution (DGE) need none, so the share may be high on trn2."""

NXD_RANK0_RUNTIME_GIB = 0.4
"""The surplus of rank 0 in the backends built on NeuronX Distributed, without the rings of its weights: collectives
(346 MiB) and NEFF code (91), less 25 by which those rings are fewer than RING_SHARE."""

USABLE_HBM = 0.95
"""The share of a core's HBM that an estimate may fill."""

_SCORE_BYTES = 2  # an attention score in the prefill
_SCALE_BYTES = 4  # the scale of a channel: float32 in transformers-neuronx `quantize.maybe_quantize_weights`


@dataclass(frozen=True)
class MemoryEstimate:
    """HBM in GiB on the fullest core of a replica, rank 0; ``others`` is the HBM on its other cores."""

    sharded: float  # weights divided among the cores, with padded heads
    replicated: float  # weights on every core: norms, biases, learned positions, copies of the KV projections
    kv: float  # this core's share of the KV cache of all slots
    scratch: float  # shared scratchpad, with the attention scores of a prefill
    runtime: float  # collectives, DMA rings, NEFF code, notifications; proportional to weights and layers
    draft_weights: float = 0.0
    draft_kv: float = 0.0
    rank0_weights: float = 0.0  # rank 0's surplus, as large as the whole embedding and head (Optimum Neuron)
    rank0_runtime: float = 0.0
    overhead: float = 0.0  # the spec's hbm_overhead_gib, in place of scratch and runtime

    @property
    def weights(self) -> float:
        """The model's weights on an ordinary rank, in GiB."""
        return self.sharded + self.replicated

    @property
    def rank0(self) -> float:
        """The surplus of rank 0 over the others, in GiB."""
        return self.rank0_weights + self.rank0_runtime

    @property
    def total(self) -> float:
        """All classes on rank 0, in GiB."""
        return sum(size for _, size in self.classes())

    @property
    def others(self) -> float:
        """All classes on any other core, in GiB."""
        return self.total - self.rank0

    def on_cores(self, tp_degree: int) -> str:
        """Returns which cores hold ``total``: "on each core" or "on the first core (8.54 on the others)"."""
        alike = tp_degree == 1 or f"{self.total:.2f}" == f"{self.others:.2f}"
        return "on each core" if alike else f"on the first core ({self.others:.2f} on the others)"

    def classes(self, *, rank0: bool = True) -> tuple[tuple[str, float], ...]:
        """Returns (name, GiB) of each class that is not empty; the terms add up to ``total``.

        With ``rank0`` False, returns the terms of the other cores, with the same names in the same order.
        """
        sizes = (
            ("weights, sharded", self.sharded, 0.0),
            ("weights, replicated", self.replicated, 0.0),
            ("embedding", 0.0, self.rank0_weights),
            ("KV cache", self.kv, 0.0),
            ("draft weights", self.draft_weights, 0.0),
            ("draft KV cache", self.draft_kv, 0.0),
            ("scratch", self.scratch, 0.0),
            ("runtime", self.runtime, self.rank0_runtime),
            ("overhead", self.overhead, 0.0),
        )
        return tuple((name, each + (more if rank0 else 0.0)) for name, each, more in sizes if each or more)

    def __str__(self) -> str:
        terms = " + ".join(f"{name} {size:.2f}" for name, size in self._brief if f"{size:.2f}" != "0.00")
        return f"{terms} = {self.total:.2f} GiB"

    @property
    def _brief(self) -> tuple[tuple[str, float], ...]:
        """The classes, with the model's weights as one class."""
        return (("weights", self.weights), *(term for term in self.classes() if not term[0].startswith("weights,")))


def measured_surplus(topology: Topology, need: MemoryEstimate) -> float:
    """Returns the GiB on each core that replicas were measured to need beyond such estimates; 0 for an overhead that
    the spec sets."""
    return topology.measured.hbm_gib if need.scratch or need.runtime else 0.0


def usable_hbm(topology: Topology, need: MemoryEstimate) -> float:
    """Returns the GiB that a replica of this estimate may fill on each core."""
    return max(0.0, USABLE_HBM * topology.hbm_per_core_gib - measured_surplus(topology, need))


def fits(need: MemoryEstimate, topology: Topology) -> bool:
    """Returns whether a replica fits the cores of this instance type."""
    return need.total <= usable_hbm(topology, need)


def padded_heads(checkpoint: Checkpoint, tp_degree: int) -> int:
    """Returns the query heads rounded up to a multiple of tp_degree; the surplus is zeros."""
    return -(-checkpoint.heads // tp_degree) * tp_degree


def padded_kv_heads(checkpoint: Checkpoint, tp_degree: int, strategy: GroupQueryAttention | None = None) -> int:
    """Returns the KV heads of all cores together, with copies and padding.

    KV heads that tp_degree divides stay as they are. Fewer KV heads than cores, if they divide tp_degree, are copied
    to one head a core. Otherwise attention becomes full multi-head attention with padded heads. So the KV cache of a
    core stops shrinking when tp_degree exceeds the KV heads. (transformers-neuronx `utils.get_qkv_padding`, NxD
    Inference `get_shardable_head_counts`.) ``replicated-heads`` uses full multi-head attention even if tp_degree
    divides the KV heads, unless the queries of a core share one KV head. ``all-gather-heads`` computes heads in parts
    and caches whole heads, at least one a core.
    """
    kv, tp = checkpoint.kv_heads, tp_degree
    padded = padded_heads(checkpoint, tp)
    if kv == checkpoint.heads:
        return padded
    if gathers_heads(checkpoint, tp, strategy):
        return -(-kv // tp) * tp
    if strategy == "replicated-heads" and padded * kv == checkpoint.heads * tp:
        return max(kv, tp)
    if kv % tp == 0 and strategy != "replicated-heads":
        return kv
    if tp % kv == 0:
        return tp
    return padded


def gathers_heads(checkpoint: Checkpoint, tp: int, strategy: GroupQueryAttention | None) -> bool:
    """Returns whether all-gather-heads is set and possible; transformers-neuronx falls back to its default otherwise
    (`decoder.check_gqa_fallback`)."""
    surplus = padded_heads(checkpoint, tp) - checkpoint.heads
    possible = checkpoint.kv_heads * checkpoint.head_dim % tp == 0 and surplus % checkpoint.kv_heads == 0
    return strategy == "all-gather-heads" and possible


def estimate(
    model: ModelSpec, checkpoint: Checkpoint, engine: Engine | None = None, draft: Checkpoint | None = None
) -> MemoryEstimate:
    """Returns the HBM of a replica on its fullest core, with the weights and KV cache of a ``draft``.

    ``engine`` is the resolved engine, by default the model's; it decides the default dtype, the surplus of rank 0, and
    whether the embeddings are on the device (`engines.memory`). ``auto`` counts as the candidate that needs most: NxD
    Inference if it serves the family. Every core holds

    - its shard of the matrices and all small parameters, in the dtype; int8 and fp8 matrices have one byte each and a
      scale for each channel; on torch-neuronx once for each length, since each trace has weights of its own;
    - the KV cache: 2 x layers x kv heads / tp x head_dim x length x slots x bytes of the dtype, or 1 if quantized; with
      a prefix cache of NxD Inference or vLLM, the tokens of its blocks instead of length x slots;
    - SCRATCH_GIB or, if greater, the attention scores of a prefill in one piece, (heads / tp) x length^2 x 2 bytes.
      The scores are in the scratchpad: the measured one of 1 GiB has room for them at length 4096 (0.125 GiB), so that
      they are not a class of their own. The engines on the host's CPUs prefill in chunks;
    - COLLECTIVES_GIB, CODE_LAYER_GIB for each layer, and on devices RING_SHARE of the weights.
    """
    engine = engine or model.engine
    costs, held = costs_of(engine, checkpoint), _weights(model, checkpoint, engine)
    copies = costs.copies(model, model.length(checkpoint))
    drafted = _weights(model, draft, engine) if draft else _Weights(0.0, 0.0, 0.0)
    overhead = model.hbm_overhead_gib
    estimated = overhead is None
    weights = (copies * held.each + drafted.each) / GIB
    rank0 = (held.rank0 + drafted.rank0) / GIB
    layers = copies * checkpoint.layers + (draft.layers if draft else 0)
    rings = RING_SHARE if engine not in HOST_ENGINES else 0.0
    runtime = COLLECTIVES_GIB + CODE_LAYER_GIB * layers + rings * weights
    rank0_runtime = NXD_RANK0_RUNTIME_GIB + RING_SHARE * rank0 if costs.on_nxd else 0.0
    return MemoryEstimate(
        sharded=copies * held.sharded / GIB,
        replicated=copies * held.replicated / GIB,
        kv=kv_cache(model, checkpoint, engine) / GIB,
        scratch=_scratch(model, checkpoint, engine) if estimated else 0.0,
        runtime=runtime if estimated else 0.0,
        draft_weights=drafted.each / GIB,
        draft_kv=kv_cache(model, draft, engine, model.length(checkpoint)) / GIB if draft else 0.0,
        rank0_weights=rank0,
        rank0_runtime=rank0_runtime if estimated else 0.0,
        overhead=overhead or 0.0,
    )


@dataclass(frozen=True)
class _Weights:
    """Bytes on each core, and the surplus of rank 0."""

    sharded: float
    replicated: float
    rank0: float

    @property
    def each(self) -> float:
        return self.sharded + self.replicated


def _weights(model: ModelSpec, checkpoint: Checkpoint, engine: Engine) -> _Weights:
    tp, width, costs = model.tp_degree, BYTES[model.dtype_on(engine)], costs_of(engine, checkpoint)
    groups, strategy = checkpoint.groups, model.group_query_attention
    embeddings, small = costs.embeddings(model, checkpoint)
    attention = groups.attention * padded_heads(checkpoint, tp) // checkpoint.heads
    projected = padded_kv_heads(checkpoint, tp, strategy)
    if gathers_heads(checkpoint, tp, strategy):
        projected = checkpoint.kv_heads
    copies = groups.kv * projected // checkpoint.kv_heads - groups.kv

    quantized = model.quantize is not None and engine not in HOST_ENGINES
    matrix = 1 if quantized else width
    sharded = embeddings * width + (attention + groups.kv + groups.feed_forward) * matrix
    replicated = float(small * width + copies * matrix / tp)
    if quantized:
        experts = checkpoint.experts or 1
        into = (padded_heads(checkpoint, tp) + 2 * projected) * checkpoint.head_dim
        into += experts * (checkpoint.feed_forward_matrices - 1) * checkpoint.ffn
        sharded += checkpoint.layers * into * _SCALE_BYTES
        replicated += checkpoint.layers * (1 + experts) * checkpoint.hidden * _SCALE_BYTES
    rank0 = embeddings * width * (1 - 1 / tp) if costs.rank0_embeds else 0.0
    return _Weights(sharded / tp, replicated, rank0)


def kv_cache(model: ModelSpec, checkpoint: Checkpoint, engine: Engine, length: int | None = None) -> float:
    """Returns the bytes on a core; ``length`` is in tokens, by default the model's."""
    if model.kind != "generate":
        return 0.0  # no token follows the input
    heads = padded_kv_heads(checkpoint, model.tp_degree, model.group_query_attention) // model.tp_degree
    tokens = heads * costs_of(engine, checkpoint).kv_tokens(model, length or model.length(checkpoint))
    width = 1 if model.quantize_kv is not None and engine not in HOST_ENGINES else BYTES[model.dtype_on(engine)]
    return 2 * checkpoint.layers * tokens * checkpoint.head_dim * width


def _scratch(model: ModelSpec, checkpoint: Checkpoint, engine: Engine) -> float:
    """Returns the GiB on a core."""
    costs = costs_of(engine, checkpoint)
    if engine in HOST_ENGINES:
        return costs.scratch_gib
    heads = padded_heads(checkpoint, model.tp_degree) // model.tp_degree
    scores = costs.prefill_rows(model) * heads * model.length(checkpoint) ** 2 * _SCORE_BYTES
    return max(costs.scratch_gib, scores / GIB)
