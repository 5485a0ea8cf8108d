"""Checks a model of the engine vllm against the releases of its Neuron plugin."""

from __future__ import annotations

from collections.abc import Iterator

from placements.facts.vllm import (
    BLOCK_SIZE,
    KV_SHARE,
    LAST_FOR,
    MIN_KV_GIB,
    VllmNeuron,
    blocks,
    hbm_share,
    version_of,
)
from placements.resources.vllm_release import release_on
from placements.rules.case import SIZES, Case, FieldRule
from placements.rules.options.vllm_flags import check_flags
from placements.spec.problems import Problem
from placements.spec.schema import Buckets, Compiler


def releases(case: Case) -> list[VllmNeuron]:
    """Returns the releases that the plan counts with; [] for other engines, and if vLLM runs on the CPU."""
    planned = [release_on(case.spec, host) for host, _ in case.fleet.kinds] if case.engine == "vllm" else []
    return list(dict.fromkeys(release for release in planned if release is not None))


def flags_are_known(case: Case) -> Iterator[Problem]:
    """engine_options are flags of vLLM that corewright does not set itself."""
    model, options = case.model, case.model.engine_options
    if case.engine != "vllm":
        return
    planned = releases(case)
    versions: list[tuple[str, str]] = [(release.vllm, release.plugin) for release in planned] or [("", "")]
    findings = [finding for vllm, plugin in versions for finding in check_flags(options, vllm, plugin)]
    for id, path, what, hint in {finding.path: finding for finding in findings}.values():
        yield case.problem(id, ("engine_options", *path), what, hint)
    back_ends = {release.back_end for release in planned}
    whole_slots = "nxd" in back_ends and options.get("prefix_cache") is not True
    replaced = {
        **dict.fromkeys(("block_size", "num_gpu_blocks_override"), (whole_slots, "prefix_cache is not true")),
        "max_num_batched_tokens": ("neuron" in back_ends and model.buckets.prefill, "buckets.prefill determines it"),
        "max_loras": (planned and not model.adapters, "there are no adapters"),
    }
    for name, (is_replaced, why) in replaced.items():
        if name in options and is_replaced:
            what = f"engine_options.{name} has no effect: {why}"
            yield case.problem("setting-unsupported", ("engine_options", name), what, "remove it")


def plugin_runs_here(case: Case) -> Iterator[Problem]:
    """The release of the plugin runs on the machines."""
    for release in releases(case):
        for place in case.machines:
            last = LAST_FOR.get(place)
            if last is None or version_of(release.plugin) <= version_of(last):
                continue
            where, hint = ("engine",), f'set engines.vllm.plugin: "{last}"'
            if release.back_end == "neuron":
                what = f"vllm-neuron {release.plugin} does not run on {place}: it requires trn2"
                yield case.problem("engine-unsupported-here", where, what, hint)
            else:
                what = f"vllm-neuron {release.plugin} is for Neuron SDK {release.sdk}, which requires trn2; "
                what += f"the last release for {place} is {last}"
                yield case.problem("engine-unsupported-here", where, what, hint, "warning")


def why_no_draft(case: Case) -> str:
    """Returns why no release has the draft's method and, after a bar, the hint; "" if one has it."""
    draft = case.model.draft
    for release in releases(case):
        if draft is not None and draft.method not in release.drafts:
            methods = " or ".join(release.drafts)
            return f"vllm-neuron {release.plugin} has no drafts by {draft.method} | set draft.method: {methods}"
    return ""


def weights_are_quantized(case: Case) -> Iterator[Problem]:
    """Each plugin quantizes weights and KV cache in its own way."""
    model = case.model
    for release in releases(case):
        if model.quantize is not None and release.back_end == "neuron":
            what = f"quantize has no effect on vllm-neuron {release.plugin}: the checkpoint decides it"
            yield case.problem("quantize-unsupported", ("quantize",), what, "use a quantized checkpoint")
        elif model.quantize is not None:
            given = model.engine_options.get("additional_config")
            inner = given.get("override_neuron_config") if isinstance(given, dict) else None
            if not isinstance(inner, dict) or not inner.get("quantized_checkpoints_path"):
                what = f"quantize on vllm-neuron {release.plugin} needs the folder of the quantized checkpoint"
                hint = "set quantized_checkpoints_path in engine_options.additional_config.override_neuron_config"
                yield case.problem("quantize-unsupported", ("quantize",), what, hint)
        if model.quantize_kv is not None and model.quantize_kv != "fp8":
            what = f"vllm-neuron supports a KV cache of fp8 or of the dtype, not of {model.quantize_kv}"
            yield case.problem("quantize-unsupported", ("quantize_kv",), what, "set quantize_kv: fp8")


def fields_reach_the_cpu(case: Case) -> Iterator[Problem]:
    """On emulated hosts, fields for Neuron devices only determine the plan: vLLM on the CPU has none of them."""
    model = case.model
    fields = {
        "quantize": model.quantize is not None,
        "quantize_kv": model.quantize_kv is not None,
        "buckets": model.buckets != Buckets(),
        "sampling": model.sampling == "device",
    }
    if case.engine == "vllm" and any(host.emulated for host in case.all_hosts.hosts):
        for field in [field for field, is_set in fields.items() if is_set and field not in model.broken]:
            what = f"{field} has no effect on emulated hosts, where vLLM runs on the CPU"
            yield case.problem("unused-on-cpu", (field,), what, "it is planned as for Neuron devices", "warning")


