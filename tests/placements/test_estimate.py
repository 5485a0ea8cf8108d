"""Speeds that are estimated, against what AWS has published."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import TOPOLOGIES
from placements.resources.estimate import HOST_STEP_S, Speed, speed
from placements.spec.schema import ModelSpec

INF2 = TOPOLOGIES["inf2.48xlarge"]
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32},
    "Llama-3-70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
    },
    "Llama-2-13b": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
    },
}
OTHERS: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192},
    "Llama-3-70B": {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192},
    "Llama-2-13b": {"num_key_value_heads": 40, "vocab_size": 32000, "max_position_embeddings": 4096},
}
ROWS = [
    ("Llama-3-8B", 1, 8192, True, 0.00741, 128, 0.02947),
    ("Llama-3-8B", 1, 8192, True, 0.00747, 4096, 0.2094),
    ("Llama-3-8B", 1, 4096, True, 0.00642, 128, 0.025),
    ("Llama-3-8B", 1, 4096, True, 0.0065, 2048, 0.1018),
    ("Llama-3-70B", 1, 4096, False, 0.03467, 2048, 0.7455),
    ("Llama-3-70B", 1, 3072, False, 0.03381, 1024, 0.3129),
    ("Llama-3-70B", 1, 2048, False, 0.03314, 1024, 0.3102),
    ("Llama-3-70B", 1, 1152, False, 0.03247, 128, 0.08),
    ("Llama-3-70B", 1, 512, False, 0.03248, 256, 0.09937),
    ("Llama-3-70B", 1, 256, False, 0.0322, 128, 0.07781),
    ("Llama-2-13b", 1, 4096, False, 0.00916553, 128, 0.02585),
    ("Llama-2-13b", 1, 8192, False, 0.0101736, 4096, 0.3338),
    ("Llama-2-13b", 1, 16384, False, 0.0134976, 8192, 0.9942),
    ("Llama-3-8B", 8, 8192, True, 0.01522, 128, 0.06895),
    ("Llama-3-8B", 8, 8192, True, 0.01531, 4096, 1.993),
    ("Llama-3-8B", 8, 4096, True, 0.01045, 128, 0.06602),
    ("Llama-3-8B", 8, 4096, True, 0.0105, 2048, 0.8235),
    ("Llama-2-13b", 8, 4096, False, 0.0148966, 128, 0.1088),
    ("Llama-2-13b", 8, 8192, False, 0.0209856, 4096, 7.084),
    ("Llama-2-13b", 4, 16384, False, 0.021709, 8192, 5.141),
]
"""Of AWS's table of inf2.48xlarge at tp 24: model, batch, length, int8, TPOT in s, prompt, TTFT in s."""


def checkpoint(name: str) -> Checkpoint:
    shape = {"model_type": "llama", "torch_dtype": "bfloat16", **SHAPES[name], **OTHERS[name]}
    return Checkpoint.from_config(shape)


def estimated(name: str, batch: int, length: int, int8: bool, tp: int = 24, instance: str = "inf2.48xlarge") -> Speed:
    model = ModelSpec(
        name="m",
        source="./m",
        engine="transformers-neuronx",
        tp_degree=tp,
        max_batch=batch,
        max_len=length,
        quantize="int8" if int8 else None,
        allow_head_padding=True,
    )
    return speed(model, checkpoint(name), "transformers-neuronx", TOPOLOGIES[instance])


def test_steps_are_close_to_aws_measurements() -> None:
    """The median within the documented error, and none beyond the maximum."""
    errors = [
        abs(estimated(name, batch, length, int8).step_s / tpot - 1) for name, batch, length, int8, tpot, _, _ in ROWS
    ]
    assert median(errors) < 0.10
    assert max(errors) < 0.29


def test_prefills_are_of_the_order_that_aws_measured() -> None:
    """The median within the error that is named."""
    errors = []
    for name, batch, length, int8, _, prompt, ttft in ROWS:
        fast = estimated(name, batch, length, int8)
        errors.append(abs((fast.prefill_base_s + fast.prefill_token_s * prompt * batch) / ttft - 1))
    assert median(errors) < estimated("Llama-3-8B", 1, 4096, False).prefill_error
    assert max(errors) < 0.8


def test_more_cores_are_faster() -> None:
    """Steps and prompts both."""
    slow, fast = (estimated("Llama-3-8B", 4, 4096, False, tp) for tp in (8, 24))
    assert fast.step_s < slow.step_s
    assert fast.prefill_token_s < slow.prefill_token_s


def test_trn2_is_faster_than_inf2_and_less_sure() -> None:
    """It has more bandwidth, and was not compared."""
    ours, theirs = (
        estimated("Llama-3-8B", 4, 4096, False, 8, instance) for instance in ("trn2.48xlarge", "inf2.48xlarge")
    )
    assert ours.step_s < theirs.step_s
    assert ours.decode_error > theirs.decode_error


@pytest.mark.parametrize(("options", "expected"), [({"step_ms": 20}, 0.02), ({}, HOST_STEP_S)])
def test_an_echo_engine_takes_its_step(options: dict[str, Any], expected: float) -> None:
    """For a prefill as for a decode."""
    fast = speed(ModelSpec(name="m", source="./m", engine_options=options), None, "echo", INF2)
    assert (fast.step_s, fast.prefill_base_s, fast.prefill_token_s) == (expected, expected, 0.0)


def test_an_unreadable_model_is_marked_as_a_guess() -> None:
    """Unlike one with a config.json."""
    fast = speed(ModelSpec(name="m", source="org/model", tp_degree=8), None, "nxd-inference", INF2)
    assert fast.decode_error == 1.0
    assert "guess" in fast.source


def test_loading_grows_with_the_weights() -> None:
    """70 billion parameters take longer than 8."""
    assert estimated("Llama-3-70B", 1, 4096, False).load_s > estimated("Llama-3-8B", 1, 4096, False).load_s + 60
