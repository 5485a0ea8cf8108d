"""The response templates of families of models, and the choice of a model's template.

The first of these that exists decides:

1. The family that the spec names.
2. The tokenizer's own `response_template`.
3. The first family whose signs are in the text of the chat template. Reasoning is read only if the template also
   contains one of its markers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from orchestrator.gateway.reading.events import AnswerReader, CallArguments, CallBegin, Content, Event
from orchestrator.gateway.reading.reader import TemplateReader, new_id
from orchestrator.gateway.reading.template import Anchor, BadResponseTemplate, ResponseTemplate, load_template
from workers.messages.requests import AnswerMarkers, ReasoningLimit
from workers.text.tokenizer import PromptTokenizer

log = logging.getLogger(__name__)


class ModelFamily(msgspec.Struct, frozen=True, omit_defaults=True):
    """A family of models. A chat template belongs to it if it contains all texts of one list of ``signs``."""

    signs: list[list[str]]
    template: dict[str, Any]
    calls: tuple[str, ...] = ()  # the beginnings of calls; "{": a call is JSON without a text before it
    markers: tuple[str, str] | None = None  # around the reasoning
    content: str = ""  # the text that begins the content in every answer; empty: there is none
    ids: Literal["", "mistral", "kimi"] = ""


@cache
def families() -> Mapping[str, ModelFamily]:
    """Returns the families by name, those with the most specific signs first."""
    data = Path(__file__).with_name("families.json").read_bytes()
    return msgspec.json.decode(data, type=dict[str, ModelFamily])


@cache
def family_template(name: str, *, reasons: bool = True) -> ResponseTemplate:
    """Returns the template of a family; without ``reasons``, it has no field for reasoning."""
    family = families()[name]
    template = load_template(family.template, family.ids)
    if reasons:
        return template
    return replace(template, fields=tuple(field for field in template.fields if field.role != "reasoning"))


def detect_family(chat_template: str | None) -> str | None:
    """Returns the family of a chat template; None for an unknown one."""
    text = chat_template or ""
    for name, family in families().items():
        if any(all(sign in text for sign in signs) for signs in family.signs):
            return name
    return None


@dataclass(frozen=True)
class AnswerReading:
    """The way in which answers are read. ``dropped`` matches special tokens that are not part of an answer."""

    template: ResponseTemplate | None
    dropped: Anchor | None = None
    markers: tuple[str, str] | None = None  # around the reasoning
    beginnings: tuple[str, ...] = ()  # of calls, as in ``ModelFamily``
    content: str = ""  # likewise

    @property
    def reasons(self) -> bool:
        """Returns whether answers may have reasoning."""
        return self.template is not None and self.template.reasons

    @property
    def calls(self) -> bool:
        """Returns whether the model's own format of calls is known."""
        return self.template is not None and self.template.field_of("calls") is not None


@lru_cache(maxsize=64)
def reading_of(setting: str, tokenizer: PromptTokenizer, tools: bool) -> AnswerReading:
    """Returns the way in which a model's answers are read. ``setting`` is its `response_template` in the spec; with
    ``tools``, its chat template for tools is used."""
    if setting == "none":
        return AnswerReading(None)
    chat_template = tokenizer.chat_template(tools) or ""
    name = detect_family(chat_template) if setting == "auto" else setting
    family = None if name is None else families()[name]
    special = tokenizer.special_tokens
    if setting == "auto" and (own := tokenizer.response_template) is not None:
        try:
            template = load_template(own, "" if family is None else family.ids)
            return AnswerReading(
                template, template.dropped(special), reasoning_markers(template), call_beginnings(template)
            )
        except BadResponseTemplate as problem:
            log.warning("the tokenizer's response_template is not used: %s", problem)
    if name is None or family is None:
        return AnswerReading(None)
    signs = family.markers or ()
    template = family_template(name, reasons=setting != "auto" or any(sign in chat_template for sign in signs))
    markers = family.markers if template.reasons else None
    return AnswerReading(template, template.dropped(special), markers, family.calls, family.content)


def call_beginnings(template: ResponseTemplate) -> tuple[str, ...]:
    """Returns the texts before calls, as far as they are literal."""
    opened = [field.open for field in template.fields if field.role == "calls" and field.open is not None]
    return tuple(anchor.text for anchor in opened if anchor.text)


