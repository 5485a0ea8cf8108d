"""Speeds that are estimated, against what AWS has published."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import median
from typing import Any

import numpy
import pytest

from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import TOPOLOGIES
from placements.resources.estimate import DECODE_ERROR, HOST_STEP_S, Speed, speed, step_bytes
from placements.spec.schema import ModelSpec

INF2 = TOPOLOGIES["inf2.48xlarge"]
SHAPES = {  # hidden, intermediate, heads, layers, KV heads, vocabulary
    "Llama-3-8B": (4096, 14336, 32, 32, 8, 128256),
    "Llama-3-70B": (8192, 28672, 64, 80, 8, 128256),
    "Llama-2-7b": (4096, 11008, 32, 32, 32, 32000),
    "Llama-2-13b": (5120, 13824, 40, 40, 40, 32000),
    "Llama-2-70b": (8192, 28672, 64, 80, 8, 32000),
    "Mistral-7B-Instruct-v0.2": (4096, 14336, 32, 32, 8, 32000),
    "CodeLlama-13b-hf": (5120, 13824, 40, 40, 40, 32016),
}
ROWS = list(csv.DictReader(Path(__file__).with_name("decode_inf2.csv").open()))
"""AWS's table of inf2.48xlarge at tp 24 with SDK 2.18."""
EXCEPTION = ("Mistral-7B-Instruct-v0.2", "8", "16384")  # its step takes two thirds of what the other rows imply


def checkpoint(name: str) -> Checkpoint:
    hidden, intermediate, heads, layers, kv_heads, vocabulary = SHAPES[name]
    shape = {
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 16384,
    }
    return Checkpoint.from_config(shape)


def model_of(batch: int, length: int, int8: bool, tp: int = 24) -> ModelSpec:
    return ModelSpec(
        name="m",
        source="./m",
        engine="transformers-neuronx",
        tp_degree=tp,
        max_batch=batch,
        max_len=length,
        quantize="int8" if int8 else None,
        allow_head_padding=True,
    )


def estimated(name: str, batch: int, length: int, int8: bool, tp: int = 24, instance: str = "inf2.48xlarge") -> Speed:
    model = model_of(batch, length, int8, tp)
    return speed(model, checkpoint(name), "transformers-neuronx", TOPOLOGIES[instance])


def of_row(row: dict[str, str]) -> tuple[str, int, int, bool]:
    return row["model"], int(row["batch"]), int(row["sequence_length"]), row["weight_dtype"] == "int8"


def test_steps_are_close_to_aws_measurements() -> None:
    """The median within the error that is named."""
    errors = [abs(estimated(*of_row(row)).step_s / float(row["tpot_p50_s"]) - 1) for row in ROWS]
    assert median(errors) < 0.03 < DECODE_ERROR
    assert sorted(errors)[-2] < 0.12


@pytest.mark.parametrize("held_out", ["model", "batch"])
def test_steps_are_predicted_for_rows_that_were_not_fitted(held_out: str) -> None:
    """Each term of the step is fitted anew without the rows of each model, or of each batch size."""
    terms, measured = [], numpy.array([float(row["tpot_p50_s"]) for row in ROWS])
    for row in ROWS:
        name, batch, length, int8 = of_row(row)
        shape = checkpoint(name)
        terms.append([*step_bytes(model_of(batch, length, int8), shape, "transformers-neuronx"), shape.layers])
    relative = numpy.array(terms) / measured[:, None]
    errors = numpy.zeros(len(ROWS))
    for value in {row[held_out] for row in ROWS}:
        out = numpy.array([row[held_out] == value for row in ROWS])
        errors[out] = abs(relative[out] @ least_deviations(relative[~out]) - 1)
    assert numpy.median(errors) < 0.06
    worst = {row["model"]: error for row, error in zip(ROWS, errors, strict=True) if error > 0.25}
    assert list(worst) == [EXCEPTION[0]]
    [beyond] = [row for row, error in zip(ROWS, errors, strict=True) if error > 0.25]
    assert (beyond["model"], beyond["batch"], beyond["sequence_length"]) == EXCEPTION
    assert max(worst.values()) < 0.5


def least_deviations(terms: numpy.ndarray) -> numpy.ndarray:
    """The coefficients with the least sum of deviations from 1, by reweighted least squares."""
    scale = terms.max(axis=0)
    weights, found = numpy.ones(len(terms)), numpy.zeros(terms.shape[1])
    for _ in range(100):
        found = numpy.linalg.lstsq(terms / scale * weights[:, None], weights, rcond=None)[0]
        weights = 1 / numpy.sqrt(abs(terms / scale @ found - 1) + 0.01)
    return found / scale


def test_a_degree_without_published_rows_is_unverified() -> None:
    """Its error is that of the only other figure, Optimum Neuron's page."""
    known, other = (estimated("Llama-2-7b", 1, 2048, False, tp) for tp in (24, 2))
    assert "unverified" not in known.source
    assert "unverified at tp 2" in other.source
    assert abs(known.step_s / 7.2e-3 - 1) < 0.1
    assert abs(other.step_s / 60e-3 - 1) <= other.decode_error + 0.02


def test_prefills_are_of_the_order_that_aws_measured() -> None:
    """The median within the error that is named."""
    errors = []
    for row in ROWS:
        fast, prompt = estimated(*of_row(row)), int(row["input_length"]) * int(row["batch"])
        errors.append(abs((fast.prefill_base_s + fast.prefill_token_s * prompt) / float(row["ttft_p50_s"]) - 1))
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
    assert ours.decode_error > estimated("Llama-3-8B", 4, 4096, False).decode_error


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
