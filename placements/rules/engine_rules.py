"""Checks a model's fields against its engine and kind, with one function for each rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import TypeVar

from placements.engines.options import PACKAGED, Finding, Scope, check_options, check_own
from placements.engines.registry import (
    AUTO_ENGINES,
    ENGINES,
    HOST_ENGINES,
    Engine,
    candidates_of,
    capabilities,
    needs_neuron,
    serves,
)
from placements.facts.checkpoints import Checkpoint
from placements.facts.encoders import EMBEDDING_DECODERS
from placements.facts.known_failures import KNOWN_FAILURE, failures_of
from placements.facts.plural import counted, joined
from placements.facts.versions import order
from placements.rules.case import Case, Objection, Rule, rules_of
from placements.rules.unused_settings import compiles
from placements.spec.problems import Problem
from placements.spec.schema import ModelSpec

T = TypeVar("T")


def engine_runs_here(case: Case) -> Iterator[Problem]:
    """The engine runs on at least one of the machines."""
    engine, machines = case.engine, case.machines
    if engine in HOST_ENGINES or not machines or any(map(capabilities(engine).runs_in, machines)):
        return
    others = [each for each in AUTO_ENGINES if each != engine and all(map(ENGINES[each].runs_in, machines))]
    fact = f"the engine {engine} does not run on {' or '.join(machines)}"
    usable = case.engines_of(*others)
    hint = f"use {usable}, or another instance type" if usable else "use another instance type"
    yield case.problem("engine-unsupported-here", ("engine",), fact, hint)


def family_is_served(case: Case) -> Iterator[Problem]:
    """The engine has a class for the model's family, in a version that runs on one of the machines."""
    engine, family, machines, kind = case.engine, case.family, case.machines, case.model.kind
    if engine in HOST_ENGINES or family is None or kind not in capabilities(engine).kinds:
        return
    running = [machine for machine in machines if capabilities(engine).runs_in(machine)]
    if machines and not running:
        return  # reported by another rule
    if any(serves(engine, family, machine) for machine in running or (None,)):
        return
    subject = f"the engine {engine} does" if engine != "auto" else "the Neuron engines do"
    fact = f"{subject} not serve {family}, the family of {case.model.name}"
    reasons = (ENGINES[name].refused.get(family, ENGINES[name].outside) for name in candidates_of(engine))
    if why := next(filter(None, reasons), ""):
        fact += f": {why}"
    others = [
        other
        for other in AUTO_ENGINES
        if kind in ENGINES[other].kinds and any(serves(other, family, machine) for machine in machines or (None,))
    ]
    hint = "use another model"
    if usable := case.engines_of(*others):
        hint = f"use {usable}"
    elif case.works(engine="cpu"):
        hint = "use engine: cpu, which is slow, or another model"
    yield case.problem("family-unsupported", ("engine",), fact, hint)


def engine_can_draft(case: Case) -> Iterator[Problem]:
    """A draft is set only for an engine and families that support it with the model's other fields."""
    model, draft = case.model, case.draft
    if model.draft is None:
        return
    if objection := _objection(case, lambda engine: _to_draft(engine, case)):
        yield case.problem("draft-unsupported", ("draft",), *objection)
        return
    if draft is None or case.checkpoint is None:
        return
    if draft.vocab != case.checkpoint.vocab:
        fact = f"the draft has a vocabulary of {draft.vocab} tokens, but {model.name} has {case.checkpoint.vocab}"
        yield case.problem("bad-draft", ("draft",), fact, "use a draft with the same vocabulary")
    if case.engine not in HOST_ENGINES and draft.heads % model.tp_degree != 0 and not model.allow_head_padding:
        fact = f"tp_degree {model.tp_degree} does not divide the {draft.heads} attention heads of the draft"
        fact += f" of {model.name}, which uses the same cores"
        hint = "use another degree or draft, or add allow_head_padding: true for an engine that pads with zeros"
        yield case.problem("heads-not-divisible", ("draft",), fact, hint)


def _to_draft(engine: Engine, case: Case) -> Objection | None:
    """Returns why the engine cannot use the draft; None if it can."""
    assert case.model.draft is not None
    method, able = case.model.draft.method, ENGINES[engine].drafts
    if method not in (able or ("draft_model",)):
        others = case.engines_of(*(name for name, other in ENGINES.items() if method in other.drafts))
        hint = f"remove draft.method, or use engine: {others}" if others else "remove draft.method"
        return Objection(f"the engine {engine} has no drafts by {method}", hint)
    if not able:
        hint = "remove draft, or use cpu or a Neuron engine"
        return Objection(f"draft has no effect on the engine {engine}", hint)
    return rules_of(engine).draft(case)


