"""One function for each rule that judges what a model asks of its engine."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from placements.facts.engines import (
    AUTO_ENGINES,
    ENGINE_OPTIONS,
    HOST_ENGINES,
    NXD_MISTRAL,
    NXD_QUANTIZED_DTYPES,
    NXD_QUANTIZED_OPTIONS,
    NXD_VERSIONS,
    PACKAGES,
    TNX_CONTINUOUS,
    TNX_DRAFTING,
    TNX_QUANTIZED_KV,
    TNX_SAMPLING,
    TNX_UNPADDED,
    Engine,
    Option,
    needs_neuron,
    newest_nxd,
    reaches,
    runs_on,
    serves,
)
from placements.facts.tnx_families import MISREAD_HINT, REFUSED, run_length
from placements.rules.case import Case, Judged
from placements.rules.options.judge import Scope, judged
from placements.spec.problems import Problem
from placements.spec.schema import Compiler, ModelSpec, is_path


def engine_runs_here(case: Case) -> Iterator[Problem]:
    """The engine runs on one of the machines, at least."""
    engine, machines = case.engine, case.machines
    if engine in HOST_ENGINES or not machines or any(runs_on(engine, place) for place in machines):
        return
    others = [one for one in AUTO_ENGINES if one != engine and all(runs_on(one, place) for place in machines)]
    what = f"the engine {engine} does not run on {' or '.join(machines)}"
    hint = f"take {' or '.join(others)}, or another instance type" if others else "take another instance type"
    yield case.problem("engine-unsupported-here", ("engine",), what, hint)


def family_is_served(case: Case) -> Iterator[Problem]:
    """The engine has a class for the model's family, in a version that runs on one of the machines."""
    engine, family, machines = case.engine, case.family, case.machines
    if engine in HOST_ENGINES or family is None:
        return
    running = [place for place in machines if runs_on(engine, place)]
    if machines and not running:
        return  # told by another rule
    if any(serves(engine, family, place) for place in running or (None,)):
        return
    named = f"the engine {engine} serves" if engine != "auto" else "the Neuron engines serve"
    what = f"{named} no {family}, which {case.model.name} is"
    if family in REFUSED and engine in ("auto", "transformers-neuronx"):
        what += f": {REFUSED[family]}"
    others = [one for one in AUTO_ENGINES if any(serves(one, family, place) for place in machines or (None,))]
    hint = f"take {' or '.join(others)}" if others else "engine: cpu serves it, slowly; or serve another model"
    yield case.problem("family-unsupported", ("engine",), what, hint)


def window_is_kept(case: Case) -> Iterator[Problem]:
    """A sliding window that the engine's class does not keep is as long as a slot, at least.

    Else the engine would leave it out, and give other answers than the model's.
    """
    checkpoint, machines = case.checkpoint, [place for place in case.machines if runs_on(case.engine, place)]
    if case.candidates != ("nxd-inference",) or checkpoint is None or checkpoint.window is None:
        return
    newest = min((newest_nxd(place) for place in machines), key=NXD_VERSIONS.index, default=NXD_VERSIONS[-1])
    keeps = case.family == "mistral" and reaches(newest, NXD_MISTRAL)
    if keeps or checkpoint.window >= case.model.length(checkpoint):
        return
    what = f"{case.model.name} attends to a sliding window of {checkpoint.window} tokens, and NxD Inference"
    what += f" {newest} computes {case.family} without one"
    hint = f"max_len: {checkpoint.window}, or another engine"
    yield case.problem("window-not-kept", ("max_len",), what, hint)