def reasoning_markers(template: ResponseTemplate) -> tuple[str, str] | None:
    """Returns the texts before and after the reasoning; None if the template has none, or several."""
    field = template.field_of("reasoning")
    if field is None or field.open is None or field.close is None:
        return None
    opening, closing = field.open.text, field.close.text
    return None if opening is None or closing is None else (opening, closing)


@dataclass(frozen=True)
class ReaderFactory:
    """Makes the readers of a request's answers.

    ``calling`` is none, auto, required, or named, which requires the ``name`` of a tool. With any model, a required or
    named call is JSON. ``prompt`` is the end of the prompt's text."""

    reading: AnswerReading
    calling: str
    name: str = ""
    tools: Mapping[str, Mapping[str, Any]] | None = None  # the properties of each tool's arguments
    prompt: str = ""
    streamed: bool = True
    only_one: bool = False
    first_call: int = 0  # the calls of earlier answers

    def __call__(self) -> AnswerReader:
        reader = self._reader()
        reader.follow(self._read_prompt)
        if self.calling == "named":
            ids = self._template.ids
            return NamedReader(CallBegin(0, new_id(ids, self.name, self.first_call), self.name), reader)
        return reader

    @property
    def markers(self) -> AnswerMarkers:
        """The texts around the part of the answer that is constrained."""
        reading = self.reading
        if reading.content:
            if reading.template is not None and reading.content in reading.template.answer_in(self.prompt):
                return AnswerMarkers(reading.beginnings)  # the client has begun the content
            return AnswerMarkers(reading.beginnings, "", reading.content, opened=True)
        if reading.markers is None:
            return AnswerMarkers(reading.beginnings)
        return AnswerMarkers(reading.beginnings, *reading.markers, opened=self._read_prompt.in_reasoning)

    def reasoning_limit(self, tokens: int) -> ReasoningLimit | None:
        """Returns the limit on the reasoning of an answer; None if its marks are unknown."""
        markers = self.reading.markers
        return None if markers is None else ReasoningLimit(tokens, *markers, self._read_prompt.in_reasoning)

    @cached_property
    def _template(self) -> ResponseTemplate:
        template = self.reading.template or _PLAIN
        return template if self.calling == "auto" else _without_calls(template, required=self.calling == "required")

    @cached_property
    def _read_prompt(self) -> TemplateReader:
        """A reader that has read the prompt, once for all choices: a long beginning takes milliseconds."""
        reader = self._reader()
        reader.read_prompt(self.prompt)
        return reader

    def _reader(self) -> TemplateReader:
        return TemplateReader(
            self._template,
            tools=self.tools,
            dropped=self.reading.dropped,
            streamed=self.streamed,
            only_one=self.only_one,
            first_call=self.first_call,
        )


@cache
def _without_calls(template: ResponseTemplate, *, required: bool) -> ResponseTemplate:
    """Returns the template of answers without calls, or whose calls are a JSON array."""
    fields = tuple(field for field in template.fields if field.role != "calls")
    return replace(template, fields=(*fields, *_REQUIRED.fields) if required else fields)


_PLAIN = load_template({"start_anchor_pattern": "(?!)", "fields": {"content": {}}})
_REQUIRED = load_template(
    {
        "start_anchor_pattern": "(?!)",
        "fields": {
            "tool_calls": {
                "open_pattern": r"(?=\[)",
                "content": "json",
                "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}},
                "transform_each": True,
            }
        },
    }
)


class NamedReader:
    """Reads the answer if `tool_choice` names a function: after the reasoning, it is the arguments.

    As with OpenAI and vLLM, its finish reason is "stop", not "tool_calls".
    """

    def __init__(self, call: CallBegin, reader: TemplateReader) -> None:
        self._begin: list[Event] = [call]
        self._reader = reader

    @property
    def in_reasoning(self) -> bool:
        """See ``AnswerReader``."""
        return self._reader.in_reasoning

    def push(self, text: str) -> list[Event]:
        return self._arguments(self._reader.push(text))

    def flush(self) -> list[Event]:
        events = self._arguments(self._reader.flush())
        begin, self._begin = self._begin, []
        return [*events, *begin]

    def finish_reason(self, reason: str) -> str:
        return reason

    def _arguments(self, events: Sequence[Event]) -> list[Event]:
        result: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                result += [*self._begin, CallArguments(0, event.text)]
                self._begin = []
            else:
                result.append(event)
        return result
