"""The types of OpenAI's requests, and the checks of their values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
import msgspec.structs

from orchestrator.gateway.openai.errors import ApiError, invalid
from orchestrator.gateway.openai.schemas import schema_text

R = TypeVar("R")
if TYPE_CHECKING:
    Ignored = Any
else:
    Ignored = msgspec.Raw  # checked as JSON but not decoded: 8 MB of brackets would take 0.2 s
MAX_ENTRIES = 1024  # of logit_bias and stop_token_ids; OpenAI's limit is 300
MAX_STOP_CHARACTERS = 2**14
LARGE_BYTES = 2**20  # a larger body is checked before it is decoded
MAX_FIELD_BYTES = 2**20  # of a field of a large body, except prompts and messages
MAX_IDS = 2**20  # in a large body
LONGEST_ID = 10  # digits
MAX_STOPS = 16
MAX_CHOICES = 128  # of `n`, as OpenAI's
MAX_TOP_LOGPROBS = 20  # as OpenAI's
MAX_PROMPTS = 2048
MAX_TOOLS = 128  # as OpenAI's
MOST = 2**31 - 1  # of any count or token id
MOST_PRIORITY = 1_000_000  # either way
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


@dataclass(frozen=True)
class Bound:
    """The range of a number; ``above`` excludes the lowest value itself."""

    lowest: float
    highest: float
    above: bool = False


BOUNDS: Mapping[str, Bound] = MappingProxyType(  # of the fields of requests, also for the OpenAPI document
    {
        "max_tokens": Bound(1, MOST),
        "max_completion_tokens": Bound(1, MOST),
        "min_tokens": Bound(0, MOST),
        "temperature": Bound(0, 2),
        "top_p": Bound(0, 1, above=True),
        "top_k": Bound(-1, MOST),
        "min_p": Bound(0, 1),
        "repetition_penalty": Bound(0, 10, above=True),
        "presence_penalty": Bound(-2, 2),
        "frequency_penalty": Bound(-2, 2),
        "no_repeat_ngram_size": Bound(0, MOST),
        "n": Bound(1, MAX_CHOICES),
        "priority": Bound(-MOST_PRIORITY, MOST_PRIORITY),
        "top_logprobs": Bound(0, MAX_TOP_LOGPROBS),
        "logprobs": Bound(0, MAX_TOP_LOGPROBS),  # of completions; a chat's is true or false
    }
)


class TextPart(msgspec.Struct):
    """One part of a message in parts; only text is supported."""

    type: str
    text: str = ""


class FunctionCall(msgspec.Struct):
    """The function and arguments of a call; ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct):
    """A call of an earlier answer, sent back as part of the chat."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    """One message. Fields for other kinds of models, such as audio, are ignored."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None  # of the assistant
    tool_call_id: str | None = None  # of a tool's answer
    function_call: Ignored = None  # refused

    def text(self) -> str:
        """Returns the text of all parts. Raises ApiError for a part that is not text."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        for part in self.content:
            if part.type != "text":
                raise invalid(f"messages: a part of type {part.type!r} is not supported; send text", param="messages")
        return "".join(part.text for part in self.content)

    def for_template(self, place: int) -> dict[str, Any]:
        """Returns the message for chat templates: the text in one piece, the arguments of calls as objects.

        Raises ApiError that names the message by its ``place``.
        """
        where = f"messages[{place}]"
        has_call = self.function_call is not None and bytes(self.function_call) != b"null"
        if has_call or self.role == "function":
            cause = f"{where}: function_call and the role 'function' are not supported"
            message = f"{cause}; send tool_calls and the role 'tool'"
            raise invalid(message, param="messages", code="unsupported_parameter")
        fields: dict[str, Any] = {"role": self.role, "content": self.text()}
        if self.name is not None:
            fields["name"] = self.name
        if self.tool_call_id is not None:
            fields["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            if self.role != "assistant":
                raise invalid(f"{where}: only messages of the assistant may have tool_calls", param="messages")
            fields["tool_calls"] = [
                _call_for_template(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(self.tool_calls)
            ]
        return fields


def _call_for_template(call: ToolCall, where: str) -> dict[str, Any]:
    _at_most(f"the characters of {where}.function.arguments", len(call.function.arguments), MAX_FIELD_BYTES, "messages")
    try:
        arguments = msgspec.json.decode(call.function.arguments.strip() or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise invalid(f"{where}.function.arguments: not a JSON object: {error}", param="messages") from None
    fields: dict[str, Any] = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return fields if call.id is None else {"id": call.id, **fields}


class FunctionDefinition(msgspec.Struct):
    """A function that the model may call. ``parameters`` is the JSON schema of its arguments; None for no arguments."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # ignored: the arguments of a forced call always match the schema


