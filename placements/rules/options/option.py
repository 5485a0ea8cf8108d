"""An option of a Neuron package, and the values that it accepts."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

_WORDS = {
    "bool": "true or false",
    "true": "true",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "mapping": "a mapping",
}


class Option(NamedTuple):
    """An option and its kind.

    ``kind`` is bool, int, float, str, list, mapping or any; several, separated by bars; enum:A,B for one of these
    texts; mapping:Table for a mapping with the options of another table; or true for a flag without a value.
    """

    kind: str
    default: str  # source text in the newest version with the option
    first: str = ""  # the first and the last recorded version with the option; "" if all have it
    last: str = ""

    @property
    def table(self) -> str:
        """The class whose options a mapping holds; "" if its options are unknown."""
        return self.kind.removeprefix("mapping:") if self.kind.startswith("mapping:") else ""

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed texts; () if the option is not an enum."""
        return tuple(self.kind.removeprefix("enum:").split(",")) if self.kind.startswith("enum:") else ()

    @property
    def wanted(self) -> str:
        """The allowed values in words, to follow "it must be"."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        return " or ".join(_WORDS.get(word.partition(":")[0], "anything") for word in self.kind.split("|"))

    def accepts(self, value: Any) -> bool:
        """Returns whether the value is of the kind. null is accepted if the default is None."""
        if value is None:
            return self.default == "None" or self.kind == "any"
        if self.choices:
            return value in self.choices
        return any(_is(word.partition(":")[0], value) for word in self.kind.split("|"))


def _is(kind: str, value: Any) -> bool:
    if kind == "true":
        return value is True
    if kind == "bool" or isinstance(value, bool):
        return kind in ("bool", "any") and isinstance(value, bool)
    if kind == "float":
        return isinstance(value, int | float) and not math.isnan(value)
    types = {"int": int, "str": str, "list": list, "mapping": dict}
    return kind == "any" or isinstance(value, types[kind])
