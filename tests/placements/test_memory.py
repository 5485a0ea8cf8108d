from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from placements.engines.memory import GIB
from placements.engines.registry import Engine
from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import TOPOLOGIES, MeasuredConstants
from placements.resources.memory import (
    COLLECTIVES_GIB,
    MemoryEstimate,
    estimate,
    fits,
    padded_heads,
    padded_kv_heads,
    usable_hbm,
)
from placements.spec.schema import GroupQueryAttention, ModelSpec
from tests.placements.fleets import GPT2_XL, LLAMA_2_7B, model

LLAMA_31_8B = Checkpoint("llama", 32, 8, 32, 4096, 14336, 128, 128256, 131072, False, 8_030_261_248)
LLAMA_31_70B = Checkpoint("llama", 64, 8, 80, 8192, 28672, 128, 128256, 131072, False, 70_553_706_496)
OPT_13B = Checkpoint("opt", 40, 40, 40, 5120, 20480, 128, 50272, 2048, True, 12_853_473_280)
OPT_30B = Checkpoint("opt", 56, 56, 48, 7168, 28672, 128, 50272, 2048, True, 29_974_540_288)
MIXTRAL = Checkpoint("mixtral", 32, 8, 32, 4096, 14336, 128, 32000, 32768, False, 46_702_792_704, experts=8)


def model_of(tp: int, length: int, dtype: str, **more: Any) -> ModelSpec:
    """A model that serves one request at a time."""
    return model("m", tp, max_len=length, max_batch=1, dtype=dtype, **{"engine": "transformers-neuronx", **more})


@pytest.mark.parametrize(
    ("heads", "kv", "tp", "strategy", "padded"),
    [
        (32, 32, 8, None, 32),  # multi-head, divisible
        (25, 25, 8, None, 32),  # multi-head, padded
        (25, 25, 8, "all-gather-heads", 32),  # strategies are for grouped queries
        (32, 8, 4, None, 8),  # grouped, divisible
        (32, 8, 8, None, 8),
        (32, 8, 24, None, 24),  # grouped, one copy a core
        (64, 8, 16, None, 16),
        (32, 8, 12, None, 36),  # neither divides: full multi-head, padded
        (16, 1, 8, None, 8),  # one kv head for all
        (32, 8, 4, "shard-over-heads", 8),
        (32, 8, 16, "shard-over-heads", 16),  # impossible: as the default
        (32, 8, 4, "replicated-heads", 32),  # copied for each query head
        (32, 8, 8, "replicated-heads", 8),  # the queries of a core share one
        (32, 8, 16, "replicated-heads", 16),
        (72, 24, 32, "replicated-heads", 32),  # the example in the code of transformers-neuronx
        (32, 8, 4, "all-gather-heads", 8),
        (32, 8, 16, "all-gather-heads", 16),  # computed in halves, cached whole
        (32, 8, 12, "all-gather-heads", 36),  # 8 x 64 does not divide by 12: as the default
    ],
)
def test_kv_heads_are_padded_as_the_engines_do(
    heads: int, kv: int, tp: int, strategy: GroupQueryAttention | None, padded: int
) -> None:
    """KV heads of all cores together."""
    checkpoint = Checkpoint("llama", heads, kv, 1, heads * 64, 1, 64, 1, None, False, 1)
    assert padded_kv_heads(checkpoint, tp, strategy) == padded


def test_query_heads_are_padded_to_a_multiple() -> None:
    """25 heads on 8 cores are 32."""
    assert padded_heads(GPT2_XL, 8) == 32


def test_padded_heads_use_memory() -> None:
    """gpt2-xl on 2 cores has 26 heads instead of 25, in the query, key, value and output projections."""
    two = estimate(model("m", 2, engine="auto"), GPT2_XL)
    more = 26 / 25 * 4 * 48 * 1600 * 1600 + 2 * 48 * 1600 * 6400 + 50257 * 1600
    assert two.sharded == pytest.approx((more - 2 * 48 * 1600 * 1600 / 25) * 2 / 2 / GIB)


