"""The types of OpenAI's requests, with the bounds of their values."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from orchestrator.access.keys import MAX_PRIORITY
from orchestrator.gateway.http.exchange import decoded
from orchestrator.gateway.openai.errors import ApiError, invalid
from orchestrator.gateway.openai.schemas import (
    ClientSchema,
    StructuralTag,
    calls_constraint,
    choice_constraint,
    schema_constraint,
    tag_constraint,
    text_constraint,
)
from orchestrator.gateway.reading.call_text import completed_object
from workers.messages.requests import AnswerConstraint

if TYPE_CHECKING:
    Ignored = Any
else:
    Ignored = msgspec.Raw  # checked as JSON but not decoded: 8 MB of brackets would take 0.2 s
MAX_ENTRIES = 1024  # of logit_bias and stop_token_ids; OpenAI's limit is 300
MAX_ARGUMENTS_CHARACTERS = 2**20  # characters of the arguments of a call that is sent back
MAX_CUT_CHARACTERS = 2**16  # of all calls of a chat that were cut off; reading them takes up to 3 us per character
MAX_ID_DIGITS = 10  # digits
SYSTEM_ROLES = frozenset({"system", "developer"})
MAX_STOPS = 16
MAX_CHOICES = 128  # of `n`, as OpenAI's
MAX_TOP_LOGPROBS = 20  # as OpenAI's
MAX_PROMPTS = 2048
MAX_TOOLS = 128  # as OpenAI's
MAX_COUNT = 2**31 - 1  # of any count or token id
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions

# The bounds are checked by msgspec; ``extra_json_schema`` is what the OpenAPI document says beyond them.
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
PositiveCount = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
LogprobCount = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
SomeText = Annotated[str, Meta(min_length=1)]
_ID_PATTERN = f"^[0-9]{{1,{MAX_ID_DIGITS}}}$"
BiasedId = Annotated[  # in Python, `$` also matches before a newline at the end
    str, Meta(pattern=_ID_PATTERN.replace("$", r"\Z"), extra_json_schema={"pattern": _ID_PATTERN})
]
Bias = Annotated[float, Meta(ge=-100, le=100)]
_REFUSED = Meta(extra_json_schema={"type": "null", "default": None})
_IDS: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "integer", "minimum": 0, "maximum": MAX_COUNT},
}
_TEXT_PARTS = ("input_text", "output_text", "refusal")  # beside `text`; two are of Responses
_THINKING_PARTS = ("thinking", "think", "redacted_thinking", "reasoning")
_PROMPTS = {"maxItems": MAX_PROMPTS, "items": {"anyOf": [{"type": "string", "minLength": 1}, _IDS]}}
IDS_OR_TEXTS = {"anyOf": [_IDS, _PROMPTS]}


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """One part of a message in parts. Texts, refusals and the thinking of earlier answers are read."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text", *_TEXT_PARTS, *_THINKING_PARTS]})]
    text: str | None = None  # of a part of this type always
    refusal: str | None = None
    thinking: str | list[TextPart] | None = None  # a list in Mistral's API
    think: str | None = None  # LibreChat's name of it
    signature: Ignored = None
    cache_control: Ignored = None
    # Fields of other kinds of parts, which only some servers read.
    image_url: Ignored = None
    video_url: Ignored = None
    audio_url: Ignored = None
    input_audio: Ignored = None
    file: Ignored = None

    @property
    def is_read(self) -> bool:
        return self.type == "text" or self.type in _TEXT_PARTS or self.type in _THINKING_PARTS

    @property
    def thought(self) -> str:
        """The thinking in this part; empty for other parts, and for encrypted thinking."""
        if self.type not in _THINKING_PARTS:
            return ""
        value = self.thinking or self.think or self.text or ""
        return value if isinstance(value, str) else "".join(part.text or "" for part in value)


