"""What every engine that reads a checkpoint wants to know of it before any weight is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.engine import EngineLoadError


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of the checkpoint in ``path``. Raises ``EngineLoadError`` where there is none to be read."""
    if not path.is_dir():
        raise EngineLoadError(
            "model-not-found", f"there is no directory {path}", "`source` must name a local checkpoint"
        )
    return read_json(path / "config.json")


def read_json(file: Path) -> dict[str, Any]:
    """The object in ``file``. Raises ``EngineLoadError``."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
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


def check_length(max_len: int, limit: int | None, positions: str = "positions of the model") -> None:
    """Raises ``EngineLoadError`` where a slot would be longer than ``limit``, if there is one."""
    if limit is not None and max_len > limit:
        raise EngineLoadError(
            "max-len-too-long", f"max_len {max_len} exceeds the {limit} {positions}", f"at most {limit}"
        )
