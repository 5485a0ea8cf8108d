"""The types of the requests of Anthropic's Messages API, with the bounds of their values."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from orchestrator.gateway.openai.protocol import (
    MAX_STOPS,
    MAX_TOOLS,
    MOST,
    Ignored,
    PositiveCount,
    Priority,
    SomeText,
)

_OBJECT = Meta(extra_json_schema={"type": "object"})


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str
    cache_control: Ignored = None
    citations: Ignored = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """Thinking of an earlier answer; it does not reach the model, as in Anthropic's API."""

    thinking: str = ""


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """As ``ThinkingBlock``."""

    data: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of an earlier answer. ``input`` is checked as JSON but not decoded."""

    id: str
    name: str
    input: Annotated[msgspec.Raw, _OBJECT]
    cache_control: Ignored = None


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    """The result of the call with that id. ``is_error`` is ignored: the text says what has failed."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: Ignored = None
    cache_control: Ignored = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct):
    role: Literal["user", "assistant"]
    content: str | list[Block]

    @property
    def blocks(self) -> list[Block]:
        """The content, a text as one block."""
        return [TextBlock(self.content)] if isinstance(self.content, str) else self.content


class ClientTool(msgspec.Struct):
    """A tool that the client runs. ``strict`` is ignored: the arguments of a forced call always match the schema."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    type: Literal["custom"] | None = None
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: Ignored = None
    cache_control: Ignored = None


class AutoChoice(msgspec.Struct, tag_field="type", tag="auto"):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(msgspec.Struct, tag_field="type", tag="any"):
    disable_parallel_tool_use: bool | None = None


class ToolChoice(msgspec.Struct, tag_field="type", tag="tool"):
    name: str
    disable_parallel_tool_use: bool | None = None


class NoneChoice(msgspec.Struct, tag_field="type", tag="none"):
    pass


Choice = AutoChoice | AnyChoice | ToolChoice | NoneChoice


class Thinking(msgspec.Struct):
    """Accepted without effect. A thinking budget is refused."""

    type: Literal["disabled", "adaptive"]


class ClearThinking(msgspec.Struct):
    """Accepted without effect: thinking never reaches the model. Other edits, such as of tool results, are refused."""

    type: Literal["clear_thinking_20251015"]
    keep: Ignored = None


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True):
    edits: list[ClearThinking] | None = None


class OutputFormat(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: OutputFormat | None = None
    effort: Ignored = None


class PromptFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of which the prompt is made. ``None`` means the default."""

    model: str
    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ClientTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    context_management: ContextManagement | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older place of `output_config.format`
    cache_control: Ignored = None


class CountTokensRequest(PromptFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(PromptFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages."""

    max_tokens: PositiveCount
    stop_sequences: Annotated[list[SomeText], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None  # Anthropic's own end at 1
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MOST)] | None = None
    stream: bool | None = None
    priority: Priority | None = None  # as in chats
    # Ignored: they do not affect the answer's tokens.
    metadata: Ignored = None
    service_tier: Ignored = None
    inference_geo: Ignored = None
    speed: Ignored = None
    diagnostics: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None
