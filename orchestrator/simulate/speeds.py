"""Measured speeds of replicas, from the request records of a fleet, which replace estimates."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.process.failure import Failed
from placements.resources.calibration import FIELDS, MeasuredSpeed
from placements.resources.measured_times import LEAST_TOKENS, PACE, Times, length_class, note, speeds_of


def measured_speeds(requests: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns the speeds (`measured_times.speeds_of`) and the number of requests by model, from the records of the
    gateways (`orchestrator.messages.request_traces`). Models with too few requests are missing."""
    by_model: dict[str, Times] = {}
    for request in requests:
        times = by_model.setdefault(request["model"], {})
        if request["output_tokens"] >= LEAST_TOKENS:
            note(times, PACE, request["decode_ms"] / 1000 / (request["output_tokens"] - 1))
        note(times, length_class(request["prompt_tokens"]), request["first_ms"] / 1000)
    every = {model: speeds_of(times) for model, times in sorted(by_model.items())}
    return {model: {**speeds, "requests": count} for model, (speeds, count) in every.items() if speeds}


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
            fact = f"{name}: {model}.{key} is not a speed; the speeds are {', '.join(FIELDS)}"
            raise Failed("speeds-wrong", fact, _HINT)
        above = key == "step_ms"  # a step takes time; the others may be 0
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
        if not is_number or (above and value == 0):
            fact = f"{name}: {model}.{key} is not a number {'>' if above else '>='} 0: {value!r}"
            raise Failed("speeds-wrong", fact, _HINT)
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
        fact = f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise Failed("speeds-wrong", fact, "check the path and its permissions") from None


_HINT = 'example: {"chat": {"step_ms": 21.5, "prefill_base_ms": 12, "prefill_token_ms": 0.05, "load_s": 40}}'
