"""Options of transformers-neuronx: a model's configuration as the constructor's keywords and a NeuronConfig."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from placements.engines import options as tables
from placements.engines.capabilities import SHORTEST_BUCKET
from placements.engines.transformers_neuronx.capabilities import Family
from workers.batching.buckets import ladder
from workers.engines.engine_setup import checked_lengths, dtype_on
from workers.messages.engine_protocol import DeviceSampling, EngineLoadError
from workers.messages.replica_config import ReplicaConfig

AMP = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}  # ours -> theirs
QUANTIZED = {"int8": "s8", "fp8": "f8e4m3fn"}
QUANTIZED_KV = {"fp8": "f8e4m3fn"}  # int8 is converted without a scale, which destroys the keys
MAX_TOP_K = 256  # for sampling on the device; the limit of vLLM's back-end for this package

TABLES = ("transformers_neuronx.NeuronConfig", "transformers_neuronx")  # of options, and of constructors' keywords
UNSERVED = {name: why for table in TABLES for name, why in tables.UNSERVED[table].items()}


@dataclass(frozen=True)
class Shapes:
    """The compiled lengths."""

    prefill: tuple[int, ...]  # context graphs; the last is the longest prompt
    decode: tuple[int, ...]  # token graphs; the last is max_len

    @classmethod
    def of(cls, config: ReplicaConfig, family: Family, continuous: bool) -> Shapes:
        """Returns the shapes of ``config``, by default the package's doubling ones. Raises EngineLoadError.

        Continuous batching has one token graph by default, as with the package's other users.
        """
        longest = config.max_len
        doubling = ladder(SHORTEST_BUCKET, longest)
        usual = doubling[-1:] if continuous or family.serial else doubling
        prefill, decode = checked_lengths(
            config.model.buckets.prefill or doubling, config.model.buckets.decode or usual, longest
        )
        if 1 in prefill and not family.serial:
            raise EngineLoadError(
                "bad-buckets", "a prefill bucket of 1 token is a decoding step", "use longer prefill buckets"
            )
        if family.serial and (config.model.buckets.prefill or len(decode) > 1):
            message = "GPT-NeoX runs prompts token by token in one graph and has no buckets"
            raise EngineLoadError("bad-buckets", message, "remove `buckets`")
        return cls((longest,) if family.serial else prefill, decode)


@dataclass(frozen=True)
class Options:
    """Everything that a model of the package is created with; needs no import of the package."""

    constructor: Mapping[str, Any]
    neuron: Mapping[str, Any]  # of NeuronConfig; enumerations and nested configurations as plain values


def options_for(
    config: ReplicaConfig, family: Family, shapes: Shapes, continuous: bool, model_class: Any, vocab_size: int
) -> Options:
    """Translate ``config`` to the package's names. ``model_class`` defines the constructor's keywords.

    ``engine_options`` use the package's names already: those of the constructor go there, the others to NeuronConfig.
    The spec's rules have checked their names and values. Raises EngineLoadError for fields that the class lacks.
    """
    amp = dtype_on("transformers-neuronx", config.dtype, AMP)
    constructor = _constructor(config, family, shapes, amp)
    neuron = _neuron(config, family, amp, continuous, vocab_size)
    keywords = set(inspect.signature(model_class.__init__).parameters) - {"self", "config"}
    for name, value in config.model.engine_options.items():
        if name not in UNSERVED:  # else its default, by the rules of the spec
            (constructor if name in keywords else neuron)[name] = value
    return Options(constructor, neuron)


def _constructor(config: ReplicaConfig, family: Family, shapes: Shapes, amp: str) -> dict[str, Any]:
    keywords: dict[str, Any] = {"batch_size": config.model.max_batch, "amp": amp, "tp_degree": config.model.tp_degree}
    if family.serial:
        return {**keywords, "n_positions": shapes.decode[-1]}
    keywords |= {"n_positions": list(shapes.decode), "context_length_estimate": list(shapes.prefill)}
    if family.broadcasts:
        keywords["prompt_batch_size"] = config.model.max_batch
    return keywords


def _neuron(config: ReplicaConfig, family: Family, amp: str, continuous: bool, vocab_size: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if continuous:
        options["continuous_batching"] = {"batch_size_for_shared_caches": config.model.max_batch}
    if config.model.group_query_attention is not None:
        options["group_query_attention"] = config.model.group_query_attention
    if config.model.fuse_qkv is not None:
        options["fuse_qkv"] = config.model.fuse_qkv
    if config.model.compiler.workers is not None:
        options["compilation_worker_count"] = config.model.compiler.workers
    weights, cache = QUANTIZED if family.quantizes else {}, QUANTIZED_KV if family.quantizes_kv else {}
    for name, dtype, kinds in (
        ("quant", config.model.quantize, weights),
        ("kv_cache_quant", config.model.quantize_kv, cache),
    ):
        if dtype is None:
            continue
        if dtype not in kinds:
            of = "the KV cache" if name == "kv_cache_quant" else "weights"
            raise EngineLoadError(
                "bad-engine-option",
                f"this class of transformers-neuronx cannot quantize {of} to {dtype}",
                f"supported: {', '.join(kinds) or 'none'}",
            )
        options[name] = {"quant_dtype": kinds[dtype], "dequant_dtype": amp}  # another dtype than amp does not work
    if config.model.sampling == "device":
        if not family.samples:
            message = "this class of transformers-neuronx does not sample on the device"
            raise EngineLoadError("bad-engine-option", message, "set `sampling: host`")
        options["on_device_generation"] = device_generation([DeviceSampling()] * config.model.max_batch, vocab_size)
    return options


def device_top_k(vocab_size: int) -> int:
    """Returns the largest top_k of sampling on the device; graphs with one beyond the vocabulary do not build."""
    return min(MAX_TOP_K, vocab_size)


def device_generation(slots: list[DeviceSampling], vocab_size: int) -> dict[str, Any]:
    """Returns the keywords of the package's GenerationConfig: each slot's sampling, which may change between steps."""
    return {
        "do_sample": True,
        "dynamic": True,
        "per_batch_line": True,
        "global_top_k": device_top_k(vocab_size),
        "top_k": [sampling.top_k for sampling in slots],
        "top_p": [float(sampling.top_p) for sampling in slots],
        "temperature": [float(sampling.temperature) for sampling in slots],
    }


def neuron_config(plain: Mapping[str, Any]) -> Any:
    """Returns a NeuronConfig of the installed package; always a new one, since some classes share theirs by default.

    Raises EngineLoadError for an option that the installed version lacks, where the package fails an assertion.
    """
    from transformers_neuronx import config as package
    from transformers_neuronx import constants

    nested = {
        "continuous_batching": package.ContinuousBatchingConfig,
        "quant": package.QuantizationConfig,
        "kv_cache_quant": package.KVCacheQuantizationConfig,
        "on_device_generation": package.GenerationConfig,
    }
    options: dict[str, Any] = {}
    for name, value in plain.items():
        if name in nested and isinstance(value, Mapping):
            options[name] = nested[name](**value)
        elif name == "sparse_attn" and isinstance(value, Mapping):
            from transformers_neuronx.sparse_attn_utils import SparseAttnConfig

            options[name] = SparseAttnConfig(**value)
        elif name == "group_query_attention":
            options[name] = _member(constants.GQA, name, value)
        elif name.endswith("_layout"):
            options[name] = _member(constants.Layout, name, value)
        else:
            options[name] = value
    try:
        return package.NeuronConfig(**options)
    except (AssertionError, TypeError) as error:  # unknown names, and "self"
        raise EngineLoadError(
            "bad-engine-option",
            f"the installed transformers-neuronx rejected an option: {error}",
            "`corewright validate` checks options against the recorded versions",
        ) from error


def _member(kind: type[Enum], name: str, value: Any) -> Enum:
    try:
        return kind(value)
    except ValueError as error:
        values = ", ".join(str(member.value) for member in kind)
        raise EngineLoadError("bad-engine-option", f"{name} must be one of {values}, not {value!r}") from error
