"""Reads answers by response templates, piece by piece.

1. Text outside of all fields belongs to the field without an anchor, or is content. It ends where another field opens.
2. The text of a field ends at its own closing anchor only. Reasoning and content are emitted as they arrive, without
   the spaces at their ends. Spaces around calls are not content.
3. A call whose text is JSON is emitted as it arrives, and ends where the JSON ends; its closing anchor may be missing.
4. Any other call is emitted at its end, with the types of its tool's schema.
5. Text that turns out not to be a call is content, unchanged.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import string
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import regex

from orchestrator.gateway.reading.call_text import ARGUMENTS, SPACE, CallText, CharacterRole
from orchestrator.gateway.reading.content import MAX_MATCH_S, Match, Pattern, Unreadable, parse, transformed, typed
from orchestrator.gateway.reading.events import CallArguments, CallBegin, Content, Event, Reasoning
from orchestrator.gateway.reading.template import Anchor, ResponseTemplate, TemplateField

MAX_PIECE_CHARACTERS = 512  # that are read at once, which limits the time of a pattern search
CONTEXT_CHARACTERS = 256  # of earlier text that look-behinds of patterns can match
_ALPHANUMERIC = string.ascii_letters + string.digits


class TemplateReader:
    """Reads one answer by a template. ``_state`` reads the text from ``_at``, and returns whether to continue."""

    def __init__(
        self,
        template: ResponseTemplate,
        *,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        dropped: Anchor | None = None,
        streamed: bool = True,
        only_one: bool = False,
        first_call: int = 0,
    ) -> None:
        """``tools``: the properties of each tool's arguments. ``dropped``: the special tokens that are not part of
        the answer. ``streamed``: arguments are emitted as they arrive, so errors in their JSON may be found too late;
        otherwise a call is emitted when it is complete. ``only_one``: further calls are dropped. ``first_call`` counts
        the calls of earlier answers."""
        self._template = template
        self._tools = tools or {}
        self._dropped = dropped
        self._streamed = streamed
        self._only_one = only_one
        self._first_call = first_call
        self._text, self._at = "", 0  # what was pushed, and how far it is read
        self._final = False
        self._silent = False  # the text is that of the prompt, and nothing is emitted
        self._implicit = template.implicit or _ANY
        self._field = self._implicit
        self._state: Callable[[], bool] = self._in_text
        self._begun = False  # the current part has characters
        self._spaces = ""  # at the end of the current part
        self._spoken: set[str] = set()  # the roles of the texts so far
        self._opening, self._groups = "", dict[str, str]()  # of the call
        self._wants = ""  # the characters that may come next in a list of calls
        self._body: list[str] = []
        self._call: CallText | None = None
        self._emitted = 0  # characters of its arguments
        self._calls = 0
        self._unmoved = 0  # anchors without characters in a row
        self._out: list[Event] = []

    @property
    def in_reasoning(self) -> bool:
        """Returns whether the next text is reasoning, unless it begins with the mark that ends reasoning."""
        return self._field.role == "reasoning"

    def read_prompt(self, text: str) -> None:
        """Reads the end of the prompt without emitting it: chat templates may write the beginning of an answer. Such a
        reader is only for ``follow``."""
        self._silent = self._final = True
        with contextlib.suppress(TimeoutError):
            self._read(self._template.answer_in(text))

    def follow(self, prompt: TemplateReader) -> None:
        """Continues where the reader of the prompt ended."""
        self._field, self._begun = prompt._field, prompt._begun

    def push(self, text: str) -> list[Event]:
        self._out = []
        for begin in range(0, len(text), MAX_PIECE_CHARACTERS):
            self._read(text[begin : begin + MAX_PIECE_CHARACTERS])
        self._emit_call()
        return self._out

    def flush(self) -> list[Event]:
        self._out, self._final = [], True
        self._read("")
        if self._call is not None:
            if not (self._call.complete or self._emitted) and (self._call.raw or not self._calls):
                self._not_a_call("".join(self._body) + self._call.raw)
        elif self._field.role == "calls" and self._state == self._in_text:
            self._end_call("", lenient=False)
            self._read("")
        return self._out

    def finish_reason(self, reason: str) -> str:
        return "tool_calls" if self._calls and reason == "stop" else reason

    def _read(self, text: str) -> None:
        if self._at > CONTEXT_CHARACTERS + MAX_PIECE_CHARACTERS:
            self._text, self._at = self._text[self._at - CONTEXT_CHARACTERS :], CONTEXT_CHARACTERS
        self._text += text
        try:
            while self._state():
                pass
        except TimeoutError:  # a pattern of the checkpoint: the rest is content
            self._field, self._state, self._call = self._implicit, self._as_content, None
            self._as_content()

    # States

    def _as_content(self) -> bool:
        text, self._at = self._text[self._at :], len(self._text)
        self._say(text)
        return False

    def _in_text(self) -> bool:
        """Reads up to the next anchor."""
        text, nearest, hold = self._text, None, len(self._text)
        gate, anchors = watched(self._template, self._field, self._dropped, self._silent)
        if gate is not None and self._at < hold:
            near = gate.search(text, self._at, partial=True, timeout=MAX_MATCH_S)
            if near is None or near.start() == hold:  # no anchor begins here
                anchors = ()
        for anchor, opened in anchors:
            match, certain = anchor.search(text, self._at, self._final)
            if match is None:
                continue
            if not certain:
                hold = min(hold, match.start())
                continue
            if nearest is None or (match.start(), -match.end()) < (nearest[0].start(), -nearest[0].end()):
                nearest = match, opened
        if nearest is not None and nearest[0].start() < hold:
            return self._anchored(*nearest)
        begin, self._at = self._at, hold
        self._say(text[begin:hold])
        return False

    def _anchored(self, match: Match, opened: TemplateField | None) -> bool:
        self._say(self._text[self._at : match.start()])
        self._unmoved = self._unmoved + 1 if match.end() == self._at else 0
        self._at = match.end()
        if self._unmoved > len(self._template.fields) + 1:  # anchors without characters that open and close in turn
            self._field = self._implicit
            self._say(self._text[self._at : self._at + 1])
            self._at += 1
            return self._at < len(self._text)
        if opened is None and self._field.role == "calls":
            self._end_call(match[0])
        elif opened is not None and opened.role == "calls":
            self._open_field(match, opened)
        elif opened is not _DROPPED:
            self._end_part()
            self._field = opened or self._implicit
        return True

    def _open_field(self, match: Match, field: TemplateField) -> None:
        self._field, self._opening, self._body = field, match[0], []
        self._groups = {key: value for key, value in match.groupdict().items() if value is not None}
        if field.json_call == "array":
            self._state, self._wants = self._in_array, "["
        elif field.json_call == "arguments" and not self._groups.get("name"):
            self._not_a_call("")
        elif field.json_call is not None:
            self._open_call()

    def _in_array(self) -> bool:
        """Reads the characters around the calls of a list."""
        while self._at < len(self._text):
            char = self._text[self._at]
            if char not in SPACE and char not in self._wants:
                break
            self._at += 1
            self._unmoved = 0
            self._body.append(char)
            if char == "]":
                self._state = self._closing
                return True
            if char in "[,":
                self._open_call()
                return True
        else:
            if not self._final:
                return False
        if self._wants == "[":
            self._not_a_call("".join(self._body))
        else:
            self._state = self._closing
        return True

    def _open_call(self) -> None:
        name = self._groups["name"] if self._field.json_call == "arguments" else None
        unmarked = self._field.json_call == "object" and not self._opening.strip()
        self._call = CallText(name, _KEYS if unmarked else None)
        self._emitted, self._state = 0, self._in_json

    def _in_json(self) -> bool:
        """Reads the JSON of a call."""
        call = self._call
        assert call is not None
        for at in range(self._at, len(self._text)):
            role = call.take(self._text[at])
            if role is CharacterRole.MORE:
                continue
            self._unmoved = 0 if call.raw else self._unmoved
            self._at = at + (role is CharacterRole.LAST)
            self._emit_call()
            self._call = None
            if role is CharacterRole.BROKEN:
                if self._emitted:
                    self._begun, self._field, self._state = True, self._implicit, self._in_text
                else:
                    self._not_a_call("".join(self._body) + call.raw)
            else:
                self._state = self._in_array if self._field.json_call == "array" else self._closing
            return True
        self._at = len(self._text)
        return False

    def _closing(self) -> bool:
        """Reads the closing anchor of a call, which may be missing."""
        close = self._field.close
        match, certain = (None, True) if close is None else close.search(self._text, self._at, False)
        rest = self._text[self._at :]
        blank = len(rest) - len(rest.lstrip(SPACE))
        if match is not None and match.start() <= self._at + blank:
            if not certain and not self._final:
                return False
            self._at = match.end()
        elif blank == len(rest) and not self._final:
            return False
        self._field, self._state = self._implicit, self._in_text
        return True

    # Texts

    def _say(self, text: str) -> None:
        """Adds text to the current part."""
        field = self._field
        if field.role == "calls":
            self._body.append(text)
            return
        if field.args.get("strip", True):
            text = text if self._begun else text.lstrip()
            bare = text.rstrip()
            if not bare:
                self._spaces += text
                return
            text, self._spaces = self._spaces + bare, text[len(bare) :]
        if not self._begun and field.role in self._spoken:
            text = field.join + text
        self._begun = True
        if self._silent or field.role == "other" or not text:
            return
        self._spoken.add(field.role)
        kind = Reasoning if field.role == "reasoning" else Content
        if self._out and isinstance(self._out[-1], kind):
            text = self._out.pop().text + text  # type: ignore[union-attr]
        self._out.append(kind(text))

    def _end_part(self) -> None:
        self._begun, self._spaces, self._field = False, "", self._implicit

    # Calls

    def _not_a_call(self, text: str) -> None:
        self._call, self._field, self._state = None, self._implicit, self._in_text
        self._say(self._opening + text)

    def _end_call(self, closing: str, *, lenient: bool = True) -> None:
        """Emits the calls of a text that was read as a whole."""
        field, body = self._field, "".join(self._body)
        try:
            if not lenient and field.content == "xml-inline":
                _check_whole(body, field)
            value = transformed(field.transform, field.each, parse(body, field.content, field.args), self._groups)
            calls = [self._call_of(each) for each in (value if isinstance(value, list) else [value])]
        except (Unreadable, ValueError, TypeError, RecursionError, TimeoutError):
            self._not_a_call(body + closing)
            return
        self._end_part()
        for name, arguments, id in calls:
            self._begin_call(name, id)
            self._emit(CallArguments(self._calls - 1, arguments))

    def _call_of(self, value: Any) -> tuple[str, str, str | None]:
        """Returns the name, the arguments as JSON, and the id of a call. Raises ValueError and TypeError."""
        function = value.get("function", value) if isinstance(value, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str) or not name:
            raise Unreadable("it has no name")
        arguments, id = function.get("arguments"), value.get("id")
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, Mapping):
            raise Unreadable("the arguments are not an object")
        written = json.dumps(typed(arguments, self._tools.get(name, {})), ensure_ascii=False, allow_nan=False)
        (name + written).encode()  # half a surrogate pair is a ValueError
        return name, written, id if isinstance(id, str) and id else None

    def _emit_call(self) -> None:
        """Emits the new part of the current call."""
        call = self._call
        if call is None or not (call.complete or (self._streamed and call.begun)):
            return
        if not self._emitted:
            assert call.name is not None
            self._begun, self._spaces = False, ""
            self._begin_call(call.name, self._groups.get("id"))
            self._opening, self._body, self._wants = "", [], ",]"
        if len(call.arguments) > self._emitted:
            self._emit(CallArguments(self._calls - 1, "".join(call.arguments[self._emitted :])))
            self._emitted = len(call.arguments)

    def _begin_call(self, name: str, id: str | None) -> None:
        self._calls += 1
        self._emit(CallBegin(self._calls - 1, id or self._new_id(name), name))

    def _emit(self, event: CallBegin | CallArguments) -> None:
        if not (self._only_one and event.index):
            self._out.append(event)

    def _new_id(self, name: str) -> str:
        return new_id(self._template.ids, name, self._first_call + self._calls - 1)


@lru_cache(maxsize=1024)
def watched(
    template: ResponseTemplate, field: TemplateField, dropped: Anchor | None, silent: bool
) -> tuple[Pattern | None, tuple[tuple[Anchor, TemplateField | None], ...]]:
    """Returns the anchors that may come next in a field, with the field that each opens, and a pattern that matches
    where any of them may begin. In the prompt, which is ``silent``, calls are not read."""
    anchors: list[tuple[Anchor, TemplateField | None]] = []
    if field.open is None:
        opens = (other for other in template.fields if other.open and not (silent and other.role == "calls"))
        anchors += [(opened.open, opened) for opened in opens if opened.open is not None]
    if field.close is not None:
        anchors.append((field.close, None))
    if dropped is not None and field.role != "calls":
        anchors.append((dropped, _DROPPED))
    patterns = [anchor.pattern for anchor, _ in anchors]
    words = {name: value for pattern in patterns for name, value in pattern.named_lists.items()}
    gate = "|".join(f"(?:{pattern.pattern})" for pattern in patterns)
    joined = None
    if len(patterns) > 1 and not regex.search(r"\\[1-9]", gate):  # numbers of groups change in it
        with contextlib.suppress(regex.error):
            joined = regex.compile(gate, regex.DOTALL, **words)  # type: ignore[arg-type]
    return joined, tuple(anchors)


_ANY = TemplateField("content", None, None, "text", {}, "\n", None, False)
_DROPPED = TemplateField("other", None, None, "text", {}, "", None, False)
_KEYS = ("name", *ARGUMENTS, "type", "id")  # of a call without a marker, so that other JSON is rejected early


def _check_whole(body: str, field: TemplateField) -> None:
    """Raises Unreadable for a text that ends inside a tag."""
    if regex.sub(field.args["tag_pattern"], "", body, flags=regex.DOTALL, timeout=MAX_MATCH_S).strip():
        raise Unreadable("the last tag is not complete")


def new_id(form: str, name: str, index: int) -> str:
    """Returns the id of a call in the form that the model's chat template accepts: Mistral's has nine characters,
    Kimi's the function and the index of the call in the chat."""
    if form == "mistral":
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    return f"functions.{name}:{index}" if form == "kimi" else f"call_{secrets.token_hex(12)}"
