"""What a model's configuration is called by transformers-neuronx: the constructor's keywords and a NeuronConfig."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from placements.facts.tnx_families import Family
from placements.rules.options import owned
from workers.batching.buckets import checked_buckets, ladder
from workers.messages.engine_protocol import DeviceSampling, EngineLoadError

if TYPE_CHECKING:
    from workers.engines import EngineConfig

AMP = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}  # ours -> theirs
QUANTIZED = {"int8": "s8", "fp8": "f8e4m3fn"}
QUANTIZED_KV = {"fp8": "f8e4m3fn"}  # int8 is converted without a scale, which leaves nothing of a key
SHORTEST = 128  # tokens; the package's own bucket lists begin here
MAX_TOP_K = 256  # of sampling on the device; the cap that vLLM's back-end for this package used

_TABLES = ("transformers_neuronx.NeuronConfig", "transformers_neuronx")  # of options, and of constructors' keywords
FIELDS = {name: field for table in _TABLES for name, field in owned.FIELDS[table].items()}
UNSERVED = {name: why for table in _TABLES for name, why in owned.UNSERVED[table].items()}


@dataclass(frozen=True)
class Shapes:
    """The lengths that are compiled."""

    prefill: tuple[int, ...]  # context graphs; the last is the longest prompt
    decode: tuple[int, ...]  # token graphs; the last is max_len

    @classmethod
    def of(cls, config: EngineConfig, family: Family, continuous: bool) -> Shapes:
        """Those that ``config`` names, else the package's doubling ones; raises EngineLoadError for impossible ones.

        With continuous batching there is one token graph unless more are asked for, as its other callers have it.
        """
        longest = config.max_len
        if config.slots < 1 or longest < 2:
            what = f"at least 1 slot and a max_len of 2 are needed, not {config.slots} and {longest}"
            raise EngineLoadError("bad-engine-size", what)
        doubling = ladder(SHORTEST, longest)
        usual = doubling[-1:] if continuous or family.serial else doubling
        try:
            prefill = checked_buckets("prefill", config.prefill_buckets or doubling, longest)
            decode = checked_buckets("decode", config.decode_buckets or usual, longest)
        except ValueError as error:
            raise EngineLoadError("bad-buckets", str(error)) from error
        if 1 in prefill and not family.serial:
            raise EngineLoadError(
                "bad-buckets", "a prompt of 1 token is a decoding step", "take a longer prefill bucket"
            )
        if decode[-1] != longest:
            what = f"the largest decode bucket is {decode[-1]}, so a slot could never hold its {longest} tokens"
            raise EngineLoadError("bad-buckets", what, f"add {longest}")
        if family.serial and (config.prefill_buckets or len(decode) > 1):
            what = "GPT-NeoX runs prompts token by token in one graph and has no buckets"
            raise EngineLoadError("bad-buckets", what, "leave `buckets` out")
        return cls((longest,) if family.serial else prefill, decode)


@dataclass(frozen=True)
class Options:
    """All that a model of the package is made with, before anything of the package is imported."""

    constructor: Mapping[str, Any]
    neuron: Mapping[str, Any]  # of NeuronConfig; enumerations and nested configurations still as plain values

    def described(self) -> dict[str, Any]:
        """As JSON, for the manifest of compiled artifacts."""
        return {"constructor": dict(self.constructor), "neuron": dict(self.neuron)}


def options_for(
    config: EngineConfig, family: Family, shapes: Shapes, continuous: bool, model_class: Any, vocab_size: int
) -> Options:
    """From ``config`` to the package's names. ``model_class`` tells which keywords its constructor has.

    ``engine_options`` are the package's names already: those of the constructor go there, the others to NeuronConfig.
    Raises EngineLoadError for what the class has not, and for shapes by another name.
    """
    amp = AMP.get(config.dtype)
    if amp is None:
        what = f"transformers-neuronx has no dtype {config.dtype!r}"
        raise EngineLoadError("bad-dtype", what, f"use {', '.join(AMP)}")
    constructor = _constructor(config, family, shapes, amp)
    neuron = _neuron(config, family, amp, continuous, vocab_size)
    takes = set(inspect.signature(model_class.__init__).parameters) - {"self", "config"}
    for name, value in config.engine_options.items():
        if name in FIELDS:
            what = f"`engine_options.{name}` cannot be set: it follows from the field `{FIELDS[name]}`"
            raise EngineLoadError("bad-engine-option", what, f"say `{FIELDS[name]}`")
        if name in UNSERVED and value not in (None, False):
            what = f"`engine_options.{name}` cannot be set: {UNSERVED[name]}"
            raise EngineLoadError("bad-engine-option", what, "leave it out")
        if name in UNSERVED:  # to say nothing of it, or no, is how it is
            continue
        if name == "prompt_batch_size" and value != config.slots:
            what = f"with prompt_batch_size {value} one prompt would be broadcast to all {config.slots} slots"
            raise EngineLoadError("bad-engine-size", what, f"leave it out, or say {config.slots}")
        (constructor if name in takes else neuron)[name] = value
    return Options(constructor, neuron)


def _constructor(config: EngineConfig, family: Family, shapes: Shapes, amp: str) -> dict[str, Any]:
    found: dict[str, Any] = {"batch_size": config.slots, "amp": amp, "tp_degree": config.tp_degree}
    if family.serial:
        return {**found, "n_positions": shapes.decode[-1]}
    found |= {"n_positions": list(shapes.decode), "context_length_estimate": list(shapes.prefill)}
    if family.broadcasts:
        found["prompt_batch_size"] = config.slots
    return found


def _neuron(config: EngineConfig, family: Family, amp: str, continuous: bool, vocab_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if continuous:
        found["continuous_batching"] = {"batch_size_for_shared_caches": config.slots}
    if config.group_query_attention is not None:
        found["group_query_attention"] = config.group_query_attention
    if config.fuse_qkv is not None:
        found["fuse_qkv"] = config.fuse_qkv
    if config.compile_workers is not None:
        found["compilation_worker_count"] = config.compile_workers
    weights, cache = {} if family.serial else QUANTIZED, QUANTIZED_KV if family.quantizes_kv else {}
    for name, what, kinds in (("quant", config.quantize, weights), ("kv_cache_quant", config.quantize_kv, cache)):
        if what is None:
            continue
        if what not in kinds:
            of = "the KV cache" if name == "kv_cache_quant" else "weights"
            raise EngineLoadError(
                "bad-engine-option",
                f"this class of transformers-neuronx has no quantization of {of} to {what}",
                f"it has {', '.join(kinds) or 'none'}",
            )
        found[name] = {"quant_dtype": kinds[what], "dequant_dtype": amp}  # another dtype than amp does not work
    if config.sampling == "device":
        if not family.samples:
            what = "this class of transformers-neuronx does not sample on the device"
            raise EngineLoadError("bad-engine-option", what, "sampling: host")
        found["on_device_generation"] = device_generation([DeviceSampling()] * config.slots, vocab_size)
    return found


def device_top_k(vocab_size: int) -> int:
    """The largest top_k of sampling on the device; graphs with one beyond the vocabulary do not build."""
    return min(MAX_TOP_K, vocab_size)


def device_generation(how: list[DeviceSampling], vocab_size: int) -> dict[str, Any]:
    """The keywords of the package's GenerationConfig: how each slot samples, which can be changed between steps."""
    return {
        "do_sample": True,
        "dynamic": True,
        "per_batch_line": True,
        "global_top_k": device_top_k(vocab_size),
        "top_k": [one.top_k for one in how],
        "top_p": [float(one.top_p) for one in how],
        "temperature": [float(one.temperature) for one in how],
    }


