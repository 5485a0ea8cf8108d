"""Measured speeds of replicas, from the request records of a fleet, which replace estimates."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.process.failure import Failed
from placements.resources.calibration import FIELDS, MeasuredSpeed
from placements.resources.measured_times import LEAST_REQUESTS, LEAST_TOKENS, line, low

GROUPS = 8  # groups of prompts by length


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
            own["step_ms"] = round(low(paces[name]), 4)
        if len(firsts.get(name, ())) >= LEAST_REQUESTS:
            fitted = _line(firsts[name])
            if fitted is not None:
                own |= {"prefill_base_ms": round(fitted[0], 4), "prefill_token_ms": round(fitted[1], 6)}
        if own:
            speeds[name] = own | {"requests": max(len(paces.get(name, ())), len(firsts.get(name, ())))}
    return speeds


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Fits a line (base, slope) through the undisturbed time of each group."""
    ordered = sorted(points)
    size = max(1, math.ceil(len(ordered) / GROUPS))
    groups = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    return line(
        [sum(tokens for tokens, _ in group) / len(group) for group in groups],
        [low(value for _, value in group) for group in groups],
    )


def parse_speeds(text: str, name: str) -> tuple[MeasuredSpeed, ...]:
    """Parses a JSON object of models, each with some of FIELDS, or a list of such objects for several shapes; with
    ``requests`` and ``shape`` as `trace export` adds them. Raises Failed."""
    try:
        read = json.loads(text)
    except ValueError as error:
        raise Failed("speeds-wrong", f"{name} is not valid JSON: {error}", _HINT) from None
    if not isinstance(read, dict):
        raise Failed("speeds-wrong", f"{name} is not a JSON object", _HINT)
    every = [(model, each) for model, value in read.items() for each in (value if isinstance(value, list) else [value])]
    return tuple(_parsed(model, fields, name) for model, fields in every)


def reported_speeds(data: Mapping[str, Any]) -> tuple[MeasuredSpeed, ...]:
    """Returns the measured speeds of a fleet's reply."""
    return tuple(MeasuredSpeed("", each["speeds"], each["requests"], each["shape"]) for each in data["speeds"])


def _parsed(model: str, fields: Any, name: str) -> MeasuredSpeed:
    if not isinstance(fields, dict):
        raise Failed("speeds-wrong", f"{name}: {model} is not an object", _HINT)
    shape = fields.pop("shape", None)
    if shape is not None and not isinstance(shape, dict):
        raise Failed("speeds-wrong", f"{name}: {model}.shape is not an object", _HINT)
    values: dict[str, float] = {}
    for key, value in fields.items():
        if key not in FIELDS and key != "requests":
            what = f"{name}: {model}.{key} is not a speed; the speeds are {', '.join(FIELDS)}"
            raise Failed("speeds-wrong", what, _HINT)
        above = key == "step_ms"  # a step takes time; the others may be 0
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
        if not is_number or (above and value == 0):
            what = f"{name}: {model}.{key} is not a number {'>' if above else '>='} 0: {value!r}"
            raise Failed("speeds-wrong", what, _HINT)
        values[key] = float(value)
    requests = values.pop("requests", None)
    return MeasuredSpeed(model, values, None if requests is None else int(requests), shape)


def read_speeds(path: Path | None) -> tuple[MeasuredSpeed, ...]:
    """Returns the measured speeds of a file; none without one. Raises Failed."""
    if path is None:
        return ()
    try:
        return parse_speeds(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        what = f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise Failed("speeds-wrong", what, "check the path and its permissions") from None


_HINT = 'example: {"chat": {"step_ms": 21.5, "prefill_base_ms": 12, "prefill_token_ms": 0.05, "load_s": 40}}'
