"""Reduces clients' JSON schemas to the parts that constrain an answer, within limits that keep compilation short.

The limits were chosen by measuring llguidance 1.9 with a vocabulary of 64,000. A schema within them compiles in 0.2 s
(without limits: 4 s for 8,000 properties, 20 s for `{"multipleOf": 999983}`), and the first mask of an answer, which
blocks the other answers of the replica, takes at most 15 ms.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType
from typing import Annotated, Any, Literal
from urllib.parse import quote, urljoin

import msgspec

from orchestrator.gateway.openai.errors import ApiError, invalid
from workers.messages.requests import AnswerConstraint

MAX_CHARACTERS = 2**16  # of the schema as JSON, without annotations
MAX_DEPTH = 32
MAX_PROPERTIES = 1024  # of all objects together: 0.1 s; the time grows quadratically
MAX_BRANCHES = 512  # of all anyOf, oneOf and allOf together
MAX_BRANCHES_OF_ONE = 128  # as many as there may be tools
MAX_VALUES = 4096  # of all enum and const together, and of all other keywords together
MAX_TEXT_CHARACTERS = 4096  # characters of a name, a pattern or a value
MAX_GRAMMAR_CHARACTERS = 2**13  # 2 s, for rules that double
MAX_MULTIPLE = 10_000  # of the least common multiple of all multipleOf, without decimal points: 20 ms

_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})  # of schemas; `items` may be one schema
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_ANNOTATIONS = frozenset({"title", "description", "$comment", "default", "examples", "deprecated"})
_IDENTITY = frozenset({"$schema", "$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"})  # references are rewritten
_IGNORED = _ANNOTATIONS | _IDENTITY | {"x-guidance"}  # llguidance's own options, which change the JSON that it allows
_REFUSED = frozenset(
    {"not", "if", "then", "else", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"}
)  # without them, most answers would be wrong
_RELAXED = frozenset(  # what llguidance 1.9 does not implement: left out
    {"uniqueItems", "contains", "minContains", "maxContains", "propertyNames", "dependentRequired"}
    | {"unevaluatedItems", "unevaluatedProperties"}
)
_NEUTRAL: Mapping[str, Any] = MappingProxyType(  # values that allow everything
    {"uniqueItems": False, "minContains": 0, "unevaluatedItems": True, "unevaluatedProperties": True}
)
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_FORMATS = frozenset(  # of llguidance 1.9
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
_LOOK_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9bB]")  # not in llguidance's regular expressions
_encode = msgspec.json.encode

Keys = tuple[str, ...]
TextKind = Literal["regex", "grammar"]


@dataclass(frozen=True)
class ClientSchema:
    """A JSON schema that a client has sent. ``param`` is the field of the request, ``path`` its place in it."""

    schema: Any
    param: str
    path: str


class TagStructure(msgspec.Struct):
    """A part of an answer: ``begin``, a value of the schema, ``end``."""

    begin: str
    schema: dict[str, Any]
    end: str


class StructuralTag(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's structural tag. The ``begin`` of each structure begins with one of the triggers."""

    structures: Annotated[list[TagStructure], msgspec.Meta(min_length=1, max_length=MAX_BRANCHES_OF_ONE)]
    triggers: list[str]
    type: Literal["structural_tag"] = "structural_tag"


def text_constraint(kind: TextKind, text: str, param: str) -> AnswerConstraint:
    """Returns the constraint to texts of a grammar or a regular expression. Raises ApiError 400 over a limit."""
    limit = MAX_TEXT_CHARACTERS if kind == "regex" else MAX_GRAMMAR_CHARACTERS
    if len(text) > limit:
        raise invalid(f"{param}: {len(text)} characters exceed the limit of {limit}", param=param)
    return AnswerConstraint(text, kind)


def choice_constraint(choices: list[str], param: str) -> AnswerConstraint:
    """Returns the constraint to one of the texts. Raises ApiError 400 over a limit."""
    count, longest = len(choices), max(map(len, choices), default=0)
    if not 0 < count <= MAX_VALUES:
        raise invalid(f"{param}: {count} texts; at least 1 and at most {MAX_VALUES} are allowed", param=param)
    text = _encode(choices).decode()
    if longest > MAX_TEXT_CHARACTERS or len(text) > MAX_CHARACTERS:
        message = f"{param}: a text has more than {MAX_TEXT_CHARACTERS} characters, or all more than {MAX_CHARACTERS}"
        raise invalid(message, param=param)
    return AnswerConstraint(text, "choice")