class DocumentText(msgspec.Struct):
    """A document of Cohere's older and Jina's requests. Its other fields are ignored."""

    text: str


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """The function and arguments of a call; ``arguments`` is the text of a JSON object, or of its beginning in an
    answer that was cut off."""

    name: str
    arguments: str | None = None


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call of an earlier answer, sent back as part of the chat."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = "function"
    index: Ignored = None  # of the deltas from which some clients make it


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message."""

    role: Annotated[str, Meta(extra_json_schema={"not": {"const": "function"}})]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None  # of the assistant
    tool_call_id: str | None = None  # of a tool's answer
    function_call: Annotated[Ignored, _REFUSED] = None
    reasoning_content: str | None = None  # of the assistant
    reasoning: str | None = None  # vLLM's newer name of it
    refusal: str | None = None  # of the assistant, in place of content
    # Ignored: they do not affect the answer's tokens.
    id: Ignored = None
    annotations: Ignored = None
    cache_control: Ignored = None

    @property
    def has_other_parts(self) -> bool:
        """Some of it is not text, such as an image."""
        return isinstance(self.content, list) and any(not part.is_read for part in self.content)

    def text(self) -> str:
        """Returns the text of all parts, without thinking. Raises ApiError for a part of another kind."""
        if self.content is None or isinstance(self.content, str):
            return self.content or self.refusal or ""
        texts = []
        for part in self.content:
            if not part.is_read:
                raise invalid(f"messages: a part of type {part.type!r} is not supported; send text", param="messages")
            if part.type in _THINKING_PARTS:
                continue
            text = part.refusal if part.type == "refusal" else part.text
            if text is None:
                raise invalid(f"messages: a part of type {part.type!r} has no text", param="messages")
            texts.append(text)
        return "".join(texts)

    def for_template(self, position: int, cut: CutCalls | None = None) -> dict[str, Any]:
        """Returns the message for chat templates: the text in one piece, the arguments of calls as objects.

        ``cut`` is of all messages. Raises ApiError that names the message by its ``position``.
        """
        where = f"messages[{position}]"
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
        if self.role == "assistant":
            parts = self.content if isinstance(self.content, list) else ()
            if (
                reasoning := self.reasoning_content
                or self.reasoning
                or "\n".join(filter(None, (p.thought for p in parts)))
            ):
                fields["reasoning_content"] = reasoning
        if self.tool_calls:
            if self.role != "assistant":
                raise invalid(f"{where}: only messages of the assistant may have tool_calls", param="messages")
            fields["tool_calls"] = [
                _call_for_template(call, f"{where}.tool_calls[{i}]", cut or CutCalls())
                for i, call in enumerate(self.tool_calls)
            ]
        return fields


class CutCalls:
    """Completes the arguments of a chat's calls that `max_tokens` has cut off, up to a limit, since hostile arguments
    could take seconds."""

    def __init__(self) -> None:
        self._left = MAX_CUT_CHARACTERS

    def completed(self, text: str) -> str:
        """Returns the object with the members that are complete; over the limit, an empty object."""
        self._left -= len(text)
        return completed_object(text) if self._left >= 0 else "{}"


def _call_for_template(call: ToolCall, where: str, cut: CutCalls) -> dict[str, Any]:
    sent = call.function.arguments or ""
    length = len(sent)
    if length > MAX_ARGUMENTS_CHARACTERS:
        message = (
            f"the characters of {where}.function.arguments: {length} exceeds the limit of {MAX_ARGUMENTS_CHARACTERS}"
        )
        raise invalid(message, param="messages")
    try:
        arguments = decoded(sent.strip().encode() or b"{}", dict[str, Any], "")
    except ApiError:  # cut off by `max_tokens`, or invalid: complete members are kept
        arguments = decoded(cut.completed(sent).encode(), dict[str, Any], f"{where}.function.arguments", "messages")
    fields: dict[str, Any] = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return fields if call.id is None else {"id": call.id, **fields}


class FunctionDefinition(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call. ``parameters`` is the JSON schema of its arguments; None for no arguments."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # ignored: the arguments of a forced call always match the schema


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool. Only functions reach the model: the server cannot run others, such as a web search."""

    type: str
    function: FunctionDefinition = msgspec.field(default_factory=lambda: FunctionDefinition(""))  # of type `function`
    custom: Ignored = None  # of a tool whose input is text
    cache_control: Ignored = None

    @property
    def label(self) -> str:
        """The name of the tool, or its type."""
        return self.function.name or self.type

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

    def properties(self) -> Mapping[str, Any]:
        """Returns the schemas of the arguments; empty where the client's are not an object."""
        properties = self.schema().get("properties")
        return properties if isinstance(properties, dict) else {}


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


