"""The rules of the engine ``nxd-inference``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from placements.engines.nxd_inference import kv_blocks
from placements.engines.nxd_inference.capabilities import (
    CAPABILITIES,
    NXD_QUANTIZED_DTYPES,
    NXD_QUANTIZED_OPTIONS,
    NXD_VERSIONS,
    NXD_WINDOW,
)
from placements.facts.versions import reaches
from placements.rules.case import Case, EngineRules, Objection
from placements.rules.unused_settings import unused
from placements.spec.notation import is_path
from placements.spec.problems import Problem

_TOP_K = 256
"""The largest top_k of on-device sampling (``modules/generation/sampling``)."""


def window_is_kept(case: Case) -> Iterator[Problem]:
    """A sliding window that the engine ignores is at least as long as a slot.

    Otherwise the answers would differ from the model's.
    """
    checkpoint = case.checkpoint
    if checkpoint is None or checkpoint.window is None:
        return
    newest = min(
        (CAPABILITIES.newest(machine) for machine in case.machines), key=NXD_VERSIONS.index, default=NXD_VERSIONS[-1]
    )
    others = {"a draft": case.model.draft, "a prefix cache": case.model.engine_options.get("prefix_cache")}
    beside = next((f" with {name}" for name, value in others.items() if value), "")
    keeps = case.family == "mistral" and reaches(newest, NXD_WINDOW) and not beside
    if keeps or checkpoint.window >= case.model.length(checkpoint):
        return
    fact = f"{case.model.name} has a sliding window of {checkpoint.window} tokens, but NxD Inference"
    fact += f" {newest} supports none for {case.family}{beside}"
    hint = f"set max_len: {checkpoint.window}, or use another engine"
    yield case.problem("window-not-kept", ("max_len",), fact, hint)


def buckets_hold_the_window(case: Case) -> Iterator[Problem]:
    """No prefill bucket is shorter than the sliding window, since its graph reads as many tokens as the window has."""
    checkpoint, lengths = case.checkpoint, case.model.buckets.prefill
    if checkpoint is None or checkpoint.window is None or not lengths:
        return
    if lengths[0] < checkpoint.window < case.model.length(checkpoint):
        fact = f"buckets.prefill: {lengths[0]} is shorter than the sliding window of {case.model.name}"
        fact += f", {checkpoint.window} tokens: NxD Inference would read beyond its end"
        hint = f"begin with {checkpoint.window} or more, as the default buckets do"
        yield case.problem("bad-buckets", ("buckets", "prefill", 0), fact, hint)


def options_have_an_effect(case: Case) -> Iterator[Problem]:
    """Options that depend on another setting are set only with it."""
    if case.model.engine_options.get("prefix_cache") is not True:
        options = (f"engine_options.{name}" for name in kv_blocks.OPTIONS)
        yield from unused(case, " without a prefix cache", *options, hint="set prefix_cache: true, too")
    if case.model.sampling == "host":
        option = "engine_options.on_device_sampling_config"
        yield from unused(case, ": sampling is host", option, hint="set sampling: device")


def blocks_fit(case: Case) -> Iterator[Problem]:
    """A prefix cache fits the model's other fields."""
    model, options = case.model, case.model.engine_options
    if options.get("prefix_cache") is True:
        others = {"draft": model.draft, "quantize_kv": model.quantize_kv}
        length, prefill = model.length(case.checkpoint), model.buckets.prefill or ()
        for path, fact, hint in kv_blocks.refusals(options, model.max_batch, length, prefill, others):
            yield case.problem("setting-unsupported", path, fact, hint)


def options_of_quantization(case: Case) -> Iterator[Problem]:
    """Options of quantization are used with ``quantize`` only."""
    model = case.model
    for name in NXD_QUANTIZED_OPTIONS:
        path, value = ("engine_options", name), model.engine_options.get(name)
        if not isinstance(value, str):
            continue  # another rule reports the wrong type
        choices = NXD_QUANTIZED_DTYPES.get(model.quantize or "", ())
        if model.quantize is None:
            fact = f"engine_options.{name} has no effect: quantize is not set"
            yield case.problem("setting-unsupported", path, fact, "add quantize: int8 or quantize: fp8")
        elif name == "quantization_dtype" and value not in choices:
            fact = f"engine_options.{name} is {value}; with quantize: {model.quantize} it must be "
            fact += " or ".join(choices)
            yield case.problem("unknown-value", path, fact)
        elif name == "quantized_checkpoints_path" and not is_path(value):
            fact = f"engine_options.{name} is {value}; it must be a folder on the host"
            yield case.problem("bad-source", path, fact, "begin the path with /, ./, ../ or ~")


def top_k_is_supported(case: Case) -> Iterator[Problem]:
    """The device samples from a limited number of ids."""
    config = case.model.engine_options.get("on_device_sampling_config")
    most = config.get("global_topk") if isinstance(config, Mapping) else None
    if type(most) is int and not 1 <= most <= _TOP_K:
        path = ("engine_options", "on_device_sampling_config", "global_topk")
        fact = f"engine_options.on_device_sampling_config.global_topk is {most}; it must be from 1 to {_TOP_K}"
        yield case.problem("out-of-range", path, fact)


def _objection_to_draft(case: Case) -> Objection | None:
    """Returns why the model cannot use its draft; None if it can."""
    family, drafting = case.family, case.draft.model_type if case.draft else None
    if family is not None and drafting is not None and family != drafting:
        fact = f"nxd-inference needs a draft of the same family, and {drafting} is not {family}"
        return Objection(fact, f"use a draft of {family}")
    if case.model.quantize is not None:
        return Objection("nxd-inference does not support drafts of quantized models", "remove quantize or draft")
    return None


def _objection_to_quantized_kv(case: Case) -> Objection | None:
    """Returns why ``quantize_kv`` is not possible; None if it is."""
    kind = case.model.quantize_kv
    fact = f"nxd-inference supports a KV cache of fp8 or of the dtype, not of {kind}"
    return None if kind == "fp8" else Objection(fact, "set quantize_kv: fp8")


RULES = EngineRules(
    rules=(top_k_is_supported, blocks_fit, options_of_quantization, options_have_an_effect),
    if_chosen=(window_is_kept, buckets_hold_the_window),
    draft=_objection_to_draft,
    quantized_kv=_objection_to_quantized_kv,
    other_weights=lambda case: "quantized_checkpoints_path" in case.model.engine_options,
)
