"""Checks of the weights that transformers-neuronx will read, before a core is claimed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.artifacts.sources.layout import TNX_SHARDS
from workers.engines.weight_files import check_pickles, check_safetensors, index_of, pickles_refused, present_files_in
from workers.messages.engine_protocol import EngineLoadError

SPLIT = "key_to_filename.json"  # in the folder pytorch_model.bin/ that ``save_pretrained_split`` wrote


def weights_of(path: Path) -> Path:
    """Returns the folder of the weights: ``checkpoint/`` in Optimum Neuron's layout, else the model's own."""
    apart = path / "checkpoint"
    return apart if (apart / "config.json").exists() and not (path / "model.safetensors").exists() else path


def check_layout(path: Path, settings: Mapping[str, Any]) -> None:
    """Raises EngineLoadError for the output of ``save(folder, sharded_weights=True)``; ``settings`` is its config.json.

    The package loads such weights without comparing them with the configuration. Their files record the number of cores
    and the dtype, but not how heads were replicated, what was fused, or which layouts were chosen.
    """
    if settings.get("neuron_sharded_weights") is True or (path / TNX_SHARDS).exists():
        message = f"transformers-neuronx has sharded the weights in {path}, and their settings are not recorded"
        hint = "set `source` to the original checkpoint: it is compiled once, and sharded at each start"
        raise EngineLoadError("layout-unsupported", message, hint)


def check_weights(path: Path, allow_pickle: bool) -> None:
    """Raises EngineLoadError where files are missing, truncated, or pickles that are not allowed.

    The package prefers safetensors, then the folder ``pytorch_model.bin/``, then pickles. It unpickles without
    restrictions, so allowed pickles are first read with torch's ``weights_only``, which calls no function.
    """
    safetensors, pickle = path / "model.safetensors", path / "pytorch_model.bin"
    if safetensors.exists() or index_of(safetensors).exists():
        check_safetensors(_files(safetensors))
        return
    if not pickle.exists() and not index_of(pickle).exists():
        message = f"{path} has neither {safetensors.name} nor {pickle.name}"
        raise EngineLoadError(
            "weights-missing", message, "copy the weights again, or convert them with save_pretrained"
        )
    files = present_files_in(pickle / SPLIT) if pickle.is_dir() else _files(pickle)
    pickles = [file for file in files if file.suffix != ".safetensors"]
    if pickles and not allow_pickle:
        raise pickles_refused(path, pickle.name)
    check_pickles(pickles)
    check_safetensors([file for file in files if file.suffix == ".safetensors"])


def _files(single: Path) -> list[Path]:
    return [single] if single.exists() else present_files_in(index_of(single))
