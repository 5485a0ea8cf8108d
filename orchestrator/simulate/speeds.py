"""How fast replicas are, as a fleet's own records tell it, in place of an estimate."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.process.failure import Failed
from orchestrator.simulate.simulated_model import SimModel

FIELDS = {
    "step_ms": ("step_s", 1000.0),
    "prefill_base_ms": ("prefill_base_s", 1000.0),
    "prefill_token_ms": ("prefill_token_s", 1000.0),
    "load_s": ("load_s", 1.0),
}
LEAST_TOKENS = 8  # of an answer whose pace counts
LEAST_REQUESTS = 20  # of a model, to tell anything
LOW = 0.2
"""The part of the requests that are taken for undisturbed. A prefill of another request stops the decodes of all, and a
prompt waits for the step that runs: most measured times are longer than what is looked for, none is much shorter."""
GROUPS = 8  # of prompts by length
SPREAD = 2.0  # the longest of them over the shortest: below that nobody can tell what a prompt costs and what a token


def measured_speeds(requests: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By model, from what gateways have recorded (`orchestrator.records.request_traces`); nothing of a model with too
    few requests.

    1. step_ms: the pace of the undisturbed answers, of those with LEAST_TOKENS or more.
    2. prefill_base_ms and prefill_token_ms: a line through the undisturbed times to the first token of GROUPS groups of
       prompts of similar length; neither where all prompts were of about one length.
    """
    paces: dict[str, list[float]] = {}
    firsts: dict[str, list[tuple[int, float]]] = {}
    for request in requests:
        name = request["model"]
        if request["decode_ms"] > 0 and request["output_tokens"] >= LEAST_TOKENS:
            paces.setdefault(name, []).append(request["decode_ms"] / (request["output_tokens"] - 1))
        if request["first_ms"] > 0:
            firsts.setdefault(name, []).append((request["prompt_tokens"], request["first_ms"]))
    found: dict[str, dict[str, float]] = {}
    for name in sorted({*paces, *firsts}):
        told: dict[str, float] = {}
        if len(paces.get(name, ())) >= LEAST_REQUESTS:
            told["step_ms"] = round(_low(paces[name]), 4)
        if len(firsts.get(name, ())) >= LEAST_REQUESTS:
            line = _line(firsts[name])
            if line is not None:
                told |= {"prefill_base_ms": round(line[0], 4), "prefill_token_ms": round(line[1], 6)}
        if told:
            found[name] = told
    return found


def _low(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * LOW)]


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Least squares through the low ones of each group; neither number is below 0. None where the lengths are too
    much alike, or longer prompts took no longer: such a line says nothing of other lengths."""
    ordered = sorted(points)
    size = max(1, math.ceil(len(ordered) / GROUPS))
    groups = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    xs = [sum(tokens for tokens, _ in group) / len(group) for group in groups]
    ys = [_low([value for _, value in group]) for group in groups]
    if xs[-1] < SPREAD * xs[0]:
        return None
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    if slope <= 0.0:
        return None
    base = mean_y - slope * mean_x
    return (base, slope) if base >= 0 else (0.0, mean_y / mean_x)


def parse_speeds(text: str, name: str, models: Iterable[str]) -> dict[str, dict[str, float]]:
    """A JSON object of models and their FIELDS, each in part. Those of models that are not there are passed over.

    Raises Failed.
    """
    try:
        read = json.loads(text)
    except ValueError as error:
        raise Failed("speeds-wrong", f"{name} is no JSON: {error}", _HINT) from None
    if not isinstance(read, dict):
        raise Failed("speeds-wrong", f"{name} holds no object", _HINT)
    known = set(models)
    found: dict[str, dict[str, float]] = {}
    for model, told in read.items():
        if not isinstance(told, dict):
            raise Failed("speeds-wrong", f"{name}: {model} is no object", _HINT)
        if model in known:
            found[model] = {}
        for field, value in told.items():
            if field not in FIELDS:
                raise Failed(
                    "speeds-wrong", f"{name}: {model}.{field} is no speed; there are {', '.join(FIELDS)}", _HINT
                )
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise Failed("speeds-wrong", f"{name}: {model}.{field} is no number from 0 on: {value!r}", _HINT)
            if model in known:
                found[model][field] = float(value)
    return found


_HINT = 'such as {"chat": {"step_ms": 21.5, "prefill_base_ms": 12, "prefill_token_ms": 0.05, "load_s": 40}}'


def with_speeds(model: SimModel, told: Mapping[str, float]) -> SimModel:
    """The model with what was measured."""
    values: dict[str, Any] = {FIELDS[field][0]: value / FIELDS[field][1] for field, value in told.items()}
    return replace(model, **values)
