"""The shapes in `config.json` of models that the examples name, as their publishers give them on the hub."""

from __future__ import annotations

from typing import Any

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}

_LLAMA_31 = {
    **_LLAMA,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "meta-llama/Meta-Llama-3-8B-Instruct": {**_LLAMA, "max_position_embeddings": 8192},
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_31,
    "meta-llama/Llama-3.3-70B-Instruct": {
        **_LLAMA_31,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
    },
    "Qwen/Qwen3-8B": {
        **_LLAMA,
        "model_type": "qwen3",
        "head_dim": 128,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "num_hidden_layers": 36,
        "rope_theta": 1000000.0,
        "vocab_size": 151936,
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        **_LLAMA,
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 32768,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "mistralai/Mistral-7B-Instruct-v0.3": {
        **_LLAMA,
        "model_type": "mistral",
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 32768,
    },
    "HuggingFaceH4/zephyr-7b-beta": {
        **_LLAMA,
        "model_type": "mistral",
        "max_position_embeddings": 32768,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 32000,
    },
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "max_position_embeddings": 2048,
        "num_hidden_layers": 22,
        "num_key_value_heads": 4,
        "rope_theta": 10000.0,
        "vocab_size": 32000,
    },
    "BAAI/bge-base-en-v1.5": {
        "model_type": "bert",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "max_position_embeddings": 512,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "type_vocab_size": 2,
        "vocab_size": 30522,
    },
}

PARAMETERS = {
    "meta-llama/Meta-Llama-3-8B-Instruct": 8_030_261_248,
    "HuggingFaceH4/zephyr-7b-beta": 7_241_732_096,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "BAAI/bge-base-en-v1.5": 109_482_240,
}
"""The parameters of each, as the hub counts them in the weights."""