Messages = Annotated[list[ChatMessage], Meta(min_length=1)]
Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """Anthropic's field, which servers of other models also accept in chats. Every type but `disabled` lets the model
    reason."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Ignored = None


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, Meta(extra_json_schema={"enum": ["text", "json_object", "json_schema"]})]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None  # llama.cpp's and Together's, of `json_object`


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's form of a constraint, of which one field is set."""

    json: str | dict[str, Any] | None = None
    regex: SomeText | None = None
    choice: list[str] | None = None
    grammar: SomeText | None = None
    json_object: bool | None = None
    structural_tag: SomeText | None = None  # JSON
    disable_fallback: Ignored = None


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that both endpoints take. ``None`` means the default, as OpenAI's clients send it."""

    model: str
    max_tokens: PositiveCount | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    no_repeat_ngram_size: Count | None = None
    logit_bias: Annotated[dict[BiasedId, Bias], Meta(max_length=MAX_ENTRIES)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: SomeText | Annotated[list[SomeText], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[Count], Meta(max_length=MAX_ENTRIES)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None  # vLLM's
    guided_json: str | dict[str, Any] | None = None  # older vLLM's, as the next three
    guided_regex: SomeText | None = None
    guided_choice: list[str] | None = None
    guided_grammar: SomeText | None = None
    return_token_ids: bool | None = None  # vLLM's: the ids beside the text
    priority: Priority | None = None  # vLLM's: lower goes first; default 0
    # Ignored: they do not affect the answer's tokens.
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    moderation: Ignored = None
    cache_salt: Ignored = None  # vLLM's
    request_id: Ignored = None  # vLLM's
    names: ClassVar[Mapping[str, str]] = MappingProxyType({})  # another API's names of these fields, for errors
    schema_paths: ClassVar[Mapping[str, str]] = MappingProxyType(  # likewise, of the schemas
        {"response_format": "response_format.json_schema.schema", "tools": "function.parameters"}
    )

    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def guided_by(self) -> str:
        """The field with the constraint that the answer must match."""
        return next(iter(self._constraints()), "response_format")

    def _constraints(self) -> dict[str, Any]:
        """Returns the fields that constrain the answer."""
        fields = dict(zip(_CONSTRAINT_FIELDS[2:], _constraint_fields(self)[2:], strict=True))
        outputs = self.structured_outputs
        if outputs is not None:
            kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
            fields |= {f"structured_outputs.{kind}": getattr(outputs, kind) for kind in kinds}
            if outputs.json_object is False:
                fields["structured_outputs.json_object"] = None
        if self.response_format is not None and self.response_format.type != "text":
            fields["response_format"] = self.response_format
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def is_free(self) -> bool:
        """Returns whether no field constrains the answer."""
        return _constraint_fields(self) == _UNCONSTRAINED

    def guide(self) -> AnswerConstraint | None:
        """Returns the constraint that the answer must match; None for free text. Raises ApiError."""
        constraints = self._constraints()
        if len(constraints) > 1:
            first, second = list(constraints)[:2]
            raise invalid(f"{first} and {second} exclude each other; send one of them", param=first)
        for field, value in constraints.items():
            if field == "response_format":
                return schema_constraint(self.format_schema(value))
            match field.removeprefix("structured_outputs.").removeprefix("guided_"):
                case "json":
                    schema = value
                    if isinstance(value, str):
                        schema = decoded(value.encode(), dict[str, Any], f"{field}: not a JSON object", field)
                    return schema_constraint(ClientSchema(schema, field, field))
                case "choice":
                    return choice_constraint(value, field)
                case "json_object":
                    return schema_constraint(ClientSchema({"type": "object"}, field, field))
                case "structural_tag":
                    tag = decoded(
                        value.encode(), StructuralTag, f"{field}: not JSON with structures and triggers", field
                    )
                    return tag_constraint(tag, field)
                case "regex" | "grammar" as kind:
                    return text_constraint(kind, value, field)
        return None

    def format_schema(self, format: ResponseFormat) -> ClientSchema:
        """Returns the schema of a format that is not `text`. Raises ApiError."""
        field, path = "response_format", self.schema_paths["response_format"]
        if format.type == "json_object":
            schema = format.schema if format.schema is not None else {"type": "object"}
            return ClientSchema(schema, field, "response_format.schema")
        if format.type == "json_schema":
            if format.json_schema is not None and format.json_schema.schema is not None:
                return ClientSchema(format.json_schema.schema, field, path)
            if format.schema is None:
                raise invalid("response_format: json_schema needs a schema", param=field)
            return ClientSchema(format.schema, field, "response_format.schema")
        message = f"response_format: {format.type!r} is not one of text, json_object and json_schema"
        raise invalid(message, param=field)


_CONSTRAINT_FIELDS = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
_constraint_fields = attrgetter(*_CONSTRAINT_FIELDS)
_UNCONSTRAINED = (None,) * len(_CONSTRAINT_FIELDS)


class ForwardedFields(msgspec.Struct):
    """The fields that the gateway reads of a body that it forwards."""

    model: str
    max_tokens: PositiveCount | None = None
    max_completion_tokens: PositiveCount | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority | None = None


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True, dict=True):
    """POST /v1/chat/completions."""

    messages: Messages
    tools: Tools | None = None
    add_generation_prompt: bool | None = None  # vLLM's: end the prompt with the start of an assistant message
    continue_final_message: bool | None = None  # vLLM's: the answer continues the last message
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's: further variables of the chat template
    reasoning_effort: Effort | None = None
    thinking: Thinking | None = None
    thinking_token_budget: Count | None = None  # vLLM's name of `thinking.budget_tokens`
    max_completion_tokens: PositiveCount | None = None
    include_reasoning: bool | None = None  # vLLM's; false: the reasoning is left out of the answer
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    prompt_logprobs: LogprobCount | None = None  # vLLM's
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None  # false: at most one call in an answer
    functions: Annotated[list[Any], Meta(extra_json_schema={"maxItems": 0})] | None = None  # refused
    function_call: Annotated[Any, _REFUSED] = None
    # Ignored, as above.
    verbosity: Ignored = None

    @property
    def shows_reasoning(self) -> bool:
        """Returns whether the answer contains the reasoning; its tokens are always counted."""
        return self.include_reasoning is not False

    @property
    def prompt_count(self) -> int:
        return 1

    @property
    def has_other_parts(self) -> bool:
        """Some of it is not text, such as an image."""
        return any(message.has_other_parts for message in self.messages)

    @property
    def default_tokens(self) -> int | None:
        """The most tokens of an answer without `max_tokens`; None: the rest of the model's length."""
        return None

    def logprobs_count(self) -> int | None:
        """Returns the alternatives per token; None without logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompt_logprobs_count(self) -> int | None:
        """Returns the alternatives per token of the prompt; None without its logprobs."""
        return self.prompt_logprobs

    @property
    def ignored_tools(self) -> list[str]:
        """The tools that were left out of the prompt, because the server cannot run them."""
        names: list[str] = self.__dict__.get("ignored_tools", [])
        return names

    def leave_out_tools(self) -> None:
        """Keeps only functions. Raises ApiError for a function without a name."""
        self.tools, self.__dict__["ignored_tools"] = functions_of(self.tools)

    @property
    def calling(self) -> Literal["none", "auto", "required"] | NamedTool:
        """How the answer may call tools; a NamedTool: the answer is the arguments of that tool."""
        if not self.tools:
            return "none"
        return self.tool_choice or "auto"

    @property
    def guided_by(self) -> str:
        return super().guided_by if self.calling in ("none", "auto") else "tools"

    @property
    def is_free(self) -> bool:
        return not self.tools and _constraint_fields(self) == _UNCONSTRAINED

    def guide(self, bare_calls: bool = False) -> AnswerConstraint | None:
        """Returns the constraint of forced calls, which makes them certain and readable, or else that of the fields.

        ``bare_calls``: the model writes calls as JSON without a text before it, so the constraint must allow a
        call instead of the answer.
        """
        calling = self.calling
        if isinstance(calling, NamedTool):
            return schema_constraint(self._schemas()[self.tool(calling.function.name).function.name])
        if calling == "required":
            return calls_constraint(self._schemas(), only_one=self.parallel_tool_calls is False)
        guide = super().guide()
        if guide is None or calling != "auto" or not bare_calls:
            return guide
        if self.response_format is None or self.guided_by != "response_format":
            message = f"{self.guided_by} cannot be combined with this model's tool calls; send response_format"
            raise invalid(message, param=self.guided_by)
        return calls_constraint(self._schemas(), instead=self.format_schema(self.response_format))

    def _schemas(self) -> dict[str, ClientSchema]:
        """Returns the schemas of the tools' arguments, by the tools' names."""
        path = self.schema_paths["tools"]
        return {
            tool.function.name: ClientSchema({"type": "object", **tool.schema()}, "tools", f"tools[{i}].{path}")
            for i, tool in enumerate(self.tools or ())
        }

    def tool(self, name: str) -> Tool:
        """Returns the tool of that name. Raises ApiError."""
        for tool in self.tools or ():
            if tool.function.name == name:
                return tool
        cause = "is a tool that this server cannot run" if name in self.ignored_tools else "is not one of the tools"
        raise invalid(f"tool_choice: {name!r} {cause}", param="tool_choice")


def functions_of(tools: list[Tool] | None) -> tuple[list[Tool] | None, list[str]]:
    """Returns the functions among the tools, and the labels of the others. Raises ApiError for a function without a
    name."""
    for position, tool in enumerate(tools or ()):
        if tool.type == "function" and not tool.function.name:
            raise invalid(f"tools[{position}]: you must provide the function and its name", param="tools")
    functions = [tool for tool in tools or () if tool.type == "function"]
    return functions or None, [tool.label for tool in tools or () if tool.type != "function"]


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. A prompt is text (tokenized with its special tokens), token ids (taken as they are), or a
    list of either."""

    prompt: SomeText | Annotated[list[Any], Meta(min_length=1, extra_json_schema=IDS_OR_TEXTS)]
    max_tokens: Count | None = None  # 0: with echo, only the prompt
    logprobs: LogprobCount | None = None
    prompt_logprobs: LogprobCount | None = None  # vLLM's
    echo: bool | None = None
    best_of: int | None = None
    suffix: Annotated[str, Meta(extra_json_schema={"maxLength": 0})] | None = None  # refused

    @property
    def default_tokens(self) -> int | None:
        """The most tokens of an answer without `max_tokens`."""
        return DEFAULT_COMPLETION_TOKENS

    @property
    def prompt_count(self) -> int:
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return len(self.prompt) if several else 1

    def logprobs_count(self) -> int | None:
        """Returns the alternatives per token; None without logprobs."""
        return self.logprobs

    def prompt_logprobs_count(self) -> int | None:
        """Returns the alternatives per token of the prompt; None without its logprobs."""
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts one by one. Raises ApiError for an invalid one."""
        return texts_or_ids(self.prompt, "prompt")


def texts_or_ids(value: str | list[Any], name: str) -> list[str | list[int]]:
    """Returns the texts and lists of token ids of a field. Raises ApiError for an invalid one."""
    if isinstance(value, str) or all(type(part) is int for part in value):
        return [value]
    for i, part in enumerate(value):
        if not (isinstance(part, str) or (isinstance(part, list) and all(type(id) is int for id in part))):
            kind = "null" if part is None else type(part).__name__
            raise invalid(f"{name}[{i}]: expected a string or a list of token ids, got {kind}", param=name)
        if not part:
            raise invalid(f"{name}[{i}] is empty", param=name)
    return value


class TokenizeTextRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize of a prompt."""

    model: str
    prompt: str
    add_special_tokens: bool | None = None  # default true
    return_token_strs: bool | None = None


class TokenizeChatRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize of a chat. The fields for the prompt are those of ``ChatRequest``."""

    model: str
    messages: Messages
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    thinking: Thinking | None = None
    thinking_token_budget: Count | None = None
    add_special_tokens: bool | None = None  # default false: the chat template writes them
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: str
    tokens: list[Count]


Chat = ChatRequest | TokenizeChatRequest
