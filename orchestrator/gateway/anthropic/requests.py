"""The requests of Anthropic's Messages API, with the bounds of their values, read as the chats that they ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from orchestrator.gateway.openai import body_reader
from orchestrator.gateway.openai.errors import invalid, renamed
from orchestrator.gateway.openai.protocol import (
    MAX_COUNT,
    MAX_STOPS,
    MAX_TOOLS,
    ChatMessage,
    ChatRequest,
    Effort,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    Ignored,
    JsonSchema,
    NamedTool,
    PositiveCount,
    Priority,
    ResponseFormat,
    SomeText,
    TextPart,
    Thinking,
    TokenizeChatRequest,
    Tool,
    ToolCall,
)

_OBJECT = Meta(extra_json_schema={"type": "object"})


class TextBlock(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str
    cache_control: Ignored = None
    citations: Ignored = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    """Thinking of an earlier answer. Its signature is not checked."""

    thinking: str | None = None
    signature: Ignored = None
    cache_control: Ignored = None


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking", forbid_unknown_fields=True):
    """Thinking that only Anthropic's servers can read; it does not reach the model."""

    data: Ignored = None


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", forbid_unknown_fields=True):
    """A call of an earlier answer. ``input`` is checked as JSON but not decoded."""

    id: str
    name: str
    input: Annotated[msgspec.Raw, _OBJECT]
    caller: Ignored = None
    cache_control: Ignored = None


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result", forbid_unknown_fields=True):
    """The result of the call with that id. ``is_error`` is ignored: the text says what has failed."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: Ignored = None
    cache_control: Ignored = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]
    # Ignored, as those of the whole request: clients also send fields of the answer back.
    id: Ignored = None
    cache_control: Ignored = None

    @property
    def blocks(self) -> list[Block]:
        """The content, a text as one block."""
        return [TextBlock(self.content)] if isinstance(self.content, str) else self.content


class ClientTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool that the client runs, or one of Anthropic's, which does not reach the model. ``strict`` is ignored: the
    arguments of a forced call always match the schema."""

    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None  # of a tool of the client always
    type: str | None = None  # `custom`, or null, for a tool of the client
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    # Ignored: they do not affect the prompt. The last ones are of tools that do not reach the model.
    strict: Ignored = None
    cache_control: Ignored = None
    input_examples: Ignored = None
    eager_input_streaming: Ignored = None
    defer_loading: Ignored = None
    allowed_callers: Ignored = None
    max_uses: Ignored = None
    allowed_domains: Ignored = None
    blocked_domains: Ignored = None
    user_location: Ignored = None
    max_characters: Ignored = None
    max_content_tokens: Ignored = None
    citations: Ignored = None
    display_width_px: Ignored = None
    display_height_px: Ignored = None
    display_number: Ignored = None
    mcp_server_name: Ignored = None
    default_config: Ignored = None
    configs: Ignored = None


class AutoChoice(msgspec.Struct, tag_field="type", tag="auto", forbid_unknown_fields=True):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(msgspec.Struct, tag_field="type", tag="any", forbid_unknown_fields=True):
    disable_parallel_tool_use: bool | None = None


class ToolChoice(msgspec.Struct, tag_field="type", tag="tool", forbid_unknown_fields=True):
    name: str
    disable_parallel_tool_use: bool | None = None


class NoneChoice(msgspec.Struct, tag_field="type", tag="none", forbid_unknown_fields=True):
    pass


Choice = AutoChoice | AnyChoice | ToolChoice | NoneChoice


class ClearThinking(msgspec.Struct, forbid_unknown_fields=True):
    """An edit that clears thinking. It has no effect, because chat templates leave out the thinking of earlier turns.
    Other edits, such as those of tool results, are refused."""

    type: Literal["clear_thinking_20251015"]
    keep: Ignored = None


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True):
    edits: list[ClearThinking] | None = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]
    name: Ignored = None


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: OutputFormat | None = None
    effort: Effort | None = None


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
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
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


_messages_decoder = body_reader.decoder_of(MessagesRequest)
_count_decoder = body_reader.decoder_of(CountTokensRequest)
REPLACEMENTS: Mapping[str, str] = MappingProxyType(  # fields of other APIs, and their replacement here
    {
        "response_format": 'output_config: {"format": {"type": "json_schema", "schema": ...}}',
        "stop": "stop_sequences",
        "max_completion_tokens": "max_tokens",
        "max_tokens_to_sample": "max_tokens",
        "instructions": "system",
        "container": "none; the server does not run code",
        "mcp_servers": "tools, which the client runs",
        "parallel_tool_calls": 'tool_choice: {"type": "auto", "disable_parallel_tool_use": true}',
    }
)


class MessagesChat(ChatRequest, kw_only=True):
    """The chat that a Messages request asks for. ``most_tokens`` is its `max_tokens`, which may exceed what the model
    has room for: the answer then ends there."""

    most_tokens: int
    names: ClassVar[Mapping[str, str]] = MappingProxyType(  # of the fields of chats
        {"stop": "stop_sequences", "response_format": "output_config.format"}
    )
    schema_paths: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"response_format": "output_config.format.schema", "tools": "input_schema"}
    )

    @property
    def default_tokens(self) -> int | None:
        return self.most_tokens

    @property
    def shows_reasoning(self) -> bool:
        """Returns whether the answer contains the thinking. Clients that do not request it may read the first block as
        the text."""
        return self.thinking is not None and self.thinking.type != "disabled" and self.thinking.display != "omitted"


