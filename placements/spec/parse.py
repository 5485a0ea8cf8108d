"""Parses YAML text into a Spec, and reports every problem with the line and column of its key."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from placements.engines.registry import NAMES, Engine, capabilities
from placements.facts.encoders import DEFAULT_BATCH, KINDS
from placements.facts.topology import DEGREES, TOPOLOGIES
from placements.spec.field_type import MAPPING, TEXT, keys_at, type_at
from placements.spec.key_names import (
    OTHER_PLACES,
    OTHER_VALUES,
    converted,
    did_you_mean,
    is_named,
    label_of,
    meant_key,
    nearest_keys,
    normalized,
    shortened,
    shown_as,
)
from placements.spec.notation import NAME, NAME_RULE, ranges_in
from placements.spec.other_formats import other_format
from placements.spec.problems import Path, Problem, SourcePosition, SourcePositions, has_errors, in_order, nearest
from placements.spec.removed import VALUES
from placements.spec.schema import MAX_HOSTS, HostsSpec, ModelSpec, Spec
from placements.spec.sections import EngineSettings
from placements.spec.yaml_tree import BROKEN, Tree, read

_M = TypeVar("_M", bound=BaseModel)


@dataclass(frozen=True)
class Parsed:
    """The spec of a text, as far as it can be read, and its problems.

    ``spec`` is set even with errors, so that `checks` can report more: fields that could not be read are missing and
    listed in its ``broken``. Only a spec without errors may be used (``ok``). None: nothing could be read.
    """

    spec: Spec | None
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Returns whether there is a spec without errors."""
        return self.spec is not None and not has_errors(self.problems)


def parse(text: str | bytes, filename: str = "<spec>", base_dir: str | None = None) -> Parsed:
    """Parses a spec. Reports all problems of the text, and raises none.

    ``filename`` is the file name in the positions of problems; ``base_dir`` the folder of relative sources, by default
    the current one.
    """
    tree = read(text, filename)
    other = other_format(tree.value, text)
    if other is not None:
        fact, hint = other
        return Parsed(None, (Problem("not-a-spec", "error", f"{filename}:1:1", fact, hint),))
    spec = None if tree.value is BROKEN else _Reader(tree, base_dir or ".").spec()
    return Parsed(spec, in_order(tree.problems))