def engine_can_quantize(case: Case) -> Iterator[Problem]:
    """Quantization is set only for an engine and a family that support it."""
    if case.model.quantize is not None and (name := _objection(case, lambda engine: _unquantizing(engine, case))):
        fact = f"{name} cannot quantize {case.family}, the family of {case.model.name}"
        yield case.problem("quantize-unsupported", ("quantize",), fact, "remove quantize")
    if case.model.quantize_kv is not None and (
        objection := _objection(case, lambda engine: rules_of(engine).quantized_kv(case))
    ):
        yield case.problem("quantize-unsupported", ("quantize_kv",), *objection)


def _unquantizing(engine: Engine, case: Case) -> str:
    """Returns the engine's name if it cannot quantize the family, else ""."""
    return engine if case.family in ENGINES[engine].unquantized else ""


def config_is_read(case: Case) -> Iterator[Problem]:
    """The engine reads the weights of the model and its draft as they are stored, and computes their rotary positions.

    Otherwise it would fail after the checkpoint is fetched, or give wrong answers.
    """
    for field, checkpoint in (("source", case.checkpoint), ("draft", case.draft)):
        for judge in (_unread_weights, _other_positions):
            if checkpoint and (problem := _objection(case, partial(judge, case, field, checkpoint))):
                yield problem


def _unread_weights(case: Case, field: str, checkpoint: Checkpoint, engine: Engine) -> Problem | None:
    """Returns a problem if the engine does not read the weights as they are quantized."""
    name, rules, method = case.model.name, rules_of(engine), checkpoint.quantized_by
    if method is None or (field == "source" and rules.other_weights(case)):
        return None
    for reader in rules.readers(case, engine):
        able = reader.weights.get(checkpoint.model_type, ())
        if method not in able:
            fact = f"the engine {engine} does not read the {field} of {name}: its weights are quantized by {method}"
            hint = "use the original checkpoint" + (f" or one quantized by {joined(able, 'or')}" if able else "")
            kinds = [kind for kind in capabilities(case.engine).quantize if case.works(quantize=kind)]
            hint += f"; to quantize it here, set quantize: {joined(kinds, 'or')}" if kinds else ""
            return case.problem("weights-quantized", (field,), fact, hint)
    return None


def _other_positions(case: Case, field: str, checkpoint: Checkpoint, engine: Engine) -> Problem | None:
    """Returns a problem if the engine does not compute the rotary positions, a warning if it may lose precision."""
    name, family, kind = case.model.name, checkpoint.model_type, checkpoint.rope_type
    for reader in rules_of(engine).readers(case, engine) if kind != "default" else ():
        differs = reader.ropes.get(family, {}).get(kind)
        if differs:
            fact = f"the engine {engine} computes the rope_type of the {field} of {name}, {kind}, {differs}"
            hint = "compare answers to long prompts with engine: cpu"
            return case.problem("rotary-inexact", (field,), fact, hint, "warning")
        if differs is None:
            fact = f"the engine {engine} does not compute the rope_type of the {field} of {name}, {kind}, for {family}"
            others = case.engines_of(*(each for each, other in ENGINES.items() if kind in other.ropes.get(family, ())))
            hint = f"use engine: {others}" if others else "use another model"
            return case.problem("rotary-unsupported", (field,), fact, hint)
    return None


def buckets_make_sense(case: Case) -> Iterator[Problem]:
    """Compiled lengths ascend, none exceeds max_len, and the longest of the KV cache is max_len."""
    model = case.model
    if not compiles(case):
        return
    longest = model.length(case.checkpoint) if model.max_len is not None or case.checkpoint is not None else None
    for field, lengths in (("prefill", model.buckets.prefill), ("decode", model.buckets.decode)):
        for i, (length, following) in enumerate(pairwise(lengths)):
            if following <= length:
                fact = f"buckets.{field}: {following} follows {length}; lengths must ascend"
                hint = f"write [{', '.join(map(str, sorted(set(lengths))))}]"
                yield case.problem("bad-buckets", ("buckets", field, i + 1), fact, hint)
                break
        else:
            if longest is not None and lengths and lengths[-1] > longest:
                fact = f"buckets.{field}: {lengths[-1]} exceeds max_len, {longest}"
                hint = f"end with {longest}, or raise max_len"
                yield case.problem("bad-buckets", ("buckets", field, len(lengths) - 1), fact, hint)
            elif longest is not None and field == "decode" and lengths and lengths[-1] < longest:
                fact = f"buckets.decode ends at {lengths[-1]}; its longest length must be max_len, {longest}"
                hint = f"add {longest}, or lower max_len"
                yield case.problem("bad-buckets", ("buckets", field, len(lengths) - 1), fact, hint)