class Tool(msgspec.Struct):
    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """Returns the tool in OpenAI's shape, without fields that were not sent."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.schema()
        return {"type": "function", "function": function}

    def schema(self) -> dict[str, Any]:
        """Returns the JSON schema of the arguments, which are always an object."""
        if self.function.parameters:
            return self.function.parameters
        return {"type": "object", "properties": {}}


class FunctionName(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class JsonSchema(msgspec.Struct):
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: str
    json_schema: JsonSchema | None = None


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that both endpoints take. ``None`` means the default, as OpenAI's clients send it."""

    model: str
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None  # vLLM's: the ids beside the text
    priority: int | None = None  # vLLM's: lower goes first; default 0
    # Ignored: they do not affect the answer's tokens.
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None

    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def guide(self) -> str | None:
        """Returns the JSON schema that the answer must match, as text; None for free text. Raises ApiError."""
        format = self.response_format
        if format is None or format.type == "text":
            return None
        if format.type == "json_object":
            return '{"type": "object"}'
        if format.type == "json_schema":
            if format.json_schema is None or format.json_schema.schema is None:
                raise invalid("response_format: json_schema needs a schema", param="response_format")
            return schema_text(format.json_schema.schema, "response_format")
        message = f"response_format: {format.type!r} is not one of text, json_object and json_schema"
        raise invalid(message, param="response_format")


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None  # vLLM's: end the prompt with the start of an assistant message
    continue_final_message: bool | None = None  # vLLM's: the answer continues the last message
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's: further variables of the chat template
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None  # false: at most one call in an answer
    functions: list[Any] | None = None  # refused
    function_call: Any = None  # refused
    # Ignored, as above.
    reasoning_effort: Ignored = None
    verbosity: Ignored = None

    def logprobs_count(self) -> int | None:
        """Returns the alternatives per token; None without logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def calling(self) -> Literal["none", "auto", "required"] | NamedTool:
        """How the answer may call tools; a NamedTool: the answer is the arguments of that tool."""
        if not self.tools:
            return "none"
        return self.tool_choice or "auto"

    def guide(self) -> str | None:
        """Returns the schema of forced calls, so that the calls are certain and readable; else as SamplingFields."""
        calling = self.calling
        if isinstance(calling, NamedTool):
            return schema_text(self.tool(calling.function.name).schema(), "tools")
        if calling == "required":
            return schema_text(_calls_schema(self.tools or [], only_one=self.parallel_tool_calls is False), "tools")
        return super().guide()

    def tool(self, name: str) -> Tool:
        """Returns the tool of that name. Raises ApiError."""
        for tool in self.tools or ():
            if tool.function.name == name:
                return tool
        raise invalid(f"tool_choice: {name!r} is not one of the tools", param="tool_choice")


def _calls_schema(tools: list[Tool], only_one: bool) -> dict[str, Any]:
    """Returns the schema of an array of calls, as in vLLM: each has the name of a tool and arguments for that tool.

    The tools' ``$defs`` move to the top level, where their references point.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        schema = dict(tool.schema())
        own = schema.pop("$defs", None) or {}
        if not isinstance(own, dict):
            raise invalid(f"tools: the $defs of {tool.function.name!r} are not an object", param="tools")
        for key, definition in own.items():
            if definitions.setdefault(key, definition) != definition:
                message = f"tools: two tools have different definitions of {key!r} under $defs; rename one of them"
                raise invalid(message, param="tools")
        properties = {"name": {"type": "string", "enum": [tool.function.name]}, "parameters": schema}
        calls.append({"type": "object", "properties": properties, "required": ["name", "parameters"]})
    array: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if only_one:
        array["maxItems"] = 1
    return {**array, "$defs": definitions} if definitions else array


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. A prompt is text (tokenized with its special tokens), token ids (taken as they are), or a
    list of either."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def logprobs_count(self) -> int | None:
        """Returns the alternatives per token; None without logprobs."""
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts one by one. Raises ApiError for an invalid one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and all(type(part) is int for part in self.prompt):
            return [self.prompt]
        for i, part in enumerate(self.prompt):
            if not (isinstance(part, str) or (isinstance(part, list) and all(type(id) is int for id in part))):
                message = f"prompt[{i}]: expected a string or a list of token ids, got {_kind(part)}"
                raise invalid(message, param="prompt")
            if not part:
                raise invalid(f"prompt[{i}] is empty", param="prompt")
        return self.prompt


class TokenizeTextRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize of a prompt."""

    model: str
    prompt: str
    add_special_tokens: bool | None = None  # default true
    return_token_strs: bool | None = None


class TokenizeChatRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize of a chat. The fields for the prompt are those of ``ChatRequest``."""

    model: str
    messages: list[ChatMessage]
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None  # default false: the chat template writes them
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: str
    tokens: list[Annotated[int, msgspec.Meta(ge=0, le=MOST)]]


Chat = ChatRequest | TokenizeChatRequest

_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_tokenize_text_decoder = msgspec.json.Decoder(TokenizeTextRequest)
_tokenize_chat_decoder = msgspec.json.Decoder(TokenizeChatRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


class _Shape(msgspec.Struct):
    """The field by which the two bodies of /tokenize differ."""

    messages: msgspec.Raw = msgspec.Raw()


_shape_decoder = msgspec.json.Decoder(_Shape)
_AT = re.compile(r"^(?P<cause>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>\w+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>[^`]*)`")


_INSTEAD: Mapping[str, str] = MappingProxyType(  # fields of vLLM, LMI and older clients, and their replacement here
    {
        **dict.fromkeys(
            ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "format"),
            'response_format: {"type": "json_schema", ...} asks for a JSON schema',
        ),
        "max_new_tokens": "max_tokens",
        "do_sample": "temperature: 0 is greedy",
        "return_full_text": "echo, of /v1/completions",
        "prompt_logprobs": "logprobs covers the answer; those of the prompt are not computed",
        "stop_sequences": "stop",
        "use_beam_search": "n, for several answers; there is no beam search",
        "inputs": "prompt, of /v1/completions",
        "parameters": "send its fields at the top level, beside model",
        "chat_template": "chat_template_kwargs, for the tokenizer's own template; templates are programs, and are not "
        "accepted from clients",
        "documents": "chat_template_kwargs",
        "include_stop_str_in_output": "stop; the stop string is not part of the answer",
    }
)


def read_chat(body: bytes) -> ChatRequest:
    """Decodes and checks a body. Raises ApiError 400 that names the wrong parameter."""
    request = _decode(_chat_decoder, body)
    _check_chat(request)
    if request.max_completion_tokens is not None:
        _bounded("max_completion_tokens", request.max_completion_tokens)
        if request.max_tokens not in (None, request.max_completion_tokens):
            fields = f"max_tokens ({request.max_tokens}) and max_completion_tokens ({request.max_completion_tokens})"
            raise invalid(f"{fields} differ; send one of them", param="max_tokens")
        request.max_tokens = request.max_completion_tokens
    _bounded("top_logprobs", request.top_logprobs)
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs requires logprobs: true", param="top_logprobs")
    _check_calling(request)
    _check(request)
    return request