def tnx_computes_it(case: Case) -> Iterator[Problem]:
    """transformers-neuronx reads of config.json what its class computes, of the model's and of its draft's.

    What it leaves out would change the answers silently, or fail once the cores are claimed.
    """
    if case.candidates != ("transformers-neuronx",):
        return
    for field, checkpoint in (("engine", case.checkpoint), ("draft", case.draft)):
        if checkpoint is None:
            continue
        whose, reading = case.model.name if field == "engine" else f"the draft of {case.model.name}", checkpoint.on_tnx
        if reading.lacks:
            what = f"transformers-neuronx computes no {checkpoint.model_type} with {reading.lacks}, as {whose} has it"
            yield case.problem("family-unsupported", (field,), what, "take another engine or model")
        elif misread := reading.misread(None):
            what = f"transformers-neuronx misreads the rotary positions of {whose}: {misread}"
            yield case.problem("rotary-misread", (field,), what, MISREAD_HINT)
        if reading.approximates:
            what = f"transformers-neuronx computes {reading.approximates} of {whose} by its tanh approximation, "
            what += "gelu_new: logits differ slightly from the model's"
            hint = "compare answers with engine: cpu; another engine computes it exactly"
            yield case.problem("activation-approximated", (field,), what, hint, "warning")


def heads_are_padded(case: Case) -> Iterator[Problem]:
    """``allow_head_padding`` is not asked of classes that would fail at the load."""
    tp, checkpoint = case.model.tp_degree, case.checkpoint
    if checkpoint is None or not case.model.allow_head_padding or checkpoint.heads % tp == 0:
        return
    if case.candidates == ("transformers-neuronx",) and checkpoint.model_type in TNX_UNPADDED:
        what = f"tp_degree {tp} does not divide the {checkpoint.heads} attention heads of {case.model.name}"
        what += f", and transformers-neuronx pads no heads of {checkpoint.model_type}"
        yield case.problem("heads-not-divisible", ("tp_degree",), what, "take a degree that divides them")


def degree_is_the_engines(case: Case) -> Iterator[Problem]:
    """The guide of the engine has the degree, where the two guides differ: 16 on trn1 is NxD Inference's alone."""
    tp = case.model.tp_degree
    here = case.engine == "transformers-neuronx" and case.machines == ("trn1",)
    if here and tp == 16 and tp not in case.model.allow_degrees:
        what = "tp_degree 16 on trn1 is in the guide of NxD Inference, not in that of transformers-neuronx"
        hint = "take 8 or 32; allow_degrees: [16] silences this"
        yield case.problem("undocumented-degree", ("tp_degree",), what, hint, "warning")


def engine_can_draft(case: Case) -> Iterator[Problem]:
    """A draft is asked only of an engine, and of families, that can use one beside what else the model asks for."""
    model, draft = case.model, case.draft
    if model.draft is None:
        return
    why = _nobody_can(case, lambda engine: _why_no_draft(engine, case))
    if why:
        what, hint = why.split(" | ")
        yield case.problem("draft-unsupported", ("draft",), what, hint)
        return
    if draft is None or case.checkpoint is None:
        return
    if draft.vocab != case.checkpoint.vocab:
        what = f"the draft has a vocabulary of {draft.vocab}, and {model.name} one of {case.checkpoint.vocab}"
        yield case.problem("bad-draft", ("draft",), what, "take a draft of the same vocabulary")
    if case.engine not in HOST_ENGINES and draft.heads % model.tp_degree != 0 and not model.allow_head_padding:
        what = f"tp_degree {model.tp_degree} does not divide the {draft.heads} attention heads of the draft"
        what += f" of {model.name}, which lies on the same cores"
        hint = "take another degree or draft, or add allow_head_padding: true for an engine that pads with zeros"
        yield case.problem("heads-not-divisible", ("draft",), what, hint)


