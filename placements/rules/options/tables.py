"""Options of the Neuron packages and of vLLM: the values that they accept, and those that the spec sets by fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from types import UnionType
from typing import Any, NamedTuple

from placements.facts.engines import reaches
from placements.facts.tables import by_name, read_table


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


TABLES: Mapping[str, Mapping[str, Option]] = {
    table: {name: Option.read(**row) for name, row in rows.items()}
    for table, rows in read_table("rules/options/tables.json").items()
}
"""Table -> name -> option. A table is ``package.Class``, or ``package:model_type`` for the constructor of a family."""

_OWNED = read_table("rules/options/owned.json")
FIELDS: Mapping[str, Mapping[str, str]] = {table: by_name(rows) for table, rows in _OWNED["fields"].items()}
"""Class, or package (the keywords of every constructor) -> option -> the field of the spec that replaces it."""

UNSERVED: Mapping[str, Mapping[str, str]] = {table: by_name(rows) for table, rows in _OWNED["unserved"].items()}
"""Class, or package -> option -> why it cannot be set. ``is_default`` values are accepted."""

_ON_BY_DEFAULT = frozenset({"has_pre_attention_norm", "save_sharded_checkpoint"})


def is_default(name: str, value: Any) -> bool:
    """Returns whether an option of ``UNSERVED`` has no effect: null, or a Boolean option as the engine has it."""
    return value is None or value is (name in _ON_BY_DEFAULT)
