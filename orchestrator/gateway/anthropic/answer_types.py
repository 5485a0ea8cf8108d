"""The types of the Messages API's answers. The gateway writes answers by hand; a test reads them as these types."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class AnsweredText(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class AnsweredToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int


class Message(msgspec.Struct):
    """``stop_sequence`` is the one that has ended the answer, if one has."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredText | AnsweredToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    input_tokens: int


class ModelInfo(msgspec.Struct):
    """A model in the list of models, if the request has the header `anthropic-version`."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str  # RFC 3339
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class ModelPage(msgspec.Struct):
    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessageErrorDetails(msgspec.Struct):
    type: str
    message: str


class MessageError(msgspec.Struct):
    """Every answer of the Messages API with a status of 400 or above."""

    type: Literal["error"]
    error: MessageErrorDetails
    request_id: str
