"""Shared fixtures: the folder that the examples of the pages are read in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import CLI, EXAMPLES, blocks, named
from tests.published_configs import PUBLISHED
from tests.stubs import HEADER, stub_checkpoint

MINILM = {
    "model_type": "bert",
    "hidden_size": 384,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
    "num_attention_heads": 12,
    "num_hidden_layers": 6,
    "vocab_size": 30522,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples' relative sources begin: the checkpoints that docs/errors.md names, and the demo's."""
    path = tmp_path_factory.mktemp("docs")
    llama = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }
    gpt2_xl = {"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48, "vocab_size": 50257}
    configs: dict[str, dict[str, Any]] = {
        "llama-2-7b": llama,
        "gpt2-xl": {**gpt2_xl, "n_positions": 1024},
        "mixtral": {**llama, "model_type": "mixtral", "num_key_value_heads": 8, "num_local_experts": 8},
        "mistral-v0.1": {**llama, "model_type": "mistral", "num_key_value_heads": 8, "sliding_window": 2048},
        "llama-3": {**llama, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
        "pythia": {**llama, "model_type": "gpt_neox", "hidden_act": "gelu"},
        "llama-awq": {**llama, "quantization_config": {"quant_method": "awq", "bits": 4}},
        "llama-linear": {**llama, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "qwen2-yarn": {**llama, "model_type": "qwen2", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "bert": {"model_type": "bert"},
        "qwen3-8b": PUBLISHED["Qwen/Qwen3-8B"],
        "minilm": MINILM,
        "reranker": MINILM,
        "compiled": {**llama, "neuron": {"task": "text-generation"}},
        "own-code": {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}},
        "broken": {key: value for key, value in llama.items() if key != "hidden_size"},
        "tiny": json.loads((EXAMPLES / "models" / "tiny" / "config.json").read_text()),
    }
    for name, config in configs.items():
        stub_checkpoint(path / "models" / name, config)
    adapters = {
        "support": {"r": 8, "base_model_name_or_path": "org/other"},
        "legal": {"r": 16},
        "large": {"r": 1024},
    }
    for name, adapter in adapters.items():
        (path / "lora" / name).mkdir(parents=True)
        (path / "lora" / name / "adapter_config.json").write_text(json.dumps(adapter))
        (path / "lora" / name / "adapter_model.safetensors").write_bytes(HEADER)
    for block in blocks(CLI):
        if block.language == "yaml":
            (path / named(block)).write_text(block.text.partition("\n")[2])
    return path
