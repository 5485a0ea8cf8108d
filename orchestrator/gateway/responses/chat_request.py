"""Reads the requests of the Responses API as the chats that they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from orchestrator.gateway.openai import body_reader
from orchestrator.gateway.openai.errors import ApiError, invalid, renamed
from orchestrator.gateway.openai.protocol import (
    ChatMessage,
    ChatRequest,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    JsonSchema,
    NamedTool,
    ResponseFormat,
    Tool,
    ToolCall,
)
from orchestrator.gateway.responses.protocol import (
    ContentPart,
    FunctionChoice,
    FunctionTool,
    InputItem,
    ResponsesRequest,
)

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
_KEPT = ("previous_response_id", "conversation", "prompt")


class ResponsesChat(ChatRequest, kw_only=True):
    """The chat that a Responses request asks for."""

    request: ResponsesRequest
    names: ClassVar[Mapping[str, str]] = MappingProxyType(  # of the fields of chats
        {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
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
    for place, item in enumerate(request.input):
        _add(messages, item, f"input[{place}]")
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
