"""The types of a spec file's values: keys, choices and words, read from the annotations of the schema's fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from placements.engines.registry import NAMES
from placements.spec.notation import Reported
from placements.spec.problems import Path
from placements.spec.schema import OWN_FIELDS, HostsSpec, ModelSpec, Spec

TEXT, MAPPING = "text", "a mapping"
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: TEXT}


class FieldType:
    """The type of one value of the file."""

    def __init__(self, annotation: Any = None, metadata: Iterable[Any] = ()) -> None:
        self._parts = tuple(_flat(annotation))  # the alternatives of a union, and metadata
        self._reported = [part for part in (*metadata, *self._parts) if isinstance(part, Reported)]
        self._mapping = next(
            (part for part in self._parts if isinstance(part, type) and issubclass(part, BaseModel)), None
        )

    @property
    def reported(self) -> Reported:
        """How problems describe a value that cannot be read."""
        return self._reported[0] if self._reported else Reported()

    @property
    def choices(self) -> tuple[str, ...]:
        """The values to choose from; () if there are others."""
        if any(part in _WORDS for part in self._parts):
            return ()
        return tuple(str(value) for part in self._parts if get_origin(part) is Literal for value in get_args(part))

    @property
    def wanted(self) -> str:
        """What the value must be, in words."""
        choices = self.choices
        if explicit := next((reported.wanted for reported in self._reported if reported.wanted), ""):
            return explicit
        if self._mapping is not None:
            return str(self._mapping.wanted)  # type: ignore[attr-defined]
        if choices and (len(choices) < 3 or choices[0].isdigit()):
            return " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))
        if choices:
            return "one of " + ", ".join(choices)
        return next((_WORDS[part] for part in self._parts if part in _WORDS), MAPPING)

    @property
    def keys(self) -> tuple[str, ...] | None:
        """The keys of the mapping; None if it may have any."""
        if self._mapping is None:
            return None
        return tuple(key for key, field in self._mapping.model_fields.items() if not field.exclude and key != "name")

    @property
    def key(self) -> FieldType:
        """The type of the keys of a mapping with any keys."""
        return next((FieldType(get_args(part)[0]) for part in self._parts if get_origin(part) is dict), FieldType())

    def inner(self, key: str | int) -> FieldType | None:
        """Returns the type of a key or an item; None if there is none."""
        if self._mapping is not None and key in self._mapping.model_fields:
            return _of_field(self._mapping, str(key))
        for part in self._parts:
            if get_origin(part) is (tuple if isinstance(key, int) else dict):
                return FieldType(get_args(part)[0 if isinstance(key, int) else 1])
        return None


def _flat(annotation: Any) -> Iterator[Any]:
    """Yields the alternatives of a type, and how they are reported."""
    if get_origin(annotation) is Annotated:
        kind, *metadata = get_args(annotation)
        yield from (part for part in metadata if isinstance(part, Reported))
        yield from _flat(kind)
    elif get_origin(annotation) in (Union, UnionType):
        for alternative in get_args(annotation):
            yield from _flat(alternative)
    else:
        yield annotation


@cache
def _of_field(mapping: type[BaseModel], key: str) -> FieldType:
    field = mapping.model_fields[key]
    return FieldType(field.annotation, field.metadata)


_MODELS = "a mapping from model names to their fields"
_HOSTS = "a mapping, like {instance: inf2.48xlarge}, or a list of them"
FILE: Mapping[str, FieldType] = {
    "version": _of_field(Spec, "version"),
    "name": _of_field(Spec, "name"),
    "hosts": FieldType(HostsSpec | tuple[HostsSpec, ...], [Reported(_HOSTS)]),
    "engines": _of_field(Spec, "engines"),
    "defaults": FieldType(ModelSpec, [Reported(MAPPING)]),
    "models": FieldType(dict[str, ModelSpec], [Reported(_MODELS)]),
}
"""The keys of a file, which writes hosts and models otherwise than `Spec` holds them."""


def type_at(path: Path) -> FieldType:
    """Returns the type of the value at a path of known keys."""
    kind = FILE.get(str(path[0])) if path else None
    for key in path[1:]:
        kind = kind.inner(key) if kind is not None else None
    return kind or FieldType()


def keys_at(path: Path) -> tuple[str, ...] | None:
    """Returns the known keys of the mapping at a path; None if it may have any."""
    if not path:
        return tuple(FILE)
    if path == ("engines",):
        return NAMES
    keys = type_at(path).keys
    return tuple(key for key in keys if key not in OWN_FIELDS) if keys and path == ("defaults",) else keys
