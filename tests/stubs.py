"""Folders that look like checkpoints to whoever plans: every file is there and whole, and none holds a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 96,
    "num_attention_heads": 24,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
HEADER = b'{"__metadata__":{}}'


def stub_checkpoint(folder: Path, config: Mapping[str, Any] = LLAMA, tokenizer: str = "{}") -> Path:
    """``tokenizer`` is the text of its tokenizer.json. Gives the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "model.safetensors").write_bytes(len(HEADER).to_bytes(8, "little") + HEADER)
    return folder
