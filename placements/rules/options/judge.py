"""What is wrong with the ``engine_options`` of a model on a Neuron engine, judged by the tables of its package."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from placements.facts.engines import NXD_VERSIONS, PACKAGES, Engine, reaches
from placements.rules.options.option import Option
from placements.rules.options.owned import FIELDS, UNSERVED
from placements.rules.options.tables import TABLES

EXPERT_FAMILIES = ("mixtral", "qwen3_moe")
"""Those whose NxD Inference class takes a MoENeuronConfig, of the families that `checkpoints` may know."""


class Finding(NamedTuple):
    """One thing that is wrong with an option; ``path`` is its name, and below it that of an option inside."""

    id: str
    path: tuple[str, ...]
    what: str
    hint: str


class Scope(NamedTuple):
    """What decides which options a model has."""

    engine: Engine
    family: str | None  # None: not known, so that the options of all are taken
    newest: str  # the last series of the engine that runs on the machines; "" where it has one
    machines: str  # their family, for the words

    @property
    def package(self) -> str:
        return PACKAGES[self.engine]


def known(scope: Scope) -> dict[str, Option]:
    """Every option that a model may give, those of other versions and those that a field stands for included."""
    found = dict(TABLES[f"{scope.package}.NeuronConfig"])
    if scope.engine == "nxd-inference":
        if scope.family is None or scope.family in EXPERT_FAMILIES:
            found |= TABLES[f"{scope.package}.MoENeuronConfig"]
        return found
    for name, options in TABLES.items():
        package, colon, family = name.partition(":")
        if colon and package == scope.package and scope.family in (None, family):
            found = {**options, **found}
    return found


def judged(scope: Scope, given: Mapping[str, Any], fields: Mapping[str, Any]) -> Iterator[Finding]:
    """Every finding. ``fields`` are those of a model, by name."""
    options = known(scope)
    for name, value in given.items():
        option = options.get(name)
        reason = _owned(scope, (f"{scope.package}.NeuronConfig", scope.package), name, value)
        if reason is not None:
            yield Finding("unknown-engine-option", (name,), *reason)
        elif option is None:
            yield Finding("unknown-engine-option", (name,), *_unknown(scope, name, options, fields))
        elif not _has(scope.newest, option):
            yield Finding("unknown-engine-option", (name,), *_elsewhere(scope, name, option))
        else:
            yield from _value(scope, (name,), option, value)


def _value(scope: Scope, path: tuple[str, ...], option: Option, value: Any) -> Iterator[Finding]:
    if not option.takes(value):
        label, shown = _label(path), _shown(value)
        if option.choices and isinstance(value, str):
            near = difflib.get_close_matches(value.upper(), option.choices, 1)
            near = near or difflib.get_close_matches(value.lower(), option.choices, 1)
            what = f"{label} is {shown}; known: {', '.join(option.choices)}"
            yield Finding("unknown-value", path, what, f'did you mean "{near[0]}"?' if near else "")
        else:
            yield Finding("wrong-type", path, f"{label} is {shown}; it must be {option.wanted}", "")
    elif option.table and isinstance(value, Mapping):
        table = f"{scope.package}.{option.table}"
        inner = TABLES[table]
        for name, held in value.items():
            reason = _owned(scope, (table,), name, held, path)
            if reason is not None:
                yield Finding("unknown-engine-option", (*path, name), *reason)
            elif name not in inner:
                near = difflib.get_close_matches(name, inner, 1)
                what = f'{_label(path)}: "{name}" is no option of {option.table}'
                hint = f'did you mean "{near[0]}"?' if near else f"it has {', '.join(inner)}"
                yield Finding("unknown-engine-option", (*path, name), what, hint)
            elif not _has(scope.newest, inner[name]):
                yield Finding("unknown-engine-option", (*path, name), *_elsewhere(scope, name, inner[name]))
            else:
                yield from _value(scope, (*path, name), inner[name], held)


def _owned(
    scope: Scope, tables: tuple[str, ...], name: str, value: Any, above: tuple[str, ...] = ()
) -> tuple[str, str] | None:
    """Why the option is not given by its name, and what is said instead."""
    label = _label(above) if above else "engine_options"
    for table in tables:
        field = FIELDS.get(table, {}).get(name)
        if field is not None:
            what = f'{label}: "{name}" of {scope.engine} follows from a field of the spec'
            return what, f"say {field}"
        why = UNSERVED.get(table, {}).get(name)
        if why is not None and value not in (None, False):
            return f'{label}: "{name}" of {scope.engine} cannot be set: {why}', "leave it out"
    return None


def _has(newest: str, option: Option) -> bool:
    """Whether a version that runs here has the option; one between the recorded ones has those of the earlier."""
    return not newest or not option.first or (reaches(newest, option.first) and reaches(option.last, newest))


def _elsewhere(scope: Scope, name: str, option: Option) -> tuple[str, str]:
    first, last = option.first, option.last
    if last == NXD_VERSIONS[-1]:
        which = f"{first} and later"
    elif first == last:
        which = first
    else:
        which = f"{first} to {last}"
    what = f'engine_options: "{name}" is an option of {scope.engine} {which}'
    return f"{what}, and {scope.newest} is the last one for {scope.machines}", "leave it out"


def _unknown(scope: Scope, name: str, options: Mapping[str, Option], fields: Mapping[str, Any]) -> tuple[str, str]:
    what = f'engine_options: "{name}" is no option of the engine {scope.engine}'
    if name in fields:
        return what, f"{name} is a field of the model itself"
    families = [table.partition(":")[2] for table in TABLES if f"{scope.package}:" in table and name in TABLES[table]]
    if families and scope.family is not None:
        return f"{what} for {scope.family}, only for {', '.join(families)}", "leave it out"
    if name in TABLES[f"{PACKAGES['nxd-inference']}.MoENeuronConfig"] and scope.engine == "nxd-inference":
        return f"{what} for {scope.family}, only for models of experts", "leave it out"
    for table, held in FIELDS.items():
        if table.partition(".")[0] != scope.package and name in held:
            return what, f"say {held[name]}"
    for other in PACKAGES:
        if other != scope.engine and name in known(Scope(other, None, "", "")):
            return what, f"it is one of the engine {other}"
    near = difflib.get_close_matches(name, [*options], 1) or difflib.get_close_matches(name.lower(), [*options], 1)
    if near:
        field = next((held[near[0]] for held in FIELDS.values() if near[0] in held), "")
        return what, f'did you mean "{near[0]}"?' + (f" say {field}" if field else "")
    return what, f"docs/spec.md says which options {scope.engine} has"


def _label(path: tuple[str, ...]) -> str:
    return ".".join(("engine_options", *path))


def _shown(value: Any) -> str:
    """As YAML would have it, on one line and not too long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
