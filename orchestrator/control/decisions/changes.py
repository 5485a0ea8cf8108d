"""Computes what a new spec changes: each difference, its cost, and the action for each model. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import blake2s
from typing import Any

from placements.engines.registry import HOST_ENGINES, Engine, candidates_of
from placements.facts.adapters import Adapter, max_rank
from placements.spec.schema import REACHES, ModelSpec, Reach, Spec


class Tag(str, Enum):
    """The cost of a change, in ascending order; a model's tag is the greatest of its fields'."""

    NONE = "none"
    RECONFIGURE = "reconfigure"  # takes effect while the replicas run
    RESTART = "restart"  # needs new processes
    RECOMPILE = "recompile"  # needs new processes and, unless it is cached, a new NEFF


_ORDER = tuple(Tag)


class Action(str, Enum):
    """The action that an apply takes on a model."""

    NONE = "none"
    CREATE = "create"
    UPDATE = "update"  # its processes stay, or it has none
    REPLACE = "replace"  # new processes replace the running ones
    DELETE = "delete"


@dataclass(frozen=True)
class FieldChange:
    """A changed field, with its values as in the spec's JSON."""

    field: str
    before: Any
    after: Any


@dataclass(frozen=True)
class ModelChange:
    """The changes of one model of the old spec, the new one, or both."""

    model: str
    tag: Tag
    fields: tuple[FieldChange, ...] = ()
    action: Action = Action.NONE  # never REPLACE: this comparison does not know what runs


def tag_of(name: str, engine: Engine) -> Tag:
    """Returns the cost of changing that field of `ModelSpec` on a resolved engine. Raises KeyError for other fields."""
    reach = REACHES[name]
    if reach is Reach.LIVE:
        return Tag.RECONFIGURE
    compiles = reach is Reach.SHAPE and engine not in HOST_ENGINES  # host engines compile nothing: a restart suffices
    return Tag.RECOMPILE if compiles else Tag.RESTART


def model_change(before: ModelSpec | None, after: ModelSpec | None, engine: Engine) -> ModelChange:
    """Returns the changes of one model. Raises ValueError if both sides are None."""
    either = after or before
    if either is None:
        raise ValueError("no model on either side")
    if before is None or after is None:
        tag = Tag.RECOMPILE if after and engine not in HOST_ENGINES else Tag.RESTART
        return ModelChange(either.name, tag, action=Action.CREATE if after else Action.DELETE)
    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    for dump, model in ((old, before), (new, after)):  # the same folder may be spelled in two ways
        dump["source"] = model.source_path or model.source
        dump["adapters"] = model.adapter_places
        if model.draft is not None:
            dump["draft"] = {**dump["draft"], "source": model.draft_path or model.draft.source}
    fields = tuple(FieldChange(name, old[name], new[name]) for name in new if name != "name" and old[name] != new[name])
    tags = [tag_of(change.field, engine) for change in fields]
    tag = max(tags, key=_ORDER.index, default=Tag.NONE)
    return ModelChange(either.name, tag, fields, Action.UPDATE if fields else Action.NONE)


def interpreters(spec: Spec, engine: Engine) -> dict[str, str]:
    """Returns the Python and the command that the spec sets for a resolved engine, by field; ``auto`` may resolve to
    either of two."""
    candidates = candidates_of(engine)
    pythons = {f"engines.{name}.python": spec.python_for(name) or "" for name in candidates}
    commands = {f"engines.{name}.command": " ".join(map(shlex.quote, spec.launch_of(name))) for name in candidates}
    return {field: value for field, value in (pythons | commands).items() if value}


def version_of(model: ModelSpec, pythons: Mapping[str, str] | None = None, adapters: tuple[object, ...] = ()) -> str:
    """Returns a hash of a replica's configuration: processes of the same version are interchangeable.

    ``model`` is resolved; ``pythons`` are the spec's `interpreters` for its engine, ``adapters`` what
    `adapters_at_start` returns.
    """
    inputs = (*model.started_with, *adapters, *sorted((pythons or {}).items()))
    return blake2s(repr(inputs).encode(), digest_size=4).hexdigest()


def adapters_at_start(model: ModelSpec, adapters: Iterable[Adapter], *, live: bool) -> tuple[object, ...]:
    """Returns what a running server cannot change about its adapters: whether it has any or ``max_loras`` reserves room
    for them, and the largest rank. If not ``live``, as on Neuron devices, all of them are loaded at the start."""
    if not live:
        return tuple(sorted(model.adapter_places.items()))
    if not model.adapters and "max_loras" not in model.engine_options:
        return ()
    return (model.engine_options.get("max_lora_rank") or max_rank([adapter.rank for adapter in adapters]),)


def difference(before: Spec | None, after: Spec, engines: Mapping[str, Engine]) -> list[ModelChange]:
    """Returns the changes of every model of either spec, the new one's first. ``engines`` are resolved, by model."""
    old = {model.name: model for model in before.models} if before is not None else {}
    changes = []
    for model in after.models:
        engine, earlier = engines[model.name], old.pop(model.name, None)
        change = model_change(earlier, model, engine)
        if before is not None and earlier is not None:
            change = _with_interpreters(change, interpreters(before, engine), interpreters(after, engine))
        changes.append(change)
    return changes + [model_change(model, None, model.engine) for model in old.values()]


def _with_interpreters(change: ModelChange, before: Mapping[str, str], after: Mapping[str, str]) -> ModelChange:
    """Returns the change with the interpreters that differ, each of which requires a restart."""
    fields = tuple(
        FieldChange(field, before.get(field), after.get(field))
        for field in dict.fromkeys((*before, *after))
        if before.get(field) != after.get(field)
    )
    if not fields:
        return change
    tag = max(change.tag, Tag.RESTART, key=_ORDER.index)
    return replace(change, tag=tag, fields=(*change.fields, *fields), action=Action.UPDATE)