class _Reader:
    """Converts the tree of one document to a Spec, and collects problems in the tree."""

    def __init__(self, tree: Tree, base_dir: str) -> None:
        self._tree = tree
        self._base_dir = base_dir
        self._defaults_places: dict[str, list[tuple[Path, SourcePosition]]] = {}
        self._hosts_read: tuple[HostsSpec, ...] = ()

    def spec(self) -> Spec | None:
        if not isinstance(self._tree.value, dict):
            self._wrong_type((), "the spec", MAPPING)
            return None
        top: dict[str, Any] = self._known(self._tree.value, ())
        broken = {key for key, value in top.items() if value is BROKEN}
        plain: dict[str, Any] = {key: top[key] for key in ("version", "name") if key in top}
        head = self._validated(Spec, plain, (), broken)
        hosts = self._hosts_read = self._hosts(top, broken)
        engines = self._engines(top, broken)
        models = self._models(top, broken)
        return Spec(
            version=1,
            name=head.name if head else "fleet",
            hosts=hosts,
            engines=engines,
            models=models,
            base_dir=self._base_dir,
            places=SourcePositions(self._tree.filename, self._tree.places),
            broken=frozenset(broken),
        )

    def _hosts(self, top: dict[str, Any], broken: set[str]) -> tuple[HostsSpec, ...]:
        """Reads one mapping, or a list of mappings for machines of several types."""
        path: Path = ("hosts",)
        value = top.get("hosts")
        if value is None and "hosts" not in top:
            return ()
        if value == []:
            hint = "list at least one type, or remove hosts to use this machine"
            self._report("wrong-type", path, "hosts is an empty list; it must be " + type_at(path).wanted, hint)
        items = [((*path, i), item) for i, item in enumerate(value)] if isinstance(value, list) else [(path, value)]
        entries = [self._hosts_of(item, where) for where, item in items]
        hosts = [entry for entry in entries if entry is not None]
        if len(hosts) < max(1, len(entries)) or not self._together(hosts, [where for where, _ in items]):
            broken.add("hosts")
            return ()
        return tuple(hosts)

    def _together(self, hosts: list[HostsSpec], paths: list[Path]) -> bool:
        """Returns whether the entries of a list are consistent. Reports the first one that is not."""
        total = 0
        for entry, path in zip(hosts, paths, strict=True):
            if (entry.instance is None) != (hosts[0].instance is None):
                fact = "hosts mixes real machines (instance) and emulated ones (emulate)"
                hint = "use instance for all entries, or emulate for all"
                self._report("hosts-mixed", (*path, "emulate" if entry.instance is None else "instance"), fact, hint)
                return False
            total += entry.most
            if total > MAX_HOSTS:
                key = "count" if entry.max is None else "max"
                fact = f"hosts has more than {MAX_HOSTS} machines in total"
                self._report("out-of-range", (*path, key), fact, f"lower {key}")
                return False
        return True

    def _hosts_of(self, value: Any, path: Path) -> HostsSpec | None:
        if not isinstance(value, dict):
            if value is not BROKEN:
                self._wrong_type(path)
            return None
        missing: set[str] = {key for key, inner in value.items() if inner is BROKEN}
        for key in ("instance", "emulate"):
            name = value.get(key)
            if isinstance(name, str) and name not in TOPOLOGIES:
                self._unknown_instance((*path, key), key, name)
                missing.add(key)
        types = [key for key in ("instance", "emulate") if key in value]
        if len(types) != 1:
            label = label_of(path)
            fact = f"{label} has both instance and emulate" if types else f"{label} has no instance type"
            hint = "keep one of the two" if types else "add instance: inf2.48xlarge, or emulate: inf2.48xlarge"
            self._report("hosts-ambiguous", path, fact, hint)
            missing.add("instance")
        hosts = self._validated(HostsSpec, value, path, missing)
        if missing or hosts is None:
            return None
        name = hosts.instance or hosts.emulate
        if name is None:  # a key without a value
            self._wrong_type((*path, types[0]), wanted="an instance type")
            return None
        if hosts.lnc is not None and TOPOLOGIES[name].lnc is None:
            fact = f"lnc is {hosts.lnc}, but {name} does not support it; only trn2 and trn3 do"
            self._report("lnc-without-choice", (*path, "lnc"), fact, "remove lnc")
            hosts = hosts.model_copy(update={"lnc": None})
        return hosts if self._has_bounds(hosts, path) else None

    def _has_bounds(self, hosts: HostsSpec, path: Path) -> bool:
        """Returns whether the numbers of machines are consistent. Reports if they are not."""
        if hosts.count is not None and (hosts.min is not None or hosts.max is not None):
            key = "min" if hosts.max is None else "max"
            fact = f"{label_of(path)} has both count and {key}"
            hint = "keep count for a fixed number of machines, or min and max"
        elif hosts.min is not None and hosts.max is None:
            key, fact = "min", f"{label_of(path)} has min without max"
            hint = f"add max, or use count: {hosts.min or 1}"
        elif hosts.least > hosts.most:
            key, fact = "min", f"min {hosts.min} of {label_of(path)} exceeds max {hosts.max}"
            hint = f"set min to {hosts.max} or less"
        else:
            return True
        self._report("host-bounds-wrong", (*path, key), fact, hint)
        return False

    def _unknown_instance(self, path: Path, key: str, name: str) -> None:
        supported = ", ".join(TOPOLOGIES)
        if name.startswith("inf1"):
            fact = f'{key} "{name}" is not supported for language models; supported are {supported}'
            self._report("unsupported-instance", path, fact, "use one of the inf2 types")
            return
        close = difflib.get_close_matches(name, TOPOLOGIES, 1)
        fact = f'{key} "{name}" is not an instance type; supported are {supported}'
        self._report("unknown-instance", path, fact, did_you_mean(close) or "use one of these")

    def _engines(self, top: dict[str, Any], broken: set[str]) -> dict[Engine, EngineSettings]:
        """Reads the settings by engine, without those that cannot be read."""
        value = self._mapping(top, "engines", broken)
        settings_by_engine: dict[Engine, EngineSettings] = {}
        for name in [engine for engine in NAMES if engine in value]:
            fields, path = value[name], ("engines", name)
            if isinstance(fields, dict):
                settings = self._validated(EngineSettings, fields, path, broken)
                if settings is not None:
                    settings_by_engine[name] = settings
                if settings is not None and settings.warm and not capabilities(name).imports_long:
                    fact = f"engines.{name}.warm has no effect: replicas of {name} import no engine's packages"
                    self._report("setting-unsupported", (*path, "warm"), fact, "remove it")
            elif fields is not BROKEN:
                self._wrong_type(path, f"engines.{name}")
                broken.add("engines")
        return settings_by_engine

    def _models(self, top: dict[str, Any], broken: set[str]) -> tuple[ModelSpec, ...]:
        defaults, broken_defaults = self._defaults(self._mapping(top, "defaults", broken))
        value = top.get("models")
        if isinstance(value, dict):
            models = [self._model(name, fields, defaults, broken_defaults) for name, fields in value.items()]
            if None in models:
                broken.add("models")
            return tuple(model for model in models if model is not None)
        if value is BROKEN:
            return ()
        broken.add("models")
        if value is None:
            path: Path = ("models",) if "models" in top else ()
            fact = "the spec lists no models"
            self._report("missing-key", path, fact, "add models: {NAME: {source: ...}}; or models: {} for none")
        else:
            self._wrong_type(("models",))
        return ()

    def _mapping(self, top: dict[str, Any], key: str, broken: set[str]) -> dict[str, Any]:
        """Returns the mapping of a key; {} if it is absent or cannot be read."""
        value = top.get(key)
        if isinstance(value, dict):
            return value
        if value is not None and value is not BROKEN:
            self._wrong_type((key,))
            broken.add(key)
        return {}

    def _defaults(self, value: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
        broken: set[str] = set()
        self._validated(ModelSpec, {**value, "name": "defaults", "source": "./"}, ("defaults",), broken)
        for key_path, position in self._tree.places.items():
            if key_path[:1] == ("defaults",) and len(key_path) > 1:
                self._defaults_places.setdefault(str(key_path[1]), []).append((key_path[2:], position))
        return {key: inner for key, inner in value.items() if key not in broken}, broken

    def _model(self, name: str, fields: Any, defaults: dict[str, Any], broken_defaults: set[str]) -> ModelSpec | None:
        path: Path = ("models", name)
        usable = NAME.fullmatch(name) is not None
        if not usable:
            fact = f'the model name "{shortened(name)}" is not valid: a name has {NAME_RULE}'
            self._report("bad-name", path, fact, "rename the model; the name is part of paths and actor names")
        if fields is BROKEN:
            return None
        if not isinstance(fields, dict):
            self._wrong_type(path, f'model "{shortened(name)}"')
            return None
        for key in defaults.keys() - fields.keys():
            self._inherit(path, key)
        values = {**defaults, **fields, "name": name if usable else "model", "base_dir": self._base_dir}
        broken = broken_defaults - fields.keys()
        engine = capabilities(str(values.get("engine")))
        server = values.get("server") if engine.forwards else None
        if isinstance(server, dict) and type(server.get("slots")) is int and "max_batch" not in fields:
            values["max_batch"] = min(max(1, server["slots"]), 1024)  # out of range is reported for slots
        if values.get("kind", "generate") in KINDS[1:] and "max_batch" not in values:
            values["max_batch"] = DEFAULT_BATCH
        if "source" not in fields and (not engine.reads_checkpoint or (server and "{model}" not in str(server))):
            values["source"] = values["engine"]  # it has no checkpoint
        elif "source" not in fields:
            self._report("missing-key", path, f'model "{shortened(name)}" has no source', _SOURCE_HINT)
            broken.add("source")
        if "source" in broken:
            values["source"] = "./"
        model = self._validated(ModelSpec, values, path, broken)
        if model is None or not usable:
            return None
        source = "" if "source" in broken else model.source
        return model.model_copy(update={"broken": frozenset(broken), "source": source})

    def _inherit(self, path: Path, key: str) -> None:
        """Uses the position of a default as the position of the model's field."""
        for suffix, position in self._defaults_places.get(key, ()):
            where = (*path, key, *suffix)
            self._tree.places[where] = position

    def _known(self, value: Any, path: Path) -> Any:
        """Returns the value without unknown keys, in all mappings in it.

        Reports these keys, and reads a misspelt key as the one that it probably means.
        """
        if isinstance(value, list):
            return [self._known(item, (*path, i)) if isinstance(item, dict) else item for i, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        allowed = keys_at(path)
        known = value if allowed is None else self._known_keys(value, allowed, path)
        return {key: self._known(inner, (*path, key)) for key, inner in known.items()}

    def _known_keys(self, values: dict[str, Any], allowed: tuple[str, ...], path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in values.items():
            if key in allowed:
                result[key] = value
                continue
            meant = None if not path and key in _MODEL else meant_key(key, allowed)  # `engine` is not `engines`
            where = (*path, key)
            elsewhere = _elsewhere(key, path, meant)
            meant = None if elsewhere else meant
            hint = elsewhere or (_meant(key, meant, value) if meant else _belongs(key, path))
            hint = hint or nearest_keys(key, allowed)
            self._report("unknown-key", where, f'"{shortened(key)}" is not a known key{_of(path)}', hint)
            if meant and meant not in values and meant not in result:
                result[meant] = converted(normalized(key), meant, value)
                for known in [known for known in _paths(where, value) if known in self._tree.places]:
                    renamed = (*path, meant, *known[len(where) :])
                    self._tree.places[renamed] = self._tree.places[known]
                    if known in self._tree.written:
                        self._tree.written[renamed] = self._tree.written[known]
        return result

    def _validated(self, kind: type[_M], values: dict[str, Any], path: Path, broken: set[str]) -> _M | None:
        """Returns a value of ``kind``. Fields that cannot be read are reported, removed, and added to ``broken``.

        Valid pins stay if others are invalid, for the rules that check each pin.
        """
        values = dict(values)
        if _holds_broken(values.get("engine_options")):  # reported by the tree; `checks` checks the types of values
            broken.add("engine_options")
            del values["engine_options"]
        for _ in range(2):
            try:
                return kind.model_validate(values)
            except ValidationError as failure:
                errors = failure.errors()
                self._explain(errors, path)
                for field in {str(error["loc"][0]) for error in errors if error["loc"]}:
                    broken.add(field)
                    items = {error["loc"][1] for error in errors if error["loc"][0] == field and error["loc"][1:]}
                    if field == "cores" and items:
                        self._remove_items(values, path, field, items)
                    elif field == "source":
                        values[field] = "./"
                    else:
                        values.pop(field, None)
        return None

    def _remove_items(self, values: dict[str, Any], path: Path, field: str, items: set[Any]) -> None:
        """Removes items from a list, and shifts the positions of those behind them."""
        remaining = [i for i in range(len(values[field])) if i not in items]
        values[field] = [values[field][i] for i in remaining]
        for new, old in enumerate(remaining):
            position = self._tree.places.get((*path, field, old))
            if position:
                where = (*path, field, new)
                self._tree.places[where] = position

    def _explain(self, errors: list[ErrorDetails], path: Path) -> None:
        reported: set[Path] = set()
        for error in errors:
            if error["input"] is BROKEN or (isinstance(error["input"], list) and BROKEN in error["input"]):
                continue  # reported by the tree
            where = self._known_path(path, error["loc"])
            if where not in reported:  # a union fails once for each of its members
                reported.add(where)
                self._explain_one(error, where)

    def _known_path(self, path: Path, loc: tuple[int | str, ...]) -> Path:
        """Converts pydantic's location to a path of keys, without the names of union members."""
        where = path
        for part in loc:
            if (*where, part) in self._tree.places or (*where, part) in self._tree.written:
                where = (*where, part)
        return where

    def _explain_one(self, error: ErrorDetails, where: Path) -> None:
        label, field, written = label_of(where), type_at(where), self._tree.written.get(where)
        written_as = shown_as(written.text, written.kind, written.plain) if written else "empty"
        kind, context, choices = error["type"], error.get("ctx", {}), field.choices
        if error["loc"][-1:] == ("[key]",):  # pydantic's name of a key that is wrong
            field = type_at(where[:-1]).key
        if kind == "value_error":
            fact = str(context.get("error", error["msg"]))
            self._report(
                field.reported.id, where, f"{label}: {fact}", _range_of(where, error["input"]) or field.reported.hint
            )
        elif kind in _BOUNDS:
            hint = _degrees(self._hosts_read) if label == "tp_degree" else field.reported.bound_hint
            fact = f"{label} is {written_as}; it must be {_BOUNDS[kind]} {next(iter(context.values()), '')}"
            self._report("out-of-range", where, fact, hint)
        elif (
            kind == "literal_error"
            and choices
            and written
            and written.kind in ("text", "a number")
            and (written.plain or str(error["input"]) not in choices)
        ):
            text = str(error["input"]).lower()
            if f"{label}: {text}" in VALUES:
                self._report("value-removed", where, f"{label}: {text} was removed", VALUES[f"{label}: {text}"])
                return
            close = OTHER_VALUES.get(text) or next(iter(difflib.get_close_matches(text, choices, 1)), "")
            hint = did_you_mean([close] if close in choices else [])
            self._report("unknown-value", where, f"{label} is {written_as}; it must be {field.wanted}", hint)
        else:
            self._wrong_type(where, hint=_range_of(where, error["input"]))

    def _wrong_type(self, where: Path, label: str = "", wanted: str = "", hint: str = "") -> None:
        label, wanted = label or label_of(where), wanted or type_at(where).wanted
        written = self._tree.written.get(where)
        if written is None or written.kind == "empty":
            self._report("wrong-type", where, f"{label} is empty; it must be {wanted}", "")
            return
        written_as = shown_as(written.text, written.kind, written.plain)
        if (
            written.plain
            and written.kind in ("a boolean", "a number")
            and (wanted == TEXT or where[-1:] in _OFTEN_UNQUOTED)
        ):
            reading = "a number"
            if written.kind == "a boolean":
                reading = "true" if written.text.lower() in ("on", "yes", "true") else "false"
            fact = f"{label} is {written.text}, which YAML reads as {reading}; it must be {wanted}"
            choices = type_at(where).choices
            hint = f'write "{written.text}" in quotes' if not choices or written.text in choices else ""
            self._report("yaml-unquoted", where, fact, hint)
            return
        if (
            written.kind == "text"
            and written.text.strip("'\"").isdecimal()
            and wanted.startswith(("a whole number", "1"))
        ):
            hint = "write the number without quotes"
        if where == ("models",) and written.kind == "a list":
            hint = "write each model as NAME: {source: ...} instead of a list item"
        self._report("wrong-type", where, f"{label} is {written_as}, {written.kind}; it must be {wanted}", hint)

    def _report(self, id: str, path: Path, fact: str, hint: str) -> None:
        self._tree.report(id, nearest(self._tree.places, path), fact, hint)


def _holds_broken(value: Any) -> bool:
    """Returns whether a part of the value could not be read."""
    if isinstance(value, dict):
        return any(_holds_broken(item) for item in value.values())
    return any(_holds_broken(item) for item in value) if isinstance(value, list) else value is BROKEN


_MODEL, _HOSTS = (frozenset(keys_at(path) or ()) for path in (("models", ""), ("hosts",)))
_OFTEN_UNQUOTED = (("engine",), ("dtype",), ("strategy",), ("revision",))
_SOURCE_HINT = "add source: ./path, s3://bucket/prefix or a hub id"
_BOUNDS = {
    "greater_than_equal": "at least",
    "less_than_equal": "at most",
    "greater_than": "more than",
    "less_than": "less than",
}


def _degrees(hosts: tuple[HostsSpec, ...]) -> str:
    """Returns a hint with the degrees of these hosts, or of all families without hosts."""
    named = {name: TOPOLOGIES[name].at_lnc(entry.lnc) for entry in hosts if (name := entry.instance or entry.emulate)}
    types = named or {topology.family: topology for topology in sorted(TOPOLOGIES.values(), key=lambda t: t.cores)}
    legal = [(name, [tp for tp in DEGREES[type_.family] if tp <= type_.cores]) for name, type_ in types.items()]
    return "tp_degree can be " + "; ".join(f"{', '.join(map(str, degrees))} on {name}" for name, degrees in legal)


def _paths(path: Path, value: Any) -> Iterator[Path]:
    """Yields the path of a value and of all values in it."""
    yield path
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths((*path, key), inner)


def _range_of(where: Path, value: object) -> str:
    """Returns a hint with the ranges that other notations of `cores` mean: "0-7", 0, "0..7", or a list of cores."""
    if where[:1] != ("models",) or "cores" not in where[2:3]:
        return ""
    meant = ranges_in(value)
    ranges = ", ".join(f'"{cores}"' for cores in meant if len(meant) > 1 or len(cores) > 1)
    if len(where) > 3:
        return f"write {ranges}" if ranges and "," not in ranges else ""
    return f"write cores: [{ranges}]" if ranges else ""


def _meant(key: str, meant: str, value: Any) -> str:
    """Returns a hint with the meant key, and with the value where that is written differently."""
    here = converted(normalized(key), meant, value)
    if here is value:
        return did_you_mean([meant])
    return "remove it" if here is None else f"write {meant}: {str(here).replace(chr(39), '')}"


def _belongs(key: str, path: Path) -> str:
    if key == "name" and path[:1] == ("models",):
        return "the name of a model is the key of its fields"
    if path == ("defaults",) and key in _MODEL:
        return f"set {key} in each model"
    if not path and key in _MODEL:
        return f"set {key} in a model or in defaults"
    if not path and key in _HOSTS:
        return f"set {key} in hosts"
    return ""


def _elsewhere(key: str, path: Path, meant: str | None) -> str:
    """Returns where a setting of another tool is set here, if it is not the name of a field in a model's place."""
    if path[:1] not in ((), ("defaults",), ("models",)) or len(path) > 2 or (meant and is_named(key, meant)):
        return ""
    return OTHER_PLACES.get(normalized(key), "")


def _of(path: Path) -> str:
    if not path:
        return " of a spec"
    if path[0] == "models":
        return f' of model "{shortened(str(path[1]))}"' if len(path) == 2 else f" of {path[-1]}"
    return " of " + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
