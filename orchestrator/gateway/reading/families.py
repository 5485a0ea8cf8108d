"""The response templates of model families whose checkpoints have none, chosen by the signs in their chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, get_args

import msgspec

from orchestrator.gateway.reading.template import ResponseTemplate, TemplateError, load_template
from placements.spec.schema import ToolParser
from workers.text.tokenizer import REASONING_MARKS

NONE, AUTO = "none", "auto"
FAMILIES: tuple[str, ...] = tuple(name for name in get_args(ToolParser) if name not in (NONE, AUTO))
"""The formats of calls; of several whose signs are in a chat template, the first one is chosen."""

ASSISTANTS = (  # the beginnings of an answer in prompts
    "<|im_start|>assistant",
    "<|start_header_id|>assistant<|end_header_id|>",
    "<|header_start|>assistant<|header_end|>",
    "[/INST]",
    "<｜Assistant｜>",
    "<|im_assistant|>assistant<|im_middle|>",
    "<|start_of_role|>assistant<|end_of_role|>",
    "<|start|>assistant",
    "<start_of_turn>model",
    "<|assistant|>",
)


class AnswerFamily(msgspec.Struct, frozen=True):
    """A format of ours."""

    signs: tuple[str, ...]  # texts in chat templates, one of which is enough
    calls: tuple[str, ...]  # how calls begin
    fields: dict[str, Any]  # as in a response template
    between: str | None = None
    reasoning: tuple[str, str] | None = None  # the beginning of reasoning, and of the content after it


class AnswerFormat(msgspec.Struct, frozen=True):
    """How a model writes its answers."""

    template: ResponseTemplate
    call_beginnings: tuple[str, ...] = ()  # literal texts, for grammars
    reasoning: tuple[str, str] | None = None  # texts around reasoning, for grammars
    has_short_ids: bool = False  # ids of calls have nine characters

    @property
    def has_calls(self) -> bool:
        return self.template.has_calls


@cache
def families() -> Mapping[str, AnswerFamily]:
    """Returns the formats of ours by name."""
    text = resources.files(__package__).joinpath("families.json").read_text("utf-8")
    return msgspec.convert(json.loads(text), dict[str, AnswerFamily])


@cache
def format_of(setting: str, chat_template: str | None, own: str | None = None) -> AnswerFormat | None:
    """Returns how a model writes its answers: by its ``own`` response template (JSON), else by the family that
    ``setting`` names or that the signs in the chat template show. None: its answers are only text."""
    if setting == NONE:
        return None
    text = chat_template or ""
    if own is not None and setting == AUTO:
        try:
            template = load_template(json.loads(own))
            return AnswerFormat(template, _beginnings(template), template.reasoning)
        except (TemplateError, ValueError):
            pass  # it is newer than this reader, or broken
    name = setting
    if setting == AUTO:
        name = next((each for each in FAMILIES if any(sign in text for sign in families()[each].signs)), NONE)
    family = families().get(name)
    fields = {} if family is None else dict(family.fields)
    markers = None if family is None else family.reasoning
    if markers is None:
        markers = next((marks for marks in REASONING_MARKS if all(mark in text for mark in marks)), None)
        if markers is not None:
            fields["thinking"] = {"open": markers[0], "close": markers[1]}
    if not fields:
        return None
    value: dict[str, Any] = {"fields": fields, "start_anchor": list(ASSISTANTS)}
    if family is not None and family.between is not None:
        value["between"] = family.between
    beginnings = () if family is None else family.calls
    return AnswerFormat(load_template(value), beginnings, markers, name == "mistral")


def _beginnings(template: ResponseTemplate) -> tuple[str, ...]:
    return tuple(
        literal
        for region in template.regions
        if region.kind == "calls" and region.open is not None
        for literal in region.open.literals
    )