def buckets_are_no_steps(case: Case) -> Iterator[Problem]:
    """Compiled prompt lengths are longer than a decoding step, for engines that distinguish the two by their width."""
    model = case.model
    draft_k = None if model.draft is None else model.draft.k
    for engine in case.candidates:
        step = next((step for step in ENGINES[engine].step_widths(draft_k) if step in model.buckets.prefill), None)
        if step is not None:
            fact = f"buckets.prefill: {engine} would treat a prompt of {counted(step, 'token')} as a decoding step"
            where = ("buckets", "prefill", model.buckets.prefill.index(step))
            yield case.problem("bad-buckets", where, fact, "use a longer one")
            return


_FLAGS = {
    "--cache_dir": "neff_cache",
    "--no_cache": "",
    "--lnc": "hosts.lnc",
    "--target": "hosts.instance",
}
"""Flag of neuronx-cc, or of its wrapper with the cache -> the field of the spec to set instead; "": not supported."""


def flags_are_free(case: Case) -> Iterator[Problem]:
    """compiler.flags does not repeat a field. The flags are part of the cache key of compiled code."""
    compiler = case.model.compiler
    for flag in compiler.flags.split():
        name = flag.partition("=")[0]
        field = _FLAGS.get(name)
        if field is None and compiler.optlevel is not None and (name.startswith("-O") or name == "--optlevel"):
            field = "compiler.optlevel"
        if field is not None:
            fact = f"compiler.flags: {name} cannot be set here"
            hint = f"set {field} instead" if field else "remove it"
            yield case.problem("bad-compiler-flags", ("compiler", "flags"), fact, hint)
        elif owner := next((each for each in case.candidates if name in ENGINES[each].compiler_flags), None):
            fact = f"compiler.flags: {owner} sets {name} itself"
            yield case.problem("bad-compiler-flags", ("compiler", "flags"), fact, "remove it")


def engine_can_run(case: Case) -> Iterator[Problem]:
    """A Neuron engine is used only on hosts with Neuron devices."""
    hosts = case.all_hosts.hosts
    if needs_neuron(case.model.engine) and hosts and all(host.emulated or host.topology is None for host in hosts):
        fact = f"engine {case.model.engine} needs Neuron devices, but the hosts are emulated or have none"
        hint = "use engine: auto, which selects cpu" if case.works(engine="auto") else "use hosts with Neuron devices"
        yield case.problem("engine-needs-neuron", ("engine",), fact, hint, "warning")


def _objection(case: Case, why: Callable[[Engine], T | None]) -> T | None:
    """Returns the first reason if ``why`` gives one for each possible engine of the model, else None."""
    reasons = [why(engine) for engine in case.candidates]
    return reasons[0] if all(reasons) and reasons else None


# Encoders


def engine_serves_the_kind(case: Case) -> Iterator[Problem]:
    """The engine serves the model's kind. Models of a kind other than generate run on an engine of encoders."""
    model, engine = case.model, capabilities(case.engine)
    if case.engine == "auto" or model.kind in engine.kinds:  # auto: hosts are unknown, or it generates
        return
    fact = f"the engine {case.engine} does not serve kind {model.kind}"
    if model.kind == "generate":
        kinds = joined([kind for kind in engine.kinds if case.works(kind=kind)], "or")
        ways = [f"set kind: {kinds}"] if kinds else []
        ways += [f"use {engines}"] if (engines := case.engines_of(*AUTO_ENGINES)) else []
        hint = "; or ".join(ways) or "use an engine that generates text"
        yield case.problem("kind-unsupported", ("engine",), fact, hint)
        return
    encoders = [name for name, other in ENGINES.items() if model.kind in other.kinds]
    engines = case.engines_of(*encoders)
    hint = f"use engine: {engines}" if engines else f"use an engine of encoders: {', '.join(encoders)}"
    if case.family in EMBEDDING_DECODERS:
        if engine.why_no_encoder:
            fact += f": {engine.why_no_encoder}"
        hint = "only vllm and cpu embed with a decoder, and cpu is slow"
        able = [each for each in encoders if ENGINES[each].reads_checkpoint and case.works("kind", engine=each)]
        if able:
            hint = f"use engine: {joined(able, 'or')}" + (", which is slow" if HOST_ENGINES.issuperset(able) else "")
    if engine.runs_on == "server":
        hint += "; or engine: server without kind, which forwards requests to its own /v1/embeddings"
    yield case.problem("kind-unsupported", ("kind",), fact, hint)


