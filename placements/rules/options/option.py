"""Option: one setting of a foreign package, with what it may be."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

_WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "mapping": "a mapping",
}


class Option(NamedTuple):
    """``kind`` is bool, int, float, str, list, mapping, or any; several with a bar between; enum:A,B for one of these
    texts; mapping:Table for a mapping with the options of another table."""

    kind: str
    default: str  # as the source has it, in the newest version that has the option
    first: str = ""  # the first and the last recorded version that have it; "" where all have
    last: str = ""

    @property
    def table(self) -> str:
        """The class whose options a mapping holds; "" where nothing is known of what it holds."""
        return self.kind.removeprefix("mapping:") if self.kind.startswith("mapping:") else ""

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts that it may be; () where it is no choice."""
        return tuple(self.kind.removeprefix("enum:").split(",")) if self.kind.startswith("enum:") else ()

    @property
    def wanted(self) -> str:
        """In words, after "it must be"."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        return " or ".join(_WORDS.get(word.partition(":")[0], "anything") for word in self.kind.split("|"))

    def takes(self, value: Any) -> bool:
        """Whether the value is of the kind. Nothing (null) is taken where the default is None."""
        if value is None:
            return self.default == "None" or self.kind == "any"
        if self.choices:
            return value in self.choices
        return any(_is(word.partition(":")[0], value) for word in self.kind.split("|"))


def _is(kind: str, value: Any) -> bool:
    if kind == "bool" or isinstance(value, bool):
        return kind in ("bool", "any") and isinstance(value, bool)
    if kind == "float":
        return isinstance(value, int | float) and not math.isnan(value)
    known = {"int": int, "str": str, "list": list, "mapping": dict}
    return kind == "any" or isinstance(value, known[kind])
