"""A mixture of experts whose router sends all tokens to the same two experts."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

SHIFT = 2.0  # of the embeddings, 10 standard deviations: what all tokens have in common decides


def skewed(source: Path, folder: Path) -> Path:
    """Returns a copy of a Mixtral checkpoint in which experts 0 and 1 get each token of the first layer."""
    copy = Path(shutil.copytree(source, folder))
    weights = load_file(copy / "model.safetensors")
    weights["model.embed_tokens.weight"] += SHIFT
    weights["model.layers.0.block_sparse_moe.gate.weight"][:2] += 1
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy
