"""The rules of the engine ``vllm``: releases of its plugins, their flags, and LoRA adapters, which it serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from placements.engines.capabilities import Capabilities
from placements.engines.nxd_inference.capabilities import CAPABILITIES as NXD
from placements.engines.server.capabilities import NO_CONTAINER, STARTS_CONTAINER, container_in
from placements.engines.vllm import capabilities as vllm
from placements.engines.vllm.flags import check_flags
from placements.facts.adapters import MODULES, RANKS, max_rank
from placements.facts.encoders import ENCODERS
from placements.facts.neuron_releases import sdk_named
from placements.facts.plural import joined
from placements.facts.topology import Host
from placements.rules.case import Case, EngineRules, Objection
from placements.rules.unused_settings import unused
from placements.spec.notation import is_path
from placements.spec.problems import Problem
from placements.spec.schema import Spec
from placements.spec.sections import EngineSettings


def releases(case: Case) -> tuple[vllm.VllmNeuron, ...]:
    """Returns the planned releases of vllm-neuron; () if vLLM runs on the CPU."""
    planned = [case.spec.vllm_release_on(host) for host, _ in case.fleet.kinds]
    return tuple(dict.fromkeys(release for release in planned if release is not None))


def planned_packages(case: Case, host: Host) -> Mapping[str, str]:
    """Returns the distributions of the planned release of vllm-neuron on a host."""
    release = case.spec.vllm_release_on(host)
    sdk = sdk_named(release.sdk.split()[0]) if release else None
    return {"vllm-neuron": release.plugin, **sdk.packages} if release and sdk else {}


def _plugins(case: Case, *names: str) -> str:
    """Returns the releases of the plugin that the model works with, quoted, in words; "" if there is none."""
    settings = case.spec.engines.get(case.engine, EngineSettings())
    changed = {name: {**case.spec.engines, case.engine: settings.model_copy(update={"plugin": name})} for name in names}
    return joined([f'"{name}"' for name, engines in changed.items() if case.holds(case.model, engines)], "or")


def flags_are_known(case: Case) -> Iterator[Problem]:
    """engine_options are flags of vLLM that corewright does not set itself."""
    options = case.model.engine_options
    versions = [(release.vllm, release.plugin) for release in releases(case)] or [("", "")]
    findings = [finding for version, plugin in versions for finding in check_flags(options, version, plugin)]
    for id, path, fact, hint in {finding.path: finding for finding in findings}.values():
        yield case.problem(id, ("engine_options", *path), fact, hint)


def plugin_runs_here(case: Case) -> Iterator[Problem]:
    """The release of the plugin runs on the machines."""
    for release in releases(case):
        for machine in case.machines:
            last = vllm.LAST_FOR.get(machine)
            if last is None or vllm.version_of(release.plugin) <= vllm.version_of(last):
                continue
            where, hint = ("engine",), f'set engines.vllm.plugin: "{last}"'
            if release.back_end == "neuron":
                fact = f"vllm-neuron {release.plugin} does not run on {machine}: it requires trn2 or trn3"
                yield case.problem("engine-unsupported-here", where, fact, hint)
            else:
                fact = f"vllm-neuron {release.plugin} is in maintenance on {machine}, "
                fact += f"where {last} is the last one in AWS's release notes"
                yield case.problem("engine-in-maintenance", where, fact, hint, "warning")


def objection_to_draft(case: Case) -> Objection | None:
    """Returns why no release has the draft's method; None if one has it."""
    draft = case.model.draft
    for release in releases(case):
        if draft is not None and draft.method not in release.drafts:
            hint = f"set draft.method: {' or '.join(release.drafts)}"
            return Objection(f"vllm-neuron {release.plugin} has no drafts by {draft.method}", hint)
    return None


def readers(case: Case, engine: str) -> Sequence[Capabilities]:
    """Returns the engine whose code reads the checkpoint, for each release; () on the CPU, where vLLM decides."""
    return [NXD if release.back_end == "nxd" else vllm.CAPABILITIES for release in releases(case)]


def _has_quantized_folder(case: Case) -> bool:
    given = case.model.engine_options.get("additional_config")
    inner = given.get("override_neuron_config") if isinstance(given, dict) else None
    return isinstance(inner, dict) and bool(inner.get("quantized_checkpoints_path"))


