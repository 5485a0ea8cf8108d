"""Options of the Neuron packages that a spec does not give by their names, and what says the same, or why not."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_BATCH, _LENGTH = "max_batch", "max_len"
_ROW = "a slot is one line of the KV cache"
_TREE = "a token tree is verified only by the package's own generate loop"
_EAGLE = "its draft reads the model's hidden states, and no test here could show that it works"
_ONE = "one process drives all cores of a replica"
_STEPS = "each step is chosen by the tokens of the one before it"
_CHUNKS = "forward raises NotImplementedError for it"
_REQUEST = "each request says it"

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
                "n_positions": "max_len, and buckets.decode for more lengths than one",
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
"""Class, or package -> option -> the field of the spec that stands for it."""

UNSERVED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "transformers_neuronx.NeuronConfig": MappingProxyType(
            {
                "padding_side": "the engine pads on the side that the way of batching needs",
                "output_all_logits": "the engine needs those of the last token",
                "log_softmax_scores": "GPT-2 then returns a pair, and the other classes fail to build their graphs",
                "cast_logits_dtype": "tokens are chosen from float32",
                "lhs_aligned": "the engine sets it with the way of batching",
                "use_2d_cache_ids": "the engine sets it with the way of batching",
                "is_eagle_target": "the engine has no EAGLE",
                "is_eagle_draft": "the engine has no EAGLE",
            }
        ),
        "transformers_neuronx": MappingProxyType(
            {
                "neuron_config": "its options stand in engine_options themselves",
                "prefixed_length": "prompts have no common beginning that is kept",
            }
        ),
        "neuronx_distributed_inference.NeuronConfig": MappingProxyType(
            {
                "padding_side": "slots are filled from the left, so padding stands on the right",
                "on_cpu": "the engine cpu is the one for that",
                "async_mode": _STEPS,
                "output_logits": "the engine returns either logits or tokens",
                "allow_input_truncation": "a prompt would be cut without a word",
                **dict.fromkeys(("is_block_kv_layout", "is_prefix_caching"), _ROW),
                **dict.fromkeys(("is_chunked_prefill", "chunked_prefill_config"), _CHUNKS),
                **dict.fromkeys(("is_medusa", "medusa_speculation_length", "num_medusa_heads"), _TREE),
                **dict.fromkeys(("medusa_tree", "token_tree_config"), _TREE),
                **dict.fromkeys(("enable_eagle_speculation", "enable_eagle_draft_input_norm"), _EAGLE),
                **dict.fromkeys(("is_eagle_draft", "is_eagle3", "eagle_rolling_buffer_kernel_enabled"), _EAGLE),
                "attention_dp_degree": "the slots would be dealt to groups of cores, each with a batch of its own",
                "flash_decoding_enabled": "a slot's positions would be dealt to the cores; it was tested nowhere here",
                "lora_config": "requests name no adapter",
                **dict.fromkeys(("pp_degree", "start_rank_id", "local_ranks_size"), _ONE),
                "skip_sharding": "the compiled folder holds the sharded weights",
            }
        ),
        "neuronx_distributed_inference.OnDeviceSamplingConfig": MappingProxyType(
            {
                **dict.fromkeys(("do_sample", "top_k", "top_p", "temperature"), _REQUEST),
                "dynamic": "requests differ in how they sample",
                "on_device_sampling_config": "it is on wherever the device samples",
            }
        ),
    }
)
"""Class, or package -> option -> why it stays as it is. To say nothing (null) or false of one is no mistake."""