def tag_constraint(tag: StructuralTag, param: str) -> AnswerConstraint:
    """Returns the constraint to text with parts that match schemas. For each part, raises ApiError 400 like
    ``schema_constraint``."""
    reduction, structures = _Reduction(), []
    for i, structure in enumerate(tag.structures):
        where = f"{param}.structures[{i}]"
        if not any(trigger and structure.begin.startswith(trigger) for trigger in tag.triggers):
            raise invalid(f"{where}.begin does not begin with one of the triggers", param=param)
        schema = reduction.reduced(ClientSchema(structure.schema, param, f"{where}.schema"), ())
        if not isinstance(schema, dict):
            raise invalid(f"{where}.schema allows no value", param=param)
        structures.append(TagStructure(structure.begin, schema, structure.end))
    return reduction.constraint(StructuralTag(structures, tag.triggers), param, "structural_tag")


def schema_constraint(sent: ClientSchema) -> AnswerConstraint:
    """Returns the constraint to a schema's values. Raises ApiError 400 with the limit, or the keyword and its path."""
    reduction = _Reduction()
    return reduction.constraint(reduction.reduced(sent, ()), sent.param)


def calls_constraint(
    tools: Mapping[str, ClientSchema], *, only_one: bool = False, instead: ClientSchema | None = None
) -> AnswerConstraint:
    """Returns the constraint to an array of calls, as in vLLM: each has the name of a tool and arguments for that tool.

    ``instead``: to one call alone, or a value of that schema. Each schema keeps its own root, so that references in it
    mean what they mean in the request. Raises as ``schema_constraint``.
    """
    reduction = _Reduction()
    definitions, calls = {}, []
    for key, (name, sent) in enumerate(tools.items()):
        definitions[str(key)] = reduction.reduced(sent, ("$defs", str(key)))
        properties = {"name": {"type": "string", "enum": [name]}, "parameters": {"$ref": f"#/$defs/{key}"}}
        calls.append({"type": "object", "properties": properties, "required": ["name", "parameters"]})
    if instead is not None:
        definitions["answer"] = reduction.reduced(instead, ("$defs", "answer"))
        schema: dict[str, Any] = {"anyOf": [{"$ref": "#/$defs/answer"}, *calls]}
    else:
        schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        if only_one:
            schema["maxItems"] = 1
    return reduction.constraint({**schema, "$defs": definitions}, "tools")