def _why_no_draft(engine: Engine, case: Case) -> str:
    """What keeps the engine from it, and after a bar what mends it; "" where nothing does."""
    model, drafting, family = case.model, case.draft.model_type if case.draft else None, case.family
    if engine == "cpu":
        return ""
    if engine == "transformers-neuronx":
        for one in (family, drafting):
            if one is not None and one not in TNX_DRAFTING:
                return (
                    f"transformers-neuronx drafts for llama and gpt2 with llama and gpt2, not with {one} | remove draft"
                )
        if family is not None and family not in TNX_CONTINUOUS and model.max_batch > 1:
            return (
                f"a draft for {family} on transformers-neuronx needs max_batch 1: rows of a static batch are at one "
                "position | max_batch: 1"
            )
        assert model.draft is not None
        run, prompts = run_length(model.draft.k + 1, model.max_batch), model.buckets.prefill
        if model.max_batch > 1 and prompts and run > prompts[-1]:
            return (
                f"transformers-neuronx verifies {run} tokens of a slot at once, the greater of draft.k + 1 and "
                f"max_batch, and the longest of buckets.prefill is {prompts[-1]} | add a bucket of at least {run}"
            )
        if model.sampling == "device":
            return (
                "transformers-neuronx compares drafts with logits on the host, and sampling is device | sampling: host"
            )
        return ""
    if engine == "nxd-inference":
        if family is not None and drafting is not None and family != drafting:
            return (
                f"nxd-inference fuses a draft with a model of the same family, and {drafting} is not {family} | "
                f"take a draft of {family}"
            )
        if model.quantize is not None:
            return "nxd-inference quantizes a draft without its scales | remove quantize or draft"
        return ""
    return f"draft has no effect: the engine {engine} drafts nothing | remove draft, or take cpu or a Neuron engine"


def engine_can_quantize(case: Case) -> Iterator[Problem]:
    """Weights and a KV cache of one byte are asked only of an engine, and of a family, that has them."""
    for field, value in (("quantize", case.model.quantize), ("quantize_kv", case.model.quantize_kv)):
        if value is None:
            continue
        if case.engine in HOST_ENGINES:
            whole = "with whole weights" if field == "quantize" else "with a whole KV cache"
            what = f"{field} has no effect: the engine {case.engine} computes {whole}"
            hint = f"remove {field}, or take an engine of Neuron devices"
            yield case.problem("quantize-unsupported", (field,), what, hint)
        elif _nobody_can(case, lambda engine: _is_unquantized(engine, case)):
            what = f"transformers-neuronx quantizes no {case.family}, which {case.model.name} is"
            yield case.problem("quantize-unsupported", (field,), what, f"remove {field}")
        elif field == "quantize_kv" and (why := _nobody_can(case, lambda engine: _why_no_cache(engine, case))):
            what, hint = why.split(" | ")
            yield case.problem("quantize-unsupported", (field,), what, hint)


def _why_no_cache(engine: Engine, case: Case) -> str:
    """What keeps the engine from the KV cache of ``quantize_kv``, and after a bar the remedy; "" where nothing does."""
    kind, family = case.model.quantize_kv, case.family
    if engine == "transformers-neuronx" and family is not None and family not in TNX_QUANTIZED_KV:
        return f"transformers-neuronx has no KV cache of one byte for {family} | remove quantize_kv"
    if engine == "transformers-neuronx" and kind != "fp8":
        return f"transformers-neuronx converts keys and values to {kind} without a scale | quantize_kv: fp8"
    if engine == "nxd-inference" and kind != "fp8":
        return f"nxd-inference keeps a KV cache of fp8 or of the dtype, not of {kind} | quantize_kv: fp8"
    return ""


def _is_unquantized(engine: Engine, case: Case) -> str:
    return "yes" if engine == "transformers-neuronx" and case.family in TNX_UNPADDED else ""


