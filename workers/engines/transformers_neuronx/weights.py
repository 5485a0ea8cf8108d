"""Checks of the weights that transformers-neuronx will read, before a core is claimed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.artifacts.sources.layout import TNX_SHARDS
from workers.engines.safetensors_headers import check_safetensors
from workers.engines.weight_files import check_pickles, index_of, pickled_files, present_files_in
from workers.messages.engine_protocol import EngineLoadError


def check_layout(path: Path, settings: Mapping[str, Any]) -> None:
    """Raises EngineLoadError for the output of ``save(folder, sharded_weights=True)``; ``settings`` is its config.json.

    The package loads such weights without comparing them with the configuration. Their files record the number of cores
    and the dtype, but not how heads were replicated, what was fused, or which layouts were chosen.
    """
    if settings.get("is_presharded_checkpoint") is True or (path / TNX_SHARDS).exists():
        message = f"transformers-neuronx has sharded the weights in {path}, and their settings are not recorded"
        hint = "set `source` to the original checkpoint: it is compiled once, and sharded at each start"
        raise EngineLoadError("layout-unsupported", message, hint)


def check_weights(path: Path, allow_pickle: bool) -> None:
    """Raises EngineLoadError where files are missing, truncated, or pickles that are not allowed.

    The package prefers safetensors, then the folder ``pytorch_model.bin/``, then pickles. It unpickles without
    restrictions, so allowed pickles are first read with torch's ``weights_only``, which calls no function.
    """
    single = path / "model.safetensors"
    if single.exists() or index_of(single).exists():
        check_safetensors([single] if single.exists() else present_files_in(index_of(single)))
        return
    files = pickled_files(path, allow_pickle)
    check_pickles(file for file in files if file.suffix != ".safetensors")
    check_safetensors(file for file in files if file.suffix == ".safetensors")