def encoders_use_one_core(case: Case) -> Iterator[Problem]:
    """A replica of an encoder is not divided among cores, except by a server."""
    model = case.model
    if model.kind != "generate" and model.tp_degree != 1 and capabilities(case.engine).runs_on != "server":
        fact = f"tp_degree {model.tp_degree} is not supported for kind {model.kind}: a replica uses one core"
        yield case.problem("setting-unsupported", ("tp_degree",), fact, "remove it, and set replicas")


def engine_options_are_known(case: Case) -> Iterator[Problem]:
    """The engine knows all engine_options, and their values have the right types. A server's own rules check them."""
    if capabilities(case.engine).runs_on != "server":
        for id, path, fact, hint in _option_findings(case):
            yield case.problem(id, ("engine_options", *path), fact, hint)


def _option_findings(case: Case) -> Iterator[Finding]:
    engine, options = capabilities(case.engine), case.model.engine_options
    if engine.package not in PACKAGED:
        return check_own(case.engine, options)
    places = [machine for machine in case.machines if engine.runs_in(machine)] or [""]
    newest = max((engine.newest(machine) for machine in places), key=order)
    scope = Scope(case.engine, case.family, newest, " and ".join(filter(None, places)))
    return check_options(scope, options, ModelSpec.model_fields)


def engine_serves_adapters(case: Case) -> Iterator[Problem]:
    """Only some engines serve LoRA adapters."""
    if case.model.adapters and not capabilities(case.engine).serves_adapters:
        fact = f"the engine {case.engine} does not serve LoRA adapters"
        others = case.engines_of(*(name for name, other in ENGINES.items() if other.serves_adapters))
        hint = f"use engine: {others}, or merge the adapter" if others else "merge the adapter"
        yield case.problem("adapters-unsupported", ("adapters",), fact, hint)


def not_known_to_fail(case: Case) -> Iterator[Problem]:
    """No report of a failure applies to the model with the releases of its machines: the installed ones, or else the
    planned ones. An engine whose release is unknown is not checked."""
    model, checkpoint, reported = case.model, case.checkpoint, dict[str, Problem]()
    if not case.candidates:
        return
    engine = case.candidates[0]  # of auto, the preferred one
    for host, _ in case.fleet.kinds:
        if host.topology is None or host.emulated or not case.has_degree(host.topology):
            continue
        versions = case.installed.get(engine) or rules_of(engine).packages(case, host)
        rows = failures_of(
            engine,
            host.topology.instance,
            versions,
            family=case.family,
            parameters=None if checkpoint is None else checkpoint.parameters,
            tp_degree=model.tp_degree,
            options=model.engine_options,
            prefill=max(model.buckets.prefill, default=model.length(checkpoint)),
        )
        for row in rows:
            facts = [*(f"{name} {versions[name]}" for name in row.packages), row.source, row.confidence, row.date]
            fact = f"{model.name}: {row.what} ({', '.join(facts)})"
            reported.setdefault(row.id, case.problem(KNOWN_FAILURE, ("source",), fact, row.helps, row.severity))
    yield from reported.values()


ENGINE_RULES: tuple[Rule, ...] = (
    engine_can_run,
    engine_runs_here,
    family_is_served,
    engine_can_draft,
    engine_can_quantize,
    config_is_read,
    buckets_make_sense,
    buckets_are_no_steps,
    flags_are_free,
    engine_serves_the_kind,
    encoders_use_one_core,
    engine_options_are_known,
    engine_serves_adapters,
    not_known_to_fail,
)
