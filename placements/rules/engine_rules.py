"""Checks a model's fields against its engine and kind, with one function for each rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TypeVar

from placements.facts.encoders import EMBEDDING_DECODERS, ENGINES_OF_ENCODERS, KINDS
from placements.facts.engines import (
    AUTO_ENGINES,
    HOST_ENGINES,
    NXD_UNQUANTIZED,
    NXD_VERSIONS,
    NXD_WINDOW,
    TNX_CONTINUOUS,
    TNX_DRAFTING,
    TNX_QUANTIZED_KV,
    TNX_SAMPLING,
    TNX_UNPADDED,
    TNX_UNQUANTIZED,
    TRACED_FAMILIES,
    TRACED_REFUSED,
    Engine,
    needs_neuron,
    newest_nxd,
    reaches,
    runs_on,
    serves,
)
from placements.facts.plural import counted, joined
from placements.facts.tnx_families import MISREAD_HINT, REFUSED, run_length
from placements.rules.case import Case, Objection, Rule
from placements.rules.unused_settings import compiles_on_host, unused
from placements.rules.vllm_rules import objection_to_draft
from placements.spec.problems import Problem

T = TypeVar("T")


def engine_runs_here(case: Case) -> Iterator[Problem]:
    """The engine runs on at least one of the machines."""
    engine, machines = case.engine, case.machines
    if engine in HOST_ENGINES or not machines or any(runs_on(engine, machine) for machine in machines):
        return
    others = [each for each in AUTO_ENGINES if each != engine and all(runs_on(each, machine) for machine in machines)]
    fact = f"the engine {engine} does not run on {' or '.join(machines)}"
    usable = case.engines_of(*others)
    hint = f"use {usable}, or another instance type" if usable else "use another instance type"
    yield case.problem("engine-unsupported-here", ("engine",), fact, hint)


def family_is_served(case: Case) -> Iterator[Problem]:
    """The engine has a class for the model's family, in a version that runs on one of the machines."""
    engine, family, machines = case.engine, case.family, case.machines
    if engine in (*HOST_ENGINES, "torch-neuronx") or family is None or case.model.kind != "generate":
        return  # the rules of encoders report it
    running = [machine for machine in machines if runs_on(engine, machine)]
    if machines and not running:
        return  # reported by another rule
    if any(serves(engine, family, machine) for machine in running or (None,)):
        return
    subject = f"the engine {engine} does" if engine != "auto" else "the Neuron engines do"
    fact = f"{subject} not serve {family}, the family of {case.model.name}"
    if family in REFUSED and engine in ("auto", "transformers-neuronx"):
        fact += f": {REFUSED[family]}"
    others = [other for other in AUTO_ENGINES if any(serves(other, family, machine) for machine in machines or (None,))]
    hint = "use another model"
    if usable := case.engines_of(*others):
        hint = f"use {usable}"
    elif case.works(engine="cpu"):
        hint = "use engine: cpu, which is slow, or another model"
    yield case.problem("family-unsupported", ("engine",), fact, hint)


def window_is_kept(case: Case) -> Iterator[Problem]:
    """A sliding window that the engine ignores is at least as long as a slot.

    Otherwise the answers would differ from the model's.
    """
    checkpoint, machines = case.checkpoint, [machine for machine in case.machines if runs_on(case.engine, machine)]
    if case.candidates != ("nxd-inference",) or checkpoint is None or checkpoint.window is None:
        return
    newest = min((newest_nxd(machine) for machine in machines), key=NXD_VERSIONS.index, default=NXD_VERSIONS[-1])
    others = {"a draft": case.model.draft, "a prefix cache": case.model.engine_options.get("prefix_cache")}
    beside = next((f" with {name}" for name, value in others.items() if value), "")
    keeps = case.family == "mistral" and reaches(newest, NXD_WINDOW) and not beside
    if keeps or checkpoint.window >= case.model.length(checkpoint):
        return
    fact = f"{case.model.name} has a sliding window of {checkpoint.window} tokens, but NxD Inference"
    fact += f" {newest} supports none for {case.family}{beside}"
    hint = f"set max_len: {checkpoint.window}, or use another engine"
    yield case.problem("window-not-kept", ("max_len",), fact, hint)