def test_kv_of_a_core_stops_shrinking_beyond_the_kv_heads() -> None:
    """With 8 kv heads tp 24 holds as much KV on a core as tp 8."""
    at = {tp: estimate(model("m", tp, engine="auto"), LLAMA_31_8B).kv for tp in (4, 8, 24)}
    assert (at[8], at[24]) == (at[4] / 2, at[8])


def test_a_prefix_cache_has_the_memory_of_its_blocks() -> None:
    """By default those of all slots, rounded up, and one more, which the package adds."""
    options: dict[str, Any] = {"engine": "nxd-inference", "max_batch": 4, "max_len": 1000}
    plain = estimate(model("m", 2, **options), LLAMA_31_8B).kv
    cached = estimate(model("m", 2, **options, engine_options={"prefix_cache": True}), LLAMA_31_8B).kv
    assert cached == pytest.approx(plain * (4 * 32 + 1) * 32 / 4000)
    more = {"prefix_cache": True, "pa_num_blocks": 500, "pa_block_size": 16}
    assert estimate(model("m", 2, **options, engine_options=more), LLAMA_31_8B).kv == plain * 501 * 16 / 4000


def test_the_blocks_of_vllm_have_the_memory_of_their_tokens() -> None:
    """Without a prefix cache a block is a slot."""
    options: dict[str, Any] = {"engine": "vllm", "max_batch": 4, "max_len": 1000}
    plain = estimate(model("m", 2, **options), LLAMA_31_8B).kv
    cached = estimate(model("m", 2, **options, engine_options={"prefix_cache": True}), LLAMA_31_8B).kv
    assert cached == pytest.approx(plain * 4 * 32 * 32 / 4000)
    more = {"prefix_cache": True, "num_gpu_blocks_override": 500, "block_size": 16}
    assert estimate(model("m", 2, **options, engine_options=more), LLAMA_31_8B).kv == plain * 500 * 16 / 4000


def strategy(name: GroupQueryAttention | None, tp: int, slots: int = 32) -> MemoryEstimate:
    wish = model("m", tp, engine="transformers-neuronx", max_batch=slots, max_len=4096, group_query_attention=name)
    return estimate(wish, LLAMA_31_8B)


def test_gathering_heads_saves_only_the_copies_of_the_projections() -> None:
    """The cache has whole heads."""
    copied, gathered = strategy("replicated-heads", 16), strategy("all-gather-heads", 16)
    assert (gathered.kv, gathered.sharded) == (copied.kv, copied.sharded)
    assert gathered.replicated < copied.replicated / 10


def test_replicated_heads_use_more_than_divided_ones() -> None:
    """tp 4: 32 heads instead of 8."""
    assert strategy("replicated-heads", 4).kv == 4 * strategy("shard-over-heads", 4).kv


def test_dtype_follows_the_engine() -> None:
    """The cpu engine's fp32 takes twice the room of bf16."""
    wish = model("m", 8)
    assert estimate(wish, LLAMA_2_7B, "cpu").weights == 2 * estimate(wish, LLAMA_2_7B, "auto").weights


def test_weights_are_divided_by_tp_but_for_norms() -> None:
    """6.74 billion parameters in bf16 on 8 cores; two norms a layer and one at the end are on each."""
    norms = 65 * 4096
    need = estimate(model("m", 8, engine="auto"), LLAMA_2_7B)
    assert (need.sharded, need.replicated) == (
        pytest.approx((6_738_415_616 - norms) * 2 / 8 / GIB),
        pytest.approx(norms * 2 / GIB),
    )


def test_transformers_neuronx_leaves_the_embedding_on_the_host() -> None:
    """The head stays: a matrix of its own, or once more the tied one."""
    tied = replace(LLAMA_2_7B, tied_embeddings=True, parameters=LLAMA_2_7B.parameters - 32000 * 4096)
    sizes = [estimate(model_of(8, 2048, "bf16", engine=engine), checkpoint).sharded * 8
             for engine, checkpoint in (("auto", LLAMA_2_7B), ("transformers-neuronx", LLAMA_2_7B),
                                        ("auto", tied), ("transformers-neuronx", tied))]  # fmt: skip
    table = 32000 * 4096 * 2 / GIB
    assert [sizes[0] - size for size in sizes[1:]] == pytest.approx([table, table, table])


