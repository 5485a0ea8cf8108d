"""The configuration objects. They only hold values; what is wrong with them shows where they are used."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

from neuron_double.bound import bound, recorded, version

from transformers_neuronx.constants import GQA, Layout

NAME = "transformers_neuronx.config."


class QuantizationConfig:
    @bound(NAME + "QuantizationConfig.__init__")
    def __init__(
        self,
        quant_dtype: str = "s8",
        dequant_dtype: str = "f16",
        quantize_method: str = "vector_dynamic",
        quantize_attn: bool = True,
        no_quantize_list: list[str] | None = None,
    ) -> None:
        _check(quant_dtype, "s8", "f8e4m3fn")
        _check(quantize_method, "vector_dynamic", "direct_cast")
        self.quant_dtype, self.dequant_dtype, self.quantize_method = quant_dtype, dequant_dtype, quantize_method
        self.quantize_attn, self.no_quantize_list = quantize_attn, no_quantize_list or []


class KVCacheQuantizationConfig:
    @bound(NAME + "KVCacheQuantizationConfig.__init__")
    def __init__(
        self, quant_dtype: str = "s8", dequant_dtype: str = "bf16", quantize_method: str = "direct_cast"
    ) -> None:
        _check(quant_dtype, "s8", "f16", "bf16", "f8e4m3fn")
        _check(quantize_method, "direct_cast")
        self.quant_dtype, self.dequant_dtype, self.quantize_method = quant_dtype, dequant_dtype, quantize_method


class ContinuousBatchingConfig:
    @bound(NAME + "ContinuousBatchingConfig.__init__")
    def __init__(self, **kwargs: Any) -> None:
        self.batch_size_for_shared_caches = int(kwargs.pop("batch_size_for_shared_caches"))
        assert not kwargs, f"unexpected keys {list(kwargs)}"  # paged attention is not played


class GenerationConfig:
    @bound(NAME + "GenerationConfig.__init__")
    def __init__(
        self,
        *,
        max_length: int | None = None,
        do_sample: bool = False,
        top_k: Any = 50,
        top_p: Any = 1.0,
        top_p_min_tokens: int = 1,
        global_top_k: int | None = None,
        eos_token_id: int | None = None,
        temperature: Any = 1.0,
        dynamic: bool = False,
        deterministic: bool = False,
        per_batch_line: bool = False,
    ) -> None:
        self.max_length, self.do_sample, self.per_batch_line = max_length, do_sample, per_batch_line
        self.top_k, self.top_p, self.temperature = top_k, top_p, temperature
        self.top_p_min_tokens, self.global_top_k = top_p_min_tokens, global_top_k
        self.eos_token_id, self.dynamic, self.deterministic = eos_token_id, dynamic, deterministic


class NeuronConfig:
    """Keyword-only, with the options and defaults that were recorded. An unknown name is an AssertionError."""

    @bound(NAME + "NeuronConfig.__init__")
    def __init__(self, **kwargs: Any) -> None:
        played = version("transformers_neuronx")
        parameters = recorded("transformers_neuronx", NAME + "NeuronConfig.__init__", played).parameters
        names = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
        assert not set(kwargs) - set(names), f"unexpected keys {sorted(set(kwargs) - set(names))}"
        for name in names:
            default = parameters[name].default
            setattr(self, name, kwargs.get(name, _value(default)))
        self.continuous_batching: ContinuousBatchingConfig | None = self.continuous_batching
        for name in ("attention_layout", "collectives_layout", "cache_layout"):
            setattr(self, name, Layout(_plain(getattr(self, name))))
        if self.group_query_attention is not None:
            self.group_query_attention = GQA(_plain(self.group_query_attention))

    def text(self) -> str:
        """What of it goes into a graph: everything but how many are compiled at once."""
        plain = {name: value for name, value in vars(self).items() if name != "compilation_worker_count"}
        return json.dumps(plain, sort_keys=True, default=_json)


def _check(value: str, *values: str) -> None:
    if value not in values:
        raise NotImplementedError(f"{value} is not one of {', '.join(values)}")


def _value(default: Any) -> Any:
    """Enumeration members were recorded as source text."""
    text = repr(default)
    return Layout[text.partition(".")[2]] if text.startswith("Layout.") else default


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _json(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else vars(value)
