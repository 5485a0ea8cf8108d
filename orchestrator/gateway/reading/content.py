"""Reads the text of a field: the content parsers and transforms of response templates, and types by tools' schemas."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import regex

MAX_MATCH_S = 0.25  # for one search of a pattern, which may come from a checkpoint
Pattern = regex.Pattern[str]
Match = regex.Match[str]
_PLACEHOLDER = regex.compile(r"\{(\w+(?:\.\w+)*)\}")
Args = Mapping[str, Any]


class Unreadable(ValueError):
    """A text that the parser of its field cannot read."""


def parse(text: str, name: str, args: Args) -> Any:
    """Returns the value of a text. Raises Unreadable, and TimeoutError."""
    try:
        return PARSERS[name](text, args)
    except (ValueError, SyntaxError, RecursionError, MemoryError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"{name}: {error}") from error


def _text(text: str, args: Args) -> str:
    return text.strip() if args.get("strip", True) else text


def _json(text: str, args: Args) -> Any:
    """Parses JSON. ``string_delims`` are further quotes of strings, ``unquoted_keys`` allows keys without quotes, and
    with ``allow_non_json`` any other text is returned unchanged."""
    strings: list[str] = []
    written = text

    def kept(match: Match) -> str:
        strings.append(json.dumps(match[1]))
        return f"\x01{len(strings) - 1}\x02"

    for opening, closing in args.get("string_delims", ()):
        if "\x01" in text or "\x02" in text:
            raise Unreadable("the text has control characters")
        pattern = regex.escape(opening) + "(.*?)" + regex.escape(closing)
        written = regex.sub(pattern, kept, written, flags=regex.DOTALL, timeout=MAX_MATCH_S)
    if args.get("unquoted_keys", False):
        written = regex.sub(r"(?<=[{,])(\w+):", r'"\1":', written, timeout=MAX_MATCH_S)
    if strings:
        written = regex.sub("\x01(\\d+)\x02", lambda match: strings[int(match[1])], written)
    try:
        return json.loads(written)
    except ValueError:
        if args.get("allow_non_json"):
            return _text(text, args)
        raise


def _value(text: str, args: Args) -> Any:
    parser = args.get("value_parser")
    return text if parser is None else parse(text, parser.get("name", "text"), parser.get("args", {}))


def _xml_inline(text: str, args: Args) -> dict[str, Any]:
    """Parses tags, by the groups ``key`` and ``value`` of ``tag_pattern``. With ``merge_duplicates``, the values of a
    repeated key are a list."""
    values: dict[str, Any] = {}
    for match in regex.finditer(args["tag_pattern"], text, regex.DOTALL, timeout=MAX_MATCH_S):
        key, value = match["key"], _value(match["value"] or "", args)
        if key in values and args.get("merge_duplicates", False):
            earlier = values[key]
            value = [*(earlier if isinstance(earlier, list) else [earlier]), value]
        values[key] = value
    return values


def _kv_lines(text: str, args: Args) -> dict[str, Any]:
    lines = (_text(line, args).partition(args.get("kv_sep", ":")) for line in text.split(args.get("line_sep", "\n")))
    return {_text(key, args): _value(_text(value, args), args) for key, separator, value in lines if separator}


def _pythonic(text: str, args: Args) -> list[dict[str, Any]]:
    """Parses calls in Python's notation, separated by commas: ``f(a=1), g()``. It extends the format, for Llama."""
    return [_python_call(call) for call in _elements(ast.parse(f"[{text.strip()}]", mode="eval").body)]


def _elements(tree: ast.expr) -> list[ast.expr]:
    if not isinstance(tree, ast.List):
        raise Unreadable("it is not a list of calls")
    return tree.elts


def _python_call(call: ast.expr) -> dict[str, Any]:
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise Unreadable("it is not a call with named arguments")
    arguments = {str(keyword.arg): ast.literal_eval(_json_names(keyword.value)) for keyword in call.keywords}
    return {"name": ast.unparse(call.func), "arguments": arguments}


def _json_names(tree: ast.expr) -> ast.expr:
    """Replaces the names of JSON that Python lacks."""
    for node in ast.walk(tree):
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.Name) and value.id in _NAMES:
                setattr(node, name, ast.Constant(_NAMES[value.id]))
    if isinstance(tree, ast.Name) and tree.id in _NAMES:
        return ast.Constant(_NAMES[tree.id])
    return tree


_NAMES = {"true": True, "false": False, "null": None}
PARSERS: Mapping[str, Callable[[str, Args], Any]] = {
    "text": _text,
    "int": lambda text, args: int(_text(text, args)),
    "float": lambda text, args: float(_text(text, args)),
    "bool": lambda text, args: _text(text, args).lower() in ("true", "1"),
    "json": _json,
    "xml-inline": _xml_inline,
    "kv-lines": _kv_lines,
    "pythonic": _pythonic,
}


def transformed(shape: Any, each: bool, value: Any, groups: Mapping[str, str]) -> Any:
    """Returns the value of a field in the ``shape`` of its transform: texts such as `{content.name}` are replaced by a
    part of the value, or by a group of the anchor. ``each``: the value is a list, whose items are transformed. Raises
    Unreadable."""
    if shape is None:
        return value
    if not each:
        return _filled(shape, {**groups, "content": value})
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise Unreadable("the value is not a list of objects")
    return [_filled(shape, {**groups, **item}) for item in value]


def _filled(shape: Any, scope: Mapping[str, Any]) -> Any:
    if isinstance(shape, Mapping):
        return {key: _filled(value, scope) for key, value in shape.items()}
    if isinstance(shape, list):
        return [_filled(value, scope) for value in shape]
    if not isinstance(shape, str) or (placeholder := _PLACEHOLDER.fullmatch(shape)) is None:
        return shape
    value: Any = scope
    for key in placeholder[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise Unreadable(f"it has no {placeholder[1]}")
        value = value[key]
    return value


def typed(arguments: Mapping[str, Any], properties: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments, with texts converted where the tool's schema requires another type."""
    result = dict(arguments)
    for key, value in arguments.items():
        types = list(_types(properties.get(key)))
        if types and isinstance(value, str):
            result[key] = _typed(value, types)
        elif types and isinstance(value, list) and "array" not in types:
            result[key] = [_typed(item, types) if isinstance(item, str) else item for item in value]
    return result


def _types(schema: Any) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    declared = schema.get("type")
    yield from (kind for kind in (declared if isinstance(declared, list) else [declared]) if isinstance(kind, str))
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            yield from _types(choice)
    if schema.get("nullable"):
        yield "null"


def _typed(text: str, types: list[str]) -> Any:
    for kind in types:
        try:
            return _CASTS[kind](text)
        except (KeyError, ValueError, RecursionError):
            continue
    return text


def _number(text: str) -> int | float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return int(number) if number.is_integer() and "." not in text else number


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise ValueError(text) from None
        return int(number)


def _of(*kinds: type) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = json.loads(text)
        if not isinstance(value, kinds):
            raise ValueError(text)
        return value

    return read


_CASTS: Mapping[str, Callable[[str], Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": lambda text: {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()],
    "null": lambda text: {"null": None, "None": None}[text.strip()],
    "object": _of(dict),
    "array": _of(list),
}