def settings_have_effect(case: Case) -> Iterator[Problem]:
    """What is for Neuron devices is asked of no engine that computes on the host."""
    model = case.model
    given = {
        "sampling": model.sampling == "device",
        "buckets": bool(model.buckets.prefill or model.buckets.decode),
        "fuse_qkv": model.fuse_qkv is not None,
        "compiler": model.compiler != Compiler(),
    }
    if case.engine in HOST_ENGINES:
        for field in [field for field, is_given in given.items() if is_given and field not in model.broken]:
            if field == "buckets" and _compiles_on_host(case):
                continue
            why = "computes on the host's CPUs" if case.engine == "cpu" else "computes nothing"
            what = f"{field} has no effect: the engine {case.engine} {why}"
            hint = f"remove {field}, or take an engine of Neuron devices"
            yield case.problem("setting-unsupported", (field,), what, hint)
    elif model.compiler.workers is not None and case.candidates == ("nxd-inference",):
        what = "compiler.workers has no effect: nxd-inference has no such option"
        yield case.problem("setting-unsupported", ("compiler", "workers"), what, "remove it")


def _compiles_on_host(case: Case) -> bool:
    return case.engine == "cpu" and case.model.engine_options.get("compile") is True


def engine_can_sample(case: Case) -> Iterator[Problem]:
    """The device samples only where the family's class can."""
    if case.model.sampling == "host" or case.engine in HOST_ENGINES or case.family is None:
        return

    def why(engine: Engine) -> str:
        return "host" if engine == "transformers-neuronx" and case.family not in TNX_SAMPLING else ""

    if _nobody_can(case, why):
        what = f"transformers-neuronx chooses the tokens of {case.family}, which {case.model.name} is, on the host only"
        yield case.problem("setting-unsupported", ("sampling",), what, "sampling: host")


def buckets_make_sense(case: Case) -> Iterator[Problem]:
    """Compiled lengths ascend, none is beyond max_len, and the longest of the KV cache is max_len itself."""
    model = case.model
    if case.engine in HOST_ENGINES and not _compiles_on_host(case):
        return
    longest = model.length(case.checkpoint) if model.max_len is not None or case.checkpoint is not None else None
    for field, lengths in (("prefill", model.buckets.prefill), ("decode", model.buckets.decode)):
        for i, (one, following) in enumerate(pairwise(lengths)):
            if following <= one:
                what = f"buckets.{field}: {following} stands after {one}; lengths ascend, each once"
                hint = f"write [{', '.join(map(str, sorted(set(lengths))))}]"
                yield case.problem("bad-buckets", ("buckets", field, i + 1), what, hint)
                break
        else:
            if longest is not None and lengths and lengths[-1] > longest:
                what = f"buckets.{field}: {lengths[-1]} is longer than the {longest} tokens of a slot, max_len"
                hint = f"end with {longest}, or raise max_len"
                yield case.problem("bad-buckets", ("buckets", field, len(lengths) - 1), what, hint)
            elif longest is not None and field == "decode" and lengths and lengths[-1] < longest:
                what = f"buckets.decode ends at {lengths[-1]}, so that no slot could hold its {longest} tokens, max_len"
                hint = f"add {longest}, or lower max_len"
                yield case.problem("bad-buckets", ("buckets", field, len(lengths) - 1), what, hint)
    several = model.buckets.prefill or len(model.buckets.decode) > 1
    if several and case.candidates == ("transformers-neuronx",) and case.family in TNX_UNPADDED:
        what = f"transformers-neuronx compiles {case.family} for one length, max_len, and has no others"
        yield case.problem("bad-buckets", ("buckets",), what, "remove buckets")


def buckets_are_no_steps(case: Case) -> Iterator[Problem]:
    """No compiled prompt length is as short as a decoding step, which both packages tell from prompts by its width.

    A step has one token, on NxD Inference also as many as it speculates (`model_base`); ``auto`` may be that engine.
    """
    model = case.model
    for engine in ("nxd-inference", "transformers-neuronx"):
        steps = (1,) if model.draft is None or engine != "nxd-inference" else (1, model.draft.k + 1)
        step = next((step for step in steps if step in model.buckets.prefill), None)
        if engine in case.candidates and step is not None:
            what = f"buckets.prefill: {engine} would take a prompt of {_count(step, 'token')} for a decoding step"
            where = ("buckets", "prefill", model.buckets.prefill.index(step))
            yield case.problem("bad-buckets", where, what, "take a longer one")
            return