def tnx_computes_it(case: Case) -> Iterator[Problem]:
    """The classes of transformers-neuronx support the config.json of the model and of its draft.

    An unsupported setting would change the answers silently, or fail after the cores are claimed.
    """
    if case.candidates != ("transformers-neuronx",):
        return
    for field, checkpoint in (("engine", case.checkpoint), ("draft", case.draft)):
        if checkpoint is None:
            continue
        whose, reading = case.model.name if field == "engine" else f"the draft of {case.model.name}", checkpoint.on_tnx
        if reading.lacks:
            fact = f"transformers-neuronx does not support {checkpoint.model_type} with {reading.lacks}, as in {whose}"
            yield case.problem("family-unsupported", (field,), fact, "use another engine or model")
        elif misread := reading.misread(None):
            fact = f"transformers-neuronx misreads the rotary positions of {whose}: {misread}"
            yield case.problem("rotary-misread", (field,), fact, MISREAD_HINT)
        if reading.approximates:
            fact = f"transformers-neuronx computes {reading.approximates} of {whose} by its tanh approximation, "
            fact += "gelu_new: logits differ slightly"
            hint = "compare answers with engine: cpu, or use an engine that computes it exactly"
            yield case.problem("activation-approximated", (field,), fact, hint, "warning")


def heads_are_padded(case: Case) -> Iterator[Problem]:
    """``allow_head_padding`` is not used with classes that would fail while they load."""
    tp, checkpoint = case.model.tp_degree, case.checkpoint
    if checkpoint is None or not case.model.allow_head_padding or checkpoint.heads % tp == 0:
        return
    if case.candidates == ("transformers-neuronx",) and checkpoint.model_type in TNX_UNPADDED:
        fact = f"tp_degree {tp} does not divide the {checkpoint.heads} attention heads of {case.model.name}"
        fact += f", and transformers-neuronx cannot pad the heads of {checkpoint.model_type}"
        yield case.problem("heads-not-divisible", ("tp_degree",), fact, "use a degree that divides them")


def degree_is_the_engines(case: Case) -> Iterator[Problem]:
    """The engine's guide documents the degree. The two guides differ in 16 on trn1, which only NxD Inference has."""
    tp = case.model.tp_degree
    tnx_on_trn1 = case.engine == "transformers-neuronx" and case.machines == ("trn1",)
    if tnx_on_trn1 and tp == 16 and tp not in case.model.allow_degrees:
        fact = "tp_degree 16 on trn1 is in the guide of NxD Inference, not in that of transformers-neuronx"
        hint = "use 8 or 32; allow_degrees: [16] silences this"
        yield case.problem("undocumented-degree", ("tp_degree",), fact, hint, "warning")


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
    model, drafting, family = case.model, case.draft.model_type if case.draft else None, case.family
    if engine == "vllm":
        return objection_to_draft(case)
    assert model.draft is not None
    if model.draft.method != "draft_model":
        other = ", or use engine: vllm" if case.works(engine="vllm") else ""
        return Objection(f"the engine {engine} has no drafts by {model.draft.method}", f"remove draft.method{other}")
    if engine == "transformers-neuronx":
        return _to_draft_on_tnx(case, drafting)
    if engine == "nxd-inference":
        if family is not None and drafting is not None and family != drafting:
            fact = f"nxd-inference needs a draft of the same family, and {drafting} is not {family}"
            return Objection(fact, f"use a draft of {family}")
        if model.quantize is not None:
            return Objection("nxd-inference does not support drafts of quantized models", "remove quantize or draft")
    elif engine != "cpu":
        hint = "remove draft, or use cpu or a Neuron engine"
        return Objection(f"draft has no effect on the engine {engine}", hint)
    return None


