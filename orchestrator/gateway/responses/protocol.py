"""The types of the requests of OpenAI's Responses API, with the bounds of their values."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from orchestrator.gateway.openai.protocol import MAX_TOOLS, Ignored, PositiveCount, Priority

_NOTHING = Meta(extra_json_schema={"type": "null", "default": None})


class ContentPart(msgspec.Struct):
    """One part of a message or of a function's output; only text is supported."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputItem(msgspec.Struct):
    """One item of the input. Reasoning of earlier answers does not reach the model."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None  # null: message
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class FunctionTool(msgspec.Struct):
    """``strict`` is ignored: the arguments of a forced call always match the schema."""

    type: Literal["function"]
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class FunctionChoice(msgspec.Struct):
    type: Literal["function"]
    name: str


class TextFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: Ignored = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses. ``None`` means the default."""

    model: str
    input: Annotated[str, Meta(min_length=1)] | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: PositiveCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    truncation: Literal["disabled"] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    priority: Priority | None = None  # as in chats
    metadata: dict[str, str] | None = None  # returned in the answer
    # Refused unless null: they need responses that are kept.
    previous_response_id: Annotated[Ignored, _NOTHING] = None
    conversation: Annotated[Ignored, _NOTHING] = None
    prompt: Annotated[Ignored, _NOTHING] = None
    background: Annotated[bool, Meta(extra_json_schema={"enum": [False]})] | None = None
    # Ignored: they do not affect the answer's tokens.
    store: Ignored = None
    stream_options: Ignored = None
    reasoning: Ignored = None
    max_tool_calls: Ignored = None
    user: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