def _check_chat(request: Chat) -> None:
    if not request.messages:
        raise invalid("messages: at least one message is required", param="messages")
    if request.add_generation_prompt and request.continue_final_message:
        message = "continue_final_message and add_generation_prompt exclude each other; send one of them"
        raise invalid(message, param="continue_final_message")
    tools = request.tools or []
    if len(tools) > MAX_TOOLS:
        raise invalid(f"tools: {len(tools)} tools exceed the limit of {MAX_TOOLS}", param="tools")
    names = [tool.function.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise invalid(f"tools: {name!r} is defined twice", param="tools")


def _check_calling(request: ChatRequest) -> None:
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(request, old) not in (None, []):
            raise invalid(f"{old} is not supported; send {new}", param=old, code="unsupported_parameter")
    if request.tool_choice not in (None, "none") and not request.tools:
        raise invalid("tool_choice requires tools", param="tool_choice")
    if request.calling == "none":
        return
    if isinstance(request.calling, NamedTool):
        request.tool(request.calling.function.name)
    if SamplingFields.guide(request) is not None:
        message = "response_format cannot be combined with tool calls; send tool_choice: none, or no tools"
        raise invalid(message, param="response_format")
    if request.calling == "auto":
        # Some models mark calls with a special token, such as Mistral's [TOOL_CALLS], which must stay in the text. The
        # tokens that end an answer are never part of it.
        request.skip_special_tokens = False


def read_tokenize(body: bytes) -> TokenizeTextRequest | TokenizeChatRequest:
    """Decodes and checks a body. Raises ApiError 400 that names the wrong parameter."""
    if bytes(_decode(_shape_decoder, body).messages) in (b"", b"null"):
        return _decode(_tokenize_text_decoder, body)
    request = _decode(_tokenize_chat_decoder, body)
    _check_chat(request)
    return request


def read_detokenize(body: bytes) -> DetokenizeRequest:
    """Decodes and checks a body. Raises ApiError 400 that names the wrong parameter."""
    return _decode(_detokenize_decoder, body)


def read_completion(body: bytes) -> CompletionRequest:
    """Decodes and checks a body. Raises ApiError 400 that names the wrong parameter."""
    request = _decode(_completion_decoder, body)
    if len(request.prompt) == 0:
        raise invalid("prompt is empty", param="prompt")
    if isinstance(request.prompt, list) and not isinstance(request.prompt[0], int):
        _within("the number of prompts", len(request.prompt), 1, MAX_PROMPTS, param="prompt")
    _bounded("logprobs", request.logprobs)
    if request.suffix:
        raise _unsupported("suffix")
    if request.best_of not in (None, request.n or 1):
        raise invalid(f"best_of: {request.best_of} must equal n; answers are not ranked", param="best_of")
    if request.echo and request.logprobs is not None:
        raise invalid("echo cannot be combined with logprobs: those of the prompt are not computed", param="echo")
    _check(request)
    return request


_BOUNDED = (
    *("tools", "response_format", "chat_template_kwargs", "logit_bias", "stop", "stop_token_ids"),
    *("functions", "function_call"),
)
_REQUESTS = (ChatRequest, CompletionRequest, TokenizeTextRequest, TokenizeChatRequest, DetokenizeRequest)
_Large = msgspec.defstruct(
    "_Large",
    [(name, msgspec.Raw, msgspec.Raw()) for name in {name: 0 for kind in _REQUESTS for name in kind.__struct_fields__}],
)
_large_decoder = msgspec.json.Decoder(_Large)
_texts_decoder = msgspec.json.Decoder(list[str])


def _check_large(body: bytes) -> None:
    """Raises ApiError for a body that would block the event loop while it is decoded; long texts do not."""
    fields = {name: bytes(raw) for name, raw in msgspec.structs.asdict(_large_decoder.decode(body)).items()}
    for name in _BOUNDED:
        _at_most(f"the bytes of {name}", len(fields[name]), MAX_FIELD_BYTES, name)
    for name in ("prompt", "tokens"):
        if fields[name].startswith(b"["):
            _check_list(name, fields[name])
    remainder = len(body) - sum(map(len, fields.values()))  # of a repeated field, ``fields`` has only the last
    if remainder > MAX_FIELD_BYTES:
        raise invalid(f"the bytes of unknown and repeated fields: {remainder} exceed the limit of {MAX_FIELD_BYTES}")


def _check_list(name: str, data: bytes) -> None:
    """Raises ApiError for a list of more token ids or prompts than may be decoded at once."""
    if b'"' in data:
        try:
            _at_most(f"the prompts of {name}", len(_texts_decoder.decode(data)), MAX_PROMPTS, name)
            return
        except msgspec.ValidationError:  # not only texts
            pass
    _at_most(f"the token ids of {name}", data.count(b",") + 1, MAX_IDS, name)
    _at_most(f"the lists of {name}", data.count(b"[") + data.count(b"{"), MAX_PROMPTS + 1, name)


def _decode(decoder: msgspec.json.Decoder[R], body: bytes) -> R:
    try:
        if len(body) > LARGE_BYTES:
            _check_large(body)
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}", code="invalid_json") from None


