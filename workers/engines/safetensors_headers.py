"""Headers of safetensors files, read and checked without the library and before gigabytes of weights are read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from workers.host import foreign_files
from workers.messages.engine_protocol import EngineLoadError

MAX_HEADERS = 64 * 2**20  # bytes of all headers of a checkpoint, 8 s of reading; the largest known one has 15 MB


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
