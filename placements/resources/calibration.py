"""Corrects estimated speeds by those that a fleet has measured, each for the shape of replica that it belongs to."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from placements.engines.registry import Engine, candidates_of, capabilities, resolve
from placements.facts.checkpoints import Checkpoint
from placements.facts.plural import counted
from placements.facts.topology import Host
from placements.resources.estimate import DECODE_ERROR, Speed, speed
from placements.resources.measured_times import LEAST_REQUESTS
from placements.spec.schema import ModelSpec, Spec

Shape = Mapping[str, Any]


def shape_of(model: ModelSpec, checkpoint: Checkpoint | None, engine: Engine, hosts: Sequence[Host]) -> dict[str, Any]:
    """Returns the shape of a model's replicas as JSON values; ``engine`` is the resolved engine.

    What is measured on emulated hosts, or by a fleet of several types, never corrects an estimate for a real instance
    type. A model without a readable checkpoint has no ``weights``.
    """
    return {
        "machine": " and ".join(sorted({host.machine for host in hosts})),
        "engine": engine,
        "weights": None if checkpoint is None else _weights(checkpoint),
        "tp_degree": model.tp_degree,
        "max_batch": model.max_batch,
        "max_len": model.length(checkpoint),
        "dtype": model.dtype_on(engine),
        "quantize": model.quantize,
        "quantize_kv": model.quantize_kv,
        "draft": None if model.draft is None else f"{model.draft.source}, {model.draft.k} tokens",
        "engine_options": json.dumps(model.engine_options, sort_keys=True) if model.engine_options else None,
    }


def difference(measured: Shape, wanted: Shape) -> str:
    """Returns the first field that differs, such as "tp_degree 8 instead of 4"; "" if none does."""
    for name, value in wanted.items():
        if name not in measured or measured[name] != value:
            return f"{name} {_text(measured.get(name))} instead of {_text(value)}"
    return ""


def _weights(checkpoint: Checkpoint) -> str:
    heads = f"{checkpoint.heads} heads of {checkpoint.head_dim}, {checkpoint.kv_heads} KV heads"
    layers = f"{checkpoint.layers} layers of {checkpoint.hidden} and {checkpoint.ffn}"
    experts = f", {checkpoint.experts} experts" if checkpoint.experts else ""
    return f"{checkpoint.model_type}: {layers}{experts}, {heads}, {checkpoint.parameters} parameters"


def _text(value: object) -> str:
    return "none" if value is None else str(value)


FIELDS: Mapping[str, tuple[str, float]] = {
    "step_ms": ("step_s", 1000.0),
    "prefill_base_ms": ("prefill_base_s", 1000.0),
    "prefill_token_ms": ("prefill_token_s", 1000.0),
    "prefill_square_ns": ("prefill_square_s", 1e9),
    "load_s": ("load_s", 1.0),
}
"""The speeds that are measured: the attribute of `Speed`, and its units in one of this field."""

LEAST_NEAR = 100
"""The requests of a measurement that corrects the estimates of near shapes: off by 3 % (REQUEST_ERROR), half of the
formula's own error from batch to batch (DECODE_ERROR), so that the measurement adds little to it. With LEAST_REQUESTS
it is off by 7 %, which is more than that error, but less than the errors of other degrees and of prefills."""
REQUEST_ERROR = 0.3
"""The undisturbed pace (the quantile 0.2) of N requests is within REQUEST_ERROR / sqrt(N) of that of all requests, for
95 % of 500 samples in simulations of a busy replica of Llama-2-7B: 7 % for 20 requests, 3 % for 100, 2 % for 400. At
full load that pace is 15 % longer than a step, as prefills of others stall every request; below half of it by 2 %."""
NEAR = ("max_batch", "max_len")  # in which near shapes may differ


@dataclass(frozen=True)
class MeasuredSpeed:
    """The measured speeds of a model, some of FIELDS, and what they belong to."""

    model: str
    speeds: Mapping[str, float] = field(default_factory=dict)
    requests: int | None = None  # measurements; None: unknown, as in a file that a user wrote
    shape: Mapping[str, Any] | None = None  # of `measured_shape`; None: the user says that they apply to the model

    def as_dict(self) -> dict[str, Any]:
        """Returns the JSON of the admin API."""
        return {"speeds": dict(self.speeds), "requests": self.requests, "shape": self.shape}


def calibrated(
    model: ModelSpec,
    checkpoint: Checkpoint | None,
    engine: Engine,
    hosts: Sequence[Host],
    measured: Iterable[MeasuredSpeed],
) -> Speed:
    """Returns the speed of a replica: the estimate, as far as measurements correct it.

    1. Speeds without a shape replace the estimates of the model of their name.
    2. Speeds of exactly the model's shape, of LEAST_REQUESTS or more, replace its estimates.
    3. Speeds of near shapes (NEAR), of LEAST_NEAR or more, correct the step: the estimate is multiplied by the median
       ratio of a measured step to the estimate of its shape. The result is no faster than a measured smaller shape, and
       no slower than a larger one, so that it grows with the batch as the measurements and the estimates do. The
       prefill does not depend on the batch, and is that of most requests.
    4. Otherwise the estimate stays.

    ``engine`` is the resolved engine. Where it is ``auto``, the first of its candidates with measurements counts: only
    the fleet's hosts know what it resolves to.
    """
    estimate, every = speed(model, checkpoint, engine, hosts[0].topology), tuple(measured)
    for each in every:  # 1
        if each.shape is None and each.model == model.name:
            return _replaced(estimate, each)
    refused = ""
    for candidate in candidates_of(engine):
        wanted, near = shape_of(model, checkpoint, candidate, hosts), []
        for each in every:
            if each.shape is None or (each.requests is not None and each.requests < LEAST_REQUESTS):
                continue
            differs = difference(each.shape, wanted)
            if not differs:  # 2
                return _replaced(estimate, each)
            if (each.requests or 0) >= LEAST_NEAR and not difference({**each.shape, **_near(wanted)}, wanted):
                near.append(each)
            elif each.model == model.name:
                refused = refused or f"; measured with {differs}, which does not apply"
        if near:  # 3
            return _corrected(estimate, model, checkpoint, candidate, hosts, near)
    return replace(estimate, source=estimate.source + refused)  # 4


def _near(shape: Mapping[str, Any]) -> dict[str, Any]:
    return {name: shape[name] for name in NEAR}


def _replaced(estimate: Speed, own: MeasuredSpeed) -> Speed:
    """Returns the speed with the measured values."""
    if not own.speeds:
        return estimate
    source = "measured" if own.requests is None else f"measured on {counted(own.requests, 'request')}"
    error = 0.0 if own.requests is None else error_of(own.requests)
    speeds = _of_whole_prompts(own.speeds)
    values: dict[str, Any] = {FIELDS[name][0]: value / FIELDS[name][1] for name, value in speeds.items()}
    if "step_ms" in own.speeds:
        values["decode_error"] = error
    if "prefill_token_ms" in own.speeds:
        values["prefill_error"] = error
    rest = "" if FIELDS.keys() <= speeds.keys() else f", the rest {estimate.source}"
    return replace(estimate, **values, requests=own.requests, source=source + rest)


def _of_whole_prompts(speeds: Mapping[str, float]) -> Mapping[str, float]:
    """Returns the speeds, with no time for squares if there is only one for tokens: that one was measured on whole
    prompts, and includes the attention."""
    return {"prefill_square_ns": 0.0, **speeds} if "prefill_token_ms" in speeds else speeds


def _corrected(
    estimate: Speed,
    model: ModelSpec,
    checkpoint: Checkpoint | None,
    engine: Engine,
    hosts: Sequence[Host],
    near: Sequence[MeasuredSpeed],
) -> Speed:
    """Returns the speed, corrected by measurements of near shapes, each of LEAST_NEAR requests or more."""
    most = max(near, key=lambda each: each.requests or 0)
    speeds = {name: value for name, value in most.speeds.items() if name.startswith("prefill")}
    corrected = replace(_replaced(estimate, MeasuredSpeed(model.name, speeds, most.requests)), source=estimate.source)
    size = model.max_batch, model.length(checkpoint)
    ratios, least, longest = [], 0.0, math.inf
    for each in near:
        shape, step_s = each.shape or {}, each.speeds.get("step_ms", 0.0) / 1000
        own = shape["max_batch"], shape["max_len"]
        if step_s <= 0.0:
            continue
        alike = model.model_copy(update={"max_batch": own[0], "max_len": own[1]})
        ratios.append(step_s / speed(alike, checkpoint, engine, hosts[0].topology).step_s)
        if own[0] <= size[0] and own[1] <= size[1]:
            least = max(least, step_s)
        if own[0] >= size[0] and own[1] >= size[1]:
            longest = min(longest, step_s)
    if not ratios:
        return corrected
    requests = sum(each.requests or 0 for each in near)
    step_s = min(max(estimate.step_s * median(ratios), least), longest)
    fact = f"{estimate.source}; step x {step_s / estimate.step_s:.2f} by {counted(requests, 'request')} measured with "
    fact += difference(most.shape or {}, shape_of(model, checkpoint, engine, hosts))
    error = DECODE_ERROR + error_of(requests)
    return replace(corrected, step_s=step_s, decode_error=error, requests=requests, source=fact)


def error_of(requests: int) -> float:
    """Returns the error of the undisturbed pace of so many requests, at least 1 %."""
    return max(0.01, round(REQUEST_ERROR / math.sqrt(requests), 2)) if requests else 1.0


def speed_rows(
    spec: Spec, hosts: Sequence[Host], checkpoints: Mapping[str, Checkpoint], measured: Iterable[MeasuredSpeed] = ()
) -> list[dict[str, Any]]:
    """Returns the speed of a replica of each model that generates, as data: `Speed.as_dict` and ``tokens_per_s``, the
    output tokens per second with a request in each slot. An unknown server's command has no estimate."""
    rows, every = [], tuple(measured)
    for model in spec.models:
        engine = resolve(model.engine, hosts[0], model.kind)
        if model.kind == "generate" and not capabilities(engine).forwards:
            own = calibrated(model, checkpoints.get(model.name), engine, hosts, every)
            rate = round(model.max_batch / own.step_s, 1)
            rows.append({"model": model.name, "tokens_per_s": rate, **own.as_dict()})
    return rows
