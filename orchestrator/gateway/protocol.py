"""OpenAI's requests and answers as values: what a body may hold, and how an answer is written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from orchestrator.gateway.errors import ApiError, invalid
from workers.requests import FinishReason, TokenEvent

R = TypeVar("R")
MAX_STOPS = 16
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


class TextPart(msgspec.Struct):
    """One part of a message that comes in parts; only text is understood."""

    type: str
    text: str = ""


class ChatMessage(msgspec.Struct):
    role: str
    content: str | list[TextPart] | None = None

    def text(self) -> str:
        """Raises ApiError for a part that is not text."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        for part in self.content:
            if part.type != "text":
                raise invalid(
                    f"messages: a part of type {part.type!r} is not understood; only text is", param="messages"
                )
        return "".join(part.text for part in self.content)


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class SamplingFields(msgspec.Struct, kw_only=True):
    """What both endpoints take. ``None`` means the default, as OpenAI's clients send it."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None  # vLLM's: the ids beside the text
    # Known and not served by this version: any value that would change the answer is refused, not ignored.
    n: int | None = None
    logprobs: bool | int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class ChatRequest(SamplingFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/completions. A prompt is text (tokenized with its special tokens) or token ids (taken as they are)."""

    prompt: str | list[str | int]
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>\w+)`")
_encode = msgspec.json.encode


def read_chat(body: bytes) -> ChatRequest:
    """Raises ApiError 400 with the parameter at fault."""
    request = _decode(_chat_decoder, body)
    _check(request)
    if not request.messages:
        raise invalid("messages: at least one message is needed", param="messages")
    if request.max_completion_tokens is not None:
        _positive("max_completion_tokens", request.max_completion_tokens)
        if request.max_tokens not in (None, request.max_completion_tokens):
            raise invalid("max_tokens and max_completion_tokens differ; send one of them", param="max_tokens")
        request.max_tokens = request.max_completion_tokens
    if request.tools:
        raise _not_served("tools")
    if request.response_format is not None and request.response_format.get("type") != "text":
        raise _not_served("response_format")
    return request


def read_completion(body: bytes) -> CompletionRequest:
    """Raises ApiError 400 with the parameter at fault."""
    request = _decode(_completion_decoder, body)
    _check(request)
    if len(request.prompt) == 0:
        raise invalid("prompt: it is empty", param="prompt")
    for name in ("echo", "suffix"):
        if getattr(request, name):
            raise _not_served(name)
    if request.best_of not in (None, 1):
        raise _not_served("best_of")
    return request


def one_prompt(prompt: str | list[str | int]) -> str | list[int]:
    """The prompt of a request: text, or token ids. Raises ApiError for a list of several texts."""
    if isinstance(prompt, str):
        return prompt
    ids = [part for part in prompt if isinstance(part, int)]
    if len(ids) == len(prompt):
        return ids
    if len(prompt) == 1 and isinstance(prompt[0], str) and prompt[0]:
        return prompt[0]
    raise invalid("prompt: this version takes one text, or one list of token ids", param="prompt")


def _decode(decoder: msgspec.json.Decoder[R], body: bytes) -> R:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        match = _AT.match(str(error))
        assert match is not None
        what, path = match["what"], match["path"]
        missing = _MISSING.search(what)
        if missing is not None:
            field = missing["field"] if not path else f"{path}.{missing['field']}"
            raise invalid(f"you must provide {field!r}", param=field) from None
        raise invalid(f"{path or 'the body'}: {what.replace('`', '')}", param=path or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not JSON: {error}", code="invalid_json") from None


