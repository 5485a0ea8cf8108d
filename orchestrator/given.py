"""Sources that bring compiled or divided weights along, compared with what the spec asks for: by their small files."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.replica_config import unplaced_config
from orchestrator.sources import Facts, Part
from placements.engines import Engine
from placements.problems import Problem
from placements.spec import ModelSpec, Spec

_ENGINE: Engine = "nxd-inference"  # what ``auto`` is on Neuron is known on the host
_NEEDED = frozenset(
    {"allow_pickle", "buckets", "draft", "dtype", "engine", "engine_options", "fuse_qkv", "max_batch", "max_len"}
    | {"quantize", "quantize_kv", "sampling", "source", "tp_degree"}
)


def given_problems(spec: Spec, facts: Facts) -> Iterator[Problem]:
    """What starts of these models would fail with, as an error each; nothing where config.json is not known. Blocks."""
    for model in spec.models:
        if model.engine == _ENGINE and model.name in facts.checkpoints and not _NEEDED & model.broken:
            problem = _problem(spec, model, facts)
            if problem is not None:
                yield problem


def _problem(spec: Spec, model: ModelSpec, facts: Facts) -> Problem | None:
    from workers.engines.nxd_given import foreseen

    own = Part(model, False)
    source = _folder(own, facts)
    draft = None if model.draft is None else _folder(Part(model, True), facts)
    if model.draft is not None and draft is None:
        return None  # what depends on it cannot be compared
    config = unplaced_config(
        model, _ENGINE, source=source, draft_source=draft, length=model.length(facts.checkpoints[model.name])
    )
    error = foreseen(config)
    if error is None:
        return None
    what, hint = (text if source is None else text.replace(source, own.source) for text in (error.what, error.hint))
    return Problem(error.id, "error", own.where(spec), f"{model.name}: {what}", hint)


def _folder(part: Part, facts: Facts) -> str | None:
    """Where its small files are on this machine."""
    head = facts.heads.get(part.key)
    return part.folder if head is None else head.folder
