"""Checks ``engine_options``, with one function for each rule."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from placements.facts import kv_blocks
from placements.facts.engines import (
    AUTO_ENGINES,
    ENGINE_OPTIONS,
    NXD_QUANTIZED_DTYPES,
    NXD_QUANTIZED_OPTIONS,
    PACKAGES,
    SERVER_ENGINES,
    OptionRange,
    newest_nxd,
    runs_on,
)
from placements.facts.plural import counted
from placements.rules.case import Case, Rule
from placements.rules.options.judge import Scope, check_options
from placements.spec.notation import is_path
from placements.spec.problems import Problem
from placements.spec.schema import ModelSpec

_TOP_K = 256
"""The largest top_k of on-device sampling in both packages (NxD Inference ``modules/generation/sampling``)."""

_LLAMA_ONLY = ("attn_output_transposed", "mlp_out_weight_transpose", "shard_over_sequence")


def engine_options_are_known(case: Case) -> Iterator[Problem]:
    """The engine knows all engine_options, and their values have the right types."""
    engine = case.engine
    if engine in SERVER_ENGINES:
        return
    if engine in ENGINE_OPTIONS or engine not in PACKAGES:
        yield from _own_options(case)
        return
    places = [machine for machine in case.machines if runs_on(engine, machine)] or [""]
    newest = max((newest_nxd(machine) for machine in places), key=lambda name: [int(part) for part in name.split(".")])
    scope = Scope(engine, case.family, newest if engine == "nxd-inference" else "", " and ".join(filter(None, places)))
    for id, path, fact, hint in check_options(scope, case.model.engine_options, ModelSpec.model_fields):
        yield case.problem(id, ("engine_options", *path), fact, hint)


def options_fit_the_model(case: Case) -> Iterator[Problem]:
    """An option is consistent with the fields of the model that it depends on."""
    engine, options = case.engine, case.model.engine_options
    prompts = options.get("prompt_batch_size")
    if engine == "transformers-neuronx" and type(prompts) is int and prompts != case.model.max_batch:
        fact = f"engine_options.prompt_batch_size is {prompts}; it must equal max_batch, {case.model.max_batch}"
        yield case.problem("out-of-range", ("engine_options", "prompt_batch_size"), fact, "remove it")
    yield from _device_top_k(case)
    yield from _layouts_of_llama(case)
    yield from _blocks(case)
    yield from _quantized_options(case)


def _layouts_of_llama(case: Case) -> Iterator[Problem]:
    """Layouts of weights and of the KV cache that transformers-neuronx builds for Llama only."""
    options, checkpoint, tp = case.model.engine_options, case.checkpoint, case.model.tp_degree
    for name in _LLAMA_ONLY if case.engine == "transformers-neuronx" else ():
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


def _blocks(case: Case) -> Iterator[Problem]:
    """A prefix cache of NxD Inference fits the model's other fields."""
    model, options = case.model, case.model.engine_options
    if case.engine == "nxd-inference" and options.get("prefix_cache") is True:
        others = {"draft": model.draft, "quantize_kv": model.quantize_kv}
        length, prefill = model.length(case.checkpoint), model.buckets.prefill or ()
        for path, fact, hint in kv_blocks.refusals(options, model.max_batch, length, prefill, others):
            yield case.problem("setting-unsupported", path, fact, hint)


def _quantized_options(case: Case) -> Iterator[Problem]:
    """Options of quantization are used with ``quantize`` only."""
    model = case.model
    for name in NXD_QUANTIZED_OPTIONS if case.engine == "nxd-inference" else ():
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


def _device_top_k(case: Case) -> Iterator[Problem]:
    config = case.model.engine_options.get("on_device_sampling_config")
    most = config.get("global_topk") if isinstance(config, Mapping) else None
    if case.engine == "nxd-inference" and type(most) is int and not 1 <= most <= _TOP_K:
        path = ("engine_options", "on_device_sampling_config", "global_topk")
        fact = f"engine_options.on_device_sampling_config.global_topk is {most}; it must be from 1 to {_TOP_K}"
        yield case.problem("out-of-range", path, fact)


def _own_options(case: Case) -> Iterator[Problem]:
    """Checks the options of corewright's own engines, and of engines without options."""
    engine = case.engine
    options = ENGINE_OPTIONS.get(engine, {})
    for name, value in case.model.engine_options.items():
        path, option = ("engine_options", name), options.get(name)
        if name not in options:
            close = difflib.get_close_matches(name, [known for known in options if _is_of(options[known], value)], 1)
            hint = f"did you mean {close[0]}?" if close else f"options of {engine}: {', '.join(options) or 'none'}"
            if engine == "auto":
                hint = f"set engine to the one with this option: {' or '.join(AUTO_ENGINES)}"
            fact = f'engine_options: "{name}" is not an option of the engine {engine}'
            yield case.problem("unknown-engine-option", path, fact, hint)
        elif not _is_of(option, value):
            kind = "true or false" if option is None else "a whole number" if option.whole else "a number"
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            yield case.problem("wrong-type", path, f"engine_options.{name} is {text}; it must be {kind}")
        elif option is not None and not option.least <= value <= option.most:
            fact = f"engine_options.{name} is {value}; it must be from {option.least} to {option.most}"
            yield case.problem("out-of-range", path, fact)


def _is_of(option: OptionRange | None, value: Any) -> bool:
    if option is None or isinstance(value, bool):
        return option is None and isinstance(value, bool)
    return isinstance(value, int if option.whole else int | float)


OPTION_RULES: tuple[Rule, ...] = (
    engine_options_are_known,
    options_fit_the_model,
)
