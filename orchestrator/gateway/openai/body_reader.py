"""Reads the bodies of OpenAI's requests, and checks what their types cannot express."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from msgspec.inspect import DictType, FloatType, IntType, ListType, Metadata, StructType, UnionType, type_info

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
    functions_of,
)

R = TypeVar("R", bound=msgspec.Struct)
T = TypeVar("T")
C = TypeVar("C", bound=ChatRequest)
MAX_STOP_CHARACTERS = 2**14
LARGE_BYTES = 2**20  # a larger body is checked before it is decoded
MAX_FIELD_BYTES = 2**20  # of a field of a large body, except prompts and messages
MAX_IDS = 2**20  # in a large body
MAX_QUOTED_CHARACTERS = 100  # bytes or characters of a wrong value that an error quotes

_encode = msgspec.json.encode
_kinds: dict[type[msgspec.Struct], str] = {}
_AT = re.compile(r"(?P<cause>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field (?P<field>\w+)")
_UNKNOWN = "Object contains unknown field"
_BOUNDED_ITEMS = ("stop", "stop_token_ids", "logit_bias")


def decoder_of(kind: type[R], *, messages: str = "") -> msgspec.json.Decoder[R]:
    """Returns the decoder of a type of requests, and registers its fields for large bodies and errors in ``decode``.
    ``messages`` is the field that is a list of messages, not of texts."""
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

# Fields of OpenAI, vLLM, LMI and older clients that would change the answer, and their replacement here.
REPLACEMENTS: Mapping[str, str] = MappingProxyType(
    {
        "format": 'response_format: {"type": "json_schema", ...}, with a JSON schema',
        **dict.fromkeys(
            ("guided_whitespace_pattern", "structured_outputs.whitespace_pattern"),
            "structured_outputs.grammar, which defines the white space itself",
        ),
        "max_new_tokens": "max_tokens",
        "do_sample": "temperature: 0 is greedy",
        "return_full_text": "echo, of /v1/completions",
        "stop_sequences": "stop",
        "use_beam_search": "n, for several answers; there is no beam search",
        "inputs": "prompt, of /v1/completions",
        "parameters": "send its fields at the top level, beside model",
        "chat_template": "chat_template_kwargs, for the tokenizer's own template; templates are programs, and are not "
        "accepted from clients",
        "documents": "chat_template_kwargs",
        "include_stop_str_in_output": "stop; the stop string is not part of the answer",
        **dict.fromkeys(("audio", "modalities", "messages.audio"), "text only"),
        "prediction": "none; predicted outputs are not used",
        "web_search_options": "tools, which the client runs",
        "best_of": "n; answers are not ranked",
        "length_penalty": "none; there is no beam search",
        "truncate_prompt_tokens": "none; send a shorter prompt",
        "add_special_tokens": "add_special_tokens, of /tokenize; a prompt of token ids is used as sent",
        "spaces_between_special_tokens": "return_token_ids",
        "return_tokens_as_token_ids": "return_token_ids",
        **dict.fromkeys(("allowed_token_ids", "bad_words", "logits_processors"), "logit_bias"),
    }
)
_ABSENT = (b"null", b"false", b"[]", b'""')
_NEUTRAL: Mapping[str, tuple[bytes, ...]] = MappingProxyType(  # further values of refused fields that change nothing
    {
        "modalities": (*_ABSENT, b'["text"]'),
        **dict.fromkeys(("best_of", "num_beams"), (b"null", b"1")),
        "length_penalty": (b"null", b"1", b"1.0"),
        "top_logprobs": (b"null", b"0"),
        "add_special_tokens": (b"null",),
        "spaces_between_special_tokens": (b"null", b"true"),
    }
)
MAX_UNKNOWN_OBJECTS = 4096  # objects with unknown fields, at 15 to 35 us for each
MAX_UNKNOWN_LEVELS = 6  # of objects with unknown fields, below the body's: each level reads its text again
MAX_UNKNOWN_FIELDS = 64  # that are counted per request
_PLACE = re.compile(r"\[\d+\]")


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
    _check_prompt_logprobs(request)
    _check_calling(request)
    _check(request)
    return request


def check_prompt(request: Chat) -> None:
    """Raises ApiError 400 for fields of the prompt that do not fit together."""
    if request.add_generation_prompt and request.continue_final_message:
        message = "continue_final_message and add_generation_prompt exclude each other; send one of them"
        raise invalid(message, param="continue_final_message")
    if not request.tools:
        return
    if isinstance(request, ChatRequest):
        request.leave_out_tools()
    else:
        request.tools, _ = functions_of(request.tools)
    names = [tool.function.name for tool in request.tools or ()]
    for name in names:
        if names.count(name) > 1:
            raise invalid(f"tools: {name!r} is defined twice", param="tools")


def _check_prompt_logprobs(request: ChatRequest | CompletionRequest) -> None:
    if request.prompt_logprobs is not None and request.stream:
        instead = (
            "send stream: false" if isinstance(request, ChatRequest) else "send stream: false, or echo and logprobs"
        )
        raise invalid(f"prompt_logprobs are not streamed; {instead}", param="prompt_logprobs")


def _check_calling(request: ChatRequest) -> None:
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(request, old) not in (None, []):
            raise invalid(f"{old} is not supported; send {new}", param=old, code="unsupported_parameter")
    if request.tool_choice not in (None, "none", "auto") and not request.tools:
        if request.ignored_tools and isinstance(request.tool_choice, NamedTool):
            request.tool(request.tool_choice.function.name)
        if not request.ignored_tools or request.tool_choice == "required":
            names = ", ".join(request.ignored_tools)
            cause = f"; this server cannot run {names}" if names else ""
            raise invalid(f"tool_choice requires tools{cause}", param="tool_choice")
    if request.calling == "none":
        return
    if isinstance(request.calling, NamedTool):
        request.tool(request.calling.function.name)


def read_tokenize(body: bytes) -> TokenizeTextRequest | TokenizeChatRequest:
    """Decodes and checks a body. Raises ApiError 400 that names the wrong parameter."""
    if bytes(decode(_shape_decoder, body).messages) in (b"", b"null"):
        return decode(_tokenize_text_decoder, body)
    request = decode(_tokenize_chat_decoder, body, {"prompt": "messages; send one of them"})
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
    if request.max_tokens == 0 and not request.echo:
        raise invalid("max_tokens: 0 requires echo; without it the answer would be empty", param="max_tokens")
    _check_prompt_logprobs(request)
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
    """Decodes a body. ``replacements`` has a text for each refused field, by its path. Raises UnknownFields, and
    ApiError 400 that names the parameter."""
    try:
        if len(body) > LARGE_BYTES and decoder is not _forwarded_decoder:
            _check_large(body, decoder.type)
        checked(body)
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            if _UNKNOWN in str(error):
                raise _without_unknown(body, decoder.type, replacements) from None
            raise _explained(str(error), body) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not JSON that can be read: {error}", code="invalid_json") from None


class UnknownFields(Exception):
    """A body has fields that its type does not have. ``body`` is the body without them. ``fields`` maps paths without
    places in lists to the full paths."""

    def __init__(self, body: bytes, fields: Mapping[str, str]) -> None:
        super().__init__(*fields)
        self.body = body
        self.fields = fields


def read(reads: Callable[[bytes], T], body: bytes, *, strict: bool = False) -> tuple[T, Sequence[str]]:
    """Returns a request, and the unknown fields that were left out of it. A body without any is decoded once. Raises
    ApiError 400; with ``strict`` also for an unknown field."""
    try:
        return reads(body), ()
    except UnknownFields as unknown:
        if strict and unknown.fields:
            path = next(iter(unknown.fields.values()))
            raise invalid(f"Unrecognized request argument supplied: {path}", param=path) from None
        return reads(unknown.body), [*unknown.fields]


def _without_unknown(body: bytes, kind: type[msgspec.Struct], replacements: Mapping[str, str]) -> UnknownFields:
    """Raises ApiError for a field that would change the answer, and DecodeError when the body is not JSON."""
    fields: dict[str, str] = {}
    objects = itertools.count(1)  # those with unknown fields, and those that contain them

    def known(raw: msgspec.Raw, kind: Any, path: str) -> msgspec.Raw:
        kinds = [_plain(part) for part in (kind.types if isinstance(kind, UnionType) else (kind,))]
        begin = bytes(memoryview(raw)[:1])
        if begin == b"[" and (lists := [each for each in kinds if isinstance(each, ListType)]):
            item = _plain(lists[0].item_type)
            if not isinstance(item, StructType | UnionType):
                return raw
            items = msgspec.json.decode(raw, type=list[msgspec.Raw])
            return _joined([known(each, item, f"{path}[{i}]") for i, each in enumerate(items)])
        structs = [each for each in kinds if isinstance(each, StructType) and each.forbid_unknown_fields]
        if begin != b"{" or not structs:
            return raw
        if path and len(structs) == 1:
            with contextlib.suppress(msgspec.ValidationError):
                msgspec.json.decode(raw, type=structs[0].cls)
                return raw
        if next(objects) > MAX_UNKNOWN_OBJECTS:
            raise invalid(f"{path}: unknown fields in more than {MAX_UNKNOWN_OBJECTS} objects")
        if path.count(".") >= MAX_UNKNOWN_LEVELS:  # names of known fields have no dots
            raise invalid(f"{path}: unknown fields in more than {MAX_UNKNOWN_LEVELS} levels of objects")
        values = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        tag = values.get(structs[0].tag_field or "", msgspec.Raw(b"null"))
        struct = next((each for each in structs if _encode(each.tag) == bytes(tag)), structs[0])
        types = {field.encode_name: field.type for field in struct.fields} | {struct.tag_field: None}
        kept = {}
        for name, value in values.items():
            where = f"{path}.{name}" if path else name
            if name in types:
                kept[name] = known(value, types[name], where)
                continue
            plain = _PLACE.sub("", where)
            if plain not in replacements:
                if len(fields) < MAX_UNKNOWN_FIELDS:
                    fields.setdefault(plain, where)
            elif msgspec.json.format(bytes(value), indent=-1) not in _NEUTRAL.get(name, _ABSENT):
                message = f"{where} is not supported; here: {replacements[plain]}"
                raise invalid(message, param=where, code="unsupported_parameter")
        return _joined(kept)

    return UnknownFields(bytes(known(msgspec.Raw(body.strip()), type_info(kind), "")), fields)


def _plain(kind: Any) -> Any:
    return kind.type if isinstance(kind, Metadata) else kind


def _joined(parts: Any) -> msgspec.Raw:
    return msgspec.Raw(_encode(parts))


def _explained(text: str, body: bytes) -> ApiError:
    """Returns the error for a message of msgspec, with the parameter first and its value last. Raises DecodeError when
    the rest of the body is not JSON."""
    match = _AT.fullmatch(text)
    assert match is not None
    cause, path = match["cause"].replace("`", ""), match["path"] or None
    missing = _MISSING.search(cause)
    if missing is not None:
        field = f"{path}.{missing['field']}" if path else missing["field"]
        return invalid(f"you must provide {field!r}", param=field)
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
    numbers: dict[str, IntType | FloatType] = {}
    for request in map(type_info, _kinds):
        assert isinstance(request, StructType)
        for field in request.fields:
            for kind in field.type.types if isinstance(field.type, UnionType) else (field.type,):
                part = kind.item_type if isinstance(kind, ListType) else kind
                part = part.value_type if isinstance(part, DictType) else part
                if isinstance(part, IntType | FloatType):
                    numbers.setdefault(field.name, part)
    return numbers
