"""Checks models that do not generate: their engine, and settings that have no effect on them."""

from __future__ import annotations

from collections.abc import Iterator

from placements.facts.encoders import EMBEDDING_DECODERS, ENGINES_OF_ENCODERS, KINDS
from placements.facts.engines import AUTO_ENGINES, HOST_ENGINES, TRACED_FAMILIES, TRACED_REFUSED
from placements.rules.case import Case, FieldRule, joined
from placements.spec.problems import Problem
from placements.spec.schema import ModelSpec

_DEFAULT = ModelSpec(name="default", source="./")
_OF_GENERATION = ("tool_parser", "trust_remote_code")
_OF_DEVICES = ("sampling", "quantize", "quantize_kv", "fuse_qkv")  # other rules report them for HOST_ENGINES


def engine_serves_the_kind(case: Case) -> Iterator[Problem]:
    """Models of a kind other than generate run on an engine of encoders, and torch-neuronx runs no others."""
    model = case.model
    if model.kind == "generate":
        if case.engine == "torch-neuronx":
            what = "the engine torch-neuronx does not serve kind generate"
            kinds = joined([kind for kind in KINDS[1:] if case.works(kind=kind)], "or")
            ways = [f"set kind: {kinds}"] if kinds else []
            ways += [f"use {engines}"] if (engines := case.engines_of(*AUTO_ENGINES)) else []
            hint = "; or ".join(ways) or "use an engine that generates text"
            yield case.problem("kind-unsupported", ("engine",), what, hint)
        return
    if case.engine in (*ENGINES_OF_ENCODERS, "auto"):  # auto: hosts are unknown
        return
    what = f"the engine {case.engine} does not serve kind {model.kind}"
    engines = case.engines_of(*ENGINES_OF_ENCODERS)
    hint = f"use engine: {engines}" if engines else f"use an engine of encoders: {', '.join(ENGINES_OF_ENCODERS)}"
    if case.family in EMBEDDING_DECODERS:
        if case.engine == "nxd-inference":
            what += ": its models return the logits or the id of the next token, not the hidden states of a text"
        hint = "only cpu embeds with a decoder, and it is slow"
        if case.works(engine="cpu"):
            hint = "use engine: cpu, which is slow: no other engine embeds with a decoder"
    if case.engine in ("server", "vllm"):
        hint += "; or engine: server without kind, which forwards requests to its own /v1/embeddings"
    yield case.problem("kind-unsupported", ("kind",), what, hint)


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
        if model.objectives.items_per_second is not None:
            what = "objectives.items_per_second has no effect on kind generate, which encodes no inputs"
            hint = "set ttft_ms, tpot_ms or queue_ms"
            yield case.problem("setting-unsupported", ("objectives", "items_per_second"), what, hint)
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


def family_is_traced(case: Case) -> Iterator[Problem]:
    """torch-neuronx traces the encoder's family."""
    model, family = case.model, case.family
    if case.engine != "torch-neuronx" or model.kind == "generate" or family is None or family in TRACED_FAMILIES:
        return
    why = TRACED_REFUSED.get(family, "it is not an encoder")
    what = f"the engine torch-neuronx does not serve {family}, the family of {model.name}: {why}"
    hint = "use engine: cpu, which is slow, or another model" if case.works(engine="cpu") else "use another model"
    yield case.problem("family-unsupported", ("engine",), what, hint)


def traces_fit(case: Case) -> Iterator[Problem]:
    """The lengths and the batch of traces fit those of the model: a trace holds no longer input."""
    model = case.model
    if case.engine != "torch-neuronx" or model.kind == "generate":
        return
    if model.buckets.decode:
        what = f"buckets.decode has no effect on kind {model.kind}"
        yield case.problem("setting-unsupported", ("buckets", "decode"), what, "remove it, and set buckets.prefill")
    lengths = model.buckets.prefill
    longest = model.length(case.checkpoint) if model.max_len is not None or case.checkpoint is not None else None
    if lengths and longest is not None and lengths[-1] < longest:
        what = f"buckets.prefill ends at {lengths[-1]}; its longest length must be max_len, {longest}"
        where = ("buckets", "prefill", len(lengths) - 1)
        yield case.problem("bad-buckets", where, what, f"add {longest}, or lower max_len")
    batch = model.engine_options.get("compiled_batch")
    if type(batch) is int and batch > model.max_batch:
        what = f"engine_options.compiled_batch is {batch}, more than max_batch, {model.max_batch}"
        yield case.problem("out-of-range", ("engine_options", "compiled_batch"), what, "raise max_batch, or lower it")


ENCODER_RULES: tuple[FieldRule, ...] = (
    FieldRule(family_is_traced, frozenset({"kind", "engine"})),
    FieldRule(traces_fit, frozenset({"kind", "engine", "engine_options", "buckets", "max_batch", "max_len"})),
    FieldRule(engine_serves_the_kind, frozenset({"kind", "engine"})),
    FieldRule(encoders_use_one_core, frozenset({"kind", "tp_degree"})),
    FieldRule(settings_are_of_the_kind, frozenset({"kind", "engine", "objectives"})),
)
