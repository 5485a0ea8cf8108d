"""Checks all of a checkpoint's files for any engine, without torch and without the engine's package."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from workers.artifacts.sources.layout import COMPILED, INDEX, NEURON_CONFIG, SPLIT
from workers.engines.checkpoint_files import read_config
from workers.engines.weight_files import pickles_refused, present_files_in
from workers.host import foreign_files
from workers.messages.engine_protocol import EngineLoadError

MAX_HEADERS = 64 * 2**20  # bytes of all headers of a checkpoint, 8 s of reading; the largest known one has 15 MB


def check_checkpoint(path: Path, *, allow_pickle: bool = False) -> None:
    """Check the config.json in ``path`` and the header of each weight file, for all engines.

    1. Checkpoints compiled by Optimum Neuron have the weights in ``checkpoint/``.
    2. Safetensors, as listed by an index or as one file; other files are then ignored.
    3. One file for each core, in ``weights/``, or a compiled model, which may contain them.
    4. Pickles: only that they exist and are allowed. Reading one needs torch.

    Raises EngineLoadError.
    """
    read_config(path)
    inner = path / "checkpoint"
    root = inner if (inner / "config.json").is_file() and not (path / "model.safetensors").is_file() else path  # 1
    single, index = root / "model.safetensors", root / INDEX
    if single.is_file() or index.is_file():  # 2
        files = present_files_in(index) if index.is_file() else [single]
    else:  # 3
        files = sorted((path / "weights").glob("tp*_sharded_checkpoint.safetensors"))
        if not files and not ((path / COMPILED).is_file() and (path / NEURON_CONFIG).is_file()):
            files = _check_pickles(root, allow_pickle)  # 4
    budget = MAX_HEADERS
    for file in files:
        budget -= _check_header(file, budget)


def _check_pickles(root: Path, allow_pickle: bool) -> list[Path]:
    """Returns the safetensors files of a split model. Raises EngineLoadError for pickles that are not allowed."""
    pickle, split = root / "pytorch_model.bin", root / SPLIT
    index = root / "pytorch_model.bin.index.json"
    if split.is_file():
        files = present_files_in(split)
    elif pickle.is_file():
        files = [pickle]
    elif index.is_file():
        files = present_files_in(index)
    else:
        unsafe = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in sorted(root.glob(pattern))]
        message = f"{root} is missing model.safetensors" + (f" and has only {', '.join(unsafe[:3])}" if unsafe else "")
        hint = "convert the weights with save_pretrained" if unsafe else "copy the weights again"
        raise EngineLoadError("weights-missing", message, hint)
    pickles = [file for file in files if file.suffix != ".safetensors"]
    if pickles and not allow_pickle:
        raise pickles_refused(root, pickles[0].name)
    return [file for file in files if file.suffix == ".safetensors"]


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    data_offsets: tuple[int, int]


def _check_header(file: Path, limit: int) -> int:
    """Detect a truncated or corrupt safetensors file by its header and its size. Returns the header's length, at most
    ``limit`` bytes."""
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
        tensors = {name: msgspec.json.decode(part, type=_Tensor) for name, part in parts.items()}
        end = _end_of_data(tensors)
        if size != 8 + length + end:
            raise ValueError(f"it has {size} bytes, but its header describes {8 + length + end}")
        return length
    except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise EngineLoadError("weights-broken", f"{file} cannot be read: {error}", "copy the file again") from error


def _end_of_data(tensors: Mapping[str, _Tensor]) -> int:
    """Returns the end of the last tensor. Raises ValueError unless tensors are contiguous, as safetensors requires, and
    each is as long as its shape and dtype say; the length is not checked for unknown dtypes."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        start, stop = tensor.data_offsets
        bits = _BITS.get(tensor.dtype)
        if start != end or stop < start:
            raise ValueError(f"the tensor {name[:80]!r} is at {start} to {stop}, but should begin at {end}")
        if bits is not None and math.prod(tensor.shape) * bits != (stop - start) * 8:
            raise ValueError(
                f"the tensor {name[:80]!r} has {stop - start} bytes, which does not match its shape and dtype"
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
