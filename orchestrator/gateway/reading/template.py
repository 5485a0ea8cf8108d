"""Response templates: the declarative format in which checkpoints describe their answers, as frozen values.

The format is that of `response_template` in tokenizer_config.json (transformers 5.13 and later). One extension: a field
named `tool_calls:NAME` is another form of `tool_calls`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import regex

from orchestrator.gateway.reading.content import MAX_MATCH_S, PARSERS, Match, Pattern

MAX_ANCHOR_CHARACTERS = 400  # of a text that an anchor matches; longer matches are not anchors
MAX_PATTERN_CHARACTERS = 4000
Role = Literal["content", "reasoning", "calls", "other"]
_ROLES: Mapping[str, Role] = {
    "content": "content",
    "thinking": "reasoning",
    "reasoning": "reasoning",
    "reasoning_content": "reasoning",
    "tool_calls": "calls",
}
_FIELD_KEYS = frozenset(
    "open open_pattern close close_pattern content content_args repeats join optional transform transform_each".split()  # noqa: SIM905
)
_KEYS = frozenset(("version", "defaults", "fields", "start_anchor", "start_anchor_pattern"))
_META = regex.compile(r"(?<!\\)[\[\](){}.*+?|^$]|\\[a-zA-Z]")


class BadResponseTemplate(ValueError):
    """A response template that is not in the format. The text names the field."""


@dataclass(frozen=True, eq=False)
class Anchor:
    """Where a field begins or ends."""

    pattern: Pattern
    fixed: bool  # a match at the end of the text cannot become longer

    def search(self, text: str, start: int, final: bool) -> tuple[Match | None, bool]:
        """Returns the first match from ``start``, and whether it is certain: more text may complete or lengthen it,
        unless the text is ``final``. Raises TimeoutError."""
        find, size = self.pattern.search, len(text)
        while (match := find(text, start, partial=not final, timeout=MAX_MATCH_S)) is not None:
            begin, end = match.span()
            if size - begin <= MAX_ANCHOR_CHARACTERS:
                return match, final or not (match.partial or self._may_grow(text, begin, end))
            match = self.pattern.match(text, begin, begin + MAX_ANCHOR_CHARACTERS, timeout=MAX_MATCH_S)
            if match is not None:
                return match, True
            start = begin + 1
        return None, False

    def _may_grow(self, text: str, begin: int, end: int) -> bool:
        if end == len(text):
            return not self.fixed or begin == end
        return not self.fixed and (
            self.pattern.fullmatch(text, begin, partial=True, timeout=MAX_MATCH_S) is not None  # an optional end
        )

    @property
    def text(self) -> str | None:
        """The only text that it matches, apart from spaces at its ends; None if it can match several."""
        bare = self.pattern.pattern.replace(r"\s*", "").replace(r"\n", "")
        return None if _META.search(bare) else regex.sub(r"\\(.)", r"\1", bare)


@dataclass(frozen=True, eq=False)
class TemplateField:
    """A part of the answer, from the anchor ``open`` to the anchor ``close``. Without ``open``, it is the text that no
    other field contains. Without ``close``, it ends where the next field begins."""

    role: Role
    open: Anchor | None
    close: Anchor | None
    content: str  # the parser of its text
    args: Mapping[str, Any]
    join: str  # between the texts of several parts of this field
    transform: Any  # the shape of the value
    each: bool  # ``transform`` is that of each item

    @property
    def json_call(self) -> Literal["object", "array", "arguments"] | None:
        """The kind of JSON that is passed on as it arrives: one call, a list of calls, or the arguments of a call whose
        name is in the anchor. None for any other text, which is read as a whole."""
        function = self.transform.get("function") if isinstance(self.transform, Mapping) else None
        if self.role != "calls" or self.content != "json" or self.args or not isinstance(function, Mapping):
            return None
        names = function.get("name"), function.get("arguments")
        if self.each:
            return "array" if names in (("{name}", "{arguments}"), ("{name}", "{parameters}")) else None
        if names in (("{content.name}", "{content.arguments}"), ("{content.name}", "{content.parameters}")):
            return "object"
        return "arguments" if names == ("{name}", "{content}") else None


@dataclass(frozen=True, eq=False)
class ResponseTemplate:
    """The parts of a model's answer."""

    start: Anchor  # the end of the prompt begins after its last match
    fields: tuple[TemplateField, ...]
    ids: Literal["", "mistral", "kimi"] = ""  # the form of calls' ids, where the chat template requires one

    def field_of(self, role: Role) -> TemplateField | None:
        """Returns the first field with the role."""
        return next((field for field in self.fields if field.role == role), None)

    @property
    def implicit(self) -> TemplateField | None:
        """The field for text that is in no other field."""
        return next((field for field in self.fields if field.open is None), None)

    def answer_in(self, prompt: str) -> str:
        """Returns the beginning of the answer that a prompt ends with."""
        ends = [match.end() for match in self.start.pattern.finditer(prompt, timeout=MAX_MATCH_S)]
        return prompt[ends[-1] :] if ends else ""

    def dropped(self, special_tokens: Iterable[str]) -> Anchor | None:
        """Returns an anchor for the special tokens that are in no anchor of a field; None if there are none."""
        anchors = [anchor for field in self.fields for anchor in (field.open, field.close) if anchor is not None]
        named = "\0".join(regex.sub(r"\\(.)", r"\1", anchor.pattern.pattern) for anchor in anchors)
        words = [token for token in special_tokens if token and token not in named]
        return Anchor(regex.compile(r"\L<words>", words=words), True) if words else None

    @property
    def reasons(self) -> bool:
        """Returns whether answers may have reasoning."""
        return self.field_of("reasoning") is not None


