"""The parsers of tool calls, one for each format.

Each searches the text for the marker of a call and passes what follows to a ``CallText``. Text that turns out not to be
a call is content, unchanged. Spaces around calls, separators and closing tags are not content.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Literal

from orchestrator.gateway.openai.call_text import ARGUMENTS, SPACE, CallText, CharacterRole
from orchestrator.gateway.reading.events import AnswerReader, CallArguments, CallBegin, Content, Event

MAX_HEAD_CHARACTERS = 400  # characters between a marker and the call's JSON
_OTHERS = ("<function=", "<arg_key>")  # models that write XML inside <tool_call>: Qwen3-Coder, GLM
_ALPHANUMERIC = string.ascii_letters + string.digits


NewId = Callable[[], str]


class _Parser:
    """The base of all formats. ``_state`` reads a text and returns the part that the next state must read."""

    markers: tuple[str, ...] = ()
    keys: Collection[str] | None = None  # allowed in a call
    between = SPACE  # characters that are content only if content follows: before, between and after calls

    def __init__(self, new_id: NewId, *, streamed: bool, only_one: bool) -> None:
        """``streamed``: arguments are emitted as they arrive, so errors in their JSON may be found too late; otherwise
        a call is emitted when it is complete. ``only_one``: further calls are dropped."""
        self._new_id = new_id
        self._streamed = streamed
        self._only_one = only_one
        self._state: Callable[[str], str] = self._text
        self._held = ""  # may become a marker
        self._fresh = True  # no content since the start, or since the last call
        self._provisional = ""  # characters of ``between``
        self._call: CallText | None = None
        self._opening = ""  # the marker of the call
        self._calls = 0
        self._emitted = 0  # characters of the arguments
        self._out: list[Event] = []

    def push(self, text: str) -> list[Event]:
        self._out = []
        text, self._held = self._held + text, ""
        while text:
            text = self._state(text)
        self._emit_call()
        return self._out

    def flush(self) -> list[Event]:
        self._out = []
        call, held, self._held = self._call, self._held, ""
        if call is not None and not (call.complete or self._emitted):
            self._content(self._opening + call.raw)
        self._call = None
        self._content(held)
        if self._provisional and not self._calls:
            self._out.append(Content(self._provisional))
        self._provisional = ""
        return self._out

    def finish_reason(self, reason: str) -> str:
        return "tool_calls" if self._calls and reason == "stop" else reason

    # States

    def _text(self, text: str) -> str:
        """Reads content, up to a marker."""
        if self._fresh:
            stripped = text.lstrip(self.between)
            self._provisional += text[: len(text) - len(stripped)]
            text = stripped
        first = min(((at, mark) for mark in self.markers if (at := text.find(mark)) >= 0), default=None)
        if first is not None:
            at, mark = first
            self._content(text[:at])
            return self._marked(mark, text[at:])
        keep = max((_overlap(text, mark) for mark in self.markers), default=0)
        self._content(text[: len(text) - keep])
        self._held = text[len(text) - keep :]
        return ""

    def _marked(self, mark: str, text: str) -> str:
        """Reads a text that begins with the marker."""
        self._open(mark)
        return text[len(mark) :]

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
                self._content("" if self._emitted else self._opening + call.raw)
                self._broken()
                return text[at:]
            self._fresh = True
            self._closed()
            return text[at + (result is CharacterRole.LAST) :]
        return ""

    def _broken(self) -> None:
        """Sets the state after text that was not a call."""
        self._fresh = False
        self._state = self._text

    def _closed(self) -> None:
        """Sets the state after a call."""
        self._state = self._text

    # Output

    def _open(self, opening: str, name: str | None = None) -> None:
        self._call, self._opening, self._emitted = CallText(name, self.keys), opening, 0
        self._state = self._in_call

    def _emit_call(self) -> None:
        """Emits the new part of the current call."""
        call = self._call
        if call is None or not (call.complete or (self._streamed and call.begun)):
            return
        if not self._emitted:
            self._provisional = ""
            assert call.name is not None
            self._emit(CallBegin(self._calls, self._id(), call.name))
            self._calls += 1
        if len(call.arguments) > self._emitted:
            self._emit(CallArguments(self._calls - 1, "".join(call.arguments[self._emitted :])))
            self._emitted = len(call.arguments)

    def _emit(self, event: CallBegin | CallArguments) -> None:
        if not (self._only_one and event.index):
            self._out.append(event)

    def _id(self) -> str:
        return self._new_id()

    def _content(self, text: str) -> None:
        if not text:
            return
        self._fresh = False
        text, self._provisional = self._provisional + text, ""
        if self._out and isinstance(self._out[-1], Content):
            text = self._out.pop().text + text  # type: ignore[union-attr]
        self._out.append(Content(text))


class HermesParser(_Parser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one pair of tags for each call: Hermes, Qwen."""

    markers = ("<tool_call>",)
    _END = "</tool_call>"

    def _closed(self) -> None:
        self._state = self._end_tag

    def _end_tag(self, text: str) -> str:
        """Reads the end tag, which may be missing."""
        stripped = text.lstrip(SPACE)
        if stripped.startswith(self._END):
            self._state = self._text
            return stripped[len(self._END) :]
        if self._END.startswith(stripped):
            self._held = text
            return ""
        self._state = self._text
        return text

    def flush(self) -> list[Event]:
        if self._state == self._end_tag:
            self._held = ""  # only the tag is incomplete
        return super().flush()


