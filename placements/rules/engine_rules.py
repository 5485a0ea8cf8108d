"""Checks a model's fields against its engine, with one function for each rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

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
    Engine,
    needs_neuron,
    newest_nxd,
    reaches,
    runs_on,
    serves,
)
from placements.facts.plural import counted
from placements.facts.tnx_families import MISREAD_HINT, REFUSED, run_length
from placements.rules.case import Case, FieldRule
from placements.rules.option_rules import OPTION_RULES
from placements.rules.vllm_rules import VLLM_RULES, why_no_draft
from placements.spec.problems import Problem
from placements.spec.schema import Compiler


def engine_runs_here(case: Case) -> Iterator[Problem]:
    """The engine runs on at least one of the machines."""
    engine, machines = case.engine, case.machines
    if engine in HOST_ENGINES or not machines or any(runs_on(engine, place) for place in machines):
        return
    others = [other for other in AUTO_ENGINES if other != engine and all(runs_on(other, place) for place in machines)]
    what = f"the engine {engine} does not run on {' or '.join(machines)}"
    usable = case.engines_of(*others)
    hint = f"use {usable}, or another instance type" if usable else "use another instance type"
    yield case.problem("engine-unsupported-here", ("engine",), what, hint)


def family_is_served(case: Case) -> Iterator[Problem]:
    """The engine has a class for the model's family, in a version that runs on one of the machines."""
    engine, family, machines = case.engine, case.family, case.machines
    if engine in (*HOST_ENGINES, "torch-neuronx") or family is None or case.model.kind != "generate":
        return  # the rules of encoders report it
    running = [place for place in machines if runs_on(engine, place)]
    if machines and not running:
        return  # reported by another rule
    if any(serves(engine, family, place) for place in running or (None,)):
        return
    subject = f"the engine {engine} does" if engine != "auto" else "the Neuron engines do"
    what = f"{subject} not serve {family}, the family of {case.model.name}"
    if family in REFUSED and engine in ("auto", "transformers-neuronx"):
        what += f": {REFUSED[family]}"
    others = [other for other in AUTO_ENGINES if any(serves(other, family, place) for place in machines or (None,))]
    hint = "use another model"
    if usable := case.engines_of(*others):
        hint = f"use {usable}"
    elif case.works(engine="cpu"):
        hint = "use engine: cpu, which is slow, or another model"
    yield case.problem("family-unsupported", ("engine",), what, hint)


def window_is_kept(case: Case) -> Iterator[Problem]:
    """A sliding window that the engine ignores is at least as long as a slot.

    Otherwise the answers would differ from the model's.
    """
    checkpoint, machines = case.checkpoint, [place for place in case.machines if runs_on(case.engine, place)]
    if case.candidates != ("nxd-inference",) or checkpoint is None or checkpoint.window is None:
        return
    newest = min((newest_nxd(place) for place in machines), key=NXD_VERSIONS.index, default=NXD_VERSIONS[-1])
    others = {"a draft": case.model.draft, "a prefix cache": case.model.engine_options.get("prefix_cache")}
    beside = next((f" with {name}" for name, value in others.items() if value), "")
    keeps = case.family == "mistral" and reaches(newest, NXD_WINDOW) and not beside
    if keeps or checkpoint.window >= case.model.length(checkpoint):
        return
    what = f"{case.model.name} has a sliding window of {checkpoint.window} tokens, but NxD Inference"
    what += f" {newest} supports none for {case.family}{beside}"
    hint = f"set max_len: {checkpoint.window}, or use another engine"
    yield case.problem("window-not-kept", ("max_len",), what, hint)


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
            what = f"transformers-neuronx does not support {checkpoint.model_type} with {reading.lacks}, as in {whose}"
            yield case.problem("family-unsupported", (field,), what, "use another engine or model")
        elif misread := reading.misread(None):
            what = f"transformers-neuronx misreads the rotary positions of {whose}: {misread}"
            yield case.problem("rotary-misread", (field,), what, MISREAD_HINT)
        if reading.approximates:
            what = f"transformers-neuronx computes {reading.approximates} of {whose} by its tanh approximation, "
            what += "gelu_new: logits differ slightly"
            hint = "compare answers with engine: cpu, or use an engine that computes it exactly"
            yield case.problem("activation-approximated", (field,), what, hint, "warning")