def plugin_embeds(case: Case) -> Iterator[Problem]:
    """The plugin serves pooling models, and has a class for the family of the embedding model."""
    for release in releases(case) if case.model.kind == "embedding" else ():
        others = case.engines_of("torch-neuronx", "cpu")
        hint = f"use engine: {others}" if others else "use another engine"
        if vllm.version_of(release.plugin) < vllm.EMBEDS_SINCE:
            fact = f"vllm-neuron {release.plugin} does not serve kind embedding"
            able = [each.plugin for each in vllm.RELEASES if vllm.version_of(each.plugin) >= vllm.EMBEDS_SINCE]
            if newer := _plugins(case, *able):
                hint = f"set engines.vllm.plugin: {newer}; or {hint}"
            yield case.problem("kind-unsupported", ("kind",), fact, hint)
        elif case.family in ENCODERS:
            fact = f"vllm-neuron {release.plugin} embeds with decoders only, and {case.model.name} is a {case.family}"
            yield case.problem("kind-unsupported", ("engine",), fact, hint)


def weights_are_quantized(case: Case) -> Iterator[Problem]:
    """Each plugin quantizes weights and KV cache in its own way."""
    model = case.model
    for release in releases(case):
        if model.quantize is not None and release.back_end == "neuron":
            fact = f"quantize has no effect on vllm-neuron {release.plugin}: the checkpoint decides it"
            yield case.problem("quantize-unsupported", ("quantize",), fact, "remove it")
        elif model.quantize is not None and not _has_quantized_folder(case):
            fact = f"quantize on vllm-neuron {release.plugin} needs the folder of the quantized checkpoint"
            hint = "set quantized_checkpoints_path in engine_options.additional_config.override_neuron_config"
            yield case.problem("quantize-unsupported", ("quantize",), fact, hint)
        if model.quantize_kv is not None and model.quantize_kv != "fp8":
            fact = f"vllm-neuron supports a KV cache of fp8 or of the dtype, not of {model.quantize_kv}"
            yield case.problem("quantize-unsupported", ("quantize_kv",), fact, "set quantize_kv: fp8")


def prefixes_are_cached(case: Case) -> Iterator[Problem]:
    """With prefix caching, the blocks hold all slots. On NxD Inference it needs more than one slot."""
    model, options = case.model, case.model.engine_options
    if options.get("prefix_cache") is not True:
        return
    for release in [release for release in releases(case) if release.back_end == "nxd"]:
        if model.max_batch == 1:
            fact = f"vllm-neuron {release.plugin} gives wrong answers with prefix_cache and max_batch 1"
            hint = "raise max_batch, or remove prefix_cache"
            yield case.problem("setting-unsupported", ("engine_options", "prefix_cache"), fact, hint)
        size, given = options.get("block_size", vllm.BLOCK_SIZE), options.get("num_gpu_blocks_override")
        if type(size) is not int or size < 1 or type(given) is not int:
            continue
        least = vllm.blocks(model.length(case.checkpoint), model.max_batch, size)
        if given < least:
            fact = f"engine_options.num_gpu_blocks_override is {given}; max_batch {model.max_batch} slots of "
            fact += f"{model.length(case.checkpoint)} tokens need {least} blocks of {size}"
            hint = f"set it to {least}, or remove it"
            yield case.problem("out-of-range", ("engine_options", "num_gpu_blocks_override"), fact, hint)


def kv_fits_its_share(case: Case) -> Iterator[Problem]:
    """The plugin "vLLM Neuron" gives the KV cache a fixed share of HBM, where slots beyond it would only wait; it does
    not start with less than MIN_KV_GIB beside the weights."""
    need = case.memory()
    types = [topology for topology in case.fleet.types if case.has_degree(topology)]
    if need is None or not types or not any(release.back_end == "neuron" for release in releases(case)):
        return
    used, hbm = vllm.hbm_share(case.model.engine_options), max(topology.hbm_per_core_gib for topology in types)
    share, rest = used * vllm.KV_SHARE * hbm, used * hbm - (need.total - need.kv)
    if need.kv > share:
        fact = f"the KV cache of {case.model.name} needs {need.kv:.2f} GiB on each core, but vllm-neuron gives it "
        fact += f"{used * vllm.KV_SHARE:.2f} of HBM, {share:.2f} GiB"
        hint = "lower max_batch or max_len, raise tp_degree, or set quantize_kv: fp8"
        yield case.problem("hbm-exceeded", ("max_batch",), fact, hint)
    elif rest < vllm.MIN_KV_GIB:
        fact = f"{case.model.name} leaves {max(rest, 0.0):.2f} GiB of each core's HBM to the KV cache, of the "
        fact += f"{used:.2f} x {hbm:g} GiB that vLLM uses; vllm-neuron does not start below {vllm.MIN_KV_GIB:.2f} GiB"
        yield case.problem("hbm-exceeded", ("tp_degree",), fact, "raise tp_degree, or use a smaller model")


