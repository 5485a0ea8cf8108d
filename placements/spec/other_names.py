"""Names of fields and values in other tools (vLLM, LMI, NxD Inference, Kubernetes), for hints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FIELDS: Mapping[str, str] = {
    "tp_degree": "tp tensor_parallel tensor_parallel_degree tensor_parallel_size num_cores tp_size",
    "max_batch": "batch batch_size max_batch_size max_rolling_batch_size max_num_seqs slots",
    "max_len": "n_positions max_model_len max_length max_seq_len seq_len sequence_length context",
    "source": "model model_id model_path path checkpoint hf_model_id uri url",
    "revision": "rev commit branch git_revision model_revision hf_revision",
    "trust_remote_code": "remote_code allow_remote_code hf_trust_remote_code",
    "dtype": "amp torch_dtype precision data_type auto_cast_type",
    "neff_cache": "cache compile_cache compiled_graph_path neuron_compile_cache_url neffs",
    "cores": "core pins pin core_range visible_cores neuron_rt_visible_cores",
    "replicas": "replica num_replicas instances data_parallel_size",
    "engine": "backend runtime model_loader",
    "max_queue": "queue queue_size max_queue_size",
    "max_queue_bytes": "queue_bytes max_queue_size_bytes",
    "max_wait_s": "queue_timeout max_wait max_wait_time queue_deadline_s request_timeout_s",
    "queue_order": "queue_policy queue_discipline scheduling_policy",
    "objectives": "slo slos objective targets service_level_objectives",
    "ttft_ms": "ttft time_to_first_token_ms first_token_ms",
    "tpot_ms": "tpot itl_ms itl time_per_output_token_ms",
    "queue_ms": "queue_time_ms wait_ms",
    "scaling": "autoscaling autoscaling_config autoscale autoscaler",
    "auto": "enabled automatic",
    "max_swap_s": "hold_s",  # its name until two fields had that one
    "idle_s": "idle idle_timeout idle_timeout_s ttl scale_to_zero_after keep_alive",
    "schedules": "schedule cron crons timers",
    "timezone": "tz time_zone zone",
    "start": "begin from",
    "end": "stop until to",
    "worth_per_1000": "worth value_per_1000",
    "price_per_core_hour": "price cost core_price price_per_core",
    "aliases": "alias served_model_name served_model_names model_alias",
    "system": "system_prompt instructions",
    "max_tokens": "max_new_tokens max_completion_tokens max_output_tokens",
    "temperature": "temp",
    "stop": "stop_sequences stops",
    "chat_template_kwargs": "template_kwargs chat_template",
    "tool_parser": "tool_call_parser tool_calls tools",
    "threads": "omp omp_num_threads num_threads",
    "models": "model",
    "hosts": "host nodes machines",
    "defaults": "default",
    "instance": "instance_type type",
    "emulate": "emulated emulation",
    "reserve": "reserved",
    "draft": "draft_model speculative speculation assistant speculative_model speculative_config",
    "k": "num_speculative_tokens speculation_length num_assistant_tokens tokens",
    "count": "num number replicas",
    "vcpus": "cpus vcpu cpu",
    "min": "minimum min_replicas",
    "max": "maximum max_replicas",
    "lnc": "logical_nc_config neuron_logical_nc_config neuron_rt_virtual_core_size virtual_core_size logical_cores",
    "memory_gib": "memory ram ram_gib mem memory_gb",
    "spread": "anti_affinity antiaffinity pod_anti_affinity max_per_host max_per_node",
    "host": "hosts node max_per_host max_per_node per_host hostname",
    "host_memory_gib": "host_memory memory memory_gib ram ram_gib host_ram_gib",
    "quantize": "quantization quant quantized quantization_dtype "
    "quant_dtype neuron_quant neuron_quant_dtype load_in_8bit int8",
    "group_query_attention": "gqa grouped_query_attention gqa_sharding kv_sharding",
    "quantize_kv": "kv_cache_quant kv_quant kv_cache_dtype kv_dtype quantize_kv_cache kv_cache_quantization",
    "buckets": "bucket bucketing bucket_sizes",
    "prefill": "context context_length_estimate context_encoding_buckets "
    "context_length_buckets neuron_context_length_estimate prompt",
    "decode": "token token_generation_buckets token_gen_buckets n_positions generation kv",
    "sampling": "on_device_sampling on_device_generation sample_on_device device_sampling sampler",
    "fuse_qkv": "fused_qkv qkv_fused fuse_qkv_weights",
    "compiler": "compile neuronx_cc compiler_options compiler_args",
    "optlevel": "opt_level optimize_level neuron_optimize_level optimization_level",
    "flags": "cc_flags neuron_cc_flags args options",
    "workers": "compilation_worker_count compile_workers num_workers jobs",
    "engines": "interpreters engine_settings environments",
    "python": "interpreter python_path executable",
    "transformers-neuronx": "tnx transformers_neuronx transformers_neuron",
    "nxd-inference": "nxdi nxd_inference neuronx_distributed_inference neuronx_distributed nxd",
    "optimum-neuron": "optimum optimum_neuron",
    "torch-neuronx": "torch_neuronx torch_neuron",
}

_PLACES: Mapping[str, str] = {
    "set --host and --port of `corewright up`: one address for all models": "host port",
    "`corewright keys create NAME` makes a key for each client": "api_key",
    "set --tls-cert, --tls-key and --tls-client-ca of `corewright up`": "ssl_certfile ssl_keyfile ssl_ca_certs",
    "set --cors-origin of `corewright up`": "allowed_origins",
    "write its options in engine_options, by the names of the engine's package; with vLLM below additional_config": (
        "override_neuron_config"
    ),
    "remove it: compiled/ of the fleet's home keeps what was compiled": (
        "neuron_compiled_artifacts save_mp_checkpoint_path"
    ),
    "set start_s in deadlines": "model_loading_timeout",
    "write draft: a mapping with source and k": "speculative_draft_model speculative_length",
    "remove it: batches always roll if the model's class supports it": "rolling_batch",
    "remove it: a prompt is one prefill; cpu has engine_options.prefill_chunk, and with vllm it is an option": (
        "max_num_batched_tokens enable_chunked_prefill"
    ),
    "set prefix_cache in engine_options": "enable_prefix_caching",
    "remove it: a request's KV cache is a slot of max_len; with vllm it is an option in engine_options": "block_size",
    "remove it: the number of slots is fixed; with vllm it is an option in engine_options": "gpu_memory_utilization",
    "remove it: the tokenizer's template is used": "chat_template",
    "remove it: always on, if the model's calls can be parsed": "enable_auto_tool_choice",
    "remove it: reasoning is not separated": "reasoning_parser",
    "write adapters: a mapping from names to sources": "enable_lora lora_modules",
    "remove it: the adapters determine it": "max_lora_rank",
}

_VALUES: Mapping[str, str] = {
    "bf16": "bfloat16",
    "fp16": "float16 f16 half",
    "fp32": "float32 f32 float",
    "transformers-neuronx": "tnx transformers_neuronx",
    "nxd-inference": "nxdi neuronx-distributed-inference",
    "optimum-neuron": "optimum",
    "torch-neuronx": "torch-neuron",
    "cpu": "hf transformers",
    "fp8": "f8 float8 f8e4m3 f8e4m3fn float8_e4m3 float8_e4m3fn",
    "device": "on_device",
    "int8": "static_int8 s8 i8 8bit w8 int8_weights dynamic_int8",
    "shard-over-heads": "shard_over_heads",
    "shard-over-batch": "shard_over_batch",
    "replicated-heads": "replicated_heads replicate-to-tp-degree",
    "all-gather-heads": "all_gather_heads",
    "llama3": "llama3_json llama4_json llama llama-3",
    "hermes": "qwen qwen2 qwen3 qwen25",
}

_SWITCHES: Mapping[str, tuple[object, object]] = {
    **dict.fromkeys(("load_in_8bit", "quantized", "neuron_quant", "int8"), ("int8", None)),
    **dict.fromkeys(("kv_cache_quant", "kv_quant"), ("fp8", None)),
    **dict.fromkeys(("on_device_sampling", "on_device_generation", "sample_on_device"), ("device", "host")),
    **dict.fromkeys(("anti_affinity", "antiaffinity"), ("host", None)),
}
"""Key of another tool -> the values of the field that replaces it, for true and for false."""

OTHER_FIELDS: Mapping[str, tuple[str, ...]] = {field: tuple(names.split()) for field, names in _FIELDS.items()}
"""Field -> its names in other tools."""

OTHER_PLACES: Mapping[str, str] = {name: hint for hint, names in _PLACES.items() for name in names.split()}
"""Name in other tools, of what no field of that name replaces -> where it is set, or why it is not."""

OTHER_VALUES: Mapping[str, str] = {name: value for value, names in _VALUES.items() for name in names.split()}
"""Value in other tools -> the value of a spec."""


def converted(key: str, field: str, value: Any) -> Any:
    """Converts the value of a key of another tool to the value of the field that replaces it."""
    if isinstance(value, bool):
        when_true, when_false = _SWITCHES.get(key, (True, False))
        return when_true if value else when_false
    if field == "spread" and isinstance(value, int):
        return {"host": value}
    return value
