"""Checks of the weights that transformers-neuronx will read, before a core is claimed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.artifacts.sources.layout import TNX_SHARDS
from workers.engines.checkpoint_files import read_json
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
    if safetensors.exists() or _index(safetensors).exists():
        _check_safetensors(_files(safetensors))
        return
    if not pickle.exists() and not _index(pickle).exists():
        message = f"{path} has neither {safetensors.name} nor {pickle.name}"
        raise EngineLoadError(
            "weights-missing", message, "copy the weights again, or convert them with save_pretrained"
        )
    files = _split_files(pickle) if pickle.is_dir() else _files(pickle)
    pickles = [file for file in files if file.suffix != ".safetensors"]
    if pickles and not allow_pickle:
        raise EngineLoadError(
            "pickle-refused",
            f"the weights of {path} are pickled ({pickle.name}), and reading a pickle can run code",
            "convert them with save_pretrained, or set `allow_pickle: true` if you trust the file",
        )
    _check_pickles(pickles)
    _check_safetensors([file for file in files if file.suffix == ".safetensors"])


def _index(file: Path) -> Path:
    return file.with_name(f"{file.name}.index.json")


def _files(single: Path) -> list[Path]:
    if single.exists():
        files = [single]
    else:
        shards = read_json(_index(single)).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise EngineLoadError("config-unreadable", f"{_index(single)} has no weight_map")
        files = [single.parent / name for name in sorted(set(shards.values()))]
    return _present(single.parent, files)


def _split_files(folder: Path) -> list[Path]:
    names = read_json(folder / SPLIT)
    if not names or not all(isinstance(name, str) for name in names.values()):
        raise EngineLoadError("config-unreadable", f"{folder / SPLIT} lists no files")
    return _present(folder, [folder / name for name in sorted(set(names.values()))])


def _present(folder: Path, files: list[Path]) -> list[Path]:
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise EngineLoadError("weights-missing", f"{folder} is missing {', '.join(missing)}", "copy the weights again")
    return files


def _check_safetensors(files: list[Path]) -> None:
    from safetensors import SafetensorError, safe_open

    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise EngineLoadError("weights-broken", f"{file} cannot be read: {error}", "copy the file again") from error


def _check_pickles(files: list[Path]) -> None:
    import torch

    for file in files:
        try:
            torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # an unpickler may raise anything on a corrupt file
            if "unsupported global" in str(error).lower():
                raise EngineLoadError(
                    "pickle-refused",
                    f"{file} calls functions or classes besides holding weights: {error}",
                    "convert it with save_pretrained in a sandbox; allow_pickle does not allow this",
                ) from error
            message = f"{file} cannot be read: {type(error).__name__}: {error}"
            raise EngineLoadError("weights-broken", message, "copy the file again") from error