def buckets_are_the_plugins(case: Case) -> Iterator[Problem]:
    """The plugin "vLLM Neuron" compiles multiples of 128 tokens for its KV cache."""
    if any(release.back_end == "neuron" for release in releases(case)):
        longest = case.model.length(case.checkpoint)
        for i, length in enumerate(case.model.buckets.decode):
            if length < longest and length % 128 != 0:
                fact = f"buckets.decode: {length} is not a multiple of 128, as vllm-neuron requires below max_len"
                yield case.problem("bad-buckets", ("buckets", "decode", i), fact, "use a multiple of 128")


# LoRA adapters


def plugin_serves_adapters(case: Case) -> Iterator[Problem]:
    """The CPU back end serves adapters, and so does the plugin on NxD Inference since 0.4."""
    for release in releases(case) if case.model.adapters else ():
        if release.back_end == "neuron" or vllm.version_of(release.vllm) < vllm.LORA_SINCE:
            fact = f"vllm-neuron {release.plugin} does not serve LoRA adapters"
            others = _plugins(case, "0.4", "0.5")
            hint = f"set engines.vllm.plugin: {others}, or merge the adapter" if others else "merge the adapter"
            yield case.problem("adapters-unsupported", ("adapters",), fact, hint)


def adapters_without_prefix_cache(case: Case) -> Iterator[Problem]:
    """NxD Inference does not serve adapters together with a prefix cache."""
    model, option = case.model, "prefix_cache"
    caches = model.engine_options.get(option) is True
    if model.adapters and caches and any(release.back_end == "nxd" for release in releases(case)):
        fact = f"{option} is not supported together with LoRA adapters on NxD Inference"
        yield case.problem("adapters-unsupported", ("adapters",), fact, f"remove {option} or the adapters")


def adapters_fit_the_server(case: Case) -> Iterator[Problem]:
    """vLLM loads the adapters: their ranks and features."""
    largest = case.model.engine_options.get("max_lora_rank")
    if largest is not None and largest not in RANKS:
        fact = f"engine_options.max_lora_rank is {largest!r}; vLLM has {', '.join(map(str, RANKS))}"
        yield case.problem("out-of-range", ("engine_options", "max_lora_rank"), fact, "use one of them, or remove it")
        largest = None
    for name, adapter in case.adapters.items():
        where, fact = ("adapters", name), f'the adapter "{name}" has the rank {adapter.rank}'
        if max_rank([adapter.rank]) is None:
            fact += f"; vLLM serves at most {RANKS[-1]}"
            yield case.problem("adapter-unusable", where, fact, "train an adapter of a smaller rank")
        elif largest is not None and adapter.rank > largest:
            fact += f", above engine_options.max_lora_rank {largest}"
            yield case.problem("adapter-unusable", where, fact, f"set it to {max_rank([adapter.rank])}, or remove it")
        if adapter.unsupported:
            fact = f'the adapter "{name}" uses {adapter.unsupported}, which vLLM does not support'
            yield case.problem("adapter-unusable", where, fact, "merge the adapter, or train one without it")


def adapters_are_of_the_model(case: Case) -> Iterator[Problem]:
    """The adapters were trained for this checkpoint, and change modules that it has."""
    model, known = case.model, MODULES.get(case.family or "")
    for name, adapter in case.adapters.items():
        where, base = ("adapters", name), adapter.base
        foreign = [module for module in adapter.modules if known and module.rpartition(".")[2] not in known]
        if foreign:
            fact = f'the adapter "{name}" changes {", ".join(foreign)}, which a {case.family} does not have'
            yield case.problem("adapter-unusable", where, fact, "use an adapter of this model")
        elif (
            model.source_kind == "hub"
            and base.count("/") == 1
            and not is_path(base)
            and _name(base) != _name(model.source)
        ):
            fact = f'the adapter "{name}" was trained for {base}, not for {model.source}'
            yield case.problem(
                "adapter-of-another-model", where, fact, "check that it is an adapter of this model", "warning"
            )


def _name(hub_id: str) -> str:
    return hub_id.rpartition("/")[2].lower()


