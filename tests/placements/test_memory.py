from __future__ import annotations

import pytest

from placements.checkpoints import Checkpoint
from placements.memory import GIB, estimate, padded_heads, padded_kv_heads
from tests.placements.fleets import GPT2_XL, LLAMA_2_7B, model

LLAMA_31_8B = Checkpoint("llama", 32, 8, 32, 4096, 14336, 128, 128256, 131072, False, 8_030_261_248)
LLAMA_31_70B = Checkpoint("llama", 64, 8, 80, 8192, 28672, 128, 128256, 131072, False, 70_553_706_496)
OPT_13B = Checkpoint("opt", 40, 40, 40, 5120, 20480, 128, 50272, 2048, True, 12_853_473_280)
OPT_30B = Checkpoint("opt", 56, 56, 48, 7168, 28672, 128, 50272, 2048, True, 29_974_540_288)


@pytest.mark.parametrize(
    ("checkpoint", "tp", "length", "dtype", "total"),
    [
        (OPT_13B, 2, 2048, "fp16", 14.4),
        (OPT_30B, 8, 2048, "fp16", 8.9),
        (GPT2_XL, 1, 1024, "bf16", 4.8),
        (LLAMA_31_70B, 16, 4096, "bf16", 9.9),
    ],
    ids=["opt-13b", "opt-30b", "gpt2-xl", "llama-3.1-70b"],
)
def test_documented_fits_get_the_documented_estimate(
    checkpoint: Checkpoint, tp: int, length: int, dtype: str, total: float
) -> None:
    """GiB on each core at batch 1, to a tenth."""
    wish = model("m", tp, engine="transformers-neuronx", max_len=length, max_batch=1, dtype=dtype)
    assert estimate(wish, checkpoint).total == pytest.approx(total, abs=0.1)


def test_the_measured_case_on_an_ordinary_rank() -> None:
    """Llama-3.1-8B, tp 8, batch 32, length 4096: 5600 MiB measured, KV exactly 2048 of them."""
    wish = model("m", 8, engine="transformers-neuronx", max_len=4096, max_batch=32)
    need = estimate(wish, LLAMA_31_8B)
    assert (round(need.total, 2), need.kv) == (5.47, 2.0)


def test_the_measured_case_on_rank_0_of_an_nxd_engine() -> None:
    """The same with unsharded embeddings on rank 0: 8029 MiB measured, 7.78 GiB estimated."""
    wish = model("m", 8, engine="optimum-neuron", max_len=4096, max_batch=32)
    assert round(estimate(wish, LLAMA_31_8B).total, 2) == 7.78


@pytest.mark.parametrize(
    ("heads", "kv", "tp", "padded"),
    [
        (32, 32, 8, 32),  # multi-head, divisible
        (25, 25, 8, 32),  # multi-head, padded
        (32, 8, 4, 8),  # grouped, divisible
        (32, 8, 8, 8),
        (32, 8, 24, 24),  # grouped, one copy a core
        (64, 8, 16, 16),
        (32, 8, 12, 36),  # neither divides: full multi-head, padded
        (16, 1, 8, 8),  # one kv head for all
    ],
)
def test_kv_heads_are_padded_as_the_engines_do(heads: int, kv: int, tp: int, padded: int) -> None:
    """KV heads of all cores together."""
    checkpoint = Checkpoint("llama", heads, kv, 1, heads * 64, 1, 64, 1, None, False, 1)
    assert padded_kv_heads(checkpoint, tp) == padded


def test_query_heads_are_padded_to_a_multiple() -> None:
    """25 heads on 8 cores are 32."""
    assert padded_heads(GPT2_XL, 8) == 32


def test_kv_of_a_core_stops_shrinking_beyond_the_kv_heads() -> None:
    """With 8 kv heads tp 24 holds as much KV on a core as tp 8."""
    at = {tp: estimate(model("m", tp, engine="auto"), LLAMA_31_8B).kv for tp in (4, 8, 24)}
    assert (at[8], at[24]) == (at[4] / 2, at[8])


def test_dtype_follows_the_engine() -> None:
    """The cpu engine's fp32 takes twice the room of bf16."""
    wish = model("m", 8)
    assert estimate(wish, LLAMA_2_7B, "cpu").weights == 2 * estimate(wish, LLAMA_2_7B, "auto").weights


def test_weights_are_divided_by_tp() -> None:
    """6.74 billion parameters in bf16 on 8 cores."""
    wish = model("m", 8, engine="transformers-neuronx")
    assert estimate(wish, LLAMA_2_7B).weights == pytest.approx(6_738_415_616 * 2 / 8 / GIB)


def test_the_overhead_can_be_replaced() -> None:
    """hbm_overhead_gib takes the place of the fixed terms, rank 0's included."""
    assert estimate(model("m", 8, engine="optimum-neuron", hbm_overhead_gib=0.3), LLAMA_2_7B).overhead == 0.3


def test_every_term_is_printed() -> None:
    """People can check the sum."""
    wish = model("m", 8, engine="optimum-neuron", max_len=4096, max_batch=8)
    assert str(estimate(wish, LLAMA_2_7B)) == (
        "weights 1.57 + KV cache 2.00 + embedding 0.43 + overhead 2.20 = 6.20 GiB"
    )


def test_a_draft_adds_its_weights_and_its_cache() -> None:
    """The same model once more as its own draft needs twice the room, without a second overhead."""
    wish = model("m", 8, max_len=4096)
    alone, both = estimate(wish, LLAMA_31_8B), estimate(wish, LLAMA_31_8B, None, LLAMA_31_8B)
    assert (both.weights, both.kv, both.overhead) == (2 * alone.weights, 2 * alone.kv, alone.overhead)
