"""The weights that transformers-neuronx will read, looked at before a core is claimed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.artifacts.sources.layout import TNX_SHARDS
from workers.engines.checkpoint_files import read_json
from workers.messages.engine_protocol import EngineLoadError

SPLIT = "key_to_filename.json"  # in the folder pytorch_model.bin/ that ``save_pretrained_split`` wrote


def weights_of(path: Path) -> Path:
    """The folder of the weights: ``checkpoint/`` in what Optimum Neuron compiled, else the model's own."""
    apart = path / "checkpoint"
    return apart if (apart / "config.json").exists() and not (path / "model.safetensors").exists() else path


def check_layout(path: Path, settings: Mapping[str, Any]) -> None:
    """Raises EngineLoadError for what ``save(folder, sharded_weights=True)`` wrote; ``settings`` are its config.json.

    The package loads such weights into whatever it is told to compute, and compares nothing. Their files tell the
    number of cores and the dtype, and not how heads were replicated, what was fused, nor which layouts were chosen.
    """
    if settings.get("neuron_sharded_weights") is True or (path / TNX_SHARDS).exists():
        what = (
            f"transformers-neuronx has divided the weights in {path} among cores, and nothing tells for which settings"
        )
        hint = "name the original checkpoint as `source`: it is compiled once, and divided at each start"
        raise EngineLoadError("layout-unsupported", what, hint)


def check_weights(path: Path, allow_pickle: bool) -> None:
    """Raises EngineLoadError where files are missing, cut off, or pickles that nobody allowed.

    The package prefers safetensors, then the folder ``pytorch_model.bin/``, then pickles. It unpickles without
    restraint, so what is allowed is read once here with torch's ``weights_only``, which calls no function.
    """
    safe, pickle = path / "model.safetensors", path / "pytorch_model.bin"
    if safe.exists() or _index(safe).exists():
        _check_safetensors(_files(safe))
        return
    if not pickle.exists() and not _index(pickle).exists():
        what = f"{path} has neither {safe.name} nor {pickle.name}"
        raise EngineLoadError("weights-missing", what, "copy the weights again, or convert them with save_pretrained")
    files = _split_files(pickle) if pickle.is_dir() else _files(pickle)
    pickles = [file for file in files if file.suffix != ".safetensors"]
    if pickles and not allow_pickle:
        raise EngineLoadError(
            "pickle-refused",
            f"the weights of {path} are pickled ({pickle.name}), and reading a pickle can run code",
            "convert them with save_pretrained; or, if you trust the file, set `allow_pickle: true`",
        )
    _check_pickles(pickles)
    _check_safetensors([file for file in files if file.suffix == ".safetensors"])


def _index(file: Path) -> Path:
    return file.with_name(f"{file.name}.index.json")


def _files(whole: Path) -> list[Path]:
    if whole.exists():
        files = [whole]
    else:
        shards = read_json(_index(whole)).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise EngineLoadError("config-unreadable", f"{_index(whole)} has no weight_map")
        files = [whole.parent / name for name in sorted(set(shards.values()))]
    return _present(whole.parent, files)


def _split_files(folder: Path) -> list[Path]:
    names = read_json(folder / SPLIT)
    if not names or not all(isinstance(name, str) for name in names.values()):
        raise EngineLoadError("config-unreadable", f"{folder / SPLIT} names no files")
    return _present(folder, [folder / name for name in sorted(set(names.values()))])


def _present(folder: Path, files: list[Path]) -> list[Path]:
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise EngineLoadError("weights-missing", f"{folder} lacks {', '.join(missing)}", "copy the weights again")
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
        except Exception as error:  # whatever an unpickler raises on a garbled file
            if "unsupported global" in str(error).lower():
                raise EngineLoadError(
                    "pickle-refused",
                    f"{file} names functions or classes to be called, and not only weights: {error}",
                    "convert it with save_pretrained where it can do no harm; allow_pickle does not go that far",
                ) from error
            what = f"{file} cannot be read: {type(error).__name__}: {error}"
            raise EngineLoadError("weights-broken", what, "copy the file again") from error