class _Reduction:
    """Counts the parts of all schemas of one constraint."""

    def __init__(self) -> None:
        self._sent = ClientSchema({}, "", "")
        self._properties = self._branches = 0
        self._values = Counter[str]()
        self._multiple = 1
        self._relaxed = set[str]()
        self._places: dict[str, Keys] = {}  # URI in the schema -> place in the constraint
        self._references: list[tuple[dict[str, Any], str, Keys]] = []  # with the base URI

    def constraint(self, value: Any, param: str, kind: Literal["json", "structural_tag"] = "json") -> AnswerConstraint:
        text = _encode(value).decode()
        if len(text) > MAX_CHARACTERS:
            raise self._over(f"{len(text)} characters", MAX_CHARACTERS, param)
        return AnswerConstraint(text, kind, relaxed=", ".join(sorted(self._relaxed)))

    def reduced(self, sent: ClientSchema, root: Keys) -> Any:
        """Returns the reduced schema. Its root will be at ``root`` of the constraint."""
        self._sent, self._places, self._references = sent, {"": root}, []
        schema = self._schema(sent.schema, root, "", 1)
        for reduced, base, keys in self._references:
            reduced["$ref"] = self._place(reduced["$ref"], base, keys)
        return schema

    def _place(self, reference: Any, base: str, keys: Keys) -> str:
        """Returns a reference from the constraint's root."""
        if not isinstance(reference, str):
            raise self._refused(keys, "is not a URI reference")
        try:
            uri, _, fragment = (base + reference if reference[:1] == "#" else urljoin(base, reference)).partition("#")
        except ValueError:
            raise self._refused(keys, "is not a URI reference") from None
        points = fragment[:1] in ("", "/")
        place = self._places.get(uri if points else f"{uri}#{fragment}")
        if place is None:
            raise self._refused(keys, f"{reference[:100]!r} is not in this schema")
        escaped = (quote(key.replace("~", "~0").replace("/", "~1"), safe="~$") for key in place)
        return "#" + "".join(f"/{key}" for key in escaped) + (fragment if points else "")

    def _schema(self, schema: Any, keys: Keys, base: str, depth: int) -> Any:
        if not isinstance(schema, Mapping):
            return schema  # true or false; llguidance rejects anything else
        if schema.get("not") in ({}, True):
            return False
        self._check_depth(depth)
        base = self._identified(schema, keys, base)
        reduced: dict[str, Any] = {}
        for name, value in schema.items():
            if name in _IGNORED or self._relaxes(schema, name, value):
                continue
            if name in _REFUSED:
                raise self._refused((*keys, name), "is not supported in JSON schemas")
            if name in _NAMED and isinstance(value, Mapping):
                self._count_properties(value)
                value = {key: self._schema(part, (*keys, name, key), base, depth + 1) for key, part in value.items()}
            elif name in _LISTS and isinstance(value, list):
                self._count_branches(name, value)
                value = [self._schema(part, (*keys, name, str(i)), base, depth + 1) for i, part in enumerate(value)]
            elif name in ("enum", "const"):
                for part in value if name == "enum" and isinstance(value, list) else [value]:
                    self._count_value(part, depth, "values of enum and const")
            elif name == "multipleOf":
                self._count_multiple(value)
            elif isinstance(value, Mapping):
                value = self._schema(value, (*keys, name), base, depth + 1)
            else:
                self._count_value(value, depth, "values of other keywords")
                if name == "$ref":
                    self._references.append((reduced, base, (*keys, name)))
                elif name == "type" and any(kind not in _TYPES for kind in (value if type(value) is list else [value])):
                    raise self._refused((*keys, name), f"{str(value)[:100]!r} is not a type of JSON")
            reduced[name] = value
        return reduced

    def _identified(self, schema: Mapping[str, Any], keys: Keys, base: str) -> str:
        """Records the URIs of a schema; returns the base of the references in it."""
        id, anchor = schema.get("$id"), schema.get("$anchor")
        if isinstance(id, str) and id[:1] != "#":
            try:
                base = urljoin(base, id).rstrip("#")
            except ValueError:
                raise self._refused((*keys, "$id"), "is not a URI") from None
            self._places[base] = keys
        for name in (id[1:] if isinstance(id, str) and id[:1] == "#" else None, anchor):  # draft 7's form, and today's
            if isinstance(name, str):
                self._places[f"{base}#{name}"] = keys
        return base

    def _relaxes(self, schema: Mapping[str, Any], name: str, value: Any) -> bool:
        """Returns whether a keyword is left out, and records it if answers are then less constrained."""
        if name == "oneOf":
            self._relaxed.add(name)  # kept; the replica treats it as anyOf
            return False
        if name == "format":
            left_out = not isinstance(value, str) or value not in _FORMATS
            changes = schema.get("type") not in ("integer", "number")
        elif name == "pattern":
            left_out = changes = isinstance(value, str) and bool(_LOOK_AROUND.search(value.replace(r"\\", "")))
        elif name in ("minProperties", "maxProperties"):  # llguidance counts only properties that are required
            named, required = schema.get("properties"), schema.get("required")
            always = {key for key in required if isinstance(key, str)} if isinstance(required, list) else set()
            optional = isinstance(named, Mapping) and set(named) - always
            left_out = changes = bool(optional)
        else:
            left_out, changes = name in _RELAXED, name not in _NEUTRAL or value != _NEUTRAL[name]
        if left_out and changes:
            self._relaxed.add(name)
        return left_out

    def _refused(self, keys: Keys, cause: str) -> ApiError:
        """Returns the error for a keyword, with its place in the request."""
        within = keys[len(self._places[""]) :]
        return invalid(f"{'.'.join((self._sent.path, *within))}: {cause}", param=self._sent.param)

    def _count_properties(self, properties: Mapping[str, Any]) -> None:
        self._properties += len(properties)
        if self._properties > MAX_PROPERTIES:
            raise self._over("properties", MAX_PROPERTIES)
        for name in properties:
            self._check_text(name)

    def _count_branches(self, name: str, branches: list[Any]) -> None:
        self._branches += len(branches)
        if self._branches > MAX_BRANCHES:
            raise self._over("branches of anyOf, oneOf and allOf", MAX_BRANCHES)
        if len(branches) > MAX_BRANCHES_OF_ONE and name not in ("prefixItems", "items"):
            raise self._over(f"{len(branches)} branches of one {name}", MAX_BRANCHES_OF_ONE)

    def _count_value(self, value: Any, depth: int, of: str) -> None:
        """Counts a value and those in it, and checks them."""
        self._check_depth(depth)
        self._values[of] += 1
        if self._values[of] > MAX_VALUES:
            raise self._over(of, MAX_VALUES)
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
            raise self._over(f"{len(text)} characters in one name, pattern or value", MAX_TEXT_CHARACTERS)

    def _count_multiple(self, value: Any) -> None:
        if isinstance(value, int):
            self._multiple = math.lcm(self._multiple, value or 1)
        elif isinstance(value, float):
            decimal = Decimal(repr(value)).normalize().as_tuple()
            digits = int("".join(map(str, decimal.digits))) * 10 ** max(0, int(decimal.exponent))
            self._multiple = math.lcm(self._multiple, digits or 1)
        if self._multiple > MAX_MULTIPLE:
            cause = f"{self._sent.param}: the multipleOf numbers in the JSON schema have a least common multiple above"
            raise invalid(f"{cause} {MAX_MULTIPLE}, ignoring decimal points", param=self._sent.param)

    def _check_depth(self, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise self._over("levels", MAX_DEPTH)

    def _over(self, subject: str, limit: int, param: str = "") -> ApiError:
        param = param or self._sent.param
        count = subject if subject[0].isdigit() else f"more than {limit} {subject}"
        return invalid(f"{param}: the JSON schema has {count}; the limit is {limit}", param=param)
