"""The flags of `vllm serve`, and checks of the ``engine_options`` that become flags."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from placements.facts.engines import reaches
from placements.rules.options.judge import Finding, wrong_value
from placements.rules.options.option import Option

VERSIONS = ("0.11", "0.13", "0.16", "0.21", "0.24", "0.32")
"""The recorded versions of vLLM, oldest first: those of the releases of its Neuron plugin, and the tested CPU build."""

_HERE = Path(__file__).parent
FLAGS: Mapping[str, Option] = {
    name.replace("-", "_"): Option(**{"default": "", **row})
    for name, row in json.loads((_HERE / "vllm.json").read_bytes()).items()
}
"""Flag without dashes, as ``engine_options`` name it -> its kind and versions."""

_OWNED = json.loads((_HERE / "vllm_owned.json").read_bytes())


def _by_flag(rows: Mapping[str, list[str]]) -> Mapping[str, str]:
    return {flag.replace("-", "_"): text for text, flags in rows.items() for flag in flags}


FIELDS = _by_flag(_OWNED["fields"])
"""Flag -> the field of the spec that it is set by."""

REFUSED = _by_flag(_OWNED["refused"])
"""Flag -> why it cannot be set."""

OWN = {"prefix_cache": Option("bool", ""), "additional_config": Option("mapping", "")}
"""Options that are not passed on as they are."""

_KNOWN = {**FLAGS, **OWN}

CONFIGS: Mapping[str, Mapping[str, str]] = {
    "override_neuron_config": {
        **dict.fromkeys(("tp_degree",), "tp_degree"),
        **dict.fromkeys(("batch_size", "max_batch_size", "tkg_batch_size", "is_continuous_batching"), "max_batch"),
        **dict.fromkeys(("seq_len", "max_context_length", "max_length", "n_positions"), "max_len"),
        **dict.fromkeys(("torch_dtype",), "dtype"),
        **dict.fromkeys(("context_encoding_buckets",), "buckets.prefill"),
        **dict.fromkeys(("token_generation_buckets",), "buckets.decode"),
        **dict.fromkeys(("quantized", "quantization_dtype"), "quantize"),
        **dict.fromkeys(("kv_cache_quant",), "quantize_kv"),
        **dict.fromkeys(("is_prefix_caching", "is_block_kv_layout"), "engine_options.prefix_cache"),
        **dict.fromkeys(("pa_num_blocks",), "engine_options.num_gpu_blocks_override"),
        **dict.fromkeys(("pa_block_size",), "engine_options.block_size"),
    },
    "neuron_config": {
        "num_batched_tokens_buckets": "buckets.prefill",
        "decode_context_length_buckets": "buckets.decode",
    },
}
"""Key of ``additional_config`` -> option in it -> the field of the spec that it is set by. Keys by plugin: NxD
Inference's first."""


def check_flags(values: Mapping[str, Any], version: str = "", release: str = "") -> Iterator[Finding]:
    """Yields the problems of ``engine_options`` for a version of vLLM; "": for any recorded one.

    ``release`` names the plugin that has the version, for messages.
    """
    for name, value in values.items():
        option = _KNOWN.get(name)
        if name in FIELDS or name in REFUSED:
            yield _owned(name)
        elif option is None:
            yield _unknown(name, value, version)
        elif not _in_version(option, version):
            yield _other_version(name, option, version, release)
        elif (finding := wrong_value((name,), option, value) or _wrong_list(name, value)) is not None:
            yield finding
        elif name == "additional_config":
            yield from _fields_in(value)
        elif name == "structured_outputs_config" and "reasoning_parser_plugin" in value:
            what = f"engine_options.{name}.reasoning_parser_plugin cannot be set: it imports code by name"
            yield Finding("unknown-engine-option", (name, "reasoning_parser_plugin"), what, "remove it")


def _in_version(option: Option, version: str) -> bool:
    return not version or not option.first or (reaches(version, option.first) and reaches(option.last, version))


def _owned(name: str) -> Finding:
    if name in FIELDS:
        what = f'engine_options: "{name}" of vLLM is set by a field of the spec'
        return Finding("unknown-engine-option", (name,), what, f"set {FIELDS[name]}")
    what = f'engine_options: "{name}" of vLLM cannot be set: {REFUSED[name]}'
    return Finding("unknown-engine-option", (name,), what, "remove it")


def _unknown(name: str, value: Any, version: str) -> Finding:
    which = version or f"{VERSIONS[0]} to {VERSIONS[-1]}"
    what = f'engine_options: "{name}" is not a flag of vLLM {which}'
    near = difflib.get_close_matches(name.lower().replace("-", "_").removeprefix("no_"), _KNOWN, 3)
    if near and near[0] in FIELDS:
        return Finding("unknown-engine-option", (name,), what, f"set {FIELDS[near[0]]}")
    near = [flag for flag in near if flag not in REFUSED and flag not in FIELDS and _in_version(_KNOWN[flag], version)]
    near = [flag for flag in near if _KNOWN[flag].accepts(value)]
    if not near:
        return Finding("unknown-engine-option", (name,), what, "remove it; `vllm serve --help=all` lists the flags")
    hint = f'did you mean "{near[0]}"?' if len(near) == 1 else f"the nearest are {', '.join(near)}"
    return Finding("unknown-engine-option", (name,), what, hint)


def _other_version(name: str, option: Option, version: str, release: str) -> Finding:
    versions = f"{option.first} to {option.last}"
    if option.first == option.last or option.last == VERSIONS[-1]:
        versions = option.first + (" and later" if option.last == VERSIONS[-1] else "")
    what = f'engine_options: "{name}" is a flag of vLLM {versions}, but vllm-neuron {release} has vLLM {version}'
    return Finding("unknown-engine-option", (name,), what, "remove it")


def _wrong_list(name: str, value: Any) -> Finding | None:
    """An item that begins with a dash would be another flag."""
    if not isinstance(value, list) or (value and all(_is_item(item) for item in value)):
        return None
    what = f"engine_options.{name} must have items: texts that do not begin with -, or numbers from 0"
    return Finding("wrong-type", (name,), what, "")


def _is_item(item: Any) -> bool:
    if isinstance(item, str):
        return not item.startswith("-")
    return isinstance(item, int | float) and not isinstance(item, bool) and item >= 0


def _fields_in(config: Any) -> Iterator[Finding]:
    for key, inner in config.items() if isinstance(config, Mapping) else ():
        path, label = ("additional_config", str(key)), f"engine_options.additional_config.{key}"
        meant = str(key).replace("-", "_")
        if meant in CONFIGS and meant != key:
            what = f"{label}: vllm-neuron ignores this spelling"
            yield Finding("unknown-engine-option", path, what, f'did you mean "{meant}"?')
        elif meant in CONFIGS and not isinstance(inner, Mapping):
            yield Finding("wrong-type", path, f"{label} must be a mapping", "")
        elif meant in CONFIGS:
            for name in [name for name in inner if name in CONFIGS[meant]]:
                what = f'{label}: "{name}" is set by a field of the spec'
                hint = f"set {CONFIGS[meant][name]}"
                yield Finding("unknown-engine-option", (*path, name), what, hint)