_FLAGS = {
    "--cache_dir": "neff_cache",
    "--no_cache": "nothing: what is compiled is always kept",
    "--lnc": "hosts.lnc",
    "--target": "hosts.instance",
}
"""Flags of neuronx-cc, or of the wrapper with its cache, that a field of the spec stands for."""


_NXD_FLAGS = frozenset(
    {"--auto-cast", "--model-type", "--tensorizer-options", "--internal-hlo2tensorizer-options", "--logfile"}
)
"""Flags that NxD Inference (`ModelWrapper`) and neuronx-distributed (`ModelBuilder`) pass in every version."""


def flags_are_free(case: Case) -> Iterator[Problem]:
    """compiler.flags says nothing that a field says. The flags are part of what compiled code is found by."""
    compiler = case.model.compiler
    for flag in compiler.flags.split():
        name = flag.partition("=")[0]
        field = _FLAGS.get(name)
        if field is None and compiler.optlevel is not None and (name.startswith("-O") or name == "--optlevel"):
            field = "compiler.optlevel"
        if field is not None:
            what = f"compiler.flags: {name} is not given here"
            yield case.problem("bad-compiler-flags", ("compiler", "flags"), what, f"say {field}")
        elif name in _NXD_FLAGS and "nxd-inference" in case.candidates:
            what = f"compiler.flags: nxd-inference passes {name} with a value of its own"
            yield case.problem("bad-compiler-flags", ("compiler", "flags"), what, "leave it out")


def engine_options_are_known(case: Case) -> Iterator[Problem]:
    """engine_options holds only what the engine understands, each of its kind."""
    engine = case.engine
    if engine not in PACKAGES:
        yield from _own_options(case)
        return
    places = [place for place in case.machines if runs_on(engine, place)] or [""]
    newest = max((newest_nxd(place) for place in places), key=lambda name: [int(part) for part in name.split(".")])
    scope = Scope(engine, case.family, newest if engine == "nxd-inference" else "", " and ".join(filter(None, places)))
    for id, path, what, hint in judged(scope, case.model.engine_options, ModelSpec.model_fields):
        yield case.problem(id, ("engine_options", *path), what, hint)


def options_fit_the_model(case: Case) -> Iterator[Problem]:
    """An option goes with the fields of the model that it depends on."""
    engine, given = case.engine, case.model.engine_options
    prompts = given.get("prompt_batch_size")
    if engine == "transformers-neuronx" and type(prompts) is int and prompts != case.model.max_batch:
        what = f"engine_options.prompt_batch_size is {prompts}, and max_batch is {case.model.max_batch}: with fewer "
        what += "prompts one would fill several slots"
        yield case.problem("out-of-range", ("engine_options", "prompt_batch_size"), what, "leave it out")
    if "on_device_sampling_config" in given and engine == "nxd-inference" and case.model.sampling == "host":
        what = "engine_options.on_device_sampling_config has no effect: sampling is host"
        path = ("engine_options", "on_device_sampling_config")
        yield case.problem("setting-unsupported", path, what, "sampling: device")
    yield from _device_top_k(case)
    yield from _quantized_options(case)
    yield from _cache_layout(case)


def _quantized_options(case: Case) -> Iterator[Problem]:
    """NxD Inference reads a quantized checkpoint, and another type of fp8, for a quantized model only."""
    model = case.model
    for name in NXD_QUANTIZED_OPTIONS if case.engine == "nxd-inference" else ():
        path, value = ("engine_options", name), model.engine_options.get(name)
        if not isinstance(value, str):
            continue  # another rule reports the wrong type
        known = NXD_QUANTIZED_DTYPES.get(model.quantize or "", ())
        if model.quantize is None:
            what = f"engine_options.{name} has no effect: quantize is not set"
            yield case.problem("setting-unsupported", path, what, "add quantize: int8 or quantize: fp8")
        elif name == "quantization_dtype" and value not in known:
            what = f"engine_options.{name} is {value}; with quantize: {model.quantize} it is one of {', '.join(known)}"
            yield case.problem("unknown-value", path, what)
        elif name == "quantized_checkpoints_path" and not is_path(value):
            what = f"engine_options.{name} is {value}; it must be a folder of the host"
            yield case.problem("bad-source", path, what, "begin the path with /, ./, ../ or ~")


