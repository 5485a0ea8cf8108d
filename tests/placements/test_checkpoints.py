from __future__ import annotations

from typing import Any

import pytest

from placements.checkpoints import Checkpoint, CheckpointError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
BLOOM: dict[str, Any] = {
    "model_type": "bloom",
    "hidden_size": 1024,
    "n_head": 16,
    "n_layer": 24,
    "vocab_size": 250880,
    "seq_length": 2048,
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(LLAMA, 8_030_261_248), (GPT2, 124_439_808), (BLOOM, 559_214_592)],
    ids=["llama-3.1-8b", "gpt2", "bloom-560m"],
)
def test_parameters_of_known_models(config: dict[str, Any], parameters: int) -> None:
    """The counts that the model cards give."""
    assert Checkpoint.from_config(config).parameters == parameters


SMALL_LLAMA = {
    **LLAMA,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}
SMALL_GPT2 = {**GPT2, "n_embd": 48, "n_head": 4, "n_layer": 3, "n_positions": 64, "vocab_size": 97}
SMALL_BLOOM = {**BLOOM, "hidden_size": 48, "n_head": 4, "n_layer": 3, "vocab_size": 97}


@pytest.mark.parametrize(
    "config",
    [
        SMALL_LLAMA,
        {**SMALL_LLAMA, "tie_word_embeddings": True},
        {**SMALL_LLAMA, "attention_bias": True, "mlp_bias": True},
        {**SMALL_LLAMA, "head_dim": 16, "num_key_value_heads": None},
        SMALL_GPT2,
        {**SMALL_GPT2, "n_inner": 100},
        {**SMALL_GPT2, "tie_word_embeddings": False},
        SMALL_BLOOM,
        {**SMALL_BLOOM, "tie_word_embeddings": False},
    ],
)
def test_parameters_are_those_that_transformers_builds(config: dict[str, Any]) -> None:
    """The formula equals the sum over the parameters of the real model class, built without memory."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    options = {key: value for key, value in config.items() if key != "model_type"}
    hf_config = transformers.AutoConfig.for_model(config["model_type"], **options)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(hf_config)
    built.tie_weights()
    assert Checkpoint.from_config(config).parameters == sum(parameter.numel() for parameter in built.parameters())


def test_llama_facts() -> None:
    """Every field of a grouped-query llama."""
    assert Checkpoint.from_config(LLAMA) == Checkpoint(
        "llama", 32, 8, 32, 4096, 14336, 128, 128256, 131072, False, 8_030_261_248
    )


def test_bloom_has_no_limit_of_positions() -> None:
    """Alibi: seq_length is what it was trained on, not a limit."""
    assert Checkpoint.from_config(BLOOM).max_positions is None


def test_older_names_are_read() -> None:
    """bloom's n_embed and num_attention_heads, llama without num_key_value_heads."""
    old = {key: value for key, value in BLOOM.items() if key not in ("hidden_size", "n_head")}
    without = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert (
        Checkpoint.from_config({**old, "n_embed": 1024, "num_attention_heads": 16}),
        Checkpoint.from_config(without).kv_heads,
    ) == (Checkpoint.from_config(BLOOM), 32)


def test_tied_embeddings_count_once() -> None:
    """Embedding and head of gpt2 are one matrix, llama's are two."""
    gpt2, llama = Checkpoint.from_config(GPT2), Checkpoint.from_config(LLAMA)
    assert (gpt2.embedding_parameters, llama.embedding_parameters) == (50257 * 768, 2 * 128256 * 4096)


@pytest.mark.parametrize("family", ["mistral", "gptj", "", "LLAMA", 7, ["llama"]])
def test_another_family_is_refused_and_the_supported_ones_listed(family: object) -> None:
    """unknown-family names what it found and what would do."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.from_config({**LLAMA, "model_type": family})
    assert (caught.value.id, f'"{family}"' in caught.value.what, "bloom, gpt2, llama" in caught.value.what) == (
        "unknown-family",
        True,
        True,
    )


@pytest.mark.parametrize(
    "config",
    [
        {},
        {key: value for key, value in LLAMA.items() if key != "num_hidden_layers"},
        {**LLAMA, "num_hidden_layers": "32"},
        {**LLAMA, "num_hidden_layers": 0},
        {**LLAMA, "num_hidden_layers": True},
        {**LLAMA, "hidden_size": 4097},
        {**LLAMA, "num_key_value_heads": 5},
        {**LLAMA, "tie_word_embeddings": "yes"},
        {**LLAMA, "vocab_size": 1 << 60},
        {**GPT2, "n_head": 7},
        {**BLOOM, "n_head": 7},
    ],
)
def test_a_config_that_makes_no_sense_is_malformed(config: dict[str, Any]) -> None:
    """Missing, mistyped and contradictory keys give checkpoint-malformed, never another exception."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.from_config(config)
    assert caught.value.id == "checkpoint-malformed"


def test_a_config_that_is_no_object_is_malformed() -> None:
    """JSON may hold a list where an object belongs."""
    with pytest.raises(CheckpointError, match="not a JSON object"):
        Checkpoint.from_config(["llama"])  # type: ignore[arg-type]
