"""Reading what the planner must know of a checkpoint: its config.json, never its weights."""

from __future__ import annotations

import json
from pathlib import Path

from placements.checkpoints import Checkpoint, CheckpointError
from placements.problems import Problem
from placements.spec import Spec


def read_checkpoints(spec: Spec) -> tuple[dict[str, Checkpoint], tuple[Problem, ...]]:
    """The checkpoint of each model whose config.json lies in a folder, and what is wrong with the others.

    A source elsewhere (a hub, S3) or a file that cannot be read gives the warning ``checkpoint-unreadable``, and the
    rules that need it are skipped; a checkpoint that no engine here can serve gives an error.
    """
    checkpoints: dict[str, Checkpoint] = {}
    problems: list[Problem] = []
    for model in spec.models:
        if model.engine == "echo" or "source" in model.broken:
            continue
        where = spec.where("models", model.name, "source")
        if model.source_path is None:
            what = f"{model.name}: the config.json of {model.source!r} is not read from here"
            hint = "rules about heads, memory and lengths are skipped for it"
            problems.append(Problem("checkpoint-unreadable", "warning", where, what, hint))
            continue
        file = Path(model.source_path) / "config.json"
        try:
            checkpoints[model.name] = Checkpoint.from_config(json.loads(file.read_text()))
        except CheckpointError as error:
            problems.append(Problem(error.id, "error", where, f"{model.name}: {error.what}", error.hint))
        except OSError as error:
            what = f"{model.name}: {file} cannot be read: {error.strerror or error}"
            hint = "a path in `source` is relative to the spec file"
            problems.append(Problem("checkpoint-unreadable", "warning", where, what, hint))
        except ValueError as error:
            what = f"{model.name}: {file} is not JSON: {error}"
            problems.append(Problem("checkpoint-unreadable", "warning", where, what, "fetch the checkpoint again"))
    return checkpoints, tuple(problems)
