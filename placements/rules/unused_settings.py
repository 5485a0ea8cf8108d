"""Reports fields that have no effect on a model's engine or kind."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from placements.facts import kv_blocks
from placements.facts.engines import HOST_ENGINES
from placements.rules.case import Case
from placements.spec.problems import Problem, Severity
from placements.spec.schema import ModelSpec
from placements.spec.sections import RequestDefaults

_DEFAULTS = ModelSpec(name="default", source="./")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_OF_THE_HOST = (*_PENALTIES, "min_p", "seed")
_OF_SERVERS = ("sampling", "buckets", "fuse_qkv", "compiler", "quantize_kv", "quantize", "group_query_attention")
_OF_DEVICES = ("sampling", "quantize", "quantize_kv", "fuse_qkv")


def unused(
    case: Case,
    why: str,
    *fields: str,
    hint: str = "remove it",
    id: str = "setting-unsupported",
    severity: Severity = "error",
) -> Iterator[Problem]:
    """Yields a problem for each of the fields, as paths with dots, that is set: "FIELD has no effect" and ``why``.

    ``hint`` may have {field}. Fields that could not be read are passed over.
    """
    for field in fields:
        path, default = _default_of(field)
        if path[0] not in case.model.broken and _value(case.model, path) != default:
            yield case.problem(id, path, f"{field} has no effect{why}", hint.format(field=field), severity)


@cache
def _default_of(field: str) -> tuple[tuple[str, ...], Any]:
    """Returns a field's path and default."""
    path = tuple(field.split("."))
    return path, _value(_DEFAULTS, path)


def _value(model: ModelSpec, path: tuple[str, ...]) -> Any:
    value: Any = model
    for key in path:
        value = value.get(key) if isinstance(value, dict) else getattr(value, key)
    return value


def compiles_on_host(case: Case) -> bool:
    """Returns whether the cpu engine compiles its buckets."""
    return case.engine == "cpu" and case.model.engine_options.get("compile") is True


def settings_of_the_engine(case: Case) -> Iterator[Problem]:
    """Settings of Neuron devices are not used with engines on the host's CPUs, nor others with engines without them."""
    here, neuron = f" on the engine {case.engine}", "remove {field}, or use a Neuron engine"
    if case.engine in HOST_ENGINES:
        yield from unused(case, here, "sampling", "fuse_qkv", "compiler", hint=neuron)
        yield from unused(case, here, "quantize", "quantize_kv", hint=neuron, id="quantize-unsupported")
        if not compiles_on_host(case):
            yield from unused(case, here, "buckets", hint=neuron)
    elif case.engine == "optimum-neuron":
        why = f"{here}, which chooses it itself"
        yield from unused(case, why, "buckets", "fuse_qkv", "compiler", hint="remove {field}")
    elif case.candidates in (("nxd-inference",), ("torch-neuronx",)):
        yield from unused(case, f": {case.candidates[0]} has no such option", "compiler.workers")
    if case.engine not in ("auto", "transformers-neuronx"):
        hint = "remove it, or use the engine transformers-neuronx"
        yield from unused(case, here, "group_query_attention", hint=hint, id="gqa-unsupported")
    if case.engine == "server":
        hint = "the command decides it: write it into server.command"
        yield from unused(case, here, *_OF_SERVERS, "engine_options", hint=hint)
    else:
        yield from unused(case, here, "server", hint="set engine: server, or remove server")


def settings_of_vllm(case: Case) -> Iterator[Problem]:
    """Fields and options that vLLM, or the release of its plugin, does not use are not set.

    On emulated hosts, fields for Neuron devices only determine the plan: vLLM on the CPU has none of them.
    """
    if case.engine != "vllm":
        return
    model, here, back_ends = case.model, " on the engine vllm here", {each.back_end for each in case.vllm_releases}
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


def options_of_nxd(case: Case) -> Iterator[Problem]:
    """Options of NxD Inference that depend on another setting are set only with it."""
    if case.engine == "nxd-inference" and case.model.engine_options.get("prefix_cache") is not True:
        options = (f"engine_options.{name}" for name in kv_blocks.OPTIONS)
        yield from unused(case, " without a prefix cache", *options, hint="set prefix_cache: true, too")
    if case.engine == "nxd-inference" and case.model.sampling == "host":
        option = "engine_options.on_device_sampling_config"
        yield from unused(case, ": sampling is host", option, hint="set sampling: device")


def settings_of_the_kind(case: Case) -> Iterator[Problem]:
    """Settings of generation are not set for other kinds, nor those of encoders for generate."""
    here = f" on kind {case.model.kind}"
    if case.model.kind == "generate":
        yield from unused(case, f"{here}, whose requests join between two steps", "max_wait_ms")
        why, hint = f"{here}, which encodes no inputs", "set ttft_ms, tpot_ms or queue_ms"
        yield from unused(case, why, "objectives.items_per_second", hint=hint)
        return
    yield from unused(case, here, "tool_parser", "trust_remote_code")
    if case.engine not in HOST_ENGINES:  # others are reported as settings of the engine
        yield from unused(case, here, *_OF_DEVICES)
    if case.engine == "cpu":
        yield from unused(case, here, "draft", "engine_options")
    if case.engine == "torch-neuronx":
        yield from unused(case, here, "buckets.decode", hint="remove it, and set buckets.prefill")
    why, hint = f"{here}, which gives no tokens", "set ttft_ms, the time to the answer"
    yield from unused(case, why, "objectives.tpot_ms", hint=hint)


def defaults_have_an_effect(case: Case) -> Iterator[Problem]:
    """The model's requests have the fields of its defaults, and of those of its aliases.

    1. engine: server, which gets requests as they were sent -> none
    2. a model that does not generate                        -> none
    3. the engine echo, which does not sample                -> no penalties
    4. sampling on the device                                -> nothing that only the host does
    """
    model = case.model
    subject = ""
    refused: tuple[str, ...] = ()
    if case.engine == "server":
        subject = "the engine server, which gets requests as they were sent"  # 1
    elif model.kind != "generate":
        subject = f"kind {model.kind}"  # 2
    elif case.engine == "echo":
        refused = _PENALTIES  # 3
    elif model.sampling == "device":
        refused = _OF_THE_HOST  # 4
    given: dict[tuple[str, ...], RequestDefaults] = {("request_defaults",): model.request_defaults}
    given |= {("aliases", alias): defaults for alias, defaults in model.alias_defaults.items()}
    for path, defaults in given.items():
        if subject and defaults.given:
            fact = f"{'.'.join(path)} has no effect on {subject}"
            yield case.problem("setting-unsupported", path, fact, "remove these defaults")
        for field in (field for field in refused if getattr(defaults, field) is not None):
            fact = f"{'.'.join((*path, field))} is not supported with "
            fact += "the engine echo" if case.engine == "echo" else "sampling: device"
            yield case.problem("setting-unsupported", (*path, field), fact, "remove it")


UNUSED_SETTINGS = (
    settings_of_the_engine,
    settings_of_vllm,
    options_of_nxd,
    settings_of_the_kind,
    defaults_have_an_effect,
)
