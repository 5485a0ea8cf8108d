"""The values in the text of a region: its parsers, transforms, and the types of a tool's arguments."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from orchestrator.gateway.reading.template import MATCH_TIMEOUT_S, Region

_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_BARE_KEY = re.compile(r"(?<=[{,])\s*(\w+):")
Properties = Mapping[str, Any]
"""The JSON schemas of a tool's arguments, by name."""


class ContentError(ValueError):
    """The text of a region is not what its template describes."""


class ParsedCall(msgspec.Struct, frozen=True):
    """A call; ``arguments`` is the text of a JSON object, ``id`` empty if the model has given none."""

    name: str
    arguments: str
    id: str = ""


def calls_in(
    region: Region, text: str, captures: Mapping[str, str], tools: Mapping[str, Properties]
) -> Iterator[ParsedCall]:
    """Yields the calls in a region's text. ``captures`` are the groups of its anchor. ``tools`` are the known ones, by
    whose schemas texts become numbers and other values. Raises ContentError."""
    value = parsed(text, region.parser, region.options)
    if region.transform is not None:
        if region.transform_each:
            if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
                raise ContentError("not a list of objects")
            value = [_transformed(region.transform, {**captures, **item}) for item in value]
        else:
            value = _transformed(region.transform, {**captures, "content": value})
    for item in value if isinstance(value, list) else [value]:
        function = item.get("function", item) if isinstance(item, dict) else {}
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            raise ContentError("not a call with a name and arguments")
        arguments = _typed(arguments, tools.get(name, {}))
        yield ParsedCall(name, msgspec.json.encode(arguments).decode(), str(item.get("id") or ""))


def parsed(text: str, parser: str, options: Mapping[str, Any]) -> Any:
    """Returns the value of a text. Raises ContentError."""
    match parser:
        case "text":
            return text.strip() if options.get("strip", True) else text
        case "int" | "float":
            try:
                return int(text) if parser == "int" else float(text)
            except ValueError as error:
                raise ContentError(str(error)) from None
        case "bool":
            return text.strip().lower() in ("true", "1")
        case "json":
            return _json(text, options)
        case "xml-inline":
            return _tags(text, options)
        case "kv-lines":
            return _lines(text, options)
        case "python":
            return _python_calls(text)
    raise ContentError(f"the parser {parser!r} is unknown")


def _json(text: str, options: Mapping[str, Any]) -> Any:
    """Returns the value of JSON, whose keys may have no quotes, and whose strings may have other delimiters."""
    strings: list[str] = []

    def kept(match: re.Match[str]) -> str:
        strings.append(match[1])
        return f'"\x01{len(strings) - 1}"'

    written = text
    for begin, end in options.get("string_delims", ()):
        written = re.sub(re.escape(begin) + r"(.*?)" + re.escape(end), kept, written, flags=re.DOTALL)
    if options.get("unquoted_keys"):
        written = _BARE_KEY.sub(r'"\1":', written)
    for i, string in enumerate(strings):
        written = written.replace(f'"\x01{i}"', msgspec.json.encode(string).decode())
    try:
        return msgspec.json.decode(written.strip())
    except (msgspec.DecodeError, RecursionError) as error:
        if options.get("allow_non_json"):
            return text.strip()
        raise ContentError(f"not JSON: {error}") from None


def _tags(text: str, options: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    try:
        for match in options["tag_pattern"].finditer(text, timeout=MATCH_TIMEOUT_S):
            key, value = match["key"], _value(match["value"] or "", options)
            if options.get("merge_duplicates") and key in values:
                earlier = values[key] if isinstance(values[key], list) else [values[key]]
                value = [*earlier, value]
            values[key] = value
    except (TimeoutError, IndexError) as error:
        raise ContentError(f"its tags cannot be read: {error}") from None
    return values


def _lines(text: str, options: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for line in text.split(options.get("line_sep", "\n")):
        key, separator, value = line.partition(options.get("kv_sep", ":"))
        if separator:
            values[key.strip()] = _value(value.strip(), options)
    return values


def _value(text: str, options: Mapping[str, Any]) -> Any:
    inner = options.get("value_parser")
    return text if inner is None else parsed(text, inner.get("name", "text"), inner.get("args") or {})


def _python_calls(text: str) -> list[dict[str, Any]]:
    """Returns the calls in a list of Python's calls with keywords and literals: `[f(a=1), g(b=[2])]`."""
    try:
        expression = ast.parse(text.strip(), mode="eval").body
        items = expression.elts if isinstance(expression, ast.List) else [expression]
        calls = []
        for item in items:
            if not isinstance(item, ast.Call) or item.args:
                raise ContentError("not calls with keywords")
            values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in item.keywords}
            calls.append({"name": ast.unparse(item.func), "arguments": values})
        return calls
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ContentError(f"not Python's calls: {error}") from None


def _transformed(template: Any, scope: Mapping[str, Any]) -> Any:
    """Returns a transform with the values of its placeholders."""
    if isinstance(template, dict):
        return {key: _transformed(value, scope) for key, value in template.items()}
    if isinstance(template, list):
        return [_transformed(value, scope) for value in template]
    match = _PLACEHOLDER.fullmatch(template) if isinstance(template, str) else None
    if match is None:
        return template
    value: Any = scope
    for key in match[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ContentError(f"there is no {match[1]}")
        value = value[key]
    return value


def _typed(arguments: dict[str, Any], properties: Properties) -> dict[str, Any]:
    return {
        key: _of_types(value, types) if isinstance(value, str) and (types := _types(properties.get(key))) else value
        for key, value in arguments.items()
    }


def _types(schema: Any) -> list[str]:
    """Returns the types that a schema allows, those of its alternatives included."""
    if not isinstance(schema, Mapping):
        return []
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else [each for each in declared or () if isinstance(each, str)]
    for union in ("anyOf", "oneOf"):
        for choice in schema.get(union) or ():
            types += _types(choice)
    return types


def _of_types(text: str, types: list[str]) -> Any:
    """Returns the text as the first type that it can be; the text itself otherwise."""
    word = text.strip()
    for type in types:
        if type == "null" and word in ("null", "None"):
            return None
        if type == "boolean" and word.lower() in ("true", "1", "false", "0"):
            return word.lower() in ("true", "1")
        if type in ("integer", "number"):
            try:
                number = float(word)
            except ValueError:
                continue
            if type == "integer" and re.fullmatch(r"[+-]?\d+", word):
                return int(word)
            if math.isfinite(number) and (type == "number" or number.is_integer()):
                return int(number) if number.is_integer() and "." not in word else number
        if type in ("object", "array"):
            try:
                value = msgspec.json.decode(word)
            except (msgspec.DecodeError, RecursionError):
                continue
            if isinstance(value, dict if type == "object" else list):
                return value
    return text
