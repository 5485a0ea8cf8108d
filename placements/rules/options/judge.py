"""Checks the ``engine_options`` of a model on a Neuron engine against the tables of its package."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from placements.facts.engines import AUTO_ENGINES, PACKAGES, Engine, reaches
from placements.rules.options.option import Option
from placements.rules.options.owned import FIELDS, UNSERVED, is_default
from placements.rules.options.tables import TABLES

EXPERT_FAMILIES = ("mixtral", "qwen3_moe")
"""The families in `checkpoints` whose NxD Inference class uses a MoENeuronConfig."""


class Finding(NamedTuple):
    """A problem of one option. ``path`` is the option's name, then the names of nested options."""

    id: str
    path: tuple[str, ...]
    what: str
    hint: str


class Scope(NamedTuple):
    """What determines the options of a model."""

    engine: Engine
    family: str | None  # None: unknown, so that the options of all families are allowed
    newest: str  # the last series of the engine that runs on the machines; "" for an engine with one series
    machines: str  # the machines' family, for messages

    @property
    def package(self) -> str:
        return PACKAGES[self.engine]


def known_options(scope: Scope) -> dict[str, Option]:
    """Returns all options of a model, with those of other versions and those that a field replaces."""
    options = dict(TABLES[f"{scope.package}.NeuronConfig"])
    if scope.engine == "nxd-inference":
        if scope.family is None or scope.family in EXPERT_FAMILIES:
            options |= TABLES[f"{scope.package}.MoENeuronConfig"]
        return options | {"prefix_cache": Option("bool", "False")}
    for name, table in TABLES.items():
        package, colon, family = name.partition(":")
        if colon and package == scope.package and scope.family in (None, family):
            options = {**table, **options}
    return options


def check_options(scope: Scope, values: Mapping[str, Any], fields: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields the problems of ``values``. ``fields`` holds the fields of a model, by name."""
    options = known_options(scope)
    for name, value in values.items():
        option = options.get(name)
        reason = _owned(scope, (f"{scope.package}.NeuronConfig", scope.package), name, value)
        if reason is not None:
            yield Finding("unknown-engine-option", (name,), *reason)
        elif option is None:
            fitting = {known: option for known, option in options.items() if option.accepts(value)}
            yield Finding("unknown-engine-option", (name,), *_unknown(scope, name, fitting, fields))
        elif not _has(scope.newest, option):
            yield Finding("unknown-engine-option", (name,), *_other_version(scope, name, option))
        else:
            yield from _check_value(scope, (name,), option, value)


def wrong_value(path: tuple[str, ...], option: Option, value: Any) -> Finding | None:
    """Returns the problem of a value that the option does not accept."""
    if option.accepts(value):
        return None
    label, shown = _label(path), _shown(value)
    if option.choices and isinstance(value, str):
        near = difflib.get_close_matches(value.upper(), option.choices, 1)
        near = near or difflib.get_close_matches(value.lower(), option.choices, 1)
        what = f"{label} is {shown}; it must be {option.wanted}"
        return Finding("unknown-value", path, what, f'did you mean "{near[0]}"?' if near else "")
    return Finding("wrong-type", path, f"{label} is {shown}; it must be {option.wanted}", "")


def _check_value(scope: Scope, path: tuple[str, ...], option: Option, value: Any) -> Iterator[Finding]:
    mismatch = wrong_value(path, option, value)
    if mismatch is not None:
        yield mismatch
    elif option.table and isinstance(value, Mapping):
        table = f"{scope.package}.{option.table}"
        inner = TABLES[table]
        for name, held in value.items():
            reason = _owned(scope, (table,), name, held, path)
            if reason is not None:
                yield Finding("unknown-engine-option", (*path, name), *reason)
            elif name not in inner:
                settable = [known for known in inner if _owned(scope, (table,), known, held, path) is None]
                near = difflib.get_close_matches(name, [one for one in settable if inner[one].accepts(held)], 1)
                what = f'{_label(path)}: "{name}" is not an option of {option.table}'
                hint = f'did you mean "{near[0]}"?' if near else f"its options: {', '.join(settable)}"
                yield Finding("unknown-engine-option", (*path, name), what, hint)
            elif not _has(scope.newest, inner[name]):
                yield Finding("unknown-engine-option", (*path, name), *_other_version(scope, name, inner[name]))
            else:
                yield from _check_value(scope, (*path, name), inner[name], held)


def _owned(
    scope: Scope, tables: tuple[str, ...], name: str, value: Any, above: tuple[str, ...] = ()
) -> tuple[str, str] | None:
    """Returns why the option cannot be set by its name, and the hint; None if it can."""
    label = _label(above) if above else "engine_options"
    for table in tables:
        field = FIELDS.get(table, {}).get(name)
        if field is not None:
            what = f'{label}: "{name}" of {scope.engine} is set by a field of the spec'
            return what, f"set {field}"
        why = UNSERVED.get(table, {}).get(name)
        if why is not None and not is_default(name, value):
            return f'{label}: "{name}" of {scope.engine} cannot be set: {why}', "remove it"
    return None


def _has(newest: str, option: Option) -> bool:
    """Returns whether a version that runs here has the option; between recorded versions, the earlier one counts."""
    return not newest or not option.first or (reaches(newest, option.first) and reaches(option.last, newest))


def _other_version(scope: Scope, name: str, option: Option) -> tuple[str, str]:
    what = f'engine_options: "{name}" is an option of {scope.engine} {option.first} and later'
    return f"{what}, but the last version for {scope.machines} is {scope.newest}", "remove it"


def _unknown(scope: Scope, name: str, options: Mapping[str, Option], fields: Mapping[str, Any]) -> tuple[str, str]:
    what = f'engine_options: "{name}" is not an option of the engine {scope.engine}'
    if name in fields:
        return what, f"set the model's field {name} instead"
    families = [table.partition(":")[2] for table in TABLES if f"{scope.package}:" in table and name in TABLES[table]]
    if families and scope.family is not None:
        return f"{what} for {scope.family}, only for {', '.join(families)}", "remove it"
    if name in TABLES[f"{PACKAGES['nxd-inference']}.MoENeuronConfig"] and scope.engine == "nxd-inference":
        return f"{what} for {scope.family}, only for mixture-of-experts models", "remove it"
    for table, held in FIELDS.items():
        if table.partition(".")[0] != scope.package and name in held:
            return what, f"set {held[name]}"
    for other in AUTO_ENGINES:
        if other != scope.engine and name in known_options(Scope(other, None, "", "")):
            return what, f"it is an option of the engine {other}"
    near = difflib.get_close_matches(name, [*options], 1) or difflib.get_close_matches(name.lower(), [*options], 1)
    if near and (field := next((held[near[0]] for held in FIELDS.values() if near[0] in held), "")):
        return what, f"set {field}"
    tables = (f"{scope.package}.NeuronConfig", scope.package)
    if near and _owned(scope, tables, near[0], "") is None and _has(scope.newest, options[near[0]]):
        return what, f'did you mean "{near[0]}"?'
    return what, f"docs/spec.md lists the options of {scope.engine}"


def _label(path: tuple[str, ...]) -> str:
    return ".".join(("engine_options", *path))


def _shown(value: Any) -> str:
    """Returns the value as YAML on one line, shortened to 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
