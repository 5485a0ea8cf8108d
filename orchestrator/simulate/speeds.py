"""Measured speeds of replicas, from the request records of a fleet, which replace estimates."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import linear_regression
from typing import Any

from orchestrator.process.failure import Failed
from orchestrator.simulate.simulated_model import SimModel
from placements.facts.plural import counted

FIELDS = {
    "step_ms": ("step_s", 1000.0),
    "prefill_base_ms": ("prefill_base_s", 1000.0),
    "prefill_token_ms": ("prefill_token_s", 1000.0),
    "prefill_square_ns": ("prefill_square_s", 1e9),
    "load_s": ("load_s", 1.0),
}
LEAST_TOKENS = 8  # output tokens of a request whose pace counts
LEAST_REQUESTS = 20  # requests of a model with an estimate
LOW = 0.2
"""The quantile of the times that counts as undisturbed. A prefill of another request stalls all decodes, and a prompt
waits for the current step: most measured times are longer than the undisturbed one, and none is much shorter."""
GROUPS = 8  # groups of prompts by length
SPREAD = 2.0  # minimum ratio of the mean lengths of the longest and the shortest group, to fit a line


@dataclass(frozen=True)
class MeasuredSpeed:
    """The measured speeds of a model, some of FIELDS, and what they belong to."""

    speeds: Mapping[str, float] = field(default_factory=dict)
    requests: int | None = None  # measurements; None: unknown, as in a file that a user wrote
    shape: Mapping[str, Any] | None = None  # of `measured_shape`; None: the user says that they apply

    @property
    def is_complete(self) -> bool:
        """True if no speed is left to the estimate."""
        return FIELDS.keys() <= _of_whole_prompts(self.speeds).keys()

    @property
    def source(self) -> str:
        """The source in a few words."""
        return "measured" if self.requests is None else f"measured on {counted(self.requests, 'request')}"


def measured_speeds(requests: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns the speeds by model from the records of the gateways (`orchestrator.records.request_traces`), without
    models with too few requests.

    1. step_ms: the undisturbed pace of requests with LEAST_TOKENS output tokens or more.
    2. prefill_base_ms and prefill_token_ms: a line through the undisturbed times to the first token of GROUPS groups of
       prompts of similar length; omitted if all prompts had about the same length.
    3. requests: the number of requests that were measured.
    """
    paces: dict[str, list[float]] = {}
    firsts: dict[str, list[tuple[int, float]]] = {}
    for request in requests:
        name = request["model"]
        if request["decode_ms"] > 0 and request["output_tokens"] >= LEAST_TOKENS:
            paces.setdefault(name, []).append(request["decode_ms"] / (request["output_tokens"] - 1))
        if request["first_ms"] > 0:
            firsts.setdefault(name, []).append((request["prompt_tokens"], request["first_ms"]))
    speeds: dict[str, dict[str, float]] = {}
    for name in sorted({*paces, *firsts}):
        own: dict[str, float] = {}
        if len(paces.get(name, ())) >= LEAST_REQUESTS:
            own["step_ms"] = round(_low(paces[name]), 4)
        if len(firsts.get(name, ())) >= LEAST_REQUESTS:
            line = _line(firsts[name])
            if line is not None:
                own |= {"prefill_base_ms": round(line[0], 4), "prefill_token_ms": round(line[1], 6)}
        if own:
            speeds[name] = own | {"requests": max(len(paces.get(name, ())), len(firsts.get(name, ())))}
    return speeds


def _low(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * LOW)]


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Fits a line (base, slope) by least squares through the low quantile of each group; neither is negative. None if
    the lengths are too similar, or longer prompts took no longer: such a line does not extrapolate."""
    ordered = sorted(points)
    size = max(1, math.ceil(len(ordered) / GROUPS))
    groups = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    xs = [sum(tokens for tokens, _ in group) / len(group) for group in groups]
    ys = [_low([value for _, value in group]) for group in groups]
    if xs[-1] < SPREAD * xs[0]:
        return None
    slope, base = linear_regression(xs, ys)
    if slope <= 0.0:
        return None
    return (base, slope) if base >= 0 else (0.0, sum(ys) / sum(xs))


def parse_speeds(text: str, name: str, models: Iterable[str]) -> dict[str, MeasuredSpeed]:
    """Parses a JSON object of models and some of their FIELDS, with ``requests`` and ``shape`` as `trace export` adds
    them; ignores unknown models. Raises Failed."""
    try:
        read = json.loads(text)
    except ValueError as error:
        raise Failed("speeds-wrong", f"{name} is not valid JSON: {error}", _HINT) from None
    if not isinstance(read, dict):
        raise Failed("speeds-wrong", f"{name} is not a JSON object", _HINT)
    names = set(models)
    speeds: dict[str, MeasuredSpeed] = {}
    for model, fields in read.items():
        if not isinstance(fields, dict):
            raise Failed("speeds-wrong", f"{name}: {model} is not an object", _HINT)
        shape = fields.pop("shape", None)
        if shape is not None and not isinstance(shape, dict):
            raise Failed("speeds-wrong", f"{name}: {model}.shape is not an object", _HINT)
        values: dict[str, float] = {}
        for key, value in fields.items():
            if key not in FIELDS and key != "requests":
                raise Failed(
                    "speeds-wrong", f"{name}: {model}.{key} is not a speed; the speeds are {', '.join(FIELDS)}", _HINT
                )
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise Failed("speeds-wrong", f"{name}: {model}.{key} is not a number >= 0: {value!r}", _HINT)
            values[key] = float(value)
        requests = values.pop("requests", None)
        if model in names:
            speeds[model] = MeasuredSpeed(values, None if requests is None else int(requests), shape)
    return speeds


_HINT = 'example: {"chat": {"step_ms": 21.5, "prefill_base_ms": 12, "prefill_token_ms": 0.05, "load_s": 40}}'


def with_speeds(model: SimModel, speeds: Mapping[str, float]) -> SimModel:
    """Returns the model with these speeds."""
    measured = _of_whole_prompts(speeds)
    values: dict[str, Any] = {FIELDS[field][0]: value / FIELDS[field][1] for field, value in measured.items()}
    return replace(model, **values)


def _of_whole_prompts(speeds: Mapping[str, float]) -> Mapping[str, float]:
    """Returns the speeds, with no time for squares if there is only one for tokens: that one was measured on whole
    prompts, and includes the attention."""
    return {"prefill_square_ns": 0.0, **speeds} if "prefill_token_ms" in speeds else speeds