def _to_draft_on_tnx(case: Case, drafting: str | None) -> Objection | None:
    model, family, prompts = case.model, case.family, case.model.buckets.prefill
    assert model.draft is not None
    run = run_length(model.draft.k + 1, model.max_batch)
    other = next((name for name in (family, drafting) if name is not None and name not in TNX_DRAFTING), None)
    if other is not None:
        fact = f"transformers-neuronx supports drafts of llama and gpt2 only, not of {other}"
        return Objection(fact, "remove draft")
    if family is not None and family not in TNX_CONTINUOUS and model.max_batch > 1:
        fact = f"a draft for {family} on transformers-neuronx needs max_batch 1, because the rows of a static batch "
        return Objection(fact + "share one position", "set max_batch: 1")
    if model.max_batch > 1 and prompts and run > prompts[-1]:
        fact = f"transformers-neuronx verifies {run} tokens of a slot at once, the greater of draft.k + 1 and max_batch"
        fact += f", but the longest of buckets.prefill is {prompts[-1]}"
        return Objection(fact, f"add a bucket of at least {run}")
    if model.sampling == "device":
        fact = "transformers-neuronx verifies drafts with logits on the host, but sampling is device"
        return Objection(fact, "set sampling: host")
    return None


def engine_can_quantize(case: Case) -> Iterator[Problem]:
    """Quantization is set only for an engine and a family that support it."""
    if case.engine == "optimum-neuron" and (case.model.quantize or case.model.quantize_kv):
        other = case.engines_of("nxd-inference")
        hint = f"remove {{field}}, or use {other}" if other else "remove {field}"
        here, fields = " on the engine optimum-neuron", ("quantize", "quantize_kv")
        yield from unused(case, here, *fields, hint=hint, id="quantize-unsupported")
    if case.model.quantize is not None and (name := _objection(case, lambda engine: _unquantizing(engine, case))):
        fact = f"{name} cannot quantize {case.family}, the family of {case.model.name}"
        yield case.problem("quantize-unsupported", ("quantize",), fact, "remove quantize")
    if case.model.quantize_kv is not None and (objection := _objection(case, lambda engine: _to_cache(engine, case))):
        yield case.problem("quantize-unsupported", ("quantize_kv",), *objection)


def _to_cache(engine: Engine, case: Case) -> Objection | None:
    """Returns why the engine cannot use ``quantize_kv``; None if it can."""
    kind, family = case.model.quantize_kv, case.family
    if engine == "transformers-neuronx" and family is not None and family not in TNX_QUANTIZED_KV:
        return Objection(f"transformers-neuronx cannot quantize the KV cache of {family}", "remove quantize_kv")
    if engine == "transformers-neuronx" and kind != "fp8":
        return Objection(
            f"transformers-neuronx converts keys and values to {kind} without a scale", "set quantize_kv: fp8"
        )
    if engine == "nxd-inference" and kind != "fp8":
        return Objection(
            f"nxd-inference supports a KV cache of fp8 or of the dtype, not of {kind}", "set quantize_kv: fp8"
        )
    return None


def _unquantizing(engine: Engine, case: Case) -> str:
    """Returns the engine's name if it cannot quantize the family, else ""."""
    families = {"transformers-neuronx": TNX_UNQUANTIZED, "nxd-inference": NXD_UNQUANTIZED}
    return engine if case.family in families.get(engine, ()) else ""


def engine_can_sample(case: Case) -> Iterator[Problem]:
    """The family's class supports sampling on the device, if it is set."""
    if case.model.sampling == "host" or case.engine in HOST_ENGINES or case.family is None:
        return
    if case.engine == "optimum-neuron" and (why_not := _why_no_device_sampling(case)):
        fact = f"optimum-neuron does not sample tokens of {case.model.name} on the device: {why_not}"
        yield case.problem("setting-unsupported", ("sampling",), fact, "set sampling: host")
        return

    if case.candidates == ("transformers-neuronx",) and case.family not in TNX_SAMPLING:
        fact = (
            f"transformers-neuronx samples tokens of {case.family}, the family of {case.model.name}, on the host only"
        )
        yield case.problem("setting-unsupported", ("sampling",), fact, "set sampling: host")


