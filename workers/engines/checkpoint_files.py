"""What every engine that reads a checkpoint wants to know of it before any weight is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from workers.artifacts.sources.layout import COMPILED, INDEX, NEURON_CONFIG, SPLIT
from workers.host import foreign_files
from workers.messages.engine_protocol import EngineLoadError

MAX_HEADERS = 64 * 2**20  # bytes of the headers of a checkpoint's files, 8 s of reading; the largest known has 15 MB


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of the checkpoint in ``path``. Raises ``EngineLoadError`` where there is none to be read."""
    if not path.is_dir():
        raise EngineLoadError(
            "model-not-found", f"there is no directory {path}", "`source` must name a local checkpoint"
        )
    try:
        foreign_files.check_folder(path)
    except OSError as error:
        raise EngineLoadError("config-unreadable", f"{error.filename} cannot be read: {error.strerror}") from error
    return read_json(path / "config.json")


def read_json(file: Path) -> dict[str, Any]:
    """The object in ``file``. Raises ``EngineLoadError``."""
    try:
        found = foreign_files.read_json(file)
    except FileNotFoundError as error:
        raise EngineLoadError("config-missing", f"{file.parent} has no {file.name}", "is it a checkpoint?") from error
    except (OSError, ValueError) as error:
        raise EngineLoadError("config-unreadable", f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise EngineLoadError("config-unreadable", f"{file} holds no JSON object")
    return found


def eos_token_ids(path: Path, settings: Mapping[str, Any]) -> frozenset[int]:
    """From generation_config.json, else config.json; an int, a list or absent. Never from the tokenizer.

    ``settings`` is what ``read_config`` gave for ``path``.
    """
    generation = path / "generation_config.json"
    found = read_json(generation).get("eos_token_id") if generation.exists() else None
    if found is None:
        found = settings.get("eos_token_id")
    if found is None:
        return frozenset()
    ids = found if isinstance(found, list) else [found]
    if not all(isinstance(token, int) for token in ids):
        raise EngineLoadError(
            "config-unreadable", f"eos_token_id of {path} is neither an id nor a list of ids: {found!r}"
        )
    return frozenset(ids)


def positions_of(settings: Mapping[str, Any]) -> int | None:
    """The positions that the model was made for. Bloom names no limit, and GPT-2 and GPT-J call theirs otherwise."""
    limit = settings.get("max_position_embeddings", settings.get("n_positions"))
    return None if limit is None else int(limit)


def check_rotary(settings: Mapping[str, Any], config: Any) -> None:
    """Raises ``EngineLoadError`` where transformers has read another rotary base or scaling than config.json describes.

    ``settings`` is what ``read_config`` returned, ``config`` what transformers made of the same file. Transformers 5
    writes ``rope_parameters``, which the releases before it ignore silently.
    """
    written = settings.get("rope_parameters")
    if not isinstance(written, Mapping) or not hasattr(config, "rope_theta"):  # transformers 5 has none
        return
    theta, kind = written.get("rope_theta", config.rope_theta), written.get("rope_type", "default")
    ignored = f"rope_theta: {theta}" if config.rope_theta != theta else ""
    if kind != "default" and not getattr(config, "rope_scaling", None):
        ignored = ignored or f"rope_type: {kind}"
    if ignored:
        what = f"the installed transformers ignores rope_parameters of config.json, which says {ignored}"
        hint = "install transformers 5, or write rope_theta and rope_scaling at the top of config.json"
        raise EngineLoadError("rotary-misread", what, hint)


def check_length(max_len: int, limit: int | None, positions: str = "positions of the model") -> None:
    """Raises ``EngineLoadError`` where a slot would be longer than ``limit``, if there is one."""
    if limit is not None and max_len > limit:
        raise EngineLoadError(
            "max-len-too-long", f"max_len {max_len} exceeds the {limit} {positions}", f"at most {limit}"
        )


def check_checkpoint(path: Path, *, allow_pickle: bool = False) -> None:
    """Look at the config.json in ``path`` and at the header of each file of weights, whichever engine will load them.

    1. What Optimum Neuron compiled has the weights in ``checkpoint/``.
    2. Safetensors, as an index names them or as one file; the rest is not looked at then.
    3. One file for each core, in ``weights/``, or a compiled model, which may hold them.
    4. Pickles: that they are there and allowed, no more. Reading one takes torch.

    Raises EngineLoadError.
    """
    read_config(path)
    inner = path / "checkpoint"
    root = inner if (inner / "config.json").is_file() and not (path / "model.safetensors").is_file() else path  # 1
    whole, index = root / "model.safetensors", root / INDEX
    if whole.is_file() or index.is_file():  # 2
        safe = _listed(index) if index.is_file() else [whole]
    else:  # 3
        safe = sorted((path / "weights").glob("tp*_sharded_checkpoint.safetensors"))
        if not safe and not ((path / COMPILED).is_file() and (path / NEURON_CONFIG).is_file()):
            safe = _check_pickles(root, allow_pickle)  # 4
    most = MAX_HEADERS
    for file in safe:
        most -= _check_header(file, most)


def _listed(index: Path) -> list[Path]:
    """The files that an index names, each of which is there."""
    found = read_json(index)
    names = found.get("weight_map") if index.name.endswith(".index.json") else found
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise EngineLoadError("config-unreadable", f"{index} names no files")
    files = [index.parent / name for name in sorted(set(names.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        what = f"{index.parent} lacks {', '.join(missing[:3])}{more}"
        raise EngineLoadError("weights-missing", what, "copy the weights again")
    return files


def _check_pickles(root: Path, allow_pickle: bool) -> list[Path]:
    """The safetensors among the files of a split model; other weights are pickles, which somebody must allow."""
    pickle, split = root / "pytorch_model.bin", root / SPLIT
    index = root / "pytorch_model.bin.index.json"
    if split.is_file():
        files = _listed(split)
    elif pickle.is_file():
        files = [pickle]
    elif index.is_file():
        files = _listed(index)
    else:
        others = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in sorted(root.glob(pattern))]
        what = f"{root} lacks model.safetensors" + (f" and has only {', '.join(others[:3])}" if others else "")
        hint = "convert the weights with save_pretrained" if others else "copy the weights again"
        raise EngineLoadError("weights-missing", what, hint)
    pickles = [file for file in files if file.suffix != ".safetensors"]
    if pickles and not allow_pickle:
        raise EngineLoadError(
            "pickle-refused",
            f"the weights of {root} are pickled ({pickles[0].name}), and reading a pickle can run code",
            "convert them with save_pretrained; or, if you trust the file, set `allow_pickle: true`",
        )
    return [file for file in files if file.suffix == ".safetensors"]


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    data_offsets: tuple[int, int]


def _check_header(file: Path, most: int) -> int:
    """Find a file of safetensors that is cut off or garbled, by its header and its size. Returns the header's length,
    which may be ``most`` bytes."""
    try:
        foreign_files.check_regular(file)
        with file.open("rb") as stream:
            size = file.stat().st_size
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= size - 8:
                raise ValueError("it has no header of safetensors")
            if length > most:
                raise ValueError(f"the headers of the checkpoint have more than {MAX_HEADERS} bytes")
            parts = msgspec.json.decode(stream.read(length), type=dict[str, msgspec.Raw])
        parts.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(part, type=_Tensor) for name, part in parts.items()}
        end = _end_of_data(tensors)
        if size != 8 + length + end:
            raise ValueError(f"it has {size} bytes, and its header tells of {8 + length + end}")
        return length
    except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise EngineLoadError("weights-broken", f"{file} cannot be read: {error}", "copy the file again") from error


def _end_of_data(tensors: Mapping[str, _Tensor]) -> int:
    """Where the last tensor ends. Raises ValueError unless they lie one behind another, as safetensors demands, each as
    long as its shape and dtype say; of a dtype that is unknown here, the length is not checked."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        start, stop = tensor.data_offsets
        bits = _BITS.get(tensor.dtype)
        if start != end or stop < start:
            raise ValueError(f"the tensor {name[:80]!r} is at {start} to {stop}, where {end} should begin it")
        if bits is not None and math.prod(tensor.shape) * bits != (stop - start) * 8:
            raise ValueError(f"the tensor {name[:80]!r} has {stop - start} bytes, which its shape and dtype contradict")
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
"""Of one element, by safetensors' name of its dtype."""
