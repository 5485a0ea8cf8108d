"""The shapes in config.json of the models that LMI's own tests serve on Neuron devices."""

from __future__ import annotations

from typing import Any


def _gated(family: str, hidden: int, ffn: int, kv_heads: int, layers: int, vocabulary: int, **more: Any) -> Any:
    """A family with gated feed-forward layers, and heads of 128 unless ``more`` says so."""
    return {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        **more,
    }


CONFIGS: dict[str, dict[str, Any]] = {  # by a part of the source, in whose spelling LMI's tests write it
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "opt-1.3b": {
        "model_type": "opt",
        "hidden_size": 2048,
        "word_embed_proj_dim": 2048,
        "ffn_dim": 8192,
        "num_attention_heads": 32,
        "num_hidden_layers": 24,
        "max_position_embeddings": 2048,
        "vocab_size": 50272,
    },
    "gpt-j-6b": {
        "model_type": "gptj",
        "n_embd": 4096,
        "n_head": 16,
        "n_layer": 28,
        "n_positions": 2048,
        "vocab_size": 50400,
    },
    "pythia-2.8b": {
        "model_type": "gpt_neox",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "max_position_embeddings": 2048,
        "vocab_size": 50304,
    },
    "bloom-7b1": {"model_type": "bloom", "hidden_size": 4096, "n_head": 32, "n_layer": 30, "vocab_size": 250880},
    "mistral-7b": _gated("mistral", 4096, 14336, 8, 32, 32000, max_position_embeddings=32768, sliding_window=4096),
    "mixtral-8x7b": _gated(
        "mixtral", 4096, 14336, 8, 32, 32000, max_position_embeddings=32768, num_local_experts=8, num_experts_per_tok=2
    ),
    "llama-2-7b": _gated("llama", 4096, 11008, 32, 32, 32000, max_position_embeddings=4096),
    "llama-2-13b": _gated("llama", 5120, 13824, 40, 40, 32000, max_position_embeddings=4096),
    "llama-3-8b": _gated("llama", 4096, 14336, 8, 32, 128256, max_position_embeddings=8192),
    "tinyllama-1.1b": _gated("llama", 2048, 5632, 4, 22, 32000, max_position_embeddings=2048, num_attention_heads=32),
}
PARAMETERS = {  # in millions, as their pages name them
    "gpt2": 124,
    "opt-1.3b": 1316,
    "gpt-j-6b": 6051,
    "pythia-2.8b": 2775,
    "bloom-7b1": 7069,
    "mistral-7b": 7242,
    "mixtral-8x7b": 46703,
    "llama-2-7b": 6738,
    "llama-2-13b": 13016,
    "llama-3-8b": 8030,
    "tinyllama-1.1b": 1100,
}