def heads_are_padded(case: Case) -> Iterator[Problem]:
    """``allow_head_padding`` is not used with classes that would fail while they load."""
    tp, checkpoint = case.model.tp_degree, case.checkpoint
    if checkpoint is None or not case.model.allow_head_padding or checkpoint.heads % tp == 0:
        return
    if case.candidates == ("transformers-neuronx",) and checkpoint.model_type in TNX_UNPADDED:
        what = f"tp_degree {tp} does not divide the {checkpoint.heads} attention heads of {case.model.name}"
        what += f", and transformers-neuronx cannot pad the heads of {checkpoint.model_type}"
        yield case.problem("heads-not-divisible", ("tp_degree",), what, "use a degree that divides them")


def degree_is_the_engines(case: Case) -> Iterator[Problem]:
    """The engine's guide documents the degree. The two guides differ in 16 on trn1, which only NxD Inference has."""
    tp = case.model.tp_degree
    tnx_on_trn1 = case.engine == "transformers-neuronx" and case.machines == ("trn1",)
    if tnx_on_trn1 and tp == 16 and tp not in case.model.allow_degrees:
        what = "tp_degree 16 on trn1 is in the guide of NxD Inference, not in that of transformers-neuronx"
        hint = "use 8 or 32; allow_degrees: [16] silences this"
        yield case.problem("undocumented-degree", ("tp_degree",), what, hint, "warning")


def engine_can_draft(case: Case) -> Iterator[Problem]:
    """A draft is set only for an engine and families that support it with the model's other fields."""
    model, draft = case.model, case.draft
    if model.draft is None:
        return
    why = _why_no_candidate(case, lambda engine: _why_no_draft(engine, case))
    if why:
        what, hint = why.split(" | ")
        yield case.problem("draft-unsupported", ("draft",), what, hint)
        return
    if draft is None or case.checkpoint is None:
        return
    if draft.vocab != case.checkpoint.vocab:
        what = f"the draft has a vocabulary of {draft.vocab} tokens, but {model.name} has {case.checkpoint.vocab}"
        yield case.problem("bad-draft", ("draft",), what, "use a draft with the same vocabulary")
    if case.engine not in HOST_ENGINES and draft.heads % model.tp_degree != 0 and not model.allow_head_padding:
        what = f"tp_degree {model.tp_degree} does not divide the {draft.heads} attention heads of the draft"
        what += f" of {model.name}, which uses the same cores"
        hint = "use another degree or draft, or add allow_head_padding: true for an engine that pads with zeros"
        yield case.problem("heads-not-divisible", ("draft",), what, hint)


