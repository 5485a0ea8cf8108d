"""OpenAI's requests as values: what a body may hold, and what is wrong with one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from orchestrator.gateway.errors import ApiError, invalid

R = TypeVar("R")
MAX_STOPS = 16
MAX_CHOICES = 128  # of `n`, as OpenAI's
MAX_TOP_LOGPROBS = 20  # as OpenAI's
MAX_PROMPTS = 2048
MOST = 2**31 - 1  # of any count or token id
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


class TextPart(msgspec.Struct):
    """One part of a message that comes in parts; only text is understood."""

    type: str
    text: str = ""


class ChatMessage(msgspec.Struct):
    """One message. Fields that only other models need (a name, an audio) are ignored."""

    role: str
    content: str | list[TextPart] | None = None

    def text(self) -> str:
        """Raises ApiError for a part that is not text."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        for part in self.content:
            if part.type != "text":
                what = f"messages: a part of type {part.type!r} is not understood; only text is"
                raise invalid(what, param="messages")
        return "".join(part.text for part in self.content)


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
    """What both endpoints take. ``None`` means the default, as OpenAI's clients send it."""

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
    # Ignored: they say nothing about the answer's tokens.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def guide(self) -> str | None:
        """The JSON schema that the answer must keep, as text; None for free text. Raises ApiError."""
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return '{"type": "object"}'
        if wanted.type == "json_schema":
            if wanted.json_schema is None or wanted.json_schema.schema is None:
                raise invalid("response_format: json_schema needs a schema", param="response_format")
            return msgspec.json.encode(wanted.json_schema.schema).decode()
        what = f"response_format: {wanted.type!r} is none of text, json_object and json_schema"
        raise invalid(what, param="response_format")


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    # Ignored, as above.
    parallel_tool_calls: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None

    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. A prompt is text (tokenized with its special tokens), token ids (taken as they are), or a
    list of either."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """Each prompt of its own. Raises ApiError for what is no prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and all(type(part) is int for part in self.prompt):
            return [self.prompt]
        for i, part in enumerate(self.prompt):
            if not (isinstance(part, str) or (isinstance(part, list) and all(type(id) is int for id in part))):
                what = f"prompt[{i}]: {_kind(part)} is neither a text nor a list of token ids"
                raise invalid(what, param="prompt")
            if not part:
                raise invalid(f"prompt[{i}]: it is empty", param="prompt")
        return self.prompt


_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>\w+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>[^`]*)`")


_INSTEAD: Mapping[str, str] = MappingProxyType(  # what vLLM, LMI and older clients send, and the field for it here
    {
        **dict.fromkeys(
            ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "format"),
            'response_format: {"type": "json_schema", ...} asks for a JSON schema',
        ),
        "max_new_tokens": "max_tokens",
        "do_sample": "temperature: 0 is greedy",
        "return_full_text": "echo, of /v1/completions",
        "prompt_logprobs": "logprobs tells of the answer; the prompt's are not computed",
        "stop_sequences": "stop",
        "use_beam_search": "n, for several answers; beams are not searched",
        "inputs": "prompt, of /v1/completions",
        "parameters": "its fields stand beside model, not inside parameters",
    }
)


def read_chat(body: bytes) -> ChatRequest:
    """Raises ApiError 400 with the parameter at fault."""
    request = _decode(_chat_decoder, body)
    if not request.messages:
        raise invalid("messages: at least one message is needed", param="messages")
    if request.max_completion_tokens is not None:
        _within("max_completion_tokens", request.max_completion_tokens, 1, MOST)
        if request.max_tokens not in (None, request.max_completion_tokens):
            both = f"max_tokens ({request.max_tokens}) and max_completion_tokens ({request.max_completion_tokens})"
            raise invalid(f"{both} differ; send one of them", param="max_tokens")
        request.max_tokens = request.max_completion_tokens
    _within("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs is only for logprobs: true", param="top_logprobs")
    if request.tools or request.functions:
        raise _not_served("tools" if request.tools else "functions")
    _check(request)
    return request


