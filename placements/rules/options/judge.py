"""Checks the ``engine_options`` of a model on a Neuron engine against the tables of its package."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from placements.facts.engines import AUTO_ENGINES, PACKAGES, Engine
from placements.rules.options.tables import FIELDS, TABLES, UNSERVED, Option, is_default

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
        return options | {"prefix_cache": Option.read("bool", "False")}
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
        if (owned := _owned(scope, (f"{scope.package}.NeuronConfig", scope.package), (name,), value)) is not None:
            yield owned
        elif option is None:
            fitting = {known: option for known, option in options.items() if option.accepts(value)}
            yield _unknown(scope, name, fitting, fields)
        else:
            yield from _check_value(scope, (name,), option, value)


def unsettable(path: tuple[str, ...], fact: str, hint: str = "remove it") -> Finding:
    """Returns the problem of an option that cannot be set."""
    return Finding("unknown-engine-option", path, fact, hint)


def wrong_value(path: tuple[str, ...], option: Option, value: Any) -> Finding | None:
    """Returns the problem of a value that the option does not accept."""
    if option.accepts(value):
        return None
    fact = f"{_label(path)} is {_as_yaml(value)}; it must be {option.wanted}"
    if not (option.choices and isinstance(value, str)):
        return Finding("wrong-type", path, fact, "")
    near = nearest(value.upper(), option.choices) or nearest(value.lower(), option.choices)
    return Finding("unknown-value", path, fact, f'did you mean "{near}"?' if near else "")


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the known name that is most similar; "" if none is."""
    return next(iter(difflib.get_close_matches(name, [*known], 1)), "")


def _check_value(scope: Scope, path: tuple[str, ...], option: Option, value: Any) -> Iterator[Finding]:
    if not option.is_in(scope.newest):
        fact = f'engine_options: "{path[-1]}" is an option of {scope.engine} {option.first} and later'
        yield unsettable(path, f"{fact}, but the last version for {scope.machines} is {scope.newest}")
    elif (mismatch := wrong_value(path, option, value)) is not None:
        yield mismatch
    elif option.table and isinstance(value, Mapping):
        table = f"{scope.package}.{option.table}"
        inner = TABLES[table]
        for name, held in value.items():
            if (owned := _owned(scope, (table,), (*path, name), held)) is not None:
                yield owned
            elif name not in inner:
                settable = [known for known in inner if _owned(scope, (table,), (*path, known), held) is None]
                near = nearest(name, [known for known in settable if inner[known].accepts(held)])
                fact = f'{_label(path)}: "{name}" is not an option of {option.table}'
                hint = f'did you mean "{near}"?' if near else f"its options: {', '.join(settable)}"
                yield unsettable((*path, name), fact, hint)
            else:
                yield from _check_value(scope, (*path, name), inner[name], held)


def _owned(scope: Scope, tables: tuple[str, ...], path: tuple[str, ...], value: Any) -> Finding | None:
    """Returns the problem of an option that a field replaces, or that is not supported; None if it can be set."""
    name, subject = path[-1], f'{_label(path[:-1])}: "{path[-1]}" of {scope.engine}'
    for table in tables:
        if (field := FIELDS.get(table, {}).get(name)) is not None:
            return unsettable(path, f"{subject} is set by a field of the spec", f"set {field}")
        if (why := UNSERVED.get(table, {}).get(name)) is not None and not is_default(name, value):
            return unsettable(path, f"{subject} cannot be set: {why}")
    return None


def _unknown(scope: Scope, name: str, options: Mapping[str, Option], fields: Mapping[str, Any]) -> Finding:
    """Returns the problem of an unknown option. ``options`` are the known ones that accept its value."""
    package, near = scope.package, nearest(name, options) or nearest(name.lower(), options)
    fact = f'engine_options: "{name}" is not an option of the engine {scope.engine}'
    families = [table.partition(":")[2] for table in TABLES if f"{package}:" in table and name in TABLES[table]]
    owners = [held[name] for table, held in FIELDS.items() if table.partition(".")[0] != package and name in held]
    engines = [
        engine
        for engine in AUTO_ENGINES
        if engine != scope.engine and name in known_options(Scope(engine, None, "", ""))
    ]
    replaced = next((held[near] for held in FIELDS.values() if near in held), "")
    is_owned = near and _owned(scope, (f"{package}.NeuronConfig", package), (near,), "") is not None
    if name in fields:
        hint = f"set the model's field {name} instead"
    elif families and scope.family is not None:
        fact, hint = f"{fact} for {scope.family}, only for {', '.join(families)}", "remove it"
    elif name in TABLES[f"{PACKAGES['nxd-inference']}.MoENeuronConfig"] and scope.engine == "nxd-inference":
        fact, hint = f"{fact} for {scope.family}, only for mixture-of-experts models", "remove it"
    elif owners:
        hint = f"set {owners[0]}"
    elif engines:
        hint = f"it is an option of the engine {engines[0]}"
    elif replaced:
        hint = f"set {replaced}"
    elif near and not is_owned and options[near].is_in(scope.newest):
        hint = f'did you mean "{near}"?'
    else:
        hint = f"docs/spec.md lists the options of {scope.engine}"
    return unsettable((name,), fact, hint)


def _label(path: tuple[str, ...]) -> str:
    return ".".join(("engine_options", *path))


def _as_yaml(value: Any) -> str:
    """Returns the value as YAML on one line, shortened to 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
