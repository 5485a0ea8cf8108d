"""The flags of `vllm serve`, and checks of the ``engine_options`` that become flags."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from placements.engines.options import Finding, Option, unsettable, wrong_value
from placements.facts.tables import by_name, read_table

VERSIONS = ("0.11", "0.13", "0.16", "0.21", "0.24", "0.29", "0.32")
"""The recorded versions of vLLM, oldest first: those of the releases of its Neuron plugin, and the tested CPU build."""


def _by_flag(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rows by the names of flags in ``engine_options``."""
    return {flag.replace("-", "_"): row for flag, row in rows.items()}


FLAGS: Mapping[str, Option] = {
    name: Option.read(**row) for name, row in _by_flag(read_table("engines/vllm/flags.json")).items()
}
"""Flag without dashes, as ``engine_options`` name it -> its kind and versions."""

_OWNED = read_table("engines/vllm/owned.json")
FIELDS = _by_flag(by_name(_OWNED["fields"]))
"""Flag -> the field of the spec that it is set by."""

REFUSED = _by_flag(by_name(_OWNED["refused"]))
"""Flag -> why it cannot be set."""

OWN = {"prefix_cache": Option.read("bool"), "additional_config": Option.read("mapping")}
"""Options that are not passed on as they are."""

_KNOWN = {**FLAGS, **OWN}

CONFIGS: Mapping[str, Mapping[str, str]] = {
    "override_neuron_config": {
        "tp_degree": "tp_degree",
        **dict.fromkeys(("batch_size", "max_batch_size", "tkg_batch_size", "is_continuous_batching"), "max_batch"),
        **dict.fromkeys(("seq_len", "max_context_length", "max_length", "n_positions"), "max_len"),
        "torch_dtype": "dtype",
        "context_encoding_buckets": "buckets.prefill",
        "token_generation_buckets": "buckets.decode",
        **dict.fromkeys(("quantized", "quantization_dtype"), "quantize"),
        "kv_cache_quant": "quantize_kv",
        **dict.fromkeys(("is_prefix_caching", "is_block_kv_layout"), "engine_options.prefix_cache"),
        "pa_num_blocks": "engine_options.num_gpu_blocks_override",
        "pa_block_size": "engine_options.block_size",
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
        option, subject = _KNOWN.get(name), f'engine_options: "{name}"'
        if name in FIELDS:
            yield unsettable((name,), f"{subject} of vLLM is set by a field of the spec", f"set {FIELDS[name]}")
        elif name in REFUSED:
            yield unsettable((name,), f"{subject} of vLLM cannot be set: {REFUSED[name]}")
        elif option is None:
            which = version or f"{VERSIONS[0]} to {VERSIONS[-1]}"
            yield unsettable((name,), f"{subject} is not a flag of vLLM {which}", _hint_for(name, value, version))
        elif not option.is_in(version):
            here = f"vllm-neuron {release} has vLLM {version}"
            yield unsettable((name,), f"{subject} is a flag of vLLM {_versions_of(option)}, but {here}")
        elif (finding := wrong_value((name,), option, value) or _wrong_list(name, value)) is not None:
            yield finding
        elif name == "additional_config":
            yield from _fields_in(value)
        elif name == "structured_outputs_config" and "reasoning_parser_plugin" in value:
            fact = f"engine_options.{name}.reasoning_parser_plugin cannot be set: it imports code by name"
            yield unsettable((name, "reasoning_parser_plugin"), fact)


def _hint_for(name: str, value: Any, version: str) -> str:
    """Returns the hint for an unknown flag."""
    near = difflib.get_close_matches(name.lower().replace("-", "_").removeprefix("no_"), _KNOWN, 3)
    if near and near[0] in FIELDS:
        return f"set {FIELDS[near[0]]}"
    near = [flag for flag in near if flag not in REFUSED and flag not in FIELDS and _KNOWN[flag].is_in(version)]
    near = [flag for flag in near if _KNOWN[flag].accepts(value)]
    if not near:
        return "remove it; `vllm serve --help=all` lists the flags"
    return f'did you mean "{near[0]}"?' if len(near) == 1 else f"the nearest are {', '.join(near)}"


def _versions_of(option: Option) -> str:
    if option.last == VERSIONS[-1]:
        return f"{option.first} and later"
    return option.first if option.first == option.last else f"{option.first} to {option.last}"


def _wrong_list(name: str, value: Any) -> Finding | None:
    """An item that begins with a dash would be another flag."""
    if not isinstance(value, list) or (value and all(_is_item(item) for item in value)):
        return None
    fact = f"engine_options.{name} must have items: texts that do not begin with -, or numbers from 0"
    return Finding("wrong-type", (name,), fact, "")


def _is_item(item: Any) -> bool:
    if isinstance(item, str):
        return not item.startswith("-")
    return isinstance(item, int | float) and not isinstance(item, bool) and item >= 0


def _fields_in(config: Any) -> Iterator[Finding]:
    for key, inner in config.items() if isinstance(config, Mapping) else ():
        path, label = ("additional_config", str(key)), f"engine_options.additional_config.{key}"
        meant = str(key).replace("-", "_")
        if meant in CONFIGS and meant != key:
            yield unsettable(path, f"{label}: vllm-neuron ignores this spelling", f'did you mean "{meant}"?')
        elif meant in CONFIGS and not isinstance(inner, Mapping):
            yield Finding("wrong-type", path, f"{label} must be a mapping", "")
        elif meant in CONFIGS:
            for name in [name for name in inner if name in CONFIGS[meant]]:
                fact = f'{label}: "{name}" is set by a field of the spec'
                yield unsettable((*path, name), fact, f"set {CONFIGS[meant][name]}")