def _why_no_draft(engine: Engine, case: Case) -> str:
    """Returns why the engine cannot use the draft and, after a bar, the hint; "" if it can."""
    model, drafting, family = case.model, case.draft.model_type if case.draft else None, case.family
    if engine == "vllm":
        return why_no_draft(case)
    assert model.draft is not None
    if model.draft.method != "draft_model":
        other = ", or use engine: vllm" if case.works(engine="vllm") else ""
        return f"the engine {engine} has no drafts by {model.draft.method} | remove draft.method{other}"
    if engine == "cpu":
        return ""
    if engine == "transformers-neuronx":
        for name in (family, drafting):
            if name is not None and name not in TNX_DRAFTING:
                return f"transformers-neuronx supports drafts of llama and gpt2 only, not of {name} | remove draft"
        if family is not None and family not in TNX_CONTINUOUS and model.max_batch > 1:
            return (
                f"a draft for {family} on transformers-neuronx needs max_batch 1, because the rows of a static batch "
                "share one position | set max_batch: 1"
            )
        run, prompts = run_length(model.draft.k + 1, model.max_batch), model.buckets.prefill
        if model.max_batch > 1 and prompts and run > prompts[-1]:
            return (
                f"transformers-neuronx verifies {run} tokens of a slot at once, the greater of draft.k + 1 and "
                f"max_batch, but the longest of buckets.prefill is {prompts[-1]} | add a bucket of at least {run}"
            )
        if model.sampling == "device":
            return (
                "transformers-neuronx verifies drafts with logits on the host, but sampling is device | "
                "set sampling: host"
            )
        return ""
    if engine == "nxd-inference":
        if family is not None and drafting is not None and family != drafting:
            return (
                f"nxd-inference needs a draft of the same family, and {drafting} is not {family} | "
                f"use a draft of {family}"
            )
        if model.quantize is not None:
            return "nxd-inference does not support drafts of quantized models | remove quantize or draft"
        return ""
    return f"draft has no effect on the engine {engine} | remove draft, or use cpu or a Neuron engine"


def engine_can_quantize(case: Case) -> Iterator[Problem]:
    """Quantization is set only for an engine and a family that support it."""
    for field, value in (("quantize", case.model.quantize), ("quantize_kv", case.model.quantize_kv)):
        if value is None:
            continue
        if case.engine in HOST_ENGINES or case.engine == "optimum-neuron":
            what = f"{field} has no effect on the engine {case.engine}"
            other = "a Neuron engine" if case.engine in HOST_ENGINES else case.engines_of("nxd-inference")
            hint = f"remove {field}, or use {other}" if other else f"remove {field}"
            yield case.problem("quantize-unsupported", (field,), what, hint)
        elif field == "quantize" and (name := _why_no_candidate(case, lambda engine: _unquantizing(engine, case))):
            what = f"{name} cannot quantize {case.family}, the family of {case.model.name}"
            yield case.problem("quantize-unsupported", (field,), what, f"remove {field}")
        elif field == "quantize_kv" and (why := _why_no_candidate(case, lambda engine: _why_no_cache(engine, case))):
            what, hint = why.split(" | ")
            yield case.problem("quantize-unsupported", (field,), what, hint)


def _why_no_cache(engine: Engine, case: Case) -> str:
    """Returns why the engine cannot use ``quantize_kv`` and, after a bar, the hint; "" if it can."""
    kind, family = case.model.quantize_kv, case.family
    if engine == "transformers-neuronx" and family is not None and family not in TNX_QUANTIZED_KV:
        return f"transformers-neuronx cannot quantize the KV cache of {family} | remove quantize_kv"
    if engine == "transformers-neuronx" and kind != "fp8":
        return f"transformers-neuronx converts keys and values to {kind} without a scale | set quantize_kv: fp8"
    if engine == "nxd-inference" and kind != "fp8":
        return f"nxd-inference supports a KV cache of fp8 or of the dtype, not of {kind} | set quantize_kv: fp8"
    return ""


def _unquantizing(engine: Engine, case: Case) -> str:
    """Returns the engine's name if it cannot quantize the family, else ""."""
    families = {"transformers-neuronx": TNX_UNQUANTIZED, "nxd-inference": NXD_UNQUANTIZED}
    return engine if case.family in families.get(engine, ()) else ""


