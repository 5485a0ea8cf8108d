"""Options of NxD Inference: lengths and NeuronConfig keywords, from the fields of a spec.

Pure: no package is imported, so the compiling process and the loading one derive the same options.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from placements.engines import options as tables
from placements.engines.capabilities import SHORTEST_BUCKET, Dtype
from placements.engines.nxd_inference.capabilities import (
    NXD_E5M2,
    NXD_QUANTIZED_DTYPES,
    NXD_QUANTIZED_OPTIONS,
    Release,
    nxd_release,
)
from placements.engines.nxd_inference.kv_blocks import OPTIONS as BLOCK_OPTIONS
from placements.engines.nxd_inference.kv_blocks import KvBlocks, kv_blocks, prefix_buckets, refusals
from placements.facts.checkpoints import CheckpointError, sliding_window
from workers.batching.buckets import ladder
from workers.compiled import neuron_target
from workers.engines.engine_setup import CheckpointSettings, checked_lengths, dtype_on
from workers.messages.engine_protocol import EngineLoadError

CONFIG = "neuronx_distributed_inference.NeuronConfig"
OPTIONS = tables.TABLES[CONFIG]
MOE_OPTIONS = frozenset(tables.TABLES["neuronx_distributed_inference.MoENeuronConfig"])  # of models of experts
FIELDS = tables.FIELDS[CONFIG]  # options that are set by fields of the spec
UNSERVED = tables.UNSERVED[CONFIG]  # options that change the model's interface or answers -> why they are unsupported

GLOBAL_TOPK = 256  # the most ids that the device samples from: OnDeviceSamplingConfig's default of global_topk


class NxdSettings(CheckpointSettings, frozen=True):
    """The part of a replica's configuration that the artifacts and their use depend on."""

    source: str
    dtype: Dtype
    slots: int
    max_len: int
    tp_degree: int
    sampling: str
    prefill_buckets: list[int]
    decode_buckets: list[int]
    draft_source: str | None
    draft_k: int
    quantize: str | None
    quantize_kv: str | None
    fuse_qkv: bool | None
    engine_options: dict[str, Any]
    allow_pickle: bool
    window: int = 0  # tokens of the sliding window, if a slot is longer (``precompiled.with_sharding``)
    presharded: bool = False  # the source has only the sharded weights of each core (``precompiled.with_sharding``)

    @property
    def quantized_source(self) -> str | None:
        """The folder of the user's own quantized checkpoint; None: it is created from the source."""
        return self.engine_options.get("quantized_checkpoints_path")

    @property
    def prefix_cache(self) -> bool:
        """Returns whether the KV cache is stored in blocks, which prompts with a common prefix share."""
        return bool(self.engine_options.get("prefix_cache"))

    @property
    def speculation_length(self) -> int:
        """The number of tokens of a step: the last one and the draft's guesses. 0 without a draft."""
        return self.draft_k + 1 if self.draft_source is not None else 0


@dataclass(frozen=True)
class GraphLengths:
    """The lengths that the graphs are compiled for."""

    context_buckets: tuple[int, ...]
    token_buckets: tuple[int, ...]  # the last is the length of a slot on the device
    decode_buckets: tuple[int, ...]  # as the batcher uses them: the last is max_len
    prefix_buckets: tuple[int, ...] = ()  # the lengths of cached prefixes that a prompt can begin with
    blocks: KvBlocks | None = None  # None: a slot is one row of the KV cache

    @property
    def seq_len(self) -> int:
        return self.token_buckets[-1]


def window_of(config: Mapping[str, Any]) -> int | None:
    """Returns the length of the sliding window, where the model of a config.json has one. Raises EngineLoadError."""
    try:
        return sliding_window(str(config.get("model_type")), config)
    except CheckpointError as error:
        raise EngineLoadError("config-unreadable", error.what, error.hint) from error