def settings_have_an_effect(case: Case) -> Iterator[Problem]:
    """Fields and options that vLLM, or the release of its plugin, does not use are not set.

    On emulated hosts, fields for Neuron devices only determine the plan: vLLM on the CPU has none of them.
    """
    model, here, back_ends = case.model, " on the engine vllm here", {each.back_end for each in releases(case)}
    yield from unused(case, f"{here}: vLLM has no flag for it", "fuse_qkv")
    if any(host.emulated for host in case.all_hosts.hosts):
        why, hint = " on emulated hosts, where vLLM runs on the CPU", "it is planned as for Neuron devices"
        fields = ("quantize", "quantize_kv", "buckets", "sampling")
        yield from unused(case, why, *fields, hint=hint, id="unused-on-cpu", severity="warning")
    if "nxd" in back_ends and model.engine_options.get("prefix_cache") is not True:
        options = ("engine_options.block_size", "engine_options.num_gpu_blocks_override")
        yield from unused(case, ": prefix_cache is not true", *options)
    if back_ends and not model.adapters:
        yield from unused(case, ": there are no adapters", "engine_options.max_loras")
    if "neuron" in back_ends:
        why = "vllm-neuron has flags of its own, which others would replace and not extend"
        yield from unused(case, f"{here}: {why}", "compiler")
        why = "on_device_sampling_config of the option neuron_config decides it"
        yield from unused(case, f"{here}: {why}", "sampling")
        if model.buckets.prefill:
            yield from unused(case, ": buckets.prefill determines it", "engine_options.max_num_batched_tokens")
    elif model.compiler.workers is not None:
        yield from unused(case, f"{here}: vLLM starts its compilers itself", "compiler")


def launches_can_be_run(spec: Spec) -> Iterator[Problem]:
    """``command`` of an engine is that of vLLM, beside its interpreter, and not a container."""
    for engine, settings in spec.engines.items():
        where, name = spec.where("engines", engine, "command"), f"engines.{engine}.command"
        if not settings.command:
            continue
        if engine != "vllm":
            fact = f"{name} has no effect: only vllm has a command"
            yield Problem("setting-unsupported", "error", where, fact, "remove it")
            continue
        if settings.python is None:
            fact = f"engines.{engine} has a command, but no python, whose vLLM it runs"
            yield Problem("missing-key", "error", where, fact, "add python: /path/to/bin/python")
        if (index := container_in(settings.command)) is not None:
            fact = f"{name} {STARTS_CONTAINER.format(settings.command[index])}"
            yield Problem("server-container", "error", where, fact, NO_CONTAINER)


def interpreter_is_named(spec: Spec) -> Iterator[Problem]:
    """The spec names the interpreter of vLLM, which is rarely that of the fleet."""
    names = [model.name for model in spec.models if model.engine == "vllm"]
    if names and spec.python_for("vllm") is None and "engines" not in spec.broken:
        fact = "engines.vllm.python is not set: vLLM must then be installed in the fleet's own Python"
        hint = "set it to the interpreter that has vLLM"
        yield Problem("interpreter-unset", "warning", spec.where("models", names[0], "engine"), fact, hint)


def plugin_is_known(spec: Spec) -> Iterator[Problem]:
    """The release of the plugin is a known one. Any other release is planned as the last known one before it."""
    settings = spec.engines.get("vllm")
    if settings is None or settings.plugin is None:
        return
    release = vllm.release_for("", settings.plugin)
    if release not in vllm.RELEASES:
        known = next(each.plugin for each in vllm.RELEASES if each.vllm == release.vllm)
        fact = f"vllm-neuron {settings.plugin} is unknown to this version of corewright, and is planned as {known}"
        hint = "test a model with it first, since flags, memory and drafts may differ"
        yield Problem("engine-version-unknown", "warning", spec.where("engines", "vllm", "plugin"), fact, hint)


RULES = EngineRules(
    rules=(
        flags_are_known,
        plugin_runs_here,
        plugin_embeds,
        weights_are_quantized,
        prefixes_are_cached,
        kv_fits_its_share,
        buckets_are_the_plugins,
        plugin_serves_adapters,
        adapters_without_prefix_cache,
        settings_have_an_effect,
    ),
    of_every_model=(adapters_fit_the_server, adapters_are_of_the_model),
    of_spec=(launches_can_be_run, interpreter_is_named, plugin_is_known),
    draft=objection_to_draft,
    packages=planned_packages,
    readers=readers,
    other_weights=_has_quantized_folder,
)