def settings_have_effect(case: Case) -> Iterator[Problem]:
    """Settings of Neuron devices are not used with engines on the host's CPUs."""
    model = case.model
    in_use = {
        "sampling": model.sampling == "device",
        "buckets": bool(model.buckets.prefill or model.buckets.decode),
        "fuse_qkv": model.fuse_qkv is not None,
        "compiler": model.compiler != Compiler(),
    }
    if case.engine in HOST_ENGINES:
        for field in [field for field, is_set in in_use.items() if is_set and field not in model.broken]:
            if field == "buckets" and _compiles_on_host(case):
                continue
            what = f"{field} has no effect on the engine {case.engine}"
            hint = f"remove {field}, or use a Neuron engine"
            yield case.problem("setting-unsupported", (field,), what, hint)
    elif case.engine == "optimum-neuron":
        for field in ("buckets", "fuse_qkv", "compiler"):
            if in_use[field] and field not in model.broken:
                what = f"{field} has no effect on the engine optimum-neuron, which chooses it itself"
                yield case.problem("setting-unsupported", (field,), what, f"remove {field}")
    elif model.compiler.workers is not None and case.candidates in (("nxd-inference",), ("torch-neuronx",)):
        what = f"compiler.workers has no effect: {case.candidates[0]} has no such option"
        yield case.problem("setting-unsupported", ("compiler", "workers"), what, "remove it")


def _compiles_on_host(case: Case) -> bool:
    return case.engine == "cpu" and case.model.engine_options.get("compile") is True


def engine_can_sample(case: Case) -> Iterator[Problem]:
    """The family's class supports sampling on the device, if it is set."""
    if case.model.sampling == "host" or case.engine in HOST_ENGINES or case.family is None:
        return
    if case.engine == "optimum-neuron" and (why_not := _why_no_device_sampling(case)):
        what = f"optimum-neuron does not sample tokens of {case.model.name} on the device: {why_not}"
        yield case.problem("setting-unsupported", ("sampling",), what, "set sampling: host")
        return

    def why(engine: Engine) -> str:
        return "host" if engine == "transformers-neuronx" and case.family not in TNX_SAMPLING else ""

    if _why_no_candidate(case, why):
        what = (
            f"transformers-neuronx samples tokens of {case.family}, the family of {case.model.name}, on the host only"
        )
        yield case.problem("setting-unsupported", ("sampling",), what, "set sampling: host")


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
    if case.engine in HOST_ENGINES and not _compiles_on_host(case):
        return
    longest = model.length(case.checkpoint) if model.max_len is not None or case.checkpoint is not None else None
    for field, lengths in (("prefill", model.buckets.prefill), ("decode", model.buckets.decode)):
        for i, (length, following) in enumerate(pairwise(lengths)):
            if following <= length:
                what = f"buckets.{field}: {following} follows {length}; lengths must ascend"
                hint = f"write [{', '.join(map(str, sorted(set(lengths))))}]"
                yield case.problem("bad-buckets", ("buckets", field, i + 1), what, hint)
                break
        else:
            if longest is not None and lengths and lengths[-1] > longest:
                what = f"buckets.{field}: {lengths[-1]} exceeds max_len, {longest}"
                hint = f"end with {longest}, or raise max_len"
                yield case.problem("bad-buckets", ("buckets", field, len(lengths) - 1), what, hint)
            elif longest is not None and field == "decode" and lengths and lengths[-1] < longest:
                what = f"buckets.decode ends at {lengths[-1]}; its longest length must be max_len, {longest}"
                hint = f"add {longest}, or lower max_len"
                yield case.problem("bad-buckets", ("buckets", field, len(lengths) - 1), what, hint)
    several = model.buckets.prefill or len(model.buckets.decode) > 1
    if several and case.candidates == ("transformers-neuronx",) and case.family in TNX_UNPADDED:
        what = f"transformers-neuronx compiles {case.family} for one length only, max_len"
        yield case.problem("bad-buckets", ("buckets",), what, "remove buckets")


