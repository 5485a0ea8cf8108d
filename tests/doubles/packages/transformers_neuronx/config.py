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
        assert quant_dtype in ("s8", "f8e4m3fn"), f"unsupported quant_dtype {quant_dtype}"
        assert quantize_method in ("vector_dynamic", "direct_cast"), f"unsupported quantize_method {quantize_method}"
        self.quant_dtype, self.dequant_dtype, self.quantize_method = quant_dtype, dequant_dtype, quantize_method
        self.quantize_attn, self.no_quantize_list = quantize_attn, no_quantize_list or []


class KVCacheQuantizationConfig:
    @bound(NAME + "KVCacheQuantizationConfig.__init__")
    def __init__(
        self, quant_dtype: str = "s8", dequant_dtype: str = "bf16", quantize_method: str = "direct_cast"
    ) -> None:
        assert quant_dtype in ("s8", "f16", "bf16", "f8e4m3fn"), f"unsupported quant_dtype {quant_dtype}"
        assert quantize_method == "direct_cast", f"unsupported quantize_method {quantize_method}"
        self.quant_dtype, self.dequant_dtype, self.quantize_method = quant_dtype, dequant_dtype, quantize_method


class ContinuousBatchingConfig:
    @bound(NAME + "ContinuousBatchingConfig.__init__")
    def __init__(self, **kwargs: Any) -> None:
        self.max_num_seqs = kwargs.pop("max_num_seqs", None)
        if "batch_size_for_shared_caches" in kwargs:
            self.max_num_seqs = kwargs.pop("batch_size_for_shared_caches")
        self.max_model_len = kwargs.pop("max_model_len", None)
        self.enable_chunked_prefill = kwargs.pop("enable_chunked_prefill", False)
        self.optimized_paged_attention = kwargs.pop("optimized_paged_attention", False)
        assert not kwargs, f"unexpected keys {list(kwargs)}"

    @property
    def batch_size_for_shared_caches(self) -> int:
        return int(self.max_num_seqs)


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
        lhs_aligned = bool(kwargs.pop("lhs_aligned", kwargs.pop("use_2d_cache_ids", False)))
        assert not set(kwargs) - set(names), f"unexpected keys {sorted(set(kwargs) - set(names))}"
        for name in names:
            default = parameters[name].default
            setattr(self, name, kwargs.get(name, _value(default)))
        self.continuous_batching: ContinuousBatchingConfig | None = self.continuous_batching
        self.lhs_aligned = lhs_aligned or self.continuous_batching is not None
        if self.continuous_batching is not None:
            self.padding_side = "right"
        for name in ("attention_layout", "collectives_layout", "cache_layout"):
            setattr(self, name, Layout(_plain(getattr(self, name))))
        if self.group_query_attention is not None:
            self.group_query_attention = GQA(_plain(self.group_query_attention))
        self.rank_id = 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"NeuronConfig has no {name}")

    @property
    def use_2d_cache_ids(self) -> bool:
        return self.lhs_aligned

    @property
    def vectorize_last_token_id(self) -> bool:
        return self.lhs_aligned

    @property
    def bsh_cache_layout(self) -> bool:
        return bool(self.cache_layout == Layout.BSH)

    def text(self) -> str:
        """What of it goes into a graph: everything but how many are compiled at once."""
        plain = {name: value for name, value in vars(self).items() if name != "compilation_worker_count"}
        return json.dumps(plain, sort_keys=True, default=_json)


def _value(default: Any) -> Any:
    """Enumeration members were recorded as source text."""
    text = repr(default)
    return Layout[text.partition(".")[2]] if text.startswith("Layout.") else default


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _json(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else vars(value)