def test_transformers_neuronx_can_embed_on_the_device() -> None:
    """Tokens and learned positions are then divided among the cores, beside the head; GPT-NeoX ignores the option."""
    on_device = {"engine_options": {"on_device_embedding": True}}
    neox = Checkpoint("gpt_neox", 64, 64, 44, 6144, 24576, 96, 50432, 2048, False, 20_554_567_680)
    more = [
        (
            estimate(model_of(8, 2048, "bf16", **on_device), each).weights
            - estimate(model_of(8, 2048, "bf16"), each).weights
        )
        for each in (LLAMA_2_7B, OPT_13B, neox)
    ]
    tables = (32000 * 4096, (50272 + 2050) * 5120, 0)
    assert more == pytest.approx([table * 2 / 8 / GIB for table in tables])


def test_int8_uses_a_byte_per_weight_and_a_scale_per_channel() -> None:
    """The matrices of the layers; embeddings, norms and the cache keep their dtype."""
    whole, small = (estimate(model("m", 1, engine="auto", quantize=kind), LLAMA_2_7B) for kind in (None, "int8"))
    matrices = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    scales = 32 * (4 * 4096 + 2 * 11008 + 4096)
    assert (whole.weights - small.weights, small.kv) == (pytest.approx((matrices - 4 * scales) / GIB), whole.kv)


def test_int8_applies_to_every_expert() -> None:
    """Mixtral 8x7B fits 8 cores with int8, and needs nearly twice that without."""
    whole, small = (estimate(model("m", 8, engine="auto", quantize=kind), MIXTRAL) for kind in (None, "int8"))
    assert 1.95 < whole.weights / small.weights < 2.0


def test_fp8_weights_are_as_large_as_int8() -> None:
    """A byte and a scale; the cache keeps its dtype."""
    small, other = (estimate(model("m", 8, engine="nxd-inference", quantize=q), LLAMA_2_7B) for q in ("int8", "fp8"))
    assert small == other


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_quantized_cache_uses_a_byte_per_number(kind: str) -> None:
    """The draft's too, which is on the same cores; weights do not change."""
    wish = {"engine": "transformers-neuronx", "max_len": 4096}
    whole, small = (
        estimate(model("m", 8, **wish, quantize_kv=value), LLAMA_2_7B, None, LLAMA_2_7B) for value in (None, kind)
    )
    assert small == replace(whole, kv=whole.kv / 2, draft_kv=whole.draft_kv / 2)
    assert estimate(model("m", 2, quantize_kv=kind), LLAMA_2_7B, "cpu") == estimate(model("m", 2), LLAMA_2_7B, "cpu")


def test_int8_changes_nothing_on_the_cpu() -> None:
    """Only the Neuron engines quantize."""
    assert estimate(model("m", 2, quantize="int8"), LLAMA_2_7B, "cpu") == estimate(model("m", 2), LLAMA_2_7B, "cpu")


@pytest.mark.parametrize(
    ("length", "scratch"), [(4096, 1.0), (8192, 1.0), (16384, 2.0), (32768, 8.0)]
)  # the scores of 4 heads x length^2 x 2 bytes: 0.125, 0.5, 2 and 8 GiB
def test_long_prefills_exceed_the_scratchpad(length: int, scratch: float) -> None:
    """It holds their scores; 1 GiB is enough for the measured length."""
    assert estimate(model_of(8, length, "bf16", engine="nxd-inference"), LLAMA_31_8B).scratch == scratch


def test_prefills_in_chunks_do_not() -> None:
    """The cpu engine's are."""
    assert estimate(model_of(8, 32768, "bf16"), LLAMA_31_8B, "cpu").scratch == 1.0


def test_the_overhead_can_be_replaced() -> None:
    """hbm_overhead_gib takes the place of scratch and runtime, rank 0's included."""
    need = estimate(model("m", 8, engine="optimum-neuron", hbm_overhead_gib=0.3), LLAMA_2_7B)
    assert [name for name, _ in need.classes()] == [
        "weights, sharded",
        "weights, replicated",
        "embedding",
        "KV cache",
        "overhead",
    ]
    assert (need.overhead, need.scratch, need.runtime, need.rank0_runtime) == (0.3, 0, 0, 0)


