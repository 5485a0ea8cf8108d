"""Checks of a checkpoint that every engine makes before it reads any weights."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Mapping
from hashlib import blake2s
from pathlib import Path
from typing import Any

from workers.host import foreign_files
from workers.messages.engine_protocol import EngineLoadError


def read_config(path: Path) -> dict[str, Any]:
    """Returns the config.json of the checkpoint in ``path``. Raises ``EngineLoadError`` where it cannot be read."""
    if not path.is_dir():
        hint = "a path in `source` must name the folder of a checkpoint"
        raise EngineLoadError("model-not-found", f"there is no directory {path}", hint)
    try:
        foreign_files.check_folder(path)
    except OSError as error:
        raise EngineLoadError("config-unreadable", f"{error.filename} cannot be read: {error.strerror}") from error
    return read_json(path / "config.json")


# Suffixes of the files that a model is loaded from; servers write others beside them, such as logs.
_LOADED = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".json", ".model", ".txt", ".tiktoken", ".jinja", ".py", ".gguf", ".neff"}
)
# Folders that a load writes: vLLM on Neuron compiles into the first, beside the weights.
_WRITTEN_BY_LOADS = frozenset({"neuron-compiled-artifacts", "__pycache__", ".cache"})


def contents_of(folders: Iterable[Path]) -> str:
    """Returns a fingerprint of the files of folders that a model is loaded from: it changes if one is replaced, added,
    removed or rewritten.

    By name, size and time of modification: reading the weights would take as long as loading them. A file that cannot
    be read is left to the load. What a server writes there while it runs does not count.
    """
    digest = blake2s(digest_size=10)
    for folder in folders:
        for file in sorted(folder.rglob("*")):
            within = file.relative_to(folder)
            if file.suffix not in _LOADED or not _WRITTEN_BY_LOADS.isdisjoint(within.parts):
                continue
            with contextlib.suppress(OSError):
                status = file.stat()
                if stat.S_ISREG(status.st_mode):
                    name = os.fsencode(within)
                    digest.update(b"%b\0%d\0%d\0" % (name, status.st_size, status.st_mtime_ns))
    return digest.hexdigest()


def read_json(file: Path) -> dict[str, Any]:
    """Returns the JSON object in ``file``. Raises ``EngineLoadError``."""
    try:
        content = foreign_files.read_json(file)
    except FileNotFoundError as error:
        raise EngineLoadError(
            "config-missing", f"{file.parent} has no {file.name}", "check that it is a checkpoint"
        ) from error
    except (OSError, ValueError) as error:
        raise EngineLoadError("config-unreadable", f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise EngineLoadError("config-unreadable", f"{file} is not a JSON object")
    return content


def eos_token_ids(path: Path, settings: Mapping[str, Any]) -> frozenset[int]:
    """Returns the EOS ids of generation_config.json, else of config.json; never of the tokenizer. May be empty.

    ``settings`` is the result of ``read_config`` for ``path``.
    """
    generation = path / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    if eos is None:
        eos = settings.get("eos_token_id")
    if eos is None:
        return frozenset()
    ids = eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token, int) for token in ids):
        raise EngineLoadError(
            "config-unreadable", f"eos_token_id of {path} must be an id or a list of ids, not: {eos!r}"
        )
    return frozenset(ids)


def text_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings of the language model: those of a model that also reads images are nested."""
    nested = settings.get("text_config")
    return {**settings, **nested} if isinstance(nested, Mapping) else settings


def positions_of(settings: Mapping[str, Any]) -> int | None:
    """Returns the model's maximum of positions. Bloom has none, and GPT-2 and GPT-J use another name."""
    limit = settings.get("max_position_embeddings", settings.get("n_positions"))
    return None if limit is None else int(limit)


def check_rotary(settings: Mapping[str, Any], config: Any) -> None:
    """Raises ``EngineLoadError`` where transformers read another rotary base or scaling than config.json describes.

    ``settings`` is the result of ``read_config``, ``config`` transformers' reading of the same file. Transformers 5
    writes ``rope_parameters``, which earlier releases silently ignore.
    """
    written = settings.get("rope_parameters")
    if not isinstance(written, Mapping) or not hasattr(config, "rope_theta"):  # transformers 5 has none
        return
    theta, kind = written.get("rope_theta", config.rope_theta), written.get("rope_type", "default")
    ignored = f"rope_theta: {theta}" if config.rope_theta != theta else ""
    if kind != "default" and not getattr(config, "rope_scaling", None):
        ignored = ignored or f"rope_type: {kind}"
    if ignored:
        message = f"the installed transformers ignores rope_parameters of config.json ({ignored})"
        hint = "install transformers 5, or write rope_theta and rope_scaling at the top level of config.json"
        raise EngineLoadError("rotary-misread", message, hint)


def check_length(max_len: int, limit: int | None, positions: str = "positions of the model") -> None:
    """Raises ``EngineLoadError`` where ``max_len`` exceeds ``limit``, if there is one."""
    if limit is not None and max_len > limit:
        raise EngineLoadError(
            "max-len-too-long", f"max_len {max_len} exceeds the {limit} {positions}", f"use at most {limit}"
        )
