"""Response templates: the format in which checkpoints describe their answers (transformers 5.13 and later).

A template has fields, each with the anchors between which its text stands in an answer. Here ``content`` is the
content, ``thinking``, ``reasoning`` and ``reasoning_content`` are the reasoning, and ``tool_calls`` the calls; the text
of any other field is dropped. Templates of ours extend the format:

- A name may have a suffix after a slash, so that a kind of text has several forms.
- ``start_anchor`` may be missing.
- ``between`` are the characters between calls that are not content.
- A field of calls in JSON without an end closes with its value; its ``keys`` are those that a call may have.
- ``python`` parses calls such as ``[f(a=1)]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import regex

from orchestrator.gateway.reading.call_text import ARGUMENTS, SPACE

MAX_ANCHOR_CHARACTERS = 1000  # of the text that a pattern matches; longer text is content
MATCH_TIMEOUT_S = 0.05  # of one search for a pattern of a checkpoint
RegionKind = Literal["content", "reasoning", "calls", "dropped"]
KINDS: Mapping[str, RegionKind] = MappingProxyType(
    {
        "content": "content",
        "thinking": "reasoning",
        "reasoning": "reasoning",
        "reasoning_content": "reasoning",
        "tool_calls": "calls",
    }
)
PARSERS = ("text", "int", "float", "bool", "json", "xml-inline", "kv-lines", "python")
_FIELDS = {"open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional"}
_FIELDS |= {"transform", "transform_each"}
_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern", "between"}


class TemplateError(ValueError):
    """A response template cannot be used."""


class Found(NamedTuple):
    """A match of an anchor."""

    start: int
    end: int
    groups: Mapping[str, str]
    is_pending: bool  # more text may change it


@dataclass(frozen=True)
class Anchor:
    """The text at which a region begins or ends: one of several literals, or a pattern of the package `regex`."""

    literals: tuple[str, ...]  # empty: the pattern
    pattern: Any = None

    def find(self, text: str, start: int, *, at_end: bool) -> Found | None:
        """Returns the first match at or after ``start``, or a beginning of one at the end of ``text``. ``at_end``: no
        more text will follow. Raises TimeoutError for a pattern that takes too long."""
        if self.pattern is None:
            return self._literal(text, start, at_end)
        while start <= len(text):
            match = self.pattern.search(text, start, partial=not at_end, timeout=MATCH_TIMEOUT_S)
            if match is None or (match.partial and match.start() == len(text)):
                return None
            if (match.end() if not match.partial else len(text)) - match.start() <= MAX_ANCHOR_CHARACTERS:
                is_pending = match.partial or (match.end() == len(text) and not at_end)
                groups = {name: value for name, value in match.groupdict().items() if value is not None}
                return Found(match.start(), match.end(), groups, is_pending)
            start = match.start() + 1
        return None

    def _literal(self, text: str, start: int, at_end: bool) -> Found | None:
        found: Found | None = None
        for literal in self.literals:
            at = text.find(literal, start)
            if at >= 0 and (found is None or (at, -len(literal)) < (found.start, found.start - found.end)):
                found = Found(at, at + len(literal), {}, False)
        if at_end:
            return found
        for literal in self.literals:
            at = len(text) - _overlap(text, literal, start)
            if at < len(text) and (found is None or at <= found.start):
                found = Found(at, len(text), {}, True)
        return found


def _overlap(text: str, literal: str, start: int) -> int:
    """Returns the length of the longest end of ``text`` that is a proper beginning of a literal."""
    for length in range(min(len(literal) - 1, len(text) - start), 0, -1):
        if text.endswith(literal[:length]):
            return length
    return 0


@dataclass(frozen=True)
class Region:
    """A field of a template: where its text stands, and how it is parsed."""

    kind: RegionKind
    open: Anchor | None  # None: text outside of all other regions
    close: Anchor | None
    parser: str
    options: Mapping[str, Any]
    transform: Any  # the value of the field, with placeholders; None: what was parsed
    transform_each: bool  # for each element of what was parsed

    @property
    def is_streamed(self) -> bool:
        """Returns whether the arguments of a call are known before its end: they are JSON in the text."""
        function = self.transform.get("function", self.transform) if isinstance(self.transform, Mapping) else {}
        if self.kind != "calls" or self.parser != "json" or set(self.options) - {"keys"}:
            return False
        prefix = "" if self.transform_each else "content."
        arguments = {"{content}"} if self.has_name else {f"{{{prefix}{key}}}" for key in ARGUMENTS}
        return not function or (
            function.get("name") == ("{name}" if self.has_name else f"{{{prefix}name}}")
            and function.get("arguments") in arguments
        )

    @property
    def has_name(self) -> bool:
        """Returns whether the name of a call is in its anchor."""
        return self.open is not None and self.open.pattern is not None and "name" in self.open.pattern.groupindex


@dataclass(frozen=True)
class ResponseTemplate:
    """A template that is ready for use."""

    regions: tuple[Region, ...]  # with an opening anchor
    outside: Region  # the rest of the text
    start: Anchor | None  # the beginning of an answer in the prompt
    between: str = SPACE

    @property
    def has_calls(self) -> bool:
        return any(region.kind == "calls" for region in self.regions)

    @property
    def reasoning(self) -> tuple[str, str] | None:
        """The texts before and after reasoning, if they are literals."""
        for region in self.regions:
            begin, end = region.open, region.close
            if region.kind == "reasoning" and begin and end and begin.literals and end.literals:
                return begin.literals[0], end.literals[0]
        return None

    @property
    def has_reasoning(self) -> bool:
        return any(region.kind == "reasoning" for region in (*self.regions, self.outside))

    def message_start(self, prompt: str) -> str:
        """Returns the part of a prompt that belongs to the answer's message already."""
        at, found = None, None if self.start is None else self.start.find(prompt, 0, at_end=True)
        while found is not None and self.start is not None and found.end > found.start:
            at, found = found.end, self.start.find(prompt, found.end, at_end=True)
        if at is not None:
            return prompt[at:]
        markers = self.reasoning
        return markers[0] if markers is not None and prompt.rstrip().endswith(markers[0]) else ""


