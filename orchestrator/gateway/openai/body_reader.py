"""Reads the bodies of OpenAI's requests, and checks what their types cannot express."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from msgspec.inspect import DictType, FloatType, IntType, ListType, StructType, UnionType, type_info

from orchestrator.gateway.http.exchange import checked
from orchestrator.gateway.openai.errors import ApiError, invalid
from orchestrator.gateway.openai.protocol import (
    MAX_ENTRIES,
    MAX_ID_DIGITS,
    MAX_PROMPTS,
    MAX_STOPS,
    MAX_TOOLS,
    Chat,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    DocumentText,
    ForwardedFields,
    NamedTool,
    SamplingFields,
    TokenizeChatRequest,
    TokenizeTextRequest,
)

R = TypeVar("R", bound=msgspec.Struct)
C = TypeVar("C", bound=ChatRequest)
MAX_STOP_CHARACTERS = 2**14
LARGE_BYTES = 2**20  # a larger body is checked before it is decoded
MAX_FIELD_BYTES = 2**20  # of a field of a large body, except prompts and messages
MAX_IDS = 2**20  # in a large body
MAX_QUOTED_CHARACTERS = 100  # bytes or characters of a wrong value that an error quotes

_kinds: dict[type[msgspec.Struct], str] = {}
_AT = re.compile(r"(?P<cause>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field (?P<field>\w+)")
_UNKNOWN = re.compile(r"Object contains unknown field (?P<field>.*)", re.DOTALL)
_BOUNDED_ITEMS = ("stop", "stop_token_ids", "logit_bias")


def decoder_of(kind: type[R], *, messages: str = "") -> msgspec.json.Decoder[R]:
    """Returns the decoder of a type of requests. From then on ``decode`` knows its fields: in large bodies, and in
    errors. ``messages``: the field that is a list of messages, not of texts."""
    _kinds[kind] = messages
    return msgspec.json.Decoder(kind)


_chat_decoder = decoder_of(ChatRequest)
_completion_decoder = decoder_of(CompletionRequest)
_tokenize_text_decoder = decoder_of(TokenizeTextRequest)
_tokenize_chat_decoder = decoder_of(TokenizeChatRequest)
_detokenize_decoder = decoder_of(DetokenizeRequest)
_forwarded_decoder = msgspec.json.Decoder(ForwardedFields)


class _Shape(msgspec.Struct):
    """The field by which the two bodies of /tokenize differ."""

    messages: msgspec.Raw = msgspec.Raw()


_shape_decoder = msgspec.json.Decoder(_Shape)

REPLACEMENTS: Mapping[str, str] = MappingProxyType(  # fields of vLLM, LMI and older clients, and their replacement here
    {
        "format": 'response_format: {"type": "json_schema", ...} asks for a JSON schema',
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
    return checked_chat(decode(_chat_decoder, body))


def checked_chat(request: C) -> C:
    """Checks what the types cannot express. Raises ApiError 400 that names the wrong parameter."""
    check_prompt(request)
    if request.max_completion_tokens is not None:
        if request.max_tokens not in (None, request.max_completion_tokens):
            fields = f"max_tokens ({request.max_tokens}) and max_completion_tokens ({request.max_completion_tokens})"
            raise invalid(f"{fields} differ; send one of them", param="max_tokens")
        request.max_tokens = request.max_completion_tokens
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs requires logprobs: true", param="top_logprobs")
    _check_calling(request)
    _check(request)
    return request


def check_prompt(request: Chat) -> None:
    """Raises ApiError 400 for fields of the prompt that do not fit together."""
    if request.add_generation_prompt and request.continue_final_message:
        message = "continue_final_message and add_generation_prompt exclude each other; send one of them"
        raise invalid(message, param="continue_final_message")
    names = [tool.function.name for tool in request.tools or ()]
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
    if request.calling == "auto":
        # Some models mark calls with a special token, such as Mistral's [TOOL_CALLS], which must stay in the text. The
        # tokens that end an answer are never part of it.
        request.skip_special_tokens = False


def read_tokenize(body: bytes) -> TokenizeTextRequest | TokenizeChatRequest:
    """Decodes and checks a body. Raises ApiError 400 that names the wrong parameter."""
    if bytes(decode(_shape_decoder, body).messages) in (b"", b"null"):
        return decode(_tokenize_text_decoder, body)
    request = decode(_tokenize_chat_decoder, body)
    check_prompt(request)
    return request


def read_detokenize(body: bytes) -> DetokenizeRequest:
    """Decodes and checks a body. Raises ApiError 400 that names the wrong parameter."""
    return decode(_detokenize_decoder, body)


def read_completion(body: bytes) -> CompletionRequest:
    """Decodes and checks a body. Raises ApiError 400 that names the wrong parameter."""
    request = decode(_completion_decoder, body)
    count = len(request.prompt)
    if isinstance(request.prompt, list) and not isinstance(request.prompt[0], int) and count > MAX_PROMPTS:
        raise invalid(out_of_range("the number of prompts", count, 1, MAX_PROMPTS), param="prompt")
    if request.suffix:
        raise invalid("suffix is not supported", param="suffix", code="unsupported_parameter")
    if request.best_of not in (None, request.n or 1):
        raise invalid(f"best_of: {request.best_of} must equal n; answers are not ranked", param="best_of")
    if request.echo and request.logprobs is not None:
        raise invalid("echo cannot be combined with logprobs: those of the prompt are not computed", param="echo")
    _check(request)
    return request


def read_forwarded(body: bytes) -> ForwardedFields:
    """Decodes these fields, and checks that the body is JSON. Raises ApiError 400."""
    return decode(_forwarded_decoder, body)


_BOUNDED = (
    *(
        "tools",
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_choice",
        "chat_template_kwargs",
        "logit_bias",
        "stop",
        "stop_token_ids",
    ),
    *("functions", "function_call", "output_config", "output_format", "stop_sequences"),
    "context_management",
)
_texts_decoder = msgspec.json.Decoder(list[str | DocumentText])


@cache
def _fields_decoder() -> msgspec.json.Decoder[Any]:
    """Returns a decoder of the fields of all requests, which leaves their values as they are."""
    names = dict.fromkeys(name for kind in _kinds for name in kind.__struct_fields__)
    return msgspec.json.Decoder(msgspec.defstruct("Fields", [(name, msgspec.Raw, msgspec.Raw()) for name in names]))


def _check_large(body: bytes, kind: type[msgspec.Struct]) -> None:
    """Raises ApiError for a body that would block the event loop while it is decoded; long texts do not."""
    fields = {name: bytes(raw) for name, raw in msgspec.structs.asdict(_fields_decoder().decode(body)).items()}
    for name in _BOUNDED:
        _check_limit(f"the bytes of {name}", len(fields.get(name, b"")), MAX_FIELD_BYTES, name)
    for name in ("prompt", "tokens", "input", "documents", "text_1", "text_2"):
        if name != _kinds.get(kind) and fields.get(name, b"").startswith(b"["):
            _check_list(name, fields[name])
    remainder = len(body) - sum(map(len, fields.values()))  # of a repeated field, ``fields`` has only the last
    if remainder > MAX_FIELD_BYTES:
        raise invalid(f"the bytes of unknown and repeated fields: {remainder} exceed the limit of {MAX_FIELD_BYTES}")


def _check_list(name: str, data: bytes) -> None:
    """Raises ApiError for a list of more token ids or prompts than may be decoded at once."""
    if b'"' in data:
        try:
            _check_limit(f"the texts of {name}", len(_texts_decoder.decode(data)), MAX_PROMPTS, name)
            return
        except msgspec.ValidationError:  # not only texts
            pass
    _check_limit(f"the token ids of {name}", data.count(b",") + 1, MAX_IDS, name)
    _check_limit(f"the lists of {name}", data.count(b"[") + data.count(b"{"), MAX_PROMPTS + 1, name)


def decode(decoder: msgspec.json.Decoder[R], body: bytes, replacements: Mapping[str, str] = REPLACEMENTS) -> R:
    """Decodes a body. ``replacements`` are those of unknown fields. Raises ApiError 400 that names the parameter."""
    try:
        if len(body) > LARGE_BYTES and decoder is not _forwarded_decoder:
            _check_large(body, decoder.type)
        checked(body)
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _explained(str(error), body, replacements) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not JSON that can be read: {error}", code="invalid_json") from None


def _explained(text: str, body: bytes, replacements: Mapping[str, str]) -> ApiError:
    """Returns the error for a message of msgspec, with the parameter first and its value last. Raises DecodeError when
    the rest of the body is not JSON."""
    match = _AT.fullmatch(text)
    assert match is not None
    cause, path = match["cause"].replace("`", ""), match["path"] or None
    missing, unknown = _MISSING.search(cause), _UNKNOWN.search(cause)
    if missing is not None:
        field = f"{path}.{missing['field']}" if path else missing["field"]
        return invalid(f"you must provide {field!r}", param=field)
    if unknown is not None:
        name = unknown["field"]
        instead = f"; here: {replacements[name]}" if name in replacements else ""
        return invalid(f"Unrecognized request argument supplied: {name}{instead}", param=name)
    if path is None:
        return invalid(f"the body: {cause}")
    name = path.partition("[")[0]
    if "got" in cause or name not in (_BOUNDED_ITEMS if name != path else _fields_decoder().type.__struct_fields__):
        return invalid(f"{path}: {cause}", param=path)
    raw = bytes(getattr(_fields_decoder().decode(body), name))
    try:
        message = out_of_bounds(name, msgspec.json.decode(raw))
    except msgspec.ValidationError:  # a number with too many digits
        quote = raw[:MAX_QUOTED_CHARACTERS].decode(errors="replace")
        return invalid(f"{path}: {cause}, got {quote}", param=path)
    return invalid(message or f"{path}: {cause}", param=name)


def _check(request: SamplingFields) -> None:
    """Raises ApiError for fields that do not fit together."""
    if request.max_tokens is not None and (request.min_tokens or 0) > request.max_tokens:
        message = out_of_range("min_tokens", request.min_tokens or 0, 0, request.max_tokens)
        raise invalid(message, param="min_tokens")
    if request.stop is not None:
        _check_limit("the characters of stop", sum(map(len, request.stops())), MAX_STOP_CHARACTERS, "stop")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options requires stream: true", param="stream_options")
    if not request.is_free:
        request.guide()  # raises ApiError for a schema over a limit


def _check_limit(name: str, count: int, limit: int, param: str) -> None:
    if count > limit:
        raise invalid(f"{name}: {count} exceeds the limit of {limit}", param=param)


# The values of fields outside their bounds, which msgspec reports without the value


def out_of_bounds(name: str, value: Any) -> str | None:
    """Returns the message for a field outside its bounds; None if ``value`` is inside, as the last of a repeated field
    may be."""
    values = value if isinstance(value, list | dict) else [value]
    match name:
        case "prompt" | "input" | "query" | "documents" | "text_1" | "text_2" if not value:
            return f"{name} is empty"
        case "documents" | "text_1" | "text_2" | "input" if len(values) > MAX_PROMPTS:
            return f"{name}: {len(values)} texts exceed the limit of {MAX_PROMPTS}"
        case "messages" if not value:
            return "messages: at least one message is required"
        case "tools" if len(values) > MAX_TOOLS:
            return f"tools: {len(values)} tools exceed the limit of {MAX_TOOLS}"
        case "stop" if len(values) > MAX_STOPS:
            return f"stop: {len(values)} strings exceed the limit of {MAX_STOPS}"
        case "stop" if "" in values:
            return "stop: an empty string is not allowed"
        case "stop_token_ids" | "logit_bias" if len(values) > MAX_ENTRIES:
            return f"{name}: {len(values)} exceeds the limit of {MAX_ENTRIES}"
    for id, part in values.items() if isinstance(values, dict) else enumerate(values):
        if isinstance(id, str) and not (id.isascii() and id.isdecimal() and len(id) <= MAX_ID_DIGITS):
            return f"logit_bias: {id[:MAX_QUOTED_CHARACTERS]!r} is not a token id"
        message = _outside(f"logit_bias of {id}" if isinstance(id, str) else name, part, _numbers().get(name))
        if message is not None:
            return message
    return None


def out_of_range(name: str, value: float, lowest: float, highest: float, *, above: bool = False) -> str:
    """Returns the message for a number outside ``lowest`` to ``highest``; ``above``: ``lowest`` itself is outside."""
    bounds = f"{'above' if above else 'at least'} {lowest} and at most {highest}"
    return f"{name}: {str(value)[:MAX_QUOTED_CHARACTERS]} is out of range; it must be {bounds}"


def _outside(name: str, value: Any, number: IntType | FloatType | None) -> str | None:
    """Returns the message for a value outside the bounds of a number; None if it is inside, or not a number."""
    if number is None or number.le is None or not isinstance(value, int | float):
        return None
    lowest, above = (number.ge, False) if number.ge is not None else (number.gt, True)
    if lowest is None or lowest < value <= number.le or (value == lowest and not above):
        return None
    if name == "seed":
        return f"seed: {str(value)[:MAX_QUOTED_CHARACTERS]} does not fit in 64 bits"
    return out_of_range(name, value, lowest, number.le, above=above)


@cache
def _numbers() -> Mapping[str, IntType | FloatType]:
    """Returns the number that each field takes, with its bounds; for a list or an object, the number in it."""
    numbers = {}
    for request in map(type_info, _kinds):
        assert isinstance(request, StructType)
        for field in request.fields:
            for kind in field.type.types if isinstance(field.type, UnionType) else (field.type,):
                part = kind.item_type if isinstance(kind, ListType) else kind
                part = part.value_type if isinstance(part, DictType) else part
                if isinstance(part, IntType | FloatType):
                    numbers[field.name] = part
    return numbers
