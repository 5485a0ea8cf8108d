"""The weight files of a checkpoint: which there are, and whether the libraries can read them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from zipfile import is_zipfile

from workers.artifacts.sources.layout import SPLIT
from workers.engines.checkpoint_files import read_json
from workers.messages.engine_protocol import EngineLoadError


def index_of(file: Path) -> Path:
    """Returns the path of the index, if the weights are sharded."""
    return file.with_name(f"{file.name}.index.json")


def files_in(index: Path) -> list[Path]:
    """Returns the files that an index lists. Raises EngineLoadError."""
    content = read_json(index)
    names = content.get("weight_map") if index.name.endswith(".index.json") else content
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise EngineLoadError("config-unreadable", f"{index} lists no files: it needs a weight_map, or file names")
    return [index.parent / name for name in sorted(set(names.values()))]


def weights_root(path: Path) -> Path:
    """Returns the folder of the weights: ``checkpoint/`` in Optimum Neuron's layout, else the model's own."""
    inner = path / "checkpoint"
    return inner if (inner / "config.json").is_file() and not (path / "model.safetensors").is_file() else path


def present_files_in(index: Path) -> list[Path]:
    """Returns the files that an index lists. Raises EngineLoadError if one is missing."""
    files = files_in(index)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        message = f"{index.parent} is missing {', '.join(missing[:3])}{more}"
        raise EngineLoadError("weights-missing", message, "copy the weights again")
    return files


def pickled_files(root: Path, allow_pickle: bool) -> list[Path]:
    """Returns the files of weights without ``model.safetensors``: pickles, or one file for each weight, of either kind,
    as transformers-neuronx splits them. Raises EngineLoadError for a missing file, and for pickles not allowed."""
    pickle, split = root / "pytorch_model.bin", root / SPLIT
    if split.is_file():
        files = present_files_in(split)
    elif pickle.is_file():
        files = [pickle]
    elif index_of(pickle).is_file():
        files = present_files_in(index_of(pickle))
    else:
        raise no_weights(root)
    first = next((file for file in files if file.suffix != ".safetensors"), None)
    if first is not None and not allow_pickle:
        raise pickles_refused(root, first.name)
    return files


def no_weights(folder: Path) -> EngineLoadError:
    """Returns the error of a folder without weights that an engine reads."""
    unsafe = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in sorted(folder.glob(pattern))]
    message = f"{folder} is missing model.safetensors" + (f" and has only {', '.join(unsafe[:3])}" if unsafe else "")
    hint = "convert the weights with save_pretrained" if unsafe else "copy the weights again"
    return EngineLoadError("weights-missing", message, hint)


def pickles_refused(folder: Path, name: str) -> EngineLoadError:
    """Returns the error of weights that are pickled where ``allow_pickle`` is not set."""
    return EngineLoadError(
        "pickle-refused",
        f"the weights of {folder} are pickled ({name}), and reading a pickle can run code",
        "convert them with save_pretrained, or set `allow_pickle: true` if you trust the file",
    )


def check_pickles(files: Iterable[Path]) -> None:
    """Read pickles with torch's ``weights_only``, which calls no function. Raises EngineLoadError.

    Those from before torch 1.6 cannot be mapped, and are read whole.
    """
    import torch

    for file in files:
        try:
            torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
        except Exception as error:  # an unpickler may raise anything on a corrupt file
            if "unsupported global" in str(error).lower():
                raise EngineLoadError(
                    "pickle-refused",
                    f"{file} calls functions or classes besides holding weights: {error}",
                    "convert it with save_pretrained in a sandbox; allow_pickle does not allow this",
                ) from error
            message = f"{file} cannot be read: {type(error).__name__}: {error}"
            raise EngineLoadError("weights-broken", message, "copy the file again") from error
