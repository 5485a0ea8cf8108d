"""Speeds that are estimated, against what AWS has published."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy
import pytest

from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import TOPOLOGIES
from placements.resources.estimate import (
    ATTENTION_MFU,
    CORE_FLOPS,
    DECODE_ERROR,
    HOST_STEP_S,
    PREFILL_ERROR,
    PREFILL_MFU,
    PREFILL_S,
    Speed,
    speed,
    step_bytes,
    token_flops,
)
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
TRN1_ROWS = list(csv.DictReader(Path(__file__).with_name("decode_trn1.csv").open()))
"""AWS's table of trn1.32xlarge at tp 32. No constant is fitted on it."""
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


class Bounds(NamedTuple):
    """The bounds of an error over many rows. They are what was achieved, rounded up, and only become smaller."""

    median: float
    worst: float

    def hold(self, errors: numpy.ndarray) -> bool:
        return bool(numpy.median(errors) < self.median and errors.max() < self.worst)


INF2_FIT, TRN1 = "inf2.48xlarge, of the fit", "trn1.32xlarge, in no fit"
HELD_OUT = "inf2.48xlarge, {} held out"
BOUNDS = {  # of steps and of prefills, as docs/sizing.md shows them
    INF2_FIT: (Bounds(0.03, 0.45), Bounds(0.17, 0.60)),
    HELD_OUT.format("model"): (Bounds(0.04, 0.47), Bounds(0.17, 0.60)),
    HELD_OUT.format("batch"): (Bounds(0.06, 0.49), Bounds(0.37, 0.76)),
    HELD_OUT.format("input_length"): (Bounds(0.03, 0.48), Bounds(0.38, 0.63)),
    TRN1: (Bounds(0.05, 0.28), Bounds(0.21, 0.98)),
}


def step_error(row: dict[str, str], instance: str) -> float:
    """The relative error of the estimated step of a row."""
    fast = estimated(*of_row(row), int(row["tp_degree"]), instance)
    return abs(fast.step_s / float(row["tpot_p50_s"]) - 1)


def test_steps_are_close_to_aws_measurements() -> None:
    """The median within the error that is named."""
    errors = [step_error(row, "inf2.48xlarge") for row in ROWS]
    assert BOUNDS[INF2_FIT][0].hold(numpy.array(errors))
    assert median(errors) < DECODE_ERROR
    assert sorted(errors)[-2] < 0.12


@pytest.mark.parametrize("held_out", ["model", "batch", "input_length"])
def test_steps_are_predicted_for_rows_that_were_not_fitted(held_out: str) -> None:
    """Each term of the step is fitted anew without the rows of each model, batch size or prompt length."""
    terms = []
    for row in ROWS:
        name, batch, length, int8 = of_row(row)
        shape = checkpoint(name)
        terms.append([*step_bytes(model_of(batch, length, int8), shape, "transformers-neuronx"), shape.layers])
    errors = held_out_errors(numpy.array(terms) / times("tpot_p50_s")[:, None], held_out)
    assert BOUNDS[HELD_OUT.format(held_out)][0].hold(errors)
    worst = {row["model"]: error for row, error in zip(ROWS, errors, strict=True) if error > 0.25}
    assert list(worst) == [EXCEPTION[0]]
    [beyond] = [row for row, error in zip(ROWS, errors, strict=True) if error > 0.25]
    assert (beyond["model"], beyond["batch"], beyond["sequence_length"]) == EXCEPTION


def times(column: str) -> numpy.ndarray:
    """The seconds in a column of the rows."""
    return numpy.array([float(row[column]) for row in ROWS])


def held_out_errors(terms: numpy.ndarray, column: str) -> numpy.ndarray:
    """The relative error of each row, by a fit without the rows that have its value in a column; ``terms`` are divided
    by what was measured."""
    errors = numpy.zeros(len(ROWS))
    for value in {row[column] for row in ROWS}:
        out = numpy.array([row[column] == value for row in ROWS])
        errors[out] = abs(terms[out] @ least_deviations(terms[~out]) - 1)
    return errors


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