class LlamaParser(_Parser):
    """`{"name": ..., "parameters": {...}}`, with or without `<|python_tag|>`, several separated by `;`: Llama 3."""

    markers = ("<|python_tag|>", "{")
    keys = ("name", *ARGUMENTS, "type", "id")  # so that other JSON is rejected early
    between = SPACE + ";"

    def _marked(self, mark: str, text: str) -> str:
        if mark == "{":
            self._open("")
            return text
        return super()._marked(mark, text)


class _ArrayParser(_Parser):
    """`[{"name": ..., "arguments": {...}}, ...]`."""

    def _between_calls(self, text: str) -> str:
        char = text[0]
        if char == ",":
            self._provisional += char
            self._open("")
        elif char in SPACE:
            self._provisional += char
        else:
            self._state = self._text
            return text[1:] if char == "]" else text
        return text[1:]


class MistralParser(_ArrayParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and the newer `[TOOL_CALLS]name{...}`, also with
    `[CALL_ID]id` and `[ARGS]` after the name."""

    markers = ("[TOOL_CALLS]",)
    _HEAD = re.compile(r"[ \t\r\n]*(?P<name>[\w.\-]+)(\[CALL_ID\](?P<id>[\w\-]+))?(\[ARGS\])?[ \t\r\n]*")
    _HEAD_GOES_ON = re.compile(r"[\w.\-\[\] \t\r\n]*")

    def __init__(self, new_id: NewId, *, streamed: bool, only_one: bool) -> None:
        super().__init__(new_id, streamed=streamed, only_one=only_one)
        self._in_array = False
        self._given_id: str | None = None

    def _marked(self, mark: str, text: str) -> str:
        self._opening, self._state = mark, self._head
        self._given_id = None
        return text[len(mark) :]

    def _head(self, text: str) -> str:
        """Reads the text between the marker and the first brace or bracket; it is held until that arrives."""
        head = text[: MAX_HEAD_CHARACTERS + 1]
        blank = len(head) - len(head.lstrip(SPACE))
        if head[blank : blank + 1] == "[":
            self._in_array = True
            self._open(self._opening + text[: blank + 1])
            return text[blank + 1 :]
        at = head.find("{")
        match = self._HEAD.fullmatch(head[:at]) if at >= 0 else None
        if match is not None:
            self._in_array, self._given_id = False, match["id"]
            self._open(self._opening + text[:at], match["name"])
            return text[at:]
        if at < 0 and len(text) <= MAX_HEAD_CHARACTERS and self._HEAD_GOES_ON.fullmatch(text):
            self._held = text
            return ""
        self._content(self._opening)
        self._broken()
        return text

    def _id(self) -> str:
        return self._given_id or super()._id()

    def _closed(self) -> None:
        self._state = self._between_calls if self._in_array else self._text

    def flush(self) -> list[Event]:
        if self._state == self._head:
            self._held = self._opening + self._held
        return super().flush()


class RequiredParser(_ArrayParser):
    """The answer to `tool_choice: required`, which guided decoding restricts to a JSON array of calls."""

    markers: tuple[str, ...] = ("[",)

    def _closed(self) -> None:
        self.markers = ()  # there is only one array
        self._state = self._between_calls


class NamedParser:
    """The answer if `tool_choice` names a function: guided decoding restricts it to the arguments.

    As with OpenAI and vLLM, its finish reason is "stop", not "tool_calls".
    """

    def __init__(self, new_id: NewId, name: str) -> None:
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


def _overlap(text: str, mark: str) -> int:
    """Returns the length of the longest suffix of ``text`` that is a proper prefix of ``mark``."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


Format = Literal["hermes", "llama3", "mistral"]
FORMATS: Mapping[Format, type[HermesParser | LlamaParser | MistralParser]] = MappingProxyType(
    {"hermes": HermesParser, "llama3": LlamaParser, "mistral": MistralParser}
)

_SIGNS: tuple[tuple[Format, tuple[str, ...]], ...] = (
    ("mistral", ("[TOOL_CALLS]",)),
    ("hermes", ("<tool_call>",)),
    ("llama3", ("<|python_tag|>", '"parameters": dictionary of argument name')),
)


def detect_format(chat_template: str | None) -> Format | None:
    """Returns the call format of a chat template, by the markers in its text; None for an unknown format."""
    text = chat_template or ""
    if any(sign in text for sign in _OTHERS):
        return None
    return next((format for format, signs in _SIGNS if any(sign in text for sign in signs)), None)


def make_parser(
    format: Format | None, calling: str, *, streamed: bool, only_one: bool = False, name: str = ""
) -> AnswerReader:
    """Returns the parser of one answer. ``calling``: auto, required, or named, which needs the ``name``.

    Only ``auto`` needs a format: a required or named call is JSON with any model. The call's id suits the format's chat
    templates.
    """
    new_id = _mistral_id if format == "mistral" else _id
    if calling == "named":
        return NamedParser(new_id, name)
    if calling == "required":
        return RequiredParser(new_id, streamed=streamed, only_one=only_one)
    if format is None:
        raise ValueError("the format of this model's calls is unknown")
    return FORMATS[format](new_id, streamed=streamed, only_one=only_one)


def _id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    """Returns an id of nine characters: Mistral's chat templates reject others."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
