"""Reading what the planner and the controller must know of a checkpoint: small files, never its weights."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2s
from pathlib import Path

from placements.checkpoints import Checkpoint, CheckpointError
from placements.problems import Problem
from placements.spec import Spec


@dataclass(frozen=True)
class Facts:
    """What was read of a spec's checkpoints, by model, and of its drafts; and what could not be read."""

    checkpoints: Mapping[str, Checkpoint]
    drafts: Mapping[str, Checkpoint]
    problems: tuple[Problem, ...]


def read_facts(spec: Spec) -> Facts:
    """The config.json of each model and draft whose source is a folder.

    A source elsewhere (a hub, S3) or a file that cannot be read gives the warning ``checkpoint-unreadable``, and the
    rules that need it are skipped; a checkpoint that no engine here can serve gives an error.
    """
    checkpoints: dict[str, Checkpoint] = {}
    drafts: dict[str, Checkpoint] = {}
    problems: list[Problem] = []
    for model in spec.models:
        if model.engine == "echo" or "source" in model.broken:
            continue
        asked = [("source", model.source, model.source_path, checkpoints)]
        if model.draft is not None:
            asked.append(("draft", model.draft.source, model.draft_path, drafts))
        for key, source, folder, found in asked:
            where = spec.where("models", model.name, key)
            read = _read(folder, source, where, model.name)
            if isinstance(read, Problem):
                problems.append(read)
            else:
                found[model.name] = read
    return Facts(checkpoints, drafts, tuple(problems))


def _read(folder: str | None, source: str, where: str, model: str) -> Checkpoint | Problem:
    skipped = "rules about heads, memory and lengths are skipped for it"
    if folder is None:
        what = f"{model}: the config.json of {source!r} is not read from here"
        return Problem("checkpoint-unreadable", "warning", where, what, skipped)
    file = Path(folder) / "config.json"
    try:
        return Checkpoint.from_config(json.loads(file.read_text()))
    except CheckpointError as error:
        return Problem(error.id, "error", where, f"{model}: {error.what}", error.hint)
    except OSError as error:
        what = f"{model}: {file} cannot be read: {error.strerror or error}"
        begins = "a relative path begins at the spec file; " if source.startswith(".") else ""
        hint = f"{begins}config.json alone is enough to plan with; until it is there {skipped}"
        return Problem("checkpoint-unreadable", "warning", where, what, hint)
    except ValueError as error:
        what = f"{model}: {file} is not JSON: {error}"
        return Problem("checkpoint-unreadable", "warning", where, what, "fetch the checkpoint again")


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def tokenizer_key(engine: str, folder: str | None) -> str:
    """Equal for two sources whose tokenizers and chat templates are made of the same files. Blocks."""
    if engine == "echo" or folder is None:
        return engine if engine == "echo" else f"{engine}:{folder}"
    digest = blake2s(digest_size=8)
    for name in _TOKENIZER_FILES:
        with contextlib.suppress(OSError):
            digest.update(name.encode() + b"\0" + blake2s((Path(folder) / name).read_bytes()).digest())
    return digest.hexdigest()