def read_messages(body: bytes) -> MessagesChat:
    """Decodes and checks a body. Raises ApiError 400 that names the wrong parameter."""
    request = body_reader.decode(_messages_decoder, body, REPLACEMENTS)
    chat = MessagesChat(
        **_prompt_of(request),
        most_tokens=request.max_tokens,
        **_calling_of(request),
        response_format=_format_of(request),
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stream=request.stream,
        priority=request.priority,
    )
    with renamed(MessagesChat.names):
        return body_reader.checked_chat(chat)


def read_count_tokens(body: bytes) -> TokenizeChatRequest:
    """Decodes and checks a body. Raises ApiError 400 that names the wrong parameter."""
    request = body_reader.decode(_count_decoder, body, REPLACEMENTS)
    prompt = _prompt_of(request)
    if _calling_of(request).get("tool_choice") == "none":
        prompt["tools"] = None
    chat = TokenizeChatRequest(**prompt)
    body_reader.check_prompt(chat)
    return chat


def _prompt_of(request: PromptFields) -> dict[str, Any]:
    """Returns the fields of the prompt. An assistant's text at the end is the beginning of the answer."""
    messages = [*_system(request), *(part for message in request.messages for part in _messages(message))]
    messages = _joined(messages)
    if not messages:
        raise invalid("messages: none has text, a tool use or a tool result", param="messages")
    last = messages[-1]
    continues = last.role == "assistant" and not last.tool_calls
    return {
        "model": request.model,
        "messages": messages,
        "tools": None if request.tools is None else [_tool(tool) for tool in request.tools],
        "continue_final_message": True if continues else None,
        "add_generation_prompt": False if continues else None,
        "thinking": request.thinking,
        "reasoning_effort": None if request.output_config is None else request.output_config.effort,
    }


def _tool(tool: ClientTool) -> Tool:
    type = "function" if tool.type in (None, "custom") else tool.type
    return Tool(type, FunctionDefinition(tool.name or "", tool.description, tool.input_schema))


def _system(request: PromptFields) -> Iterator[ChatMessage]:
    if isinstance(request.system, str):
        yield ChatMessage("system", request.system)
    elif request.system:
        yield ChatMessage("system", [TextPart("text", block.text) for block in request.system])


def _messages(message: InputMessage) -> Iterator[ChatMessage]:
    """Yields the messages of a chat: each result of a tool is one of its own."""
    texts: list[TextPart] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for position, block in enumerate(message.blocks):
        if isinstance(block, TextBlock):
            texts.append(TextPart("text", block.text))
        elif isinstance(block, ToolUseBlock):
            if message.role != "assistant":
                raise _misplaced(position, "tool_use", "assistant")
            calls.append(ToolCall(FunctionCall(block.name, bytes(block.input).decode()), block.id))
        elif isinstance(block, ToolResultBlock):
            if message.role != "user":
                raise _misplaced(position, "tool_result", "user")
            if texts:
                yield ChatMessage("user", texts)
                texts = []
            yield ChatMessage("tool", _result(block), tool_call_id=block.tool_use_id)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking or "")
    if texts or calls:
        yield ChatMessage(
            message.role, texts, tool_calls=calls or None, reasoning_content="\n".join(filter(None, thoughts)) or None
        )


def _misplaced(position: int, kind: str, role: str) -> Exception:
    return invalid(f"messages: content[{position}]: only messages of the role {role!r} have {kind}", param="messages")


def _result(block: ToolResultBlock) -> str:
    if block.content is None or isinstance(block.content, str):
        return block.content or ""
    return "".join(part.text for part in block.content)


def _joined(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Joins successive messages of one role, as the API does: many chat templates reject them."""
    joined: list[ChatMessage] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is None or last.role != message.role or message.role not in ("user", "assistant") or last.tool_calls:
            joined.append(message)
            continue
        assert isinstance(last.content, list)
        assert isinstance(message.content, list)
        thoughts = "\n".join(filter(None, (last.reasoning_content, message.reasoning_content)))
        content = [*last.content, *message.content]
        joined[-1] = ChatMessage(last.role, content, tool_calls=message.tool_calls, reasoning_content=thoughts or None)
    return joined


def _calling_of(request: PromptFields) -> dict[str, Any]:
    """Returns the fields that say how tools may be called."""
    choice = request.tool_choice
    called: Literal["none", "auto", "required"] | NamedTool
    match choice:
        case None:
            return {}
        case NoneChoice():
            return {"tool_choice": "none"}
        case AutoChoice():
            called = "auto"
        case AnyChoice():
            called = "required"
        case ToolChoice():
            called = NamedTool("function", FunctionName(choice.name))
    return {"tool_choice": called, "parallel_tool_calls": False if choice.disable_parallel_tool_use else None}


def _format_of(request: PromptFields) -> ResponseFormat | None:
    config = request.output_config
    format = request.output_format if config is None or config.format is None else config.format
    return None if format is None else ResponseFormat("json_schema", JsonSchema(schema=format.schema))