_TOP_K = 256
"""The largest top_k of both packages' sampling on the device (NxD Inference ``modules/generation/sampling``)."""


def _device_top_k(case: Case) -> Iterator[Problem]:
    given = case.model.engine_options.get("on_device_sampling_config")
    most = given.get("global_topk") if isinstance(given, Mapping) else None
    if case.engine == "nxd-inference" and type(most) is int and not 1 <= most <= _TOP_K:
        path = ("engine_options", "on_device_sampling_config", "global_topk")
        what = f"engine_options.on_device_sampling_config.global_topk is {most}; it must be from 1 to {_TOP_K}"
        yield case.problem("out-of-range", path, what)


_SHORTEST = 128  # tokens; where transformers-neuronx's own list of lengths begins (`bucket`)


def _cache_layout(case: Case) -> Iterator[Problem]:
    """BSH is asked of transformers-neuronx only with continuous batching, and with one length of each kind.

    Else ``module.PretrainedModel.from_pretrained`` fails an assertion.
    """
    model = case.model
    if case.engine != "transformers-neuronx" or model.engine_options.get("cache_layout") != "BSH":
        return
    path, buckets = ("engine_options", "cache_layout"), model.buckets
    known = model.max_len is not None or case.checkpoint is not None
    doubling = not buckets.prefill and known and model.length(case.checkpoint) > _SHORTEST
    if model.max_batch == 1 or (case.family is not None and case.family not in TNX_CONTINUOUS):
        what = "engine_options.cache_layout: BSH is for continuous batching, and batches are static here"
        yield case.problem("setting-unsupported", path, what, "leave it out")
    elif doubling or max(len(buckets.prefill), len(buckets.decode)) > 1:
        what = "engine_options.cache_layout: BSH takes one compiled length, and there are several"
        yield case.problem("setting-unsupported", path, what, "name one in buckets.prefill, or leave cache_layout out")


def _own_options(case: Case) -> Iterator[Problem]:
    """Of the engines whose options are our own, and of those that have none."""
    engine = case.engine
    known = ENGINE_OPTIONS.get(engine, {})
    for name, value in case.model.engine_options.items():
        path, option = ("engine_options", name), known.get(name)
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"known for {engine}: {', '.join(known) or 'none'}"
            if engine == "auto":
                hint = f"name the engine whose option it is: {' or '.join(PACKAGES)}"
            what = f'engine_options: "{name}" is no option of the engine {engine}'
            yield case.problem("unknown-engine-option", path, what, hint)
        elif not _is_of(option, value):
            wanted = "true or false" if option is None else "a whole number" if option.whole else "a number"
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            yield case.problem("wrong-type", path, f"engine_options.{name} is {shown}; it must be {wanted}")
        elif option is not None and not option.least <= value <= option.most:
            what = f"engine_options.{name} is {value}; it must be from {option.least} to {option.most}"
            yield case.problem("out-of-range", path, what)


def _is_of(option: Option | None, value: Any) -> bool:
    if option is None or isinstance(value, bool):
        return option is None and isinstance(value, bool)
    return isinstance(value, int if option.whole else int | float)


