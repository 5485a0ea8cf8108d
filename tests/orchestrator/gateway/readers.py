"""Readers of answers by the family of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.gateway.reading.events import AnswerReader
from orchestrator.gateway.reading.families import format_of
from orchestrator.gateway.reading.reader import NamedReader, RequiredReader, TemplateReader, call_id, mistral_id


def reader_of(
    family: str | None,
    calling: str = "auto",
    *,
    streamed: bool = True,
    only_one: bool = False,
    chat_template: str = "",
    message: str = "",
    tools: Mapping[str, Mapping[str, Any]] | None = None,
) -> AnswerReader:
    """Returns a reader; ``message`` is the end of the prompt."""
    if calling == "named":
        return NamedReader("f")
    if calling == "required":
        return RequiredReader(streamed=streamed, only_one=only_one)
    format = format_of(family or "auto", chat_template)
    assert format is not None
    return TemplateReader(
        format.template,
        mistral_id if format.has_short_ids else call_id,
        message=format.template.message_start(message),
        tools=tools or {},
        streamed=streamed,
        only_one=only_one,
    )