def _why_no_device_sampling(case: Case) -> str:
    """Returns why Optimum Neuron 0.4 switches it off (``_get_neuron_config`` of the family's class); "" if it does not.

    For qwen2 and qwen3 it names a fault of the SDK.
    """
    model = case.model
    if case.family == "mixtral":
        return "its class has none"
    if case.family in ("qwen2", "qwen3") and model.tp_degree == 2 and model.max_batch > 1:
        return f"not for {case.family} with tp_degree 2 and max_batch above 1"
    return ""


def buckets_make_sense(case: Case) -> Iterator[Problem]:
    """Compiled lengths ascend, none exceeds max_len, and the longest of the KV cache is max_len."""
    model = case.model
    if case.engine in HOST_ENGINES and not compiles_on_host(case):
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
    several = model.buckets.prefill or len(model.buckets.decode) > 1
    if several and case.candidates == ("transformers-neuronx",) and case.family in TNX_UNPADDED:
        fact = f"transformers-neuronx compiles {case.family} for one length only, max_len"
        yield case.problem("bad-buckets", ("buckets",), fact, "remove buckets")


def buckets_are_no_steps(case: Case) -> Iterator[Problem]:
    """Compiled prompt lengths are longer than a decoding step: both packages distinguish the two by their width.

    A step has one token, or draft.k + 1 tokens on NxD Inference (`model_base`), which may be the engine of ``auto``.
    """
    model = case.model
    for engine in ("nxd-inference", "transformers-neuronx"):
        steps = (1,) if model.draft is None or engine != "nxd-inference" else (1, model.draft.k + 1)
        step = next((step for step in steps if step in model.buckets.prefill), None)
        if engine in case.candidates and step is not None:
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


_NXD_FLAGS = frozenset(
    {"--auto-cast", "--model-type", "--tensorizer-options", "--internal-hlo2tensorizer-options", "--logfile"}
)
"""Flags that NxD Inference (`ModelWrapper`) and neuronx-distributed (`ModelBuilder`) pass in every version."""


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
        elif name in _NXD_FLAGS and "nxd-inference" in case.candidates:
            fact = f"compiler.flags: nxd-inference sets {name} itself"
            yield case.problem("bad-compiler-flags", ("compiler", "flags"), fact, "remove it")


def engine_can_share_heads(case: Case) -> Iterator[Problem]:
    """group_query_attention is used only with transformers-neuronx, and only where it is possible.

    transformers-neuronx itself would warn and fall back to another one, which needs other memory
    (``check_gqa_fallback``).
    """
    model, checkpoint = case.model, case.checkpoint
    mode, tp, path = model.group_query_attention, model.tp_degree, ("group_query_attention",)
    if mode is None or case.engine not in ("auto", "transformers-neuronx"):
        return
    if mode == "shard-over-batch":
        fact = (
            "group_query_attention: transformers-neuronx cannot use shard-over-batch, since it runs prompts one by one"
        )
        yield case.problem("gqa-unsupported", path, fact, "remove it, or use all-gather-heads")
        return
    if checkpoint is None:
        return
    why, hint = "", "use replicated-heads, which is always possible, or remove group_query_attention"
    if mode == "shard-over-heads" and checkpoint.kv_heads % tp != 0:
        why = f"tp_degree {tp} does not divide the {counted(checkpoint.kv_heads, 'KV head')}"
    elif mode == "all-gather-heads":
        width, padding = checkpoint.kv_heads * checkpoint.head_dim, -checkpoint.heads % tp
        if width % tp != 0:
            why = f"tp_degree {tp} does not divide the total KV width, {width}"
        elif padding % checkpoint.kv_heads != 0:
            why = f"{counted(padding, 'head')} of padding cannot be divided among {checkpoint.kv_heads} KV heads"
        elif model.fuse_qkv and tp > checkpoint.kv_heads:
            why = f"tp_degree {tp} splits {counted(checkpoint.kv_heads, 'KV head')}, whose weights fuse_qkv would join"
            hint = f"remove fuse_qkv, or {hint}"
    if why:
        yield case.problem("gqa-not-divisible", path, f"{mode} is not possible for {model.name}: {why}", hint)


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
    """Models of a kind other than generate run on an engine of encoders, and torch-neuronx runs no others."""
    model = case.model
    if model.kind == "generate":
        if case.engine == "torch-neuronx":
            fact = "the engine torch-neuronx does not serve kind generate"
            kinds = joined([kind for kind in KINDS[1:] if case.works(kind=kind)], "or")
            ways = [f"set kind: {kinds}"] if kinds else []
            ways += [f"use {engines}"] if (engines := case.engines_of(*AUTO_ENGINES)) else []
            hint = "; or ".join(ways) or "use an engine that generates text"
            yield case.problem("kind-unsupported", ("engine",), fact, hint)
        return
    if case.engine in (*ENGINES_OF_ENCODERS, "auto"):  # auto: hosts are unknown
        return
    fact = f"the engine {case.engine} does not serve kind {model.kind}"
    engines = case.engines_of(*ENGINES_OF_ENCODERS)
    hint = f"use engine: {engines}" if engines else f"use an engine of encoders: {', '.join(ENGINES_OF_ENCODERS)}"
    if case.family in EMBEDDING_DECODERS:
        if case.engine == "nxd-inference":
            fact += ": its models return the logits or the id of the next token, not the hidden states of a text"
        hint = "only cpu embeds with a decoder, and it is slow"
        if case.works(engine="cpu"):
            hint = "use engine: cpu, which is slow: no other engine embeds with a decoder"
    if case.engine in ("server", "vllm"):
        hint += "; or engine: server without kind, which forwards requests to its own /v1/embeddings"
    yield case.problem("kind-unsupported", ("kind",), fact, hint)