def prefill_terms() -> numpy.ndarray:
    """The terms of the time to the first token, divided by what was measured: the base, and the seconds at full FLOPS
    of the matrices and of the attention, of all prompts of the batch."""
    terms = []
    for row in ROWS:
        name, batch, length, int8 = of_row(row)
        matrices, position = token_flops(model_of(batch, length, int8), checkpoint(name))
        prompt, flops = int(row["input_length"]), int(row["tp_degree"]) * CORE_FLOPS
        terms.append([1.0, batch * prompt * matrices / flops, batch * prompt**2 * position / flops])
    return numpy.array(terms) / times("ttft_p50_s")[:, None]


def test_the_constants_of_a_prefill_are_those_of_the_fit() -> None:
    """On all rows, to two or three digits."""
    base, matrices, attention = least_deviations(prefill_terms())
    assert base == pytest.approx(PREFILL_S, rel=0.005)
    assert 1 / matrices == pytest.approx(PREFILL_MFU, rel=0.01)
    assert 1 / attention == pytest.approx(ATTENTION_MFU, rel=0.01)


@pytest.mark.parametrize("held_out", ["model", "batch", "input_length"])
def test_prefills_are_predicted_for_rows_that_were_not_fitted(held_out: str) -> None:
    """Each term is fitted anew without the rows of each model, batch size or prompt length."""
    errors = held_out_errors(prefill_terms(), held_out)
    assert BOUNDS[HELD_OUT.format(held_out)][1].hold(errors)
    assert numpy.median(errors) < PREFILL_ERROR


def prefill_error(row: dict[str, str], instance: str) -> float:
    """The relative error of the estimate for all prompts of a row."""
    fast = estimated(*of_row(row), int(row["tp_degree"]), instance)
    prompt, batch = int(row["input_length"]), int(row["batch"])
    each = prompt * fast.prefill_token_s + prompt**2 * fast.prefill_square_s
    return abs((fast.prefill_base_s + batch * each) / float(row["ttft_p50_s"]) - 1)


def test_prefills_are_close_to_aws_measurements() -> None:
    """On the rows of the fit."""
    errors = [prefill_error(row, "inf2.48xlarge") for row in ROWS]
    assert BOUNDS[INF2_FIT][1].hold(numpy.array(errors))


@pytest.mark.parametrize(("kind", "error"), [(0, step_error), (1, prefill_error)])
def test_another_generation_is_predicted_without_a_factor(
    kind: int, error: Callable[[dict[str, str], str], float]
) -> None:
    """The rows of trn1 are in no fit; its cores have the bandwidth and FLOPS of inf2's."""
    errors = [error(row, "trn1.32xlarge") for row in TRN1_ROWS]
    assert BOUNDS[TRN1][kind].hold(numpy.array(errors))


@pytest.mark.parametrize(
    ("instance", "tp", "verified"),
    [
        ("trn1.32xlarge", 32, True),
        ("trn1.32xlarge", 8, False),
        ("trn1.2xlarge", 2, False),
        ("trn2.48xlarge", 24, False),
    ],
)
def test_only_a_family_and_degree_with_published_rows_is_verified(instance: str, tp: int, verified: bool) -> None:
    """The source names the other ones."""
    fast = estimated("Llama-3-8B", 1, 4096, False, tp, instance)
    assert ("verified with" in fast.source) == verified
    assert ((fast.decode_error, fast.prefill_error) == (DECODE_ERROR, PREFILL_ERROR)) == verified
    assert verified or "unverified at tp" in fast.source or "trn2" in fast.source


def test_more_cores_are_faster() -> None:
    """Steps and prompts both."""
    slow, fast = (estimated("Llama-3-8B", 4, 4096, False, tp) for tp in (8, 24))
    assert fast.step_s < slow.step_s
    assert fast.prefill_token_s < slow.prefill_token_s
    assert fast.prefill_square_s < slow.prefill_square_s


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
    assert (fast.step_s, fast.prefill_base_s) == (expected, expected)
    assert fast.prefill_token_s == fast.prefill_square_s == 0.0


def test_an_unreadable_model_is_marked_as_a_guess() -> None:
    """Unlike one with a config.json."""
    fast = speed(ModelSpec(name="m", source="org/model", tp_degree=8), None, "nxd-inference", INF2)
    assert fast.decode_error == 1.0
    assert "guess" in fast.source


def test_loading_grows_with_the_weights() -> None:
    """70 billion parameters take longer than 8."""
    assert estimated("Llama-3-70B", 1, 4096, False).load_s > estimated("Llama-3-8B", 1, 4096, False).load_s + 60