def _explained(text: str) -> ApiError:
    """Returns the error for a message of msgspec, with the parameter first."""
    match = _AT.match(text)
    cause, path = (match["cause"], match["path"]) if match is not None else (text, None)
    missing, unknown = _MISSING.search(cause), _UNKNOWN.search(cause)
    if missing is not None:
        field = missing["field"] if not path else f"{path}.{missing['field']}"
        return invalid(f"you must provide {field!r}", param=field)
    if unknown is not None:
        name = unknown["field"]
        instead = f"; here: {_INSTEAD[name]}" if name in _INSTEAD else ""
        return invalid(f"Unrecognized request argument supplied: {name}{instead}", param=name)
    return invalid(f"{path or 'the body'}: {cause.replace('`', '')}", param=path or None)


_OF_ALL = tuple(name for name in BOUNDS if name in SamplingFields.__struct_fields__)
_bounded_fields = attrgetter(*_OF_ALL)
_ALL_UNSET = (None,) * len(_OF_ALL)


def _check(request: SamplingFields) -> None:
    values = _bounded_fields(request)
    if values != _ALL_UNSET:
        for name, value in zip(_OF_ALL, values, strict=True):
            if value is not None:
                _bounded(name, value)
    if request.max_tokens is not None and request.min_tokens is not None:
        _within("min_tokens", request.min_tokens, 0, request.max_tokens)
    if request.seed is not None and not -(2**63) <= request.seed < 2**63:
        raise invalid(f"seed: {request.seed} does not fit in 64 bits", param="seed")
    if request.logit_bias is not None:
        _at_most("logit_bias", len(request.logit_bias), MAX_ENTRIES)
        for id, bias in request.logit_bias.items():
            if not (id.isascii() and id.isdecimal() and len(id) <= LONGEST_ID):
                raise invalid(f"logit_bias: {id[:100]!r} is not a token id", param="logit_bias")
            _within(f"logit_bias of {id}", bias, -100, 100, param="logit_bias")
    if request.stop_token_ids is not None:
        _at_most("stop_token_ids", len(request.stop_token_ids), MAX_ENTRIES)
        for stop_id in request.stop_token_ids:
            _within("stop_token_ids", stop_id, 0, MOST)
    if request.stop is not None:
        stops = request.stops()
        if len(stops) > MAX_STOPS:
            raise invalid(f"stop: {len(stops)} strings exceed the limit of {MAX_STOPS}", param="stop")
        _at_most("the characters of stop", sum(map(len, stops)), MAX_STOP_CHARACTERS, "stop")
        if "" in stops:
            raise invalid("stop: an empty string is not allowed", param="stop")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options requires stream: true", param="stream_options")
    request.guide()  # raises ApiError for a schema over a limit


def _at_most(name: str, count: int, limit: int, param: str | None = None) -> None:
    """Raises ApiError above the limit: these values are copied into each choice, or searched at each step."""
    if count > limit:
        raise invalid(f"{name}: {count} exceeds the limit of {limit}", param=param or name)


def _bounded(name: str, value: float | None) -> None:
    bound = BOUNDS[name]
    if value is not None and bound.lowest < value < bound.highest:
        return  # as most are: a call less for each field
    _within(name, value, bound.lowest, bound.highest, above=bound.above)


def _within(
    name: str,
    value: float | None,
    lowest: float,
    highest: float,
    *,
    above: bool = False,
    param: str | None = None,
) -> None:
    """Raises ApiError for a value out of range; ``above`` excludes the lowest value itself."""
    if value is None:
        return
    too_low = value <= lowest if above else value < lowest
    if too_low or value > highest:
        bounds = f"{'above' if above else 'at least'} {lowest:g} and at most {highest:g}"
        raise invalid(f"{name}: {value} is out of range; it must be {bounds}", param=param or name)


def _unsupported(name: str) -> ApiError:
    return invalid(f"{name} is not supported", param=name, code="unsupported_parameter")


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