def encoders_use_one_core(case: Case) -> Iterator[Problem]:
    """A replica of an encoder is not divided among cores."""
    model = case.model
    if model.kind != "generate" and model.tp_degree != 1:
        fact = f"tp_degree {model.tp_degree} is not supported for kind {model.kind}: a replica uses one core"
        yield case.problem("setting-unsupported", ("tp_degree",), fact, "remove it, and set replicas")


def family_is_traced(case: Case) -> Iterator[Problem]:
    """torch-neuronx traces the encoder's family."""
    model, family = case.model, case.family
    if case.engine != "torch-neuronx" or model.kind == "generate" or family is None or family in TRACED_FAMILIES:
        return
    why = TRACED_REFUSED.get(family, "it is not an encoder")
    fact = f"the engine torch-neuronx does not serve {family}, the family of {model.name}: {why}"
    hint = "use engine: cpu, which is slow, or another model" if case.works(engine="cpu") else "use another model"
    yield case.problem("family-unsupported", ("engine",), fact, hint)


def traces_fit(case: Case) -> Iterator[Problem]:
    """The lengths and the batch of traces fit those of the model: a trace holds no longer input."""
    model = case.model
    if case.engine != "torch-neuronx" or model.kind == "generate":
        return
    lengths = model.buckets.prefill
    longest = model.length(case.checkpoint) if model.max_len is not None or case.checkpoint is not None else None
    if lengths and longest is not None and lengths[-1] < longest:
        fact = f"buckets.prefill ends at {lengths[-1]}; its longest length must be max_len, {longest}"
        where = ("buckets", "prefill", len(lengths) - 1)
        yield case.problem("bad-buckets", where, fact, f"add {longest}, or lower max_len")
    batch = model.engine_options.get("compiled_batch")
    if type(batch) is int and batch > model.max_batch:
        fact = f"engine_options.compiled_batch is {batch}, more than max_batch, {model.max_batch}"
        yield case.problem("out-of-range", ("engine_options", "compiled_batch"), fact, "raise max_batch, or lower it")


ENGINE_RULES: tuple[Rule, ...] = (
    engine_can_run,
    engine_runs_here,
    family_is_served,
    heads_are_padded,
    degree_is_the_engines,
    engine_can_draft,
    engine_can_quantize,
    engine_can_share_heads,
    tnx_computes_it,
    window_is_kept,
    engine_can_sample,
    buckets_make_sense,
    buckets_are_no_steps,
    flags_are_free,
    family_is_traced,
    traces_fit,
    engine_serves_the_kind,
    encoders_use_one_core,
)
