"""The ``engine_options`` of a model: the options of engines and of their packages, and checks of values by them."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from types import UnionType
from typing import Any, NamedTuple

from placements.engines.capabilities import Capabilities, OptionRange
from placements.engines.registry import AUTO_ENGINES, ENGINES, Engine, capabilities
from placements.facts.tables import by_name, has_table, read_table
from placements.facts.versions import reaches


class ValueKind(Enum):
    """A kind of values, with its words, which follow "it must be", and its types."""

    BOOL = "true or false", bool
    TRUE = "true", bool  # a flag without a value
    INT = "a whole number", int
    FLOAT = "a number", int | float
    STR = "text", str
    LIST = "a list", list
    MAPPING = "a mapping", dict
    ANY = "anything", object

    def __init__(self, words: str, types: type | UnionType) -> None:
        self.words = words
        self.types = types

    def accepts(self, value: Any) -> bool:
        """Returns whether the value is of the kind. A boolean is not a number, and NaN is none."""
        if isinstance(value, bool):
            return self in (ValueKind.BOOL, ValueKind.ANY) or (self is ValueKind.TRUE and value)
        if self is ValueKind.FLOAT and isinstance(value, float) and math.isnan(value):
            return False
        return isinstance(value, self.types)


class Option(NamedTuple):
    """An option: a value of one of ``kinds``, or one of the texts of ``choices``."""

    kinds: tuple[ValueKind, ...]
    default: str = ""  # source text in the newest version with the option
    first: str = ""  # the first and the last recorded version with the option; "" if all have it
    last: str = ""
    choices: tuple[str, ...] = ()
    table: str = ""  # the class whose options a mapping holds; "" if its options are unknown

    @classmethod
    def read(cls, kind: str, default: str = "", first: str = "", last: str = "") -> Option:
        """Reads a row of a table. ``kind`` is the names of kinds, separated by bars; "enum:A,B" for one of these texts;
        or "mapping:Table" for a mapping with the options of another table."""
        name, _, detail = kind.partition(":")
        if name == "enum":
            return cls((ValueKind.STR,), default, first, last, choices=tuple(detail.split(",")))
        return cls(tuple(ValueKind[each.upper()] for each in name.split("|")), default, first, last, table=detail)

    @property
    def wanted(self) -> str:
        """The allowed values in words, to follow "it must be"."""
        return f"one of {', '.join(self.choices)}" if self.choices else " or ".join(kind.words for kind in self.kinds)

    def accepts(self, value: Any) -> bool:
        """Returns whether the value is allowed. null is accepted if the default is None."""
        if value is None:
            return self.default == "None" or ValueKind.ANY in self.kinds
        if self.choices:
            return value in self.choices
        return any(kind.accepts(value) for kind in self.kinds)

    def is_in(self, version: str) -> bool:
        """Returns whether a version has the option; "": any version. Between recorded ones, the earlier one counts."""
        return not version or not self.first or (reaches(version, self.first) and reaches(self.last, version))


PACKAGED: Mapping[str, Capabilities] = {
    str(engine.package): engine for engine in ENGINES.values() if has_table(f"engines/{engine.module}/options.json")
}
"""Package -> its engine, for the engines whose folder has the options of their package."""

TABLES: Mapping[str, Mapping[str, Option]] = {
    table: {name: Option.read(**row) for name, row in rows.items()}
    for engine in PACKAGED.values()
    for table, rows in read_table(f"engines/{engine.module}/options.json").items()
}
"""Table -> name -> option. A table is ``package.Class``, or ``package:model_type`` for the constructor of a family."""


def _owners(kind: str) -> dict[str, dict[str, str]]:
    owned = [read_table(f"engines/{engine.module}/owned.json")[kind] for engine in PACKAGED.values()]
    return {table: by_name(rows) for tables in owned for table, rows in tables.items()}


FIELDS: Mapping[str, Mapping[str, str]] = _owners("fields")
"""Class, or package (the keywords of every constructor) -> option -> the field of the spec that replaces it."""

UNSERVED: Mapping[str, Mapping[str, str]] = _owners("unserved")
"""Class, or package -> option -> why it cannot be set. ``is_default`` values are accepted."""

_ON_BY_DEFAULT = frozenset({"has_pre_attention_norm", "save_sharded_checkpoint"})


def is_default(name: str, value: Any) -> bool:
    """Returns whether an option of ``UNSERVED`` has no effect: null, or a Boolean option as the engine has it."""
    return value is None or value is (name in _ON_BY_DEFAULT)


# Checks of ``engine_options``


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
        return str(ENGINES[self.engine].package)


def known_options(scope: Scope) -> dict[str, Option]:
    """Returns all options of a model, with those of other versions and those that a field replaces."""
    engine, options = ENGINES[scope.engine], dict(TABLES[f"{scope.package}.NeuronConfig"])
    for owned in engine.class_options:
        if scope.family is None or scope.family in owned.families:
            options |= TABLES[f"{scope.package}.{owned.table}"]
    for name, table in TABLES.items():
        package, colon, family = name.partition(":")
        if colon and package == scope.package and scope.family in (None, family):
            options = {**table, **options}
    return options | {name: Option.read("bool", "False") for name in engine.options}


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
    class_options = [
        owned.models for owned in ENGINES[scope.engine].class_options if name in TABLES[f"{package}.{owned.table}"]
    ]
    if name in fields:
        hint = f"set the model's field {name} instead"
    elif families and scope.family is not None:
        fact, hint = f"{fact} for {scope.family}, only for {', '.join(families)}", "remove it"
    elif class_options:
        fact, hint = f"{fact} for {scope.family}, only for {class_options[0]}", "remove it"
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


def check_own(engine: Engine, values: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields the problems of the options of an engine without a table of a package."""
    options = capabilities(engine).options
    for name, value in values.items():
        option = options.get(name)
        if name not in options:
            close = nearest(name, [known for known in options if _is_of(options[known], value)])
            hint = f"did you mean {close}?" if close else f"options of {engine}: {', '.join(options) or 'none'}"
            if engine == "auto":
                hint = f"set engine to the one with this option: {' or '.join(AUTO_ENGINES)}"
            yield unsettable((name,), f'engine_options: "{name}" is not an option of the engine {engine}', hint)
        elif not _is_of(option, value):
            kind = "true or false" if option is None else "a whole number" if option.whole else "a number"
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            yield Finding("wrong-type", (name,), f"engine_options.{name} is {text}; it must be {kind}", "")
        elif option is not None and not option.least <= value <= option.most:
            fact = f"engine_options.{name} is {value}; it must be from {option.least} to {option.most}"
            yield Finding("out-of-range", (name,), fact, "")


def _is_of(option: OptionRange | None, value: Any) -> bool:
    if option is None or isinstance(value, bool):
        return option is None and isinstance(value, bool)
    return isinstance(value, int if option.whole else int | float)