def prefixes_are_cached(case: Case) -> Iterator[Problem]:
    """With prefix caching, the blocks hold all slots. On NxD Inference it needs more than one slot."""
    model, options = case.model, case.model.engine_options
    if options.get("prefix_cache") is not True:
        return
    for release in [release for release in releases(case) if release.back_end == "nxd"]:
        if model.max_batch == 1:
            what = f"vllm-neuron {release.plugin} gives wrong answers with prefix_cache and max_batch 1"
            hint = "raise max_batch, or remove prefix_cache"
            yield case.problem("setting-unsupported", ("engine_options", "prefix_cache"), what, hint)
        size, given = options.get("block_size", BLOCK_SIZE), options.get("num_gpu_blocks_override")
        if type(size) is not int or size < 1 or type(given) is not int:
            continue
        least = blocks(model.length(case.checkpoint), model.max_batch, size)
        if given < least:
            what = f"engine_options.num_gpu_blocks_override is {given}; max_batch {model.max_batch} slots of "
            what += f"{model.length(case.checkpoint)} tokens need {least} blocks of {size}"
            hint = f"set it to {least}, or remove it"
            yield case.problem("out-of-range", ("engine_options", "num_gpu_blocks_override"), what, hint)


def kv_fits_its_share(case: Case) -> Iterator[Problem]:
    """The plugin "vLLM Neuron" gives the KV cache a fixed share of HBM, where slots beyond it would only wait; it does
    not start with less than MIN_KV_GIB beside the weights."""
    need = case.memory()
    types = [topology for topology in case.fleet.types if case.has_degree(topology)]
    if need is None or not types or not any(release.back_end == "neuron" for release in releases(case)):
        return
    used, hbm = hbm_share(case.model.engine_options), max(topology.hbm_per_core_gib for topology in types)
    share, rest = used * KV_SHARE * hbm, used * hbm - (need.total - need.kv)
    if need.kv > share:
        what = f"the KV cache of {case.model.name} needs {need.kv:.2f} GiB on each core, but vllm-neuron gives it "
        what += f"{used * KV_SHARE:.2f} of HBM, {share:.2f} GiB"
        hint = "lower max_batch or max_len, raise tp_degree, or set quantize_kv: fp8"
        yield case.problem("hbm-exceeded", ("max_batch",), what, hint)
    elif rest < MIN_KV_GIB:
        what = f"{case.model.name} leaves {max(rest, 0.0):.2f} GiB of each core's HBM to the KV cache, of the "
        what += f"{used:.2f} x {hbm:g} GiB that vLLM uses; vllm-neuron does not start below {MIN_KV_GIB:.2f} GiB"
        yield case.problem("hbm-exceeded", ("tp_degree",), what, "raise tp_degree, or use a smaller model")


def settings_reach_vllm(case: Case) -> Iterator[Problem]:
    """Fields that no flag of vLLM carries are not set."""
    model, planned = case.model, releases(case)
    unused = {}
    if model.fuse_qkv is not None:
        unused["fuse_qkv"] = "vLLM has no flag for it"
    if model.compiler.workers is not None:
        unused["compiler"] = "vLLM starts its compilers itself"
    if any(release.back_end == "neuron" for release in planned):
        if model.compiler != Compiler():
            unused["compiler"] = "vllm-neuron has flags of its own, which others would replace and not extend"
        if model.sampling == "device":
            unused["sampling"] = "on_device_sampling_config of the option neuron_config decides it"
    for field, why in unused.items() if case.engine == "vllm" else ():
        what = f"{field} has no effect on the engine vllm here: {why}"
        yield case.problem("setting-unsupported", (field,), what, "remove it")


def buckets_are_the_plugins(case: Case) -> Iterator[Problem]:
    """The plugin "vLLM Neuron" compiles multiples of 128 tokens for its KV cache."""
    if any(release.back_end == "neuron" for release in releases(case)):
        longest = case.model.length(case.checkpoint)
        for i, length in enumerate(case.model.buckets.decode):
            if length < longest and length % 128 != 0:
                what = f"buckets.decode: {length} is not a multiple of 128, as vllm-neuron requires below max_len"
                yield case.problem("bad-buckets", ("buckets", "decode", i), what, "use a multiple of 128")


_ENGINE = frozenset({"engine"})
VLLM_RULES: tuple[FieldRule, ...] = (
    FieldRule(flags_are_known, _ENGINE | {"engine_options", "buckets", "adapters"}),
    FieldRule(plugin_runs_here, _ENGINE),
    FieldRule(weights_are_quantized, _ENGINE | {"quantize", "quantize_kv", "engine_options"}),
    FieldRule(fields_reach_the_cpu, _ENGINE),
    FieldRule(prefixes_are_cached, _ENGINE | {"max_batch", "max_len", "engine_options"}),
    FieldRule(kv_fits_its_share, SIZES | {"quantize_kv"}),
    FieldRule(settings_reach_vllm, _ENGINE | {"fuse_qkv", "compiler", "sampling"}),
    FieldRule(buckets_are_the_plugins, _ENGINE | {"buckets", "max_len"}),
)