def load_template(spec: Any, ids: Literal["", "mistral", "kimi"] = "") -> ResponseTemplate:
    """Checks a response template, and compiles its patterns. Raises BadResponseTemplate."""
    scope = "response_template"
    values = _mapping(scope, spec, _KEYS)
    if values.get("version", 1) != 1:
        raise BadResponseTemplate(f"{scope}: version {values['version']} is not supported, only 1")
    fields = values.get("fields")
    if not isinstance(fields, Mapping) or not fields:
        raise BadResponseTemplate(f"{scope}.fields must be an object with at least one field")
    loaded = tuple(_field(str(name), field) for name, field in fields.items())
    if sum(field.open is None for field in loaded) > 1:
        raise BadResponseTemplate(f"{scope}.fields: only one field may have neither open nor open_pattern")
    start = _anchor(scope, values, "start_anchor")
    if start is None:
        raise BadResponseTemplate(f"{scope} must have start_anchor or start_anchor_pattern")
    return ResponseTemplate(start, loaded, ids)


def _mapping(scope: str, value: Any, keys: frozenset[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadResponseTemplate(f"{scope} must be an object, not {type(value).__name__}")
    if unknown := sorted(map(str, value.keys() - keys)):
        raise BadResponseTemplate(f"{scope}: {unknown[0]} is not a known key; keys are {', '.join(sorted(keys))}")
    return value


def _field(name: str, spec: Any) -> TemplateField:
    scope = f"response_template.fields.{name}"
    values = _mapping(scope, spec, _FIELD_KEYS)
    content, args, join = values.get("content", "text"), values.get("content_args", {}), values.get("join")
    if content not in PARSERS:
        raise BadResponseTemplate(f"{scope}.content: {content!r} is not one of {', '.join(sorted(PARSERS))}")
    if not isinstance(args, Mapping) or not isinstance(join, str | None):
        raise BadResponseTemplate(f"{scope}: content_args must be an object, and join a text")
    role = _ROLES.get(name.partition(":")[0], "other")
    if role in ("content", "reasoning") and (content != "text" or values.get("transform") is not None):
        raise BadResponseTemplate(f"{scope} must be text without a transform")
    pattern = args.get("tag_pattern")
    if pattern is not None and not {"key", "value"} <= _compiled(f"{scope}.content_args", pattern).groupindex.keys():
        raise BadResponseTemplate(f"{scope}.content_args.tag_pattern must have the groups key and value")
    return TemplateField(
        role,
        _anchor(scope, values, "open"),
        _anchor(scope, values, "close"),
        content,
        args,
        "\n" if join is None else join,
        values.get("transform"),
        bool(values.get("transform_each", False)),
    )


def _anchor(scope: str, values: Mapping[str, Any], key: str) -> Anchor | None:
    literal, pattern = values.get(key), values.get(f"{key}_pattern")
    if literal is None and pattern is None:
        return None
    if pattern is not None:
        if literal is not None:
            raise BadResponseTemplate(f"{scope}: {key} and {key}_pattern exclude each other")
        return Anchor(_compiled(f"{scope}.{key}_pattern", pattern), False)
    texts = [literal] if isinstance(literal, str) else literal
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise BadResponseTemplate(f"{scope}.{key} must be a text or a list of texts")
    longest = sorted(texts, key=len, reverse=True)
    grows = any(one != other and one.startswith(other) for one in texts for other in texts)
    return Anchor(_compiled(f"{scope}.{key}", "|".join(map(regex.escape, longest))), not grows)


def _compiled(scope: str, pattern: Any) -> Pattern:
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARACTERS:
        raise BadResponseTemplate(f"{scope} must be a pattern of at most {MAX_PATTERN_CHARACTERS} characters")
    try:
        return regex.compile(pattern, regex.DOTALL)
    except (regex.error, RecursionError, OverflowError) as error:
        raise BadResponseTemplate(f"{scope}: {pattern!r} is not a regular expression: {error}") from error