def load_template(value: Any) -> ResponseTemplate:
    """Returns a decoded template. Raises TemplateError that names the field."""
    if not isinstance(value, dict) or not isinstance(value.get("fields"), dict) or not value["fields"]:
        raise TemplateError("it is not an object with `fields`")
    if value.get("version", 1) != 1:
        raise TemplateError(f"version {value['version']!r} is unknown; the format has version 1")
    if unknown := sorted(value.keys() - _KEYS):
        raise TemplateError(f"{unknown[0]!r} is not a key of the format")
    regions = {name: _region(name, field) for name, field in value["fields"].items()}
    outside = [name for name, region in regions.items() if region.open is None]
    if len(outside) > 1:
        raise TemplateError(f"the fields {', '.join(outside)} have no `open`; only one may have none")
    default = Region("content", None, None, "text", {}, None, False)
    return ResponseTemplate(
        tuple(region for region in regions.values() if region.open is not None),
        regions[outside[0]] if outside else default,
        _anchor("the template", value, "start_anchor"),
        value.get("between", SPACE),
    )


def _region(name: str, field: Any) -> Region:
    where = f"fields.{name}"
    if not isinstance(field, dict):
        raise TemplateError(f"{where} is not an object")
    if unknown := sorted(field.keys() - _FIELDS):
        raise TemplateError(f"{where}.{unknown[0]} is not a key of the format")
    parser, options = field.get("content", "text"), field.get("content_args") or {}
    if parser not in PARSERS:
        raise TemplateError(f"{where}.content: {parser!r} is not one of {', '.join(PARSERS)}")
    if not isinstance(options, dict) or (parser == "xml-inline" and "tag_pattern" not in options):
        raise TemplateError(f"{where}.content_args: {parser} needs an object with its arguments")
    if "tag_pattern" in options:
        options = {
            **options,
            "tag_pattern": _compiled(f"fields.{name}.content_args.tag_pattern", options["tag_pattern"]),
        }
    where = f"fields.{name}"
    return Region(
        KINDS.get(name.partition("/")[0], "dropped"),
        _anchor(where, field, "open"),
        _anchor(where, field, "close"),
        parser,
        options,
        field.get("transform"),
        bool(field.get("transform_each")),
    )


def _anchor(where: str, field: Mapping[str, Any], key: str) -> Anchor | None:
    literal, pattern = field.get(key), field.get(f"{key}_pattern")
    if literal is not None and pattern is not None:
        raise TemplateError(f"{where}: {key} and {key}_pattern exclude each other")
    if pattern is not None:
        return Anchor((), _compiled(f"{where}.{key}_pattern", pattern))
    if literal is None:
        return None
    literals = [literal] if isinstance(literal, str) else literal
    if not isinstance(literals, list) or not all(isinstance(each, str) and each for each in literals) or not literals:
        raise TemplateError(f"{where}.{key} is not a text or a list of texts")
    return Anchor(tuple(literals))


def _compiled(where: str, pattern: Any) -> Any:
    try:
        return regex.compile(pattern, regex.DOTALL)
    except (regex.error, TypeError) as error:
        raise TemplateError(f"{where} is not a regular expression: {error}") from None


def first_of(
    anchors: Iterable[tuple[Region, Anchor]], text: str, *, at_end: bool
) -> tuple[tuple[Region, Found] | None, int]:
    """Returns the first match of several anchors, with its owner, and where text begins that may become another one.

    Of matches at one place the longest wins, then the first anchor. A match is returned only if no other can begin at
    or before it.
    """
    best: tuple[Region, Found] | None = None
    held = len(text)
    for owner, anchor in anchors:
        found = anchor.find(text, 0, at_end=at_end)
        if found is None:
            continue
        if found.is_pending:
            held = min(held, found.start)
        elif best is None or (found.start, found.start - found.end) < (best[1].start, best[1].start - best[1].end):
            best = owner, found
    if best is not None and best[1].start >= held and held < len(text):
        best = None
    return best, held if best is None else best[1].start
