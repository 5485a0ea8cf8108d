"""Checks models that do not generate: their engine, and settings that have no effect on them."""

from __future__ import annotations

from collections.abc import Iterator

from placements.facts.encoders import ENGINES_OF_ENCODERS
from placements.facts.engines import HOST_ENGINES
from placements.rules.case import Case, FieldRule
from placements.spec.problems import Problem
from placements.spec.schema import ModelSpec

_DEFAULT = ModelSpec(name="default", source="./")
_OF_GENERATION = ("tool_parser", "trust_remote_code")
_OF_DEVICES = ("sampling", "quantize", "quantize_kv", "fuse_qkv")  # other rules report them for HOST_ENGINES


def engine_serves_the_kind(case: Case) -> Iterator[Problem]:
    """Models of a kind other than generate run on an engine of encoders."""
    model = case.model
    if model.kind == "generate" or case.engine in (*ENGINES_OF_ENCODERS, *_NOT_SERVED):
        return
    engine = "engine auto" if case.engine == "auto" else f"the engine {case.engine}"
    what = f"{engine} does not serve kind {model.kind}" + (" on Neuron devices" if case.engine == "auto" else "")
    hint = f"use engine: {' or '.join(ENGINES_OF_ENCODERS)}"
    if case.engine in ("server", "vllm"):
        hint += "; or engine: server without kind, which forwards requests to its own /v1/embeddings"
    yield case.problem("kind-unsupported", ("kind",), what, hint)


_NOT_SERVED = ("torch-neuronx",)  # `up` refuses it for every kind


def encoders_use_one_core(case: Case) -> Iterator[Problem]:
    """A replica of an encoder is not divided among cores."""
    model = case.model
    if model.kind != "generate" and model.tp_degree != 1:
        what = f"tp_degree {model.tp_degree} is not supported for kind {model.kind}: a replica uses one core"
        yield case.problem("setting-unsupported", ("tp_degree",), what, "remove it, and set replicas")


def settings_are_of_the_kind(case: Case) -> Iterator[Problem]:
    """Settings of generation are not set for other kinds, nor those of encoders for generate."""
    model = case.model
    if model.kind == "generate":
        if model.max_wait_ms != _DEFAULT.max_wait_ms:
            what = "max_wait_ms has no effect on kind generate, whose requests join between two steps"
            yield case.problem("setting-unsupported", ("max_wait_ms",), what, "remove it")
        return
    fields = _OF_GENERATION if case.engine in HOST_ENGINES else (*_OF_GENERATION, *_OF_DEVICES)
    unused = [field for field in fields if getattr(model, field) != getattr(_DEFAULT, field)]
    if case.engine == "cpu":
        unused += [field for field in ("draft", "engine_options") if getattr(model, field)]
    for field in (field for field in unused if field not in model.broken):
        what = f"{field} has no effect on kind {model.kind}"
        yield case.problem("setting-unsupported", (field,), what, "remove it")
    if model.objectives.tpot_ms is not None:
        what = f"objectives.tpot_ms has no effect on kind {model.kind}, which gives no tokens"
        yield case.problem(
            "setting-unsupported", ("objectives", "tpot_ms"), what, "set ttft_ms, the time to the answer"
        )


ENCODER_RULES: tuple[FieldRule, ...] = (
    FieldRule(engine_serves_the_kind, frozenset({"kind", "engine"})),
    FieldRule(encoders_use_one_core, frozenset({"kind", "tp_degree"})),
    FieldRule(settings_are_of_the_kind, frozenset({"kind", "engine", "objectives"})),
)