def engine_can_share_heads(case: Case) -> Iterator[Problem]:
    """A way to deal KV heads out is asked only of the engine that has the choice, and only where it can be.

    transformers-neuronx itself would warn and take another way, with another need of memory (its
    ``check_gqa_fallback``).
    """
    model, checkpoint = case.model, case.checkpoint
    way, tp, path = model.group_query_attention, model.tp_degree, ("group_query_attention",)
    if way is None:
        return
    if case.engine not in ("auto", "transformers-neuronx"):
        what = f"group_query_attention has no effect: the engine {case.engine} has no such choice"
        hint = "remove it, or take the engine transformers-neuronx"
        yield case.problem("gqa-unsupported", path, what, hint)
        return
    why = ""
    if way == "shard-over-batch" and model.max_batch % tp != 0:
        why = f"tp_degree {tp} does not divide max_batch {model.max_batch}"
    elif checkpoint is None:
        return
    elif way == "shard-over-heads" and checkpoint.kv_heads % tp != 0:
        why = f"tp_degree {tp} does not divide the {_count(checkpoint.kv_heads, 'KV head')}"
    elif way == "all-gather-heads":
        width, padding = checkpoint.kv_heads * checkpoint.head_dim, -checkpoint.heads % tp
        if width % tp != 0:
            why = f"tp_degree {tp} does not divide the {width} numbers of all KV heads"
        elif padding % checkpoint.kv_heads != 0:
            why = f"the {_count(padding, 'head')} of padding cannot be dealt to {checkpoint.kv_heads} KV heads"
    if why:
        hint = "replicated-heads is always possible; or leave group_query_attention out"
        yield case.problem("gqa-not-divisible", path, f"{way} of {model.name} cannot be: {why}", hint)


def engine_can_run(case: Case) -> Iterator[Problem]:
    """An engine of Neuron devices is not asked of hosts that have none."""
    hosts = case.all_hosts.hosts
    if needs_neuron(case.model.engine) and hosts and all(host.emulated or host.topology is None for host in hosts):
        what = f"engine {case.model.engine} needs Neuron devices, and the hosts are emulated or have none"
        yield case.problem("engine-needs-neuron", ("engine",), what, "engine: auto takes cpu there", "warning")


def _nobody_can(case: Case, why: Callable[[Engine], str]) -> str:
    """Why none of the engines that the model's may be can; "" where one can."""
    reasons = [why(engine) for engine in case.candidates]
    return reasons[0] if reasons and all(reasons) else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


ENGINE_RULES: tuple[Judged, ...] = (
    Judged(engine_can_run, frozenset({"engine"})),
    Judged(engine_runs_here, frozenset({"engine"})),
    Judged(family_is_served, frozenset({"engine"})),
    Judged(heads_are_padded, frozenset({"engine", "tp_degree", "allow_head_padding"})),
    Judged(degree_is_the_engines, frozenset({"engine", "tp_degree", "allow_degrees"})),
    Judged(engine_can_draft, frozenset({"engine", "draft", "tp_degree", "max_batch", "sampling", "quantize"})),
    Judged(engine_can_quantize, frozenset({"engine", "quantize", "quantize_kv"})),
    Judged(engine_can_share_heads, frozenset({"engine", "tp_degree", "max_batch", "group_query_attention"})),
    Judged(settings_have_effect, frozenset({"engine", "engine_options"})),
    Judged(tnx_computes_it, frozenset({"engine", "draft"})),
    Judged(window_is_kept, frozenset({"engine", "max_len"})),
    Judged(engine_can_sample, frozenset({"engine", "sampling"})),
    Judged(buckets_make_sense, frozenset({"engine", "engine_options", "buckets", "max_len"})),
    Judged(buckets_are_no_steps, frozenset({"engine", "buckets", "draft"})),
    Judged(flags_are_free, frozenset({"engine", "compiler"})),
    Judged(engine_options_are_known, frozenset({"engine", "engine_options"})),
    Judged(
        options_fit_the_model,
        frozenset({"engine", "engine_options", "max_batch", "max_len", "sampling", "buckets", "quantize"}),
    ),
)
