"""The requests of OpenAI's Responses API, with the bounds of their values, read as the chats that they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from orchestrator.gateway.openai import body_reader
from orchestrator.gateway.openai.errors import ApiError, invalid, renamed
from orchestrator.gateway.openai.protocol import (
    MAX_TOOLS,
    ChatMessage,
    ChatRequest,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    Ignored,
    JsonSchema,
    NamedTool,
    PositiveCount,
    Priority,
    ResponseFormat,
    Tool,
    ToolCall,
)

_NOTHING = Meta(extra_json_schema={"type": "null", "default": None})
_KEPT = ("previous_response_id", "conversation", "prompt")


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


_decoder = body_reader.decoder_of(ResponsesRequest, messages="input")
REPLACEMENTS: Mapping[str, str] = MappingProxyType(  # fields of other APIs, and their replacement here
    {
        "messages": "input",
        "system": "instructions",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": 'text: {"format": ...}',
        "stop": "stop, of /v1/chat/completions",
        "logprobs": "logprobs, of /v1/chat/completions",
        "top_logprobs": "top_logprobs, of /v1/chat/completions",
    }
)


class ResponsesChat(ChatRequest, kw_only=True):
    """The chat that a Responses request asks for."""

    request: ResponsesRequest
    names: ClassVar[Mapping[str, str]] = MappingProxyType(  # of the fields of chats
        {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
    )
    schema_paths: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"response_format": "text.format.schema", "tools": "parameters"}
    )


def read_responses(body: bytes) -> ResponsesChat:
    """Decodes and checks a body. Raises ApiError 400 that names the wrong parameter."""
    request = body_reader.decode(_decoder, body, REPLACEMENTS)
    for name in _KEPT:
        value = getattr(request, name)
        if value is not None and bytes(value) != b"null":
            raise _unsupported(name, "no responses are kept; send the whole conversation as input")
    if request.background:
        raise _unsupported("background", "send stream: true, or wait for the answer")
    choice = request.tool_choice
    named = NamedTool("function", FunctionName(choice.name)) if isinstance(choice, FunctionChoice) else choice
    chat = ResponsesChat(
        model=request.model,
        messages=_messages(request),
        tools=None if request.tools is None else [_tool(tool) for tool in request.tools],
        tool_choice=named,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format_of(request),
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        stream=request.stream,
        priority=request.priority,
        request=request,
    )
    with renamed(ResponsesChat.names):
        return body_reader.checked_chat(chat)


def _unsupported(name: str, instead: str) -> ApiError:
    return invalid(f"{name} is not supported: {instead}", param=name, code="unsupported_parameter")


def _tool(tool: FunctionTool) -> Tool:
    return Tool("function", FunctionDefinition(tool.name, tool.description, tool.parameters))


def _messages(request: ResponsesRequest) -> list[ChatMessage]:
    messages = [] if not request.instructions else [ChatMessage("system", request.instructions)]
    if isinstance(request.input, str):
        return [*messages, ChatMessage("user", request.input)]
    for position, item in enumerate(request.input):
        _add(messages, item, f"input[{position}]")
    return messages


def _add(messages: list[ChatMessage], item: InputItem, where: str) -> None:
    """Adds an item: calls belong to the assistant's message before them."""
    match item.type:
        case "reasoning":
            return
        case "function_call":
            name, arguments, id = _given(item.name, f"{where}.name"), item.arguments or "", item.call_id
            call = ToolCall(FunctionCall(name, arguments), _given(id, f"{where}.call_id"))
            last = messages[-1] if messages else None
            if last is not None and last.role == "assistant":
                last.tool_calls = [*(last.tool_calls or ()), call]
            else:
                messages.append(ChatMessage("assistant", tool_calls=[call]))
        case "function_call_output":
            id = _given(item.call_id, f"{where}.call_id")
            messages.append(ChatMessage("tool", _text(item.output), tool_call_id=id))
        case _:
            messages.append(ChatMessage(_given(item.role, f"{where}.role"), _text(item.content)))


def _given(value: str | None, param: str) -> str:
    if value is None:
        raise invalid(f"you must provide {param!r}", param=param)
    return value


def _text(content: str | list[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def _format_of(request: ResponsesRequest) -> ResponseFormat | None:
    format = None if request.text is None else request.text.format
    if format is None:
        return None
    return ResponseFormat(format.type, JsonSchema(format.name, format.schema))