def lengths(settings: NxdSettings) -> GraphLengths:
    """Returns the buckets of ``settings``, by default doubling ones up to max_len. Raises EngineLoadError.

    The graph of a prompt copies as many keys as the KV cache of a sliding window has, also from shorter prompts
    (``attention/utils.get_last_kv_window``): a bucket that is shorter than the window would be read beyond its end.

    With a draft, a slot on the device is longer than max_len by the tokens of one step: every step is speculative,
    since no other decode graph is compiled, and the last one writes its guesses after max_len. The bucket must be
    larger than position + speculation_length (``model_wrapper.get_target_bucket`` compares with ``<``).
    """
    prompts = ladder(max(SHORTEST_BUCKET, settings.window), settings.max_len)
    default = ladder(SHORTEST_BUCKET, settings.max_len)
    context, decode = checked_lengths(
        settings.prefill_buckets or prompts, settings.decode_buckets or default, settings.max_len
    )
    if context[0] < settings.window:
        message = f"a prefill bucket of {context[0]} tokens is shorter than the sliding window of {settings.window}"
        raise EngineLoadError("bad-buckets", message, f"use buckets of {settings.window} tokens or more")
    ahead = settings.speculation_length
    if 1 in context or ahead in context:
        # The graph distinguishes prompts from steps by width (``model_base``: "1" or "speculation_length" is a step).
        message = f"a prefill bucket of {1 if 1 in context else ahead} tokens would be run as a decoding step"
        raise EngineLoadError("bad-buckets", message, "use a longer bucket")
    if settings.prefix_cache:
        return _block_lengths(settings, context, decode)
    token = decode if not ahead else (*decode[:-1], settings.max_len + ahead)
    return GraphLengths(context, token, decode)