def read_completion(body: bytes) -> CompletionRequest:
    """Raises ApiError 400 with the parameter at fault."""
    request = _decode(_completion_decoder, body)
    if len(request.prompt) == 0:
        raise invalid("prompt: it is empty", param="prompt")
    if isinstance(request.prompt, list) and not isinstance(request.prompt[0], int):
        _within("the number of prompts", len(request.prompt), 1, MAX_PROMPTS, param="prompt")
    _within("logprobs", request.logprobs, 0, MAX_TOP_LOGPROBS)
    if request.suffix:
        raise _not_served("suffix")
    if request.best_of not in (None, request.n or 1):
        raise invalid(f"best_of: {request.best_of} is not n; this server does not rank answers", param="best_of")
    if request.echo and request.logprobs is not None:
        raise invalid("echo with logprobs: the prompt's own logprobs are not computed", param="echo")
    _check(request)
    return request


def _decode(decoder: msgspec.json.Decoder[R], body: bytes) -> R:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}", code="invalid_json") from None


def _explained(text: str) -> ApiError:
    """msgspec's account of a wrong value, with the parameter first."""
    match = _AT.match(text)
    what, path = (match["what"], match["path"]) if match is not None else (text, None)
    missing, unknown = _MISSING.search(what), _UNKNOWN.search(what)
    if missing is not None:
        field = missing["field"] if not path else f"{path}.{missing['field']}"
        return invalid(f"you must provide {field!r}", param=field)
    if unknown is not None:
        name = unknown["field"]
        instead = f"; here: {_INSTEAD[name]}" if name in _INSTEAD else ""
        return invalid(f"Unrecognized request argument supplied: {name}{instead}", param=name)
    return invalid(f"{path or 'the body'}: {what.replace('`', '')}", param=path or None)


def _check(request: SamplingFields) -> None:
    _within("max_tokens", request.max_tokens, 1, MOST)
    _within("min_tokens", request.min_tokens, 0, request.max_tokens or MOST)
    _within("temperature", request.temperature, 0, 2)
    _within("top_p", request.top_p, 0, 1, above=True)
    _within("top_k", request.top_k, -1, MOST)
    _within("min_p", request.min_p, 0, 1)
    _within("repetition_penalty", request.repetition_penalty, 0, 10, above=True)
    _within("presence_penalty", request.presence_penalty, -2, 2)
    _within("frequency_penalty", request.frequency_penalty, -2, 2)
    _within("no_repeat_ngram_size", request.no_repeat_ngram_size, 0, MOST)
    _within("n", request.n, 1, MAX_CHOICES)
    if request.seed is not None and not -(2**63) <= request.seed < 2**63:
        raise invalid(f"seed: {request.seed} does not fit in 64 bits", param="seed")
    for id, bias in (request.logit_bias or {}).items():
        if not id.isdecimal():
            raise invalid(f"logit_bias: {id!r} is no token id", param="logit_bias")
        _within(f"logit_bias of {id}", bias, -100, 100, param="logit_bias")
    for stop_id in request.stop_token_ids or ():
        _within("stop_token_ids", stop_id, 0, MOST)
    if len(request.stops()) > MAX_STOPS:
        raise invalid(f"stop: {len(request.stops())} strings are more than {MAX_STOPS}", param="stop")
    if "" in request.stops():
        raise invalid("stop: an empty string stops nothing", param="stop")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options is only for stream: true", param="stream_options")
    request.guide()


def _within(
    name: str,
    value: float | None,
    lowest: float,
    highest: float | None,
    *,
    above: bool = False,
    param: str | None = None,
) -> None:
    """``above``: the lowest value itself is excluded."""
    if value is None:
        return
    too_low = value <= lowest if above else value < lowest
    if too_low or not math.isfinite(value) or (highest is not None and value > highest):
        bounds = f"{'above' if above else 'at least'} {lowest:g}" + (
            "" if highest is None else f" and at most {highest:g}"
        )
        raise invalid(f"{name}: {value} is out of range; it must be {bounds}", param=param or name)


def _not_served(name: str) -> ApiError:
    return invalid(f"{name}: this version does not serve it", param=name, code="unsupported_parameter")


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