def neuron_config(plain: Mapping[str, Any]) -> Any:
    """A NeuronConfig of the installed package; always a new one, since some classes share theirs by default.

    Raises EngineLoadError for an option that the installed version has not, where the package fails an assertion.
    """
    from transformers_neuronx import config as package
    from transformers_neuronx import constants

    nested = {
        "continuous_batching": package.ContinuousBatchingConfig,
        "quant": package.QuantizationConfig,
        "kv_cache_quant": package.KVCacheQuantizationConfig,
        "on_device_generation": package.GenerationConfig,
    }
    made: dict[str, Any] = {}
    for name, value in plain.items():
        if name in nested and isinstance(value, Mapping):
            made[name] = nested[name](**value)
        elif name == "sparse_attn" and isinstance(value, Mapping):
            from transformers_neuronx.sparse_attn_utils import SparseAttnConfig

            made[name] = SparseAttnConfig(**value)
        elif name == "group_query_attention":
            made[name] = _member(constants.GQA, name, value)
        elif name.endswith("_layout"):
            made[name] = _member(constants.Layout, name, value)
        else:
            made[name] = value
    try:
        return package.NeuronConfig(**made)
    except (AssertionError, TypeError) as error:  # unknown names, and "self"
        raise EngineLoadError(
            "bad-engine-option",
            f"the installed transformers-neuronx refuses an option: {error}",
            "`corewright validate` names those of the recorded versions",
        ) from error


def _member(kind: type[Enum], name: str, value: Any) -> Enum:
    try:
        return kind(value)
    except ValueError as error:
        known = ", ".join(str(member.value) for member in kind)
        raise EngineLoadError("bad-engine-option", f"{name} is none of {known}: {value!r}") from error
