"""Reduces a client's JSON schema to the parts that constrain an answer, within limits that keep compilation short.

The limits were chosen by measuring llguidance 1.9 with a vocabulary of 64,000. A schema within them compiles in 0.2 s
(without limits: 4 s for 8,000 properties, 20 s for `{"multipleOf": 999983}`), and the first mask of an answer, which
blocks the other answers of the replica, takes at most 15 ms.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import msgspec

from orchestrator.gateway.openai.errors import ApiError, invalid

MAX_CHARACTERS = 2**16  # of the schema as JSON, without annotations
MAX_DEPTH = 32
MAX_PROPERTIES = 1024  # of all objects together: 0.1 s; the time grows quadratically
MAX_BRANCHES = 512  # of all anyOf, oneOf and allOf together
MAX_BRANCHES_OF_ONE = 128  # as many as there may be tools
MAX_VALUES = 4096  # of all enum and const together, and of all other keywords together
MAX_TEXT_CHARACTERS = 4096  # characters of a name, a pattern or a value
MAX_MULTIPLE = 10_000  # of the least common multiple of all multipleOf, without decimal points: 20 ms

_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})  # of schemas; `items` may be one schema
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_ANNOTATIONS = frozenset({"title", "description", "$comment", "default", "examples", "deprecated"})
_IGNORED = _ANNOTATIONS | {"x-guidance"}  # llguidance's own options, which change the JSON that it allows
_encode = msgspec.json.encode


def schema_text(schema: Mapping[str, Any], param: str) -> str:
    """Returns the reduced schema as compact JSON. Raises ApiError 400 with the limit, for ``param`` of the request."""
    text = _encode(_Reduction(param).schema(schema, 1)).decode()
    if len(text) > MAX_CHARACTERS:
        raise _over(param, f"{len(text)} characters", MAX_CHARACTERS)
    return text


class _Reduction:
    def __init__(self, param: str) -> None:
        self._param = param
        self._properties = self._branches = 0
        self._values = Counter[str]()
        self._multiple = 1

    def schema(self, schema: Any, depth: int) -> Any:
        if not isinstance(schema, Mapping):
            return schema  # true or false; llguidance rejects anything else
        self._check_depth(depth)
        reduced: dict[str, Any] = {}
        for name, value in schema.items():
            if name in _IGNORED:
                continue
            if name in _NAMED and isinstance(value, Mapping):
                self._count_properties(value)
                value = {key: self.schema(part, depth + 1) for key, part in value.items()}
            elif name in _LISTS and isinstance(value, list):
                self._count_branches(name, value)
                value = [self.schema(part, depth + 1) for part in value]
            elif name in ("enum", "const"):
                for part in value if name == "enum" and isinstance(value, list) else [value]:
                    self._count_value(part, depth, "values of enum and const")
            elif name == "multipleOf":
                self._count_multiple(value)
            elif isinstance(value, Mapping):
                value = self.schema(value, depth + 1)
            else:
                self._count_value(value, depth, "values of other keywords")
            reduced[name] = value
        return reduced

    def _count_properties(self, properties: Mapping[str, Any]) -> None:
        self._properties += len(properties)
        if self._properties > MAX_PROPERTIES:
            raise _over(self._param, "properties", MAX_PROPERTIES)
        for name in properties:
            self._check_text(name)

    def _count_branches(self, name: str, branches: list[Any]) -> None:
        self._branches += len(branches)
        if self._branches > MAX_BRANCHES:
            raise _over(self._param, "branches of anyOf, oneOf and allOf", MAX_BRANCHES)
        if len(branches) > MAX_BRANCHES_OF_ONE and name not in ("prefixItems", "items"):
            raise _over(self._param, f"{len(branches)} branches of one {name}", MAX_BRANCHES_OF_ONE)

    def _count_value(self, value: Any, depth: int, of: str) -> None:
        """Counts a value and those in it, and checks them."""
        self._check_depth(depth)
        self._values[of] += 1
        if self._values[of] > MAX_VALUES:
            raise _over(self._param, of, MAX_VALUES)
        if isinstance(value, str):
            self._check_text(value)
        elif isinstance(value, list):
            for part in value:
                self._count_value(part, depth + 1, of)
        elif isinstance(value, Mapping):
            for key, part in value.items():
                self._check_text(key)
                self._count_value(part, depth + 1, of)

    def _check_text(self, text: str) -> None:
        if len(text) > MAX_TEXT_CHARACTERS:
            raise _over(self._param, f"{len(text)} characters in one name, pattern or value", MAX_TEXT_CHARACTERS)

    def _count_multiple(self, value: Any) -> None:
        if isinstance(value, int):
            self._multiple = math.lcm(self._multiple, value or 1)
        elif isinstance(value, float):
            decimal = Decimal(repr(value)).normalize().as_tuple()
            digits = int("".join(map(str, decimal.digits))) * 10 ** max(0, int(decimal.exponent))
            self._multiple = math.lcm(self._multiple, digits or 1)
        if self._multiple > MAX_MULTIPLE:
            cause = f"{self._param}: the multipleOf numbers in the JSON schema have a least common multiple above"
            raise invalid(f"{cause} {MAX_MULTIPLE}, ignoring decimal points", param=self._param)

    def _check_depth(self, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise _over(self._param, "levels", MAX_DEPTH)


def _over(param: str, subject: str, limit: int) -> ApiError:
    count = subject if subject[0].isdigit() else f"more than {limit} {subject}"
    return invalid(f"{param}: the JSON schema has {count}; the limit is {limit}", param=param)
