"""Measured speeds correct the estimates of their own shape and of near ones, and of no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placements.engines.registry import Engine
from placements.resources.calibration import LEAST_NEAR, MeasuredSpeed, calibrated, shape_of, speed_rows
from placements.resources.estimate import Speed, speed
from placements.resources.measured_times import LEAST_REQUESTS
from placements.spec.schema import ModelSpec
from tests.placements.fleets import LLAMA_2_7B, host, model, spec

INF2, EMULATED = host(), host(emulated=True)
NXD: Engine = "nxd-inference"
TNX: Engine = "transformers-neuronx"
CPU: Engine = "cpu"
BATCHES, LENGTHS = st.integers(1, 64), st.integers(128, 8192)


def chat(batch: int, length: int = 2048, **fields: Any) -> ModelSpec:
    return model("chat", 8, max_batch=batch, max_len=length, **fields)


def estimated(wanted: ModelSpec, engine: Engine = NXD) -> Speed:
    return speed(wanted, LLAMA_2_7B, engine, INF2.topology)


def corrected(wanted: ModelSpec, *measured: MeasuredSpeed, engine: Engine = NXD) -> Speed:
    return calibrated(wanted, LLAMA_2_7B, engine, [INF2], measured)


def measurement(
    of: ModelSpec, step_ms: float, requests: int = 500, engine: Engine = NXD, at: Any = INF2
) -> MeasuredSpeed:
    return MeasuredSpeed("chat", {"step_ms": step_ms}, requests, shape_of(of, LLAMA_2_7B, engine, [at]))


def ratio(wanted: ModelSpec, *measured: MeasuredSpeed, engine: Engine = NXD) -> float:
    return corrected(wanted, *measured, engine=engine).step_s / estimated(wanted, engine).step_s


def twice(batch: int, requests: int = 500) -> MeasuredSpeed:
    """A measurement of twice the estimate."""
    return measurement(chat(batch), 2000 * estimated(chat(batch)).step_s, requests)


def test_a_measured_step_replaces_the_estimate_of_its_shape() -> None:
    """With the number of requests, and an error by that number."""
    own = corrected(chat(8), measurement(chat(8), 31.0, 400))
    assert (own.step_s, own.requests, own.decode_error) == (0.031, 400, 0.01)
    assert own.source.startswith("measured on 400 requests, the rest fitted")


def test_a_near_shape_is_corrected_by_the_measured_ratio() -> None:
    """Another batch or length; its error is also that of the formula from batch to batch."""
    own = corrected(chat(16, 4096), twice(8))
    assert own.step_s == pytest.approx(2 * estimated(chat(16, 4096)).step_s)
    assert own.decode_error == pytest.approx(0.07)
    assert own.source.endswith("; step x 2.00 by 500 requests measured with max_batch 8 instead of 16")


def test_the_prefill_of_a_near_shape_is_the_measured_one() -> None:
    """It does not depend on the batch."""
    speeds = {"prefill_base_ms": 9.0, "prefill_token_ms": 0.5}
    measured = measurement(chat(8), 20.0)
    own = corrected(chat(16), replace(measured, speeds={**measured.speeds, **speeds}))
    assert (own.prefill_base_s, own.prefill_token_s, own.load_s) == (0.009, 0.0005, estimated(chat(16)).load_s)


@given(st.integers(0, LEAST_REQUESTS - 1), st.floats(0.001, 1e6))
def test_too_few_requests_correct_nothing(requests: int, step_ms: float) -> None:
    """Whatever they have measured."""
    assert ratio(chat(8), measurement(chat(8), step_ms, requests)) == 1.0


@given(st.integers(0, LEAST_NEAR - 1), st.floats(0.001, 1e6))
def test_near_shapes_need_more_requests(requests: int, step_ms: float) -> None:
    """So that the error of the measurement does not add much to that of the formula."""
    assert ratio(chat(16), measurement(chat(8), step_ms, requests)) == 1.0


@pytest.mark.parametrize(
    "other",
    [
        measurement(chat(8), 99.0, engine=CPU),
        measurement(chat(8), 99.0, engine=CPU, at=EMULATED),
        measurement(chat(8), 99.0, at=EMULATED),
        measurement(chat(8), 99.0, engine=TNX),
        measurement(chat(8), 99.0, at=host("trn1.32xlarge")),
        measurement(model("chat", 4, max_batch=8, max_len=2048), 99.0),
        measurement(chat(8, quantize="int8"), 99.0),
    ],
)
def test_other_engines_machines_degrees_and_types_correct_nothing(other: MeasuredSpeed) -> None:
    """Steps of the CPU engine above all; neither the measured shape nor a near one."""
    assert [ratio(chat(8), other), ratio(chat(16), other)] == [1.0, 1.0]


@pytest.mark.parametrize(("measured", "expected"), [((TNX,), 30.0), ((TNX, NXD), 40.0), ((NXD, TNX), 40.0)])
def test_auto_is_compared_as_the_engine_that_it_resolves_to(measured: tuple[Engine, ...], expected: float) -> None:
    """The preferred one of those that the fleet has measured."""
    steps = {TNX: 30.0, NXD: 40.0}
    own = corrected(chat(8), *(measurement(chat(8), steps[each], engine=each) for each in measured), engine="auto")
    assert own.step_s * 1000 == pytest.approx(expected)


@given(
    st.dictionaries(BATCHES, st.floats(0.2, 5.0), min_size=1, max_size=4),
    BATCHES,
    BATCHES,
    st.booleans(),
)
def test_a_corrected_step_grows_with_the_batch(
    measured: dict[int, float], first: int, second: int, longer: bool
) -> None:
    """As the estimate does, if the measured steps do."""
    steps, least = [], 0.0
    for batch, factor in sorted(measured.items()):
        least = max(least, factor * 1000 * estimated(chat(batch)).step_s)
        steps.append(measurement(chat(batch), least))
    small, large = sorted((first, second))
    length = 4096 if longer else 2048
    before, after = (corrected(chat(batch, length), *steps).step_s for batch in (small, large))
    assert before <= after * (1 + 1e-9)


@given(st.permutations([twice(4), twice(8, 100), measurement(chat(16), 3.0), measurement(chat(32, 4096), 900.0)]))
def test_the_order_of_measurements_does_not_matter(measured: list[MeasuredSpeed]) -> None:
    assert ratio(chat(24), *measured) == ratio(chat(24), *sorted(measured, key=str))


def test_each_model_that_generates_has_a_row() -> None:
    """With its tokens per second; not servers, whose speed nobody can estimate, nor encoders."""
    other = model("other", engine="server", engine_options={"command": ["x"]})
    encoder = model("vectors", kind="embedding")
    fleet = spec(chat(8, engine=NXD), other, encoder)
    rows = speed_rows(fleet, [INF2], {"chat": LLAMA_2_7B}, [measurement(chat(8), 20.0)])
    assert [(row["model"], row["tokens_per_s"], row["measured_requests"]) for row in rows] == [("chat", 400.0, 500)]
