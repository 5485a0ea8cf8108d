"""The weight files of a checkpoint: which there are, and whether the libraries can read them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated
from zipfile import is_zipfile

import msgspec

from placements.engines.capabilities import BYTES, Dtype
from workers.artifacts.sources.layout import COMPILED, INDEX, NEURON_CONFIG, SPLIT, names_in
from workers.artifacts.sources.listing import Listing
from workers.engines.checkpoint_files import read_config, read_json
from workers.host import foreign_files
from workers.messages.engine_protocol import EngineLoadError

MAX_HEADERS = 64 * 2**20  # bytes of all headers of a checkpoint, 8 s of reading; the largest known one has 15 MB

FLOATS = frozenset({"BF16", "F16", "F32", "F64"})  # dtypes that a copy converts to its own dtype


class Tensor(msgspec.Struct):
    dtype: str  # as safetensors names it: BF16
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    data_offsets: tuple[int, int]

    @property
    def size(self) -> int:
        """Its length in bytes."""
        return self.data_offsets[1] - self.data_offsets[0]


def check_safetensors(files: Iterable[Path]) -> None:
    """Detect truncated and corrupt files. Raises EngineLoadError."""
    budget = MAX_HEADERS
    for file in files:
        budget -= read_header(file, budget)[1]


def tensors_of(file: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file by name. Raises EngineLoadError for a truncated or corrupt one."""
    return read_header(file, MAX_HEADERS)[0]


def copy_bytes(source: Path, dtype: Dtype) -> int:
    """Returns the bytes of a copy of a checkpoint's weights in ``dtype``. Quantized tensors stay as they are, as do
    files that are not safetensors, or corrupt, which their reader reports."""
    root = weights_root(source)
    files = sorted(root.glob("model*.safetensors")) or root.glob("pytorch_model*.bin")
    total = 0
    for file in files:
        try:
            tensors = tensors_of(file).values()
        except EngineLoadError:
            total += file.stat().st_size
        else:
            total += sum(
                BYTES[dtype] * math.prod(tensor.shape) if tensor.dtype in FLOATS else tensor.size for tensor in tensors
            )
    return total


def read_header(file: Path, limit: int) -> tuple[dict[str, Tensor], int]:
    """Returns the tensors of a file, and the length of its header, at most ``limit`` bytes.

    Raises EngineLoadError where the header or the size of the file is wrong.
    """
    try:
        foreign_files.check_regular(file)
        with file.open("rb") as stream:
            size = file.stat().st_size
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= size - 8:
                raise ValueError("it has no safetensors header")
            if length > limit:
                raise ValueError(f"the headers of the checkpoint have more than {MAX_HEADERS} bytes")
            parts = msgspec.json.decode(stream.read(length), type=dict[str, msgspec.Raw])
        parts.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(part, type=Tensor) for name, part in parts.items()}
        end = _end_of_data(tensors)
        if size != 8 + length + end:
            raise ValueError(f"it has {size} bytes, but its header describes {8 + length + end}")
        return tensors, length
    except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise EngineLoadError("weights-broken", f"{file} cannot be read: {error}", "copy the file again") from error


def _end_of_data(tensors: Mapping[str, Tensor]) -> int:
    """Returns the end of the last tensor. Raises ValueError unless tensors are contiguous, as safetensors requires, and
    each is as long as its shape and dtype say; the length is not checked for unknown dtypes."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        start, stop = tensor.data_offsets
        bits = _BITS.get(tensor.dtype)
        if start != end or stop < start:
            raise ValueError(f"the tensor {name[:80]!r} is at {start} to {stop}, but should begin at {end}")
        if bits is not None and math.prod(tensor.shape) * bits != tensor.size * 8:
            raise ValueError(
                f"the tensor {name[:80]!r} has {tensor.size} bytes, which does not match its shape and dtype"
            )
        end = stop
    return end


_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
"""Bits of one element, by safetensors' name of its dtype."""


def names_of(source: Path) -> frozenset[str]:
    """Returns the names of all files of a source, including those that are not fetched yet."""
    from workers.artifacts.sources.source_metadata import MARK

    try:  # the small files of a remote source, with a list of all
        listing = foreign_files.read_bytes(source / MARK)
    except OSError:
        return frozenset(names_in(source))
    return frozenset(file.name for file in msgspec.json.decode(listing, type=Listing).files)


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


def check_checkpoint(path: Path, *, allow_pickle: bool = False) -> None:
    """Check the config.json in ``path`` and the header of each weight file, for all engines.

    1. Checkpoints compiled by Optimum Neuron have the weights in ``checkpoint/``.
    2. Safetensors, as listed by an index or as one file; other files are then ignored.
    3. One file for each core, in ``weights/``, or a compiled model, which may contain them.
    4. Pickles: only that they exist and are allowed. Reading one needs torch.

    Raises EngineLoadError.
    """
    read_config(path)
    root = weights_root(path)  # 1
    single, index = root / "model.safetensors", root / INDEX
    if single.is_file() or index.is_file():  # 2
        files = present_files_in(index) if index.is_file() else [single]
    else:  # 3
        files = sorted((path / "weights").glob("tp*_sharded_checkpoint.safetensors"))
        if not files and not ((path / COMPILED).is_file() and (path / NEURON_CONFIG).is_file()):
            files = [file for file in pickled_files(root, allow_pickle) if file.suffix == ".safetensors"]  # 4
    check_safetensors(files)
