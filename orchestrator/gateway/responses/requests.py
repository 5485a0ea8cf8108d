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
    Tool,
    ToolCall,
)

_NOTHING = Meta(extra_json_schema={"type": "null", "default": None})
LOGPROBS = "message.output_text.logprobs"  # of `include`
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
_KEPT = ("previous_response_id", "conversation", "prompt")


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """One part of a message, of a function's output or of reasoning; only text is supported."""

    type: str = ""  # input_text, output_text, text, reasoning_text, summary_text or refusal
    text: str | None = None  # of a text always
    refusal: str | None = None
    # Ignored: they do not affect the prompt.
    annotations: Ignored = None
    logprobs: Ignored = None
    prompt_cache_breakpoint: Ignored = None


Content = str | list[ContentPart] | dict[str, Any] | None  # an object in items that are not read


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """One item of the input. From reasoning, the model gets the content, or else the summary. Encrypted reasoning and
    items of types that are not read here, such as a web search, do not reach the model."""

    type: str | None = None  # null: message
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None  # an object in items that are not read
    input: str | None = None  # of a call of a tool whose input is text
    output: Content = None
    summary: list[ContentPart] | None = None  # of reasoning
    # Ignored: they do not affect the prompt.
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None
    encrypted_content: Ignored = None
    namespace: Ignored = None
    action: Ignored = None


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool of any type; only functions reach the model. ``strict`` is ignored: the arguments of a forced call always
    match the schema."""

    type: str
    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None  # of a function always
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    # Ignored: all but the first are of tools that do not reach the model.
    defer_loading: Ignored = None
    format: Ignored = None
    tools: Ignored = None
    filters: Ignored = None
    user_location: Ignored = None
    search_context_size: Ignored = None
    external_web_access: Ignored = None
    container: Ignored = None
    server_label: Ignored = None
    server_url: Ignored = None
    require_approval: Ignored = None
    vector_store_ids: Ignored = None


class ChosenTool(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    name: str | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Ignored = None


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True):
    """``summary`` is ignored: the answer has the reasoning itself."""

    effort: Effort | None = None
    summary: Ignored = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses. ``None`` means the default."""

    model: str
    input: Annotated[str, Meta(min_length=1)] | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: PositiveCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    truncation: Literal["disabled", "auto"] | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    priority: Priority | None = None  # as in chats
    metadata: dict[str, str] | None = None  # returned in the answer
    # Refused unless null: they need responses that are kept.
    previous_response_id: Annotated[Ignored, _NOTHING] = None
    conversation: Annotated[Ignored, _NOTHING] = None
    prompt: Annotated[Ignored, _NOTHING] = None
    background: Annotated[bool, Meta(extra_json_schema={"enum": [False]})] | None = None
    # Ignored: they do not affect the answer's tokens.
    store: Ignored = None
    client_metadata: Ignored = None
    moderation: Ignored = None
    stream_options: Ignored = None
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
        "context_management": "none; send the messages that the model should read",
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
    if LOGPROBS in (request.include or ()):
        raise _unsupported("include", f"{LOGPROBS} needs logprobs of /v1/chat/completions")
    choice = request.tool_choice
    named = NamedTool("function", FunctionName(_chosen(choice))) if isinstance(choice, ChosenTool) else choice
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
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        request=request,
    )
    with renamed(ResponsesChat.names):
        return body_reader.checked_chat(chat)


def _unsupported(name: str, instead: str) -> ApiError:
    return invalid(f"{name} is not supported: {instead}", param=name, code="unsupported_parameter")


def _chosen(choice: ChosenTool) -> str:
    if choice.type != "function":
        message = f"tool_choice: {choice.name or choice.type!r} is not a function, and this server runs no other tools"
        raise invalid(message, param="tool_choice")
    return _given(choice.name, "tool_choice.name")


def _tool(tool: FunctionTool) -> Tool:
    return Tool(tool.type, FunctionDefinition(tool.name or "", tool.description, tool.parameters))


def _messages(request: ResponsesRequest) -> list[ChatMessage]:
    messages = [] if not request.instructions else [ChatMessage("system", request.instructions)]
    if isinstance(request.input, str):
        return [*messages, ChatMessage("user", request.input)]
    for position, item in enumerate(request.input):
        _add(messages, item, f"input[{position}]")
    return messages


def _add(messages: list[ChatMessage], item: InputItem, where: str) -> None:
    """Adds an item. Calls belong to the assistant's message before them, and reasoning to the message after it."""
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    match item.type:
        case "reasoning":
            thought = _text(item.content, f"{where}.content") or _text(item.summary, f"{where}.summary")
            if last is not None:
                last.reasoning_content = "\n".join(filter(None, (last.reasoning_content, thought))) or None
            elif thought:
                messages.append(ChatMessage("assistant", reasoning_content=thought))
        case "item_reference":
            raise _unsupported(where, "no responses are kept; send the item itself")
        case "function_call" | "custom_tool_call":
            name, arguments, id = _given(item.name, f"{where}.name"), item.arguments or "", item.call_id
            if not isinstance(arguments, str) or item.type == "custom_tool_call":
                arguments = msgspec.json.encode(arguments or {"input": item.input}).decode()
            call = ToolCall(FunctionCall(name, arguments), _given(id, f"{where}.call_id"))
            if last is not None:
                last.tool_calls = [*(last.tool_calls or ()), call]
            else:
                messages.append(ChatMessage("assistant", tool_calls=[call]))
        case "function_call_output" | "custom_tool_call_output":
            id = _given(item.call_id, f"{where}.call_id")
            messages.append(ChatMessage("tool", _text(item.output, f"{where}.output"), tool_call_id=id))
        case None | "message":
            role, text = _given(item.role, f"{where}.role"), _text(item.content, f"{where}.content")
            if role == "assistant" and last is not None and last.content is None and not last.tool_calls:
                last.content = text
            else:
                messages.append(ChatMessage(role, text))


def _given(value: str | None, param: str) -> str:
    if value is None:
        raise invalid(f"you must provide {param!r}", param=param)
    return value


def _text(content: Content, where: str) -> str:
    """Returns the text of a content. Raises ApiError for parts of another kind."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, dict):
        raise invalid(f"{where}: expected a text or a list of parts", param=where)
    texts = [part.refusal if part.type == "refusal" else part.text for part in content]
    for position, part in enumerate(content):
        if part.type not in _TEXT_PARTS or texts[position] is None:
            message = f"{where}[{position}]: a part of type {part.type!r} is not supported; send text"
            raise invalid(message, param=f"{where}[{position}].type")
    return "".join(text or "" for text in texts)


def _format_of(request: ResponsesRequest) -> ResponseFormat | None:
    format = None if request.text is None else request.text.format
    if format is None:
        return None
    return ResponseFormat(format.type, JsonSchema(format.name, format.schema))