def _block_lengths(settings: NxdSettings, context: tuple[int, ...], decode: tuple[int, ...]) -> GraphLengths:
    """Returns the lengths with a prefix cache: those of the device are multiples of a block. Raises EngineLoadError."""
    options, slots, max_len = settings.engine_options, settings.slots, settings.max_len
    others = {"draft": settings.draft_source, "quantize_kv": settings.quantize_kv}
    for refusal in refusals(options, slots, max_len, context, others):
        raise EngineLoadError("bad-engine-option", refusal.what, refusal.hint)
    blocks = kv_blocks(options, slots, max_len)
    token = sorted({-(-length // blocks.size) * blocks.size for length in decode})
    return GraphLengths(context, tuple(token), decode, prefix_buckets(options, context), blocks)


def neuron_options(settings: NxdSettings, sizes: GraphLengths, release: Release, quantized: str) -> dict[str, Any]:
    """Returns NeuronConfig's keywords for the model itself. Raises EngineLoadError.

    ``quantized`` is the output folder of the quantized checkpoint. dtypes are names; on_device_sampling_config is a
    dictionary of its own options. Options whose default varies between versions are always set.
    """
    slots = settings.slots
    options: dict[str, Any] = {
        "tp_degree": settings.tp_degree,
        "torch_dtype": dtype_on("nxd-inference", settings.dtype),
        "batch_size": slots,
        "ctx_batch_size": 1,
        "tkg_batch_size": slots,
        "max_batch_size": slots,
        "is_continuous_batching": slots > 1,
        "seq_len": sizes.seq_len,
        "n_positions": sizes.seq_len,
        "max_length": sizes.seq_len,
        "max_context_length": sizes.context_buckets[-1],
        "padding_side": "right",
        "enable_bucketing": True,
        "context_encoding_buckets": list(sizes.context_buckets),
        "token_generation_buckets": list(sizes.token_buckets),
        "save_sharded_checkpoint": True,
        "async_mode": False,
        "allow_input_truncation": False,
        "kv_cache_batch_size": slots,
    }
    lnc = os.environ.get("NEURON_LOGICAL_NC_CONFIG")
    if lnc:  # the runtime's value; the compiler must use the same
        options["logical_nc_config"] = int(lnc)
    if settings.fuse_qkv is not None:
        options["fused_qkv"] = settings.fuse_qkv
    if settings.window and neuron_target.current().name in (None, "inf2", "trn1"):
        # Else prompts of 512 tokens or more use `modules/sliding_window/attention.flash_fwd` (0.6 to 0.8). It needs
        # multiples of 512, or of 2048 for 2048 tokens or more, and computes its products in bf16.
        options["attn_kernel_enabled"] = False
    if settings.presharded:
        options["skip_sharding"] = True  # a load still reads the weights of each core
    if sizes.blocks is not None:
        options |= {
            "is_block_kv_layout": True,
            "is_prefix_caching": True,
            "pa_num_blocks": sizes.blocks.number,
            "pa_block_size": sizes.blocks.size,
            "prefix_buckets": list(sizes.prefix_buckets),
        }
    options |= _quantization(settings, quantized, release) | _sampling(settings)
    return options | _user_options(settings.engine_options, options, release)


def draft_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns NeuronConfig's keywords for the draft model: the target's, without its speculation."""
    return dict(options) | {"enable_fused_speculation": False, "speculation_length": 0}


def _user_options(options: Mapping[str, Any], own: Mapping[str, Any], release: Release) -> dict[str, Any]:
    """Returns the options that the spec sets itself, which its rules have checked for every version. Raises
    EngineLoadError for one that the model or the installed version lacks."""
    for option in options:
        if option in BLOCK_OPTIONS and "is_prefix_caching" not in own:
            _refuse(option, "it has no effect without a prefix cache", "set `prefix_cache: true`, too")
        if option in MOE_OPTIONS:  # for models of experts, which the model's class shows later
            continue
        missing = lacks(option, release)
        if missing is not None and option != "prefix_cache":  # corewright's own
            version = f"{release[0]}.{release[1]}"
            raise EngineLoadError(
                "option-not-in-version",
                f"`{option}` is not an option of NxD Inference {version}: {missing}",
                "remove it, or run the model on an image with another version",
            )
    passed_over = {*UNSERVED, *NXD_QUANTIZED_OPTIONS, *BLOCK_OPTIONS, "prefix_cache"}
    merged = {option: value for option, value in options.items() if option not in passed_over}
    if isinstance(options.get("on_device_sampling_config"), Mapping):
        if "on_device_sampling_config" not in own:
            _refuse("on_device_sampling_config", "the host samples", "set `sampling: device`")
        merged["on_device_sampling_config"] = {
            **options["on_device_sampling_config"],
            # what the engine relies on
            **{name: own["on_device_sampling_config"][name] for name in ("do_sample", "dynamic")},
        }
    return merged


def _refuse(option: str, why: str, hint: str) -> None:
    raise EngineLoadError("bad-engine-option", f"`engine_options.{option}` cannot be set: {why}", hint)


def _quantization(settings: NxdSettings, folder: str, release: Release) -> dict[str, Any]:
    """Quantize with one scale for each channel: by default one large weight spoils the scale of a whole matrix."""
    options: dict[str, Any] = {}
    if settings.quantize is not None:
        dtype = settings.engine_options.get("quantization_dtype", NXD_QUANTIZED_DTYPES[settings.quantize][0])
        if dtype == "f8e5m2" and release < nxd_release(NXD_E5M2):
            message = f"NxD Inference {release[0]}.{release[1]} would convert weights of f8e5m2 to int8"
            raise EngineLoadError("option-not-in-version", message, f"use NxD Inference {NXD_E5M2} or later")
        if settings.draft_source is not None:
            _refuse("quantized", "the draft would be converted too, without its scales", "remove `quantize` or `draft`")
        options |= {
            "quantized": True,
            "quantized_checkpoints_path": folder,
            "quantization_dtype": dtype,
            "quantization_type": "per_channel_symmetric",
        }
    if settings.quantize_kv is not None:
        if settings.quantize_kv != "fp8":
            _refuse(
                "kv_cache_quant", f"the KV cache is stored as fp8, not {settings.quantize_kv}", "set `quantize_kv: fp8`"
            )
        options["kv_cache_quant"] = True  # the switch up to 0.7; later only a compiler flag follows from it
        if release >= (0, 8):
            options["kv_quant_config"] = {"direct_cast": True}
    return options


def _sampling(settings: NxdSettings) -> dict[str, Any]:
    """With a draft, the device compares tokens, greedily."""
    if settings.speculation_length:
        return {
            "on_device_sampling_config": {"do_sample": False, "dynamic": False, "top_k": 1},
            "enable_fused_speculation": True,
            "speculation_length": settings.speculation_length,
        }
    if settings.sampling == "device":
        return {"on_device_sampling_config": {"do_sample": True, "dynamic": True, "global_topk": GLOBAL_TOPK}}
    return {}


def lacks(option: str, release: Release) -> str | None:
    """Returns why NeuronConfig of ``release`` lacks the option; None where it has it."""
    entry = OPTIONS.get(option)
    if entry is None:
        return "no version has it"
    if entry.first and nxd_release(entry.first) > release:
        return f"versions from {entry.first} on have it"
    return None
