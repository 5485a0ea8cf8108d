"""Options of the Neuron packages that ``engine_options`` cannot set: the field that replaces them, or the reason."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_BATCH, _LENGTH = "max_batch", "max_len"
_ROW = "a slot is one row of the KV cache"
_TREE = "only the package's own generate loop verifies token trees"
_EAGLE = "EAGLE drafts read the model's hidden states, which is not tested"
_ONE = "one process drives all cores of a replica"
_STEPS = "each step depends on the tokens of the previous step"
_CHUNKS = "forward raises NotImplementedError for it"
_REQUEST = "each request sets it"

FIELDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "transformers_neuronx.NeuronConfig": MappingProxyType(
            {
                "continuous_batching": _BATCH,
                "group_query_attention": "group_query_attention",
                "fuse_qkv": "fuse_qkv",
                "on_device_generation": "sampling",
                "compilation_worker_count": "compiler.workers",
                "quant": "quantize",
                "kv_cache_quant": "quantize_kv",
            }
        ),
        "transformers_neuronx": MappingProxyType(  # the keywords of every constructor
            {
                "batch_size": _BATCH,
                "n_positions": "max_len, and buckets.decode for several lengths",
                "context_length_estimate": "buckets.prefill",
                "tp_degree": "tp_degree",
                "amp": "dtype",
            }
        ),
        "neuronx_distributed_inference.NeuronConfig": MappingProxyType(
            {
                **dict.fromkeys(("batch_size", "max_batch_size", "ctx_batch_size", "tkg_batch_size"), _BATCH),
                **dict.fromkeys(("spec_batch_size", "kv_cache_batch_size", "is_continuous_batching"), _BATCH),
                **dict.fromkeys(("seq_len", "n_positions", "max_length", "n_active_tokens", "max_new_tokens"), _LENGTH),
                "max_context_length": "buckets.prefill",
                "context_encoding_buckets": "buckets.prefill",
                "token_generation_buckets": "buckets.decode",
                "buckets": "buckets",
                "enable_bucketing": "buckets",
                "tp_degree": "tp_degree",
                "torch_dtype": "dtype",
                "fused_qkv": "fuse_qkv",
                "quantized": "quantize",
                **dict.fromkeys(("kv_cache_quant", "kv_quant_config"), "quantize_kv"),
                "speculation_length": "draft.k",
                "enable_fused_speculation": "draft",
                "logical_nc_config": "hosts.lnc",
                "logical_neuron_cores": "hosts.lnc",
            }
        ),
    }
)
"""Class, or package -> option -> the field of the spec that replaces it."""

UNSERVED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "transformers_neuronx.NeuronConfig": MappingProxyType(
            {
                "padding_side": "the batching mode determines the padding side",
                "output_all_logits": "the engine needs the logits of the last token only",
                "log_softmax_scores": "GPT-2 returns a pair then, and the other classes fail to build their graphs",
                "cast_logits_dtype": "the engine samples from float32 logits",
                "lhs_aligned": "the batching mode determines it",
                "use_2d_cache_ids": "the batching mode determines it",
                "is_eagle_target": "the engine does not support EAGLE",
                "is_eagle_draft": "the engine does not support EAGLE",
            }
        ),
        "transformers_neuronx": MappingProxyType(
            {
                "neuron_config": "engine_options holds its options directly",
                "prefixed_length": "prompts do not share a cached prefix",
            }
        ),
        "neuronx_distributed_inference.NeuronConfig": MappingProxyType(
            {
                "padding_side": "slots are filled from the left, so that padding is on the right",
                "on_cpu": "the engine cpu runs on CPUs",
                "async_mode": _STEPS,
                "output_logits": "the engine returns either logits or tokens",
                "allow_input_truncation": "prompts would be truncated silently",
                **dict.fromkeys(("is_block_kv_layout", "is_prefix_caching"), _ROW),
                **dict.fromkeys(("is_chunked_prefill", "chunked_prefill_config"), _CHUNKS),
                **dict.fromkeys(("is_medusa", "medusa_speculation_length", "num_medusa_heads"), _TREE),
                **dict.fromkeys(("medusa_tree", "token_tree_config"), _TREE),
                **dict.fromkeys(("enable_eagle_speculation", "enable_eagle_draft_input_norm"), _EAGLE),
                **dict.fromkeys(("is_eagle_draft", "is_eagle3", "eagle_rolling_buffer_kernel_enabled"), _EAGLE),
                "attention_dp_degree": "it divides the slots among groups of cores, which is not supported",
                "flash_decoding_enabled": "it divides a slot's positions among the cores, which is not tested",
                "lora_config": "requests cannot select an adapter",
                **dict.fromkeys(("pp_degree", "start_rank_id", "local_ranks_size"), _ONE),
                "skip_sharding": "the compiled folder holds the sharded weights",
            }
        ),
        "neuronx_distributed_inference.OnDeviceSamplingConfig": MappingProxyType(
            {
                **dict.fromkeys(("do_sample", "top_k", "top_p", "temperature"), _REQUEST),
                "dynamic": "requests differ in their sampling settings",
                "on_device_sampling_config": "it is always on with sampling: device",
            }
        ),
    }
)
"""Class, or package -> option -> why it cannot be set. null and false are accepted."""