def _check(request: SamplingFields) -> None:
    if request.max_tokens is not None:
        _positive("max_tokens", request.max_tokens)
    if request.temperature is not None and not 0 <= request.temperature <= 2:
        raise invalid(f"temperature: {request.temperature} is not between 0 and 2", param="temperature")
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise invalid(f"top_p: {request.top_p} is not above 0 and at most 1", param="top_p")
    if request.seed is not None and not -(2**63) <= request.seed < 2**63:
        raise invalid(f"seed: {request.seed} does not fit in 64 bits", param="seed")
    if len(request.stops()) > MAX_STOPS:
        raise invalid(f"stop: {len(request.stops())} strings are more than {MAX_STOPS}", param="stop")
    if "" in request.stops():
        raise invalid("stop: an empty string stops nothing", param="stop")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options is only for stream: true", param="stream_options")
    if request.n not in (None, 1):
        raise _not_served("n")
    for name in ("frequency_penalty", "presence_penalty", "logit_bias", "logprobs"):
        if getattr(request, name) not in (None, 0, False, {}):
            raise _not_served(name)


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise invalid(f"{name}: {value} is below 1", param=name)


def _not_served(name: str) -> ApiError:
    return invalid(f"{name}: this version does not serve it", param=name, code="unsupported_parameter")


class Answer:
    """Writes one completion: whole, or as server-sent events. ``chat`` picks the shape."""

    def __init__(
        self, *, id: str, model: str, created: int, chat: bool, prompt_ids: Sequence[int], with_ids: bool = False
    ) -> None:
        self._chat = chat
        self._prompt_tokens = len(prompt_ids)
        self._prompt_ids = list(prompt_ids) if with_ids else None
        self._completion_tokens = 0
        self._head: dict[str, Any] = {
            "id": id,
            "object": "chat.completion" if chat else "text_completion",
            "created": created,
            "model": model,
        }

    def whole(self, events: Sequence[TokenEvent]) -> bytes:
        """The JSON body of an answer whose last event says why it ended."""
        self._count(events)
        text = "".join(event.text for event in events)
        finish = _finish(events[-1])
        content: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        head = dict(self._head)
        if self._prompt_ids is not None:
            choice["token_ids"] = [id for event in events for id in event.token_ids]
            (head if self._chat else choice)["prompt_token_ids"] = self._prompt_ids
        return _encode({**head, "choices": [choice], "usage": self._usage()})

    def opening(self) -> bytes:
        """The event that begins a stream: a chat names its role; a completion needs none."""
        self._head["object"] = "chat.completion.chunk" if self._chat else "text_completion"
        return self._chunk({"role": "assistant", "content": ""}, None, []) if self._chat else b""

    def events(self, events: Sequence[TokenEvent]) -> bytes:
        """Server-sent events for what came since the last call; nothing for tokens that gave no text yet."""
        self._count(events)
        lines = []
        for event in events:
            if event.text or (self._prompt_ids is not None and event.token_ids):
                delta = {"content": event.text} if self._chat else event.text
                lines.append(self._chunk(delta, None, event.token_ids))
            if event.finish is not None:
                lines.append(self._chunk({} if self._chat else "", _finish(event), []))
        return b"".join(lines)

    def closing(self, *, include_usage: bool) -> bytes:
        """What ends a stream: usage where it was asked for, and `[DONE]`."""
        usage = _event({**self._head, "choices": [], "usage": self._usage()}) if include_usage else b""
        return usage + b"data: [DONE]\n\n"

    def _chunk(self, delta: dict[str, str] | str, finish: str | None, ids: list[int]) -> bytes:
        content: dict[str, Any] = {"delta": delta} if self._chat else {"text": delta}
        if self._prompt_ids is not None:
            content["token_ids"] = ids
        return _event({**self._head, "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": finish}]})

    def _count(self, events: Sequence[TokenEvent]) -> None:
        self._completion_tokens += sum(len(event.token_ids) for event in events)

    def _usage(self) -> dict[str, int]:
        prompt, completion = self._prompt_tokens, self._completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def error_event(error: ApiError) -> bytes:
    """What ends a stream that fails after it has begun."""
    return _event(error.body())


def _event(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def _finish(event: TokenEvent) -> str:
    return "length" if event.finish is FinishReason.LENGTH else "stop"
