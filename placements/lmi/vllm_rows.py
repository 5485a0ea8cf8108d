"""What replaces each property that LMI's loaders `vllm` and `nxdi` hand to vLLM.

By DJL Serving 0.28 to 0.33: `VllmRbProperties`, what `build_vllm_rb_properties` takes out, and the flags of vLLM.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from placements.engines.options import Option, ValueKind
from placements.engines.vllm.flags import CONFIGS, FIELDS, FLAGS, REFUSED
from placements.lmi.conversion import Conversion, boolean, one_of
from placements.lmi.rows import ROWS, Row, degree_row, draft_row, drafted_row, plain_rows, refused
from placements.lmi.settings import LmiSetting

DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}
METHODS = {"fp8": "fp8", "fbgemm_fp8": "fp8", "neuron_quant": "int8"}
"""vLLM's quantization methods on Neuron -> `quantize`."""


def vllm_row(name: str) -> Row | None:
    """Returns what becomes of a property with one of these loaders; None if nothing reads it."""
    if name in VLLM_ROWS or name in ROWS:
        return VLLM_ROWS.get(name) or ROWS[name]
    if name in FIELDS:
        return refused(f"write `{FIELDS[name]}`")
    if name in REFUSED:
        return refused(REFUSED[name])
    return _flag_row(name) if name in FLAGS else None


def _flag_row(name: str) -> Row:
    """An engine option of the same name."""

    def row(model: Conversion, setting: LmiSetting) -> None:
        value = _value(FLAGS[name], setting.value)
        if model.fields["engine"] != "vllm":
            model.note(setting, "dropped", "an option of vLLM")
        elif FLAGS[name].kinds == (ValueKind.TRUE,) and value is False:
            model.note(setting, "dropped", "it is false by default")
        else:
            model.map(setting, f"engine_options.{name}", value)

    return row


def _value(option: Option, written: str) -> Any:
    """Returns the value of a flag. Raises ValueError."""
    kind = option.kinds[0]
    value: Any = written
    if kind in (ValueKind.BOOL, ValueKind.TRUE):
        value = boolean(written)
    elif kind is not ValueKind.STR:
        value = _decoded(written)
    if not option.accepts(value) and not (kind is ValueKind.TRUE and value is False):
        raise ValueError(f"{written[:40]!r} is not {option.wanted}")
    return value


def _decoded(written: str) -> Any:
    """Returns a value in JSON, or as a literal of Python, which is how LMI reads a mapping; else the text itself."""
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(json.dumps(ast.literal_eval(written)))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return written


def _prefix_cache(model: Conversion, setting: LmiSetting) -> None:
    if not boolean(setting.value):
        model.note(setting, "dropped", "it is false by default")
    elif model.fields["engine"] in ("vllm", "nxd-inference", "cpu"):
        model.map(setting, "engine_options.prefix_cache", True)
    else:
        raise ValueError(f"{model.fields['engine']} has no prefix cache")


def _quantize(model: Conversion, setting: LmiSetting) -> None:
    model.map(setting, "quantize", METHODS[one_of(*METHODS)(setting.value)])


def _quantize_kv(model: Conversion, setting: LmiSetting) -> None:
    if setting.value == "auto":
        model.note(setting, "dropped", "vLLM's default")
    else:
        model.map(setting, "quantize_kv", one_of("fp8")(setting.value))


def _dtype(model: Conversion, setting: LmiSetting) -> None:
    if setting.value == "auto":
        model.note(setting, "dropped", "vLLM's default")
    else:
        model.map(setting, "dtype", DTYPES[one_of(*DTYPES)(setting.value)])


def _neuron_config(model: Conversion, setting: LmiSetting) -> None:
    """Options of NxD Inference. Those that a field sets are not repeated: lists of lengths become `buckets`, others are
    refused by name."""
    options = _decoded(setting.value)
    if not isinstance(options, dict):
        raise ValueError(f"{setting.value[:40]!r} is not a mapping")
    if model.fields["engine"] != "vllm":
        raise ValueError("its options are those of vLLM's plugin: write `engine_options` by the engine's own names")
    owners = CONFIGS[setting.name]
    for name in [name for name in options if name in owners]:
        value = options.pop(name)
        if owners[name].startswith("buckets."):
            model.map(setting, owners[name], value)
        else:
            model.note(setting, "refused", f"{name} in it: write `{owners[name]}`")
    if options:
        model.map(setting, "engine_options.additional_config", {setting.name: options})


VLLM_ROWS: Mapping[str, Row] = {
    **plain_rows("vllm"),
    "tensor_parallel_size": degree_row,
    "dtype": _dtype,
    "quantize": _quantize,
    "quantization": _quantize,
    "kv_cache_dtype": _quantize_kv,
    "enable_prefix_caching": _prefix_cache,
    "override_neuron_config": _neuron_config,
    "max_rolling_batch_prefill_tokens": _flag_row("max_num_batched_tokens"),
    "cpu_offload_gb_per_gpu": _flag_row("cpu_offload_gb"),
    "speculative_model": draft_row,
    "num_speculative_tokens": drafted_row,
    "enable_reasoning": refused(REFUSED["reasoning_parser"]),
}