@pytest.mark.parametrize("engine", ["auto", "transformers-neuronx", "optimum-neuron", "cpu"])
@pytest.mark.parametrize("draft", [None, GPT2_XL])
def test_the_classes_add_up(engine: Engine, draft: Checkpoint | None) -> None:
    """To the total on rank 0, and without rank 0's share on the others; under the same names."""
    need = estimate(model("m", 4, engine=engine), LLAMA_31_8B, None, draft)
    rank0, other = need.classes(), need.classes(rank0=False)
    assert sum(size for _, size in rank0) == need.total
    assert sum(size for _, size in other) == pytest.approx(need.others)
    assert [name for name, _ in rank0] == [name for name, _ in other]


@pytest.mark.parametrize(
    ("engine", "checkpoint", "burdened"),
    [
        ("transformers-neuronx", LLAMA_31_8B, False),
        ("nxd-inference", LLAMA_31_8B, True),
        ("optimum-neuron", LLAMA_31_8B, True),
        ("vllm", LLAMA_31_8B, True),
        ("auto", LLAMA_31_8B, True),  # may be NxD Inference
        ("auto", GPT2_XL, False),  # can only be transformers-neuronx
    ],
)
def test_only_nxd_engines_use_more_on_rank_0(engine: Engine, checkpoint: Checkpoint, burdened: bool) -> None:
    """Otherwise all cores are equal; auto counts as the engine that needs more."""
    assert (estimate(model("m", 8), checkpoint, engine).rank0 > 0) == burdened


def test_every_term_is_printed() -> None:
    """So that users can check the sum."""
    wish = model("m", 8, engine="optimum-neuron", max_len=4096, max_batch=8)
    assert str(estimate(wish, LLAMA_2_7B)) == (
        "weights 1.57 + embedding 0.43 + KV cache 2.00 + scratch 1.00 + runtime 1.00 = 6.00 GiB"
    )


def test_a_draft_adds_its_weights_and_its_cache() -> None:
    """The same model as its own draft needs twice the memory, without a second scratchpad or further collectives."""
    wish = model("m", 8, engine="transformers-neuronx", max_len=4096)
    alone, both = estimate(wish, LLAMA_31_8B), estimate(wish, LLAMA_31_8B, None, LLAMA_31_8B)
    twice = pytest.approx(2 * alone.runtime - COLLECTIVES_GIB)
    assert both == replace(alone, draft_weights=alone.weights, draft_kv=alone.kv, runtime=both.runtime)
    assert both.runtime == twice


def test_a_core_may_be_filled_to_95_percent() -> None:
    """Of 16 GiB on inf2, of 24 on trn2 and of 12 there with one physical core each."""
    inf2, trn2, need = TOPOLOGIES["inf2.xlarge"], TOPOLOGIES["trn2.48xlarge"], estimate(model("m", 8), LLAMA_31_8B)
    assert [usable_hbm(topology, need) for topology in (inf2, trn2, trn2.at_lnc(1))] == pytest.approx(
        [15.2, 22.8, 11.4]
    )


def test_a_measured_surplus_is_not_usable() -> None:
    """Except for a model whose overhead the spec sets: its author has measured it."""
    measured = replace(TOPOLOGIES["inf2.xlarge"], measured=MeasuredConstants(hbm_gib=0.5))
    needs = [estimate(model("m", 8, hbm_overhead_gib=own), LLAMA_31_8B) for own in (None, 2.0)]
    assert [usable_hbm(measured, need) for need in needs] == pytest.approx([14.7, 15.2])
    full = replace(needs[0], kv=needs[0].kv + 15.0 - needs[0].total)
    assert [fits(full, topology) for topology in (TOPOLOGIES["inf2.xlarge"], measured)] == [True, False]


def test_half_the_memory_of_a_core_holds_half_as_much() -> None:
    """13 GiB of weights fit a core of trn2 at LNC 2, and not at LNC 1."""
    need, trn2 = estimate(model("m", 1, max_batch=1, engine="auto"), LLAMA_2_7B), TOPOLOGIES["trn2.48xlarge"]
    assert (fits(need, trn2), fits(need, trn2.at_lnc(1))) == (True, False)
