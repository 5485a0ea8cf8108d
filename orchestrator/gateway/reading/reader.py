"""Reads an answer by its model's response template, and the answers to forced calls, which are JSON with any model.

Text that turns out not to be a call is content. Spaces around calls and reasoning are not content.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from orchestrator.gateway.reading.call_text import SPACE, CallText, CharacterRole
from orchestrator.gateway.reading.content import ContentError, calls_in
from orchestrator.gateway.reading.events import (
    AnswerReader,
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
)
from orchestrator.gateway.reading.template import Found, Region, ResponseTemplate, first_of

_ALPHANUMERIC = string.ascii_letters + string.digits
NewId = Callable[[], str]


def call_id() -> str:
    """Returns a new id of a call."""
    return f"call_{secrets.token_hex(12)}"


def mistral_id() -> str:
    """Returns an id of nine characters: Mistral's chat templates reject others."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class CallReader:
    """Reads calls in JSON: one object, or an array of them. The base of all readers."""

    def __init__(self, new_id: NewId = call_id, *, streamed: bool = False, only_one: bool = False) -> None:
        """``streamed``: arguments are emitted as they arrive, so errors in their JSON may be found too late; otherwise
        a call is emitted when it is complete. ``only_one``: further calls are dropped."""
        self._new_id = new_id
        self._streamed = streamed
        self._only_one = only_one
        self._state: Callable[[str], str] = self._outside
        self._held = ""  # may become an anchor
        self._spaces = ""  # content only if content follows
        self._call: CallText | None = None
        self._opening = ""  # the text before the call that belongs to it
        self._given_id = ""  # the call's, by the model
        self._keys: tuple[str, ...] | None = None  # allowed in a call
        self._calls = 0
        self._emitted = 0  # characters of the arguments
        self._has_content = False
        self._has_regions = False  # calls or reasoning
        self._is_over = False  # no more text will follow
        self._out: list[Event] = []

    between = SPACE

    def push(self, text: str) -> list[Event]:
        self._out = []
        text, self._held = self._held + text, ""
        while text:
            text = self._state(text)
        self._emit_call()
        return self._out

    def flush(self) -> list[Event]:
        self._is_over = True
        self.push("")
        self._end()
        if not self._has_regions:
            self._emit_text(Content, self._spaces)
        return self._out

    def finish_reason(self, reason: str) -> str:
        return "tool_calls" if self._calls and reason == "stop" else reason

    # States: each reads a text and returns the part that the next state must read

    def _outside(self, text: str) -> str:
        """Reads content."""
        self._content(text)
        return ""

    def _value(self, text: str) -> str:
        """Reads the beginning of a call or of an array of calls."""
        stripped = text.lstrip(SPACE)
        if not stripped:
            self._opening += text
            return ""
        blank = text[: len(text) - len(stripped)]
        if stripped[0] == "[":
            self._after = self._between_calls
            self._open(self._opening + blank + "[")
            return stripped[1:]
        self._after = self._closed
        self._open(self._opening + blank)
        return stripped

    def _open(self, opening: str, name: str | None = None) -> None:
        self._call, self._opening, self._emitted = CallText(name, self._keys), opening, 0
        self._state = self._in_call

    def _in_call(self, text: str) -> str:
        call = self._call
        assert call is not None
        for at, char in enumerate(text):
            result = call.take(char)
            if result is CharacterRole.MORE:
                continue
            self._emit_call()
            self._call = None
            if result is CharacterRole.BROKEN:
                if not (self._emitted or self._opening or call.raw):  # the same text would be read as a call again
                    self._content(char)
                    at += 1
                elif not self._emitted:
                    self._content(self._opening + call.raw)
                self._has_content = True  # so that the rest of the text is unchanged
                self._state = self._outside
                return text[at:]
            self._state = self._after
            return text[at + (result is CharacterRole.LAST) :]
        return ""

    def _between_calls(self, text: str) -> str:
        stripped = text.lstrip(SPACE)
        if stripped[:1] == ",":
            self._open("")
            return stripped[1:]
        if stripped:
            self._state = self._closed
        return stripped[1:] if stripped[:1] == "]" else stripped

    def _closed(self, text: str) -> str:
        """Reads what is behind the last call of a region."""
        self._state = self._outside
        return text

    _after: Callable[[str], str]

    def _end(self) -> None:
        """Turns what is incomplete at the end of the text into content."""
        call, self._call = self._call, None
        if call is not None and not (call.complete or self._emitted):
            self._content(self._opening + call.raw)
        elif self._state == self._value:
            self._content(self._opening)

    # Output

    def _emit_call(self) -> None:
        """Emits the new part of the current call."""
        call = self._call
        if call is None or not (call.complete or (self._streamed and call.begun)):
            return
        if not self._emitted:
            assert call.name is not None
            self._begin_call(call.name, self._given_id)
        if len(call.arguments) > self._emitted:
            self._emit(CallArguments(self._calls - 1, "".join(call.arguments[self._emitted :])))
            self._emitted = len(call.arguments)

    def _begin_call(self, name: str, id: str) -> None:
        self._has_regions = True
        self._emit(CallBegin(self._calls, id or self._new_id(), name))
        self._calls += 1

    def _emit(self, event: CallBegin | CallArguments) -> None:
        if not (self._only_one and event.index):
            self._out.append(event)

    def _content(self, text: str) -> None:
        """Emits content, but the spaces at its end only when more follows, and those after a call or reasoning only
        when there was content before."""
        text = self._spaces + text
        stripped = text.rstrip(self.between)
        if stripped and self._has_regions and not self._has_content:
            stripped = stripped.lstrip(self.between)
        self._spaces = text[len(text.rstrip(self.between)) :]
        if stripped:
            self._has_content = True
            self._emit_text(Content, stripped)

    def _emit_text(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        if not text:
            return
        last = self._out[-1] if self._out else None
        if isinstance(last, kind):
            self._out[-1] = kind(last.text + text)
        else:
            self._out.append(kind(text))


class TemplateReader(CallReader):
    """Reads an answer by a response template."""

    def __init__(
        self,
        template: ResponseTemplate,
        new_id: NewId = call_id,
        *,
        message: str = "",
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        streamed: bool = False,
        only_one: bool = False,
    ) -> None:
        """``message``: what the prompt has of the answer's message. ``tools``: the schemas of their
        arguments, by name; None: calls are content."""
        super().__init__(new_id, streamed=streamed, only_one=only_one)
        self.between = template.between
        self._template = template
        self._tools = {name: schema.get("properties") or {} for name, schema in (tools or {}).items()}
        self._opens = [
            (region, region.open)
            for region in template.regions
            if region.open is not None and (tools is not None or region.kind != "calls")
        ]
        if template.outside.close is not None:
            self._opens.append((template.outside, template.outside.close))
        self._region: Region | None = None  # None: outside
        self._found: Found | None = None  # of the region's opening anchor
        self._body: list[str] = []  # of a region that is parsed at its end
        self._begun = False  # the region has text that is not a space
        self._pushed = 0  # characters
        self._empty_at = -1  # where the last anchor without text was
        if message:
            self.push(message)
            self._out, self._spaces = [], ""

    @property
    def in_reasoning(self) -> bool:
        """Returns whether the text so far ends in reasoning."""
        return (self._region or self._template.outside).kind == "reasoning"

    def push(self, text: str) -> list[Event]:
        self._pushed += len(text)
        return super().push(text)

    def _outside(self, text: str) -> str:
        try:
            best, held = first_of(self._opens, text, at_end=self._is_over)
        except TimeoutError:  # of a checkpoint's pattern
            self._opens, best, held = [], None, len(text)
        self._text_of(self._template.outside, text[:held])
        if best is None:
            self._held = text[held:]
            return ""
        region, found = best
        at = self._pushed - len(text) + found.start
        if found.start == found.end and at == self._empty_at:  # it would match forever
            self._text_of(self._template.outside, text[found.start])
            return text[found.start + 1 :]
        self._empty_at = at if found.start == found.end else -1
        if region is not self._template.outside:
            self._enter(region, found, text[found.start : found.end])
        return text[found.end :]

    def _enter(self, region: Region, found: Found, opening: str) -> None:
        self._region, self._found, self._begun, self._opening = region, found, False, opening
        if region.kind != "calls":
            self._spaces = self._spaces if region.kind == "content" else ""
            self._state = self._inside
            return
        self._keys, self._given_id = region.options.get("keys"), found.groups.get("id", "")
        self._state = self._value if region.is_streamed else self._collect
        if region.is_streamed and region.has_name:
            self._after = self._closed
            self._open(opening, found.groups["name"])

    def _inside(self, text: str) -> str:
        """Reads a region of text, up to its end."""
        region = self._region
        assert region is not None
        before, found = self._until_closed(text)
        self._text_of(region, before)
        if found is None:
            return ""
        self._leave()
        return text[found.end :]

    def _collect(self, text: str) -> str:
        """Reads a region of calls that is parsed at its end."""
        before, found = self._until_closed(text)
        self._body.append(before)
        if found is None:
            return ""
        self._parse(text[found.start : found.end])
        return text[found.end :]

    def _until_closed(self, text: str) -> tuple[str, Found | None]:
        """Returns the text before the region's end, and the end; without an end, holds what may become one."""
        region = self._region
        assert region is not None
        try:
            found = None if region.close is None else region.close.find(text, 0, at_end=self._is_over)
        except TimeoutError:
            self._region, found = replace(region, close=None), None
        if found is None:
            return text, None
        if found.is_pending:
            self._held = text[found.start :]
            return text[: found.start], None
        return text[: found.start], found

    def _text_of(self, region: Region, text: str) -> None:
        if region.kind == "content":
            self._content(text)
        elif region.kind == "reasoning" and text:
            self._has_regions = True
            text = self._spaces + text
            stripped = text.rstrip(SPACE)
            self._spaces = text[len(stripped) :]
            if not self._begun:
                stripped = stripped.lstrip(SPACE)
            self._begun = self._begun or bool(stripped)
            self._emit_text(Reasoning, stripped)

    def _leave(self) -> None:
        region, self._region, self._state = self._region, None, self._outside
        if region is not None and region.kind == "reasoning":
            self._has_regions, self._spaces = True, ""

    def _parse(self, closing: str) -> None:
        region, found, body = self._region, self._found, "".join(self._body)
        assert region is not None
        assert found is not None
        self._body = []
        self._leave()
        try:
            calls = list(calls_in(region, body, found.groups, self._tools))
        except ContentError:
            self._content(self._opening + body + closing)
            return
        for call in calls:
            self._begin_call(call.name, call.id or self._given_id)
            self._emit(CallArguments(self._calls - 1, call.arguments))

    def _in_call(self, text: str) -> str:
        rest = super()._in_call(text)
        if self._state == self._outside:  # it was no call
            self._region = None
        return rest

    def _closed(self, text: str) -> str:
        """Reads the end of a region of calls, which may be missing."""
        region = self._region
        assert region is not None
        if region.close is not None:
            stripped = text.lstrip(SPACE)
            found = region.close.find(stripped, 0, at_end=False)
            is_next = found is not None and not found.start
            if not stripped or (found is not None and is_next and found.is_pending):
                self._held = "" if self._is_over else text
                return ""
            if found is not None and is_next:
                text = stripped[found.end :]
        self._leave()
        return text

    def _end(self) -> None:
        super()._end()
        if self._state == self._collect:
            self._parse("")


class RequiredReader(CallReader):
    """Reads the answer to `tool_choice: required`, which guided decoding restricts to a JSON array of calls."""

    def __init__(self, new_id: NewId = call_id, *, streamed: bool = False, only_one: bool = False) -> None:
        super().__init__(new_id, streamed=streamed, only_one=only_one)
        self._state = self._value


class NamedReader:
    """Reads the answer if `tool_choice` names a function: guided decoding restricts it to the arguments.

    As with OpenAI and vLLM, its finish reason is "stop", not "tool_calls".
    """

    def __init__(self, name: str, new_id: NewId = call_id) -> None:
        self._begin: list[Event] = [CallBegin(0, new_id(), name)]

    def push(self, text: str) -> list[Event]:
        if not text:
            return []
        begin, self._begin = self._begin, []
        return [*begin, CallArguments(0, text)]

    def flush(self) -> list[Event]:
        begin, self._begin = self._begin, []
        return begin

    def finish_reason(self, reason: str) -> str:
        return reason


class ForcedReader:
    """Reads a forced call after reasoning: what the template takes for content is the call."""

    def __init__(self, reasoning: TemplateReader, call: AnswerReader) -> None:
        self._reasoning = reasoning
        self._call = call

    def push(self, text: str) -> list[Event]:
        return [read for event in self._reasoning.push(text) for read in self._forced(event)]

    def flush(self) -> list[Event]:
        read = [each for event in self._reasoning.flush() for each in self._forced(event)]
        return [*read, *self._call.flush()]

    def finish_reason(self, reason: str) -> str:
        return self._call.finish_reason(reason)

    def _forced(self, event: Event) -> list[Event]:
        return self._call.push(event.text) if isinstance(event, Content) else [event]