def buckets_are_no_steps(case: Case) -> Iterator[Problem]:
    """Compiled prompt lengths are longer than a decoding step: both packages distinguish the two by their width.

    A step has one token, or draft.k + 1 tokens on NxD Inference (`model_base`), which may be the engine of ``auto``.
    """
    model = case.model
    for engine in ("nxd-inference", "transformers-neuronx"):
        steps = (1,) if model.draft is None or engine != "nxd-inference" else (1, model.draft.k + 1)
        step = next((step for step in steps if step in model.buckets.prefill), None)
        if engine in case.candidates and step is not None:
            what = f"buckets.prefill: {engine} would treat a prompt of {counted(step, 'token')} as a decoding step"
            where = ("buckets", "prefill", model.buckets.prefill.index(step))
            yield case.problem("bad-buckets", where, what, "use a longer one")
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
            what = f"compiler.flags: {name} cannot be set here"
            hint = f"set {field} instead" if field else "remove it"
            yield case.problem("bad-compiler-flags", ("compiler", "flags"), what, hint)
        elif name in _NXD_FLAGS and "nxd-inference" in case.candidates:
            what = f"compiler.flags: nxd-inference sets {name} itself"
            yield case.problem("bad-compiler-flags", ("compiler", "flags"), what, "remove it")


def engine_can_share_heads(case: Case) -> Iterator[Problem]:
    """group_query_attention is used only with transformers-neuronx, and only where it is possible.

    transformers-neuronx itself would warn and fall back to another one, which needs other memory
    (``check_gqa_fallback``).
    """
    model, checkpoint = case.model, case.checkpoint
    mode, tp, path = model.group_query_attention, model.tp_degree, ("group_query_attention",)
    if mode is None:
        return
    if case.engine not in ("auto", "transformers-neuronx"):
        what = f"group_query_attention has no effect on the engine {case.engine}"
        hint = "remove it, or use the engine transformers-neuronx"
        yield case.problem("gqa-unsupported", path, what, hint)
        return
    if mode == "shard-over-batch":
        what = (
            "group_query_attention: transformers-neuronx cannot use shard-over-batch, since it runs prompts one by one"
        )
        yield case.problem("gqa-unsupported", path, what, "remove it, or use all-gather-heads")
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
        what = f"engine {case.model.engine} needs Neuron devices, but the hosts are emulated or have none"
        hint = "use engine: auto, which selects cpu" if case.works(engine="auto") else "use hosts with Neuron devices"
        yield case.problem("engine-needs-neuron", ("engine",), what, hint, "warning")


def _why_no_candidate(case: Case, why: Callable[[Engine], str]) -> str:
    """Returns the first reason if ``why`` excludes all possible engines of the model, else ""."""
    reasons = [why(engine) for engine in case.candidates]
    return reasons[0] if reasons and all(reasons) else ""


ENGINE_RULES: tuple[FieldRule, ...] = (
    FieldRule(engine_can_run, frozenset({"engine"})),
    FieldRule(engine_runs_here, frozenset({"engine"})),
    FieldRule(family_is_served, frozenset({"engine"})),
    FieldRule(heads_are_padded, frozenset({"engine", "tp_degree", "allow_head_padding"})),
    FieldRule(degree_is_the_engines, frozenset({"engine", "tp_degree", "allow_degrees"})),
    FieldRule(engine_can_draft, frozenset({"engine", "draft", "tp_degree", "max_batch", "sampling", "quantize"})),
    FieldRule(engine_can_quantize, frozenset({"engine", "quantize", "quantize_kv"})),
    FieldRule(engine_can_share_heads, frozenset({"engine", "tp_degree", "max_batch", "group_query_attention"})),
    FieldRule(settings_have_effect, frozenset({"engine", "engine_options"})),
    FieldRule(tnx_computes_it, frozenset({"engine", "draft"})),
    FieldRule(window_is_kept, frozenset({"engine", "max_len", "draft", "engine_options"})),
    FieldRule(engine_can_sample, frozenset({"engine", "sampling", "tp_degree", "max_batch"})),
    FieldRule(buckets_make_sense, frozenset({"engine", "engine_options", "buckets", "max_len"})),
    FieldRule(buckets_are_no_steps, frozenset({"engine", "buckets", "draft"})),
    FieldRule(flags_are_free, frozenset({"engine", "compiler"})),
    *OPTION_RULES,
    *VLLM_RULES,
)
