"""The rules of the engine ``transformers-neuronx``."""

from __future__ import annotations

from collections.abc import Iterator

from placements.engines.transformers_neuronx.capabilities import FAMILIES, MISREAD_HINT, Family, Reading, run_length
from placements.facts.plural import counted, joined
from placements.rules.case import Case, EngineRules, Objection
from placements.rules.size_rules import degrees_of
from placements.spec.problems import Problem

_LLAMA_ONLY = ("attn_output_transposed", "mlp_out_weight_transpose", "shard_over_sequence")


def _family(case: Case) -> Family:
    """Returns what the class of the model's family can do: everything if the family is unknown, nothing if the package
    does not serve it."""
    if case.family is None:
        return Family(continuous=True, speculates=True, quantizes_kv=True)
    return FAMILIES.get(case.family, Family(samples=False))


def experts_divisible(case: Case) -> Iterator[Problem]:
    """transformers-neuronx assigns whole experts to cores, or groups of cores to experts."""
    tp, experts = case.model.tp_degree, case.checkpoint.experts if case.checkpoint else None
    if not experts or experts % tp == 0 or tp % experts == 0:
        return
    dividing = [degree for degree in degrees_of(case.fleet.types) if experts % degree == 0 or degree % experts == 0]
    fact = f"tp_degree {tp} and the {experts} experts of {case.model.name} do not divide each other"
    dividing = [degree for degree in dividing if case.works(tp_degree=degree)]
    hint = f"use {joined(dividing, 'or')}" if dividing else "use another degree or engine"
    yield case.problem("experts-not-divisible", ("tp_degree",), fact, hint)


def degree_is_the_engines(case: Case) -> Iterator[Problem]:
    """The engine's guide documents the degree. The two guides differ in 16 on trn1, which only NxD Inference has."""
    tp = case.model.tp_degree
    if case.machines == ("trn1",) and tp == 16 and tp not in case.model.allow_degrees:
        fact = "tp_degree 16 on trn1 is in the guide of NxD Inference, not in that of transformers-neuronx"
        hint = "use 8 or 32; allow_degrees: [16] silences this"
        yield case.problem("undocumented-degree", ("tp_degree",), fact, hint, "warning")


def config_is_computed(case: Case) -> Iterator[Problem]:
    """The classes of transformers-neuronx support the config.json of the model and of its draft.

    An unsupported setting would change the answers silently, or fail after the cores are claimed.
    """
    for field, checkpoint in (("engine", case.checkpoint), ("draft", case.draft)):
        if checkpoint is None:
            continue
        whose, reading = (
            case.model.name if field == "engine" else f"the draft of {case.model.name}",
            Reading.of(checkpoint.config),
        )
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
    if _family(case).serial:
        fact = f"tp_degree {tp} does not divide the {checkpoint.heads} attention heads of {case.model.name}"
        fact += f", and transformers-neuronx cannot pad the heads of {checkpoint.model_type}"
        yield case.problem("heads-not-divisible", ("tp_degree",), fact, "use a degree that divides them")


def tokens_are_sampled(case: Case) -> Iterator[Problem]:
    """The family's class supports sampling on the device, if it is set."""
    if case.model.sampling != "host" and not _family(case).samples:
        fact = f"transformers-neuronx samples tokens of {case.family}, the family of {case.model.name}"
        yield case.problem("setting-unsupported", ("sampling",), f"{fact}, on the host only", "set sampling: host")


def buckets_are_supported(case: Case) -> Iterator[Problem]:
    """Serial classes have no lists of lengths."""
    model = case.model
    if (model.buckets.prefill or len(model.buckets.decode) > 1) and _family(case).serial:
        fact = f"transformers-neuronx compiles {case.family} for one length only, max_len"
        yield case.problem("bad-buckets", ("buckets",), fact, "remove buckets")


def heads_are_shared(case: Case) -> Iterator[Problem]:
    """group_query_attention is used only where it is possible.

    transformers-neuronx itself would warn and fall back to another one, which needs other memory
    (``check_gqa_fallback``).
    """
    model, checkpoint = case.model, case.checkpoint
    mode, tp, path = model.group_query_attention, model.tp_degree, ("group_query_attention",)
    if mode is None:
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


def prompts_fill_the_batch(case: Case) -> Iterator[Problem]:
    """One prompt is not broadcast to all slots."""
    prompts = case.model.engine_options.get("prompt_batch_size")
    if type(prompts) is int and prompts != case.model.max_batch:
        fact = f"engine_options.prompt_batch_size is {prompts}; it must equal max_batch, {case.model.max_batch}"
        yield case.problem("out-of-range", ("engine_options", "prompt_batch_size"), fact, "remove it")


def layouts_are_llamas(case: Case) -> Iterator[Problem]:
    """Layouts of weights and of the KV cache that transformers-neuronx builds for Llama only."""
    options, checkpoint, tp = case.model.engine_options, case.checkpoint, case.model.tp_degree
    for name in _LLAMA_ONLY:
        fact = f"engine_options.{name} is not possible for {case.model.name}: "
        if options.get(name) is not True or case.family is None:
            continue
        if case.family != "llama":
            fact += f"transformers-neuronx builds it for llama only, not for {case.family}"
        elif name == "shard_over_sequence" and checkpoint and (tp <= checkpoint.kv_heads or tp % checkpoint.kv_heads):
            heads = counted(checkpoint.kv_heads, "KV head")
            fact += f"tp_degree {tp} is not a multiple of the {heads} that is above {checkpoint.kv_heads}"
        else:
            continue
        yield case.problem("setting-unsupported", ("engine_options", name), fact, "remove it")


def _objection_to_draft(case: Case) -> Objection | None:
    """Returns why the model cannot use its draft; None if it can."""
    model, family, prompts = case.model, case.family, case.model.buckets.prefill
    drafting = case.draft.model_type if case.draft else None
    assert model.draft is not None
    run = run_length(model.draft.k + 1, model.max_batch)
    other = next((name for name in (family, drafting) if name and not FAMILIES.get(name, Family()).speculates), None)
    if other is not None:
        fact = f"transformers-neuronx supports drafts of llama and gpt2 only, not of {other}"
        return Objection(fact, "remove draft")
    if not _family(case).continuous and model.max_batch > 1:
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


def _objection_to_quantized_kv(case: Case) -> Objection | None:
    """Returns why ``quantize_kv`` is not possible; None if it is."""
    kind = case.model.quantize_kv
    if not _family(case).quantizes_kv:
        return Objection(f"transformers-neuronx cannot quantize the KV cache of {case.family}", "remove quantize_kv")
    if kind != "fp8":
        return Objection(
            f"transformers-neuronx converts keys and values to {kind} without a scale", "set quantize_kv: fp8"
        )
    return None


RULES = EngineRules(
    rules=(experts_divisible, degree_is_the_engines, heads_are_shared, prompts_fill_the_batch, layouts_are_llamas),
    if_chosen=(config_is_computed, heads_are_padded, tokens_are_sampled, buckets_are_supported),
    of_auto=(heads_are_shared,),
    draft=_objection_to_draft,
    quantized_kv=_objection_to_quantized_kv,
)
