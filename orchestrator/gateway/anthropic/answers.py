"""The answers and errors of Anthropic's Messages API: their types, and the writers, complete or as server-sent events.

The gateway writes answers by hand; a test reads them as these types.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import msgspec

from orchestrator.gateway.anthropic.requests import MessagesChat
from orchestrator.gateway.http.exchange import Exchange
from orchestrator.gateway.openai.answers import Choice, PartsWriter, Text, whole_parts
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.reading.call_text import completed_object
from orchestrator.gateway.reading.events import CallArguments, CallBegin, Content, Event
from workers.messages.requests import FinishReason, TokenEvent

_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
)
_encode = msgspec.json.encode
_NO_STOP = {"stop_reason": None, "stop_sequence": None}


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Returns the JSON value of an error; its type depends on the status alone."""
    described = {"type": _TYPES.get(error.status, "invalid_request_error"), "message": error.message}
    return {"type": "error", "error": described, "request_id": request_id}


class AnsweredText(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class AnsweredToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int


class Message(msgspec.Struct):
    """``stop_sequence`` is the one that has ended the answer, if one has."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredText | AnsweredToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    input_tokens: int


class ModelInfo(msgspec.Struct):
    """A model in the list of models, if the request has the header `anthropic-version`."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str  # RFC 3339
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class ModelPage(msgspec.Struct):
    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessageErrorDetails(msgspec.Struct):
    type: str
    message: str


class MessageError(msgspec.Struct):
    """Every answer of the Messages API with a status of 400 or above."""

    type: Literal["error"]
    error: MessageErrorDetails
    request_id: str


def sse(kind: str, fields: dict[str, Any]) -> bytes:
    """Returns one server-sent event, which has its type twice."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


PING = sse("ping", {})


class MessagesAnswer(PartsWriter, eq=False):
    """Writes the answer of one choice."""

    id: str
    model: str
    most_tokens: int  # `max_tokens` of the request
    request_id: str
    keep_alive: ClassVar[bytes] = PING
    _block: int = -1  # the index of the last content block
    _open: bool = False
    _is_text: bool = False  # the last block is text
    _calls: bool = False  # there was a call

    def body(self, answers: Sequence[tuple[Choice, Sequence[TokenEvent]]]) -> bytes | list[bytes]:
        ((choice, events),) = answers
        content: list[dict[str, Any]] = []
        for part in whole_parts(choice, events):
            if isinstance(part, Text):
                content.append({"type": "text", "text": part.text})
            else:
                input = msgspec.Raw(completed_object(part.arguments).encode())
                content.append({"type": "tool_use", "id": part.id, "name": part.name, "input": input})
                self._calls = True
        return _encode(self._message(content, self._stop(events[-1])))

    def opening(self, choice: Choice) -> bytes:
        return sse("message_start", {"message": self._message([], _NO_STOP)}) + PING

    def ending(self, event: TokenEvent) -> Iterator[bytes]:
        yield from self._end_block()
        yield sse("message_delta", {"delta": self._stop(event), "usage": self._usage()})
        yield sse("message_stop", {})

    def failure(self, error: ApiError) -> bytes:
        """Returns the last event of a stream that failed after its start."""
        return b"event: error\ndata: %b\n\n" % _encode(error_body(error, self.request_id))

    def written(self, read: Event) -> Iterator[bytes]:
        if isinstance(read, CallBegin):
            yield from self._end_block()
            self._calls = True
            yield self._begin_block({"type": "tool_use", "id": read.id, "name": read.name, "input": {}})
        elif isinstance(read, CallArguments):
            yield self._delta(b'"input_json_delta","partial_json"', read.text)
        else:
            assert isinstance(read, Content)
            if not (self._open and self._is_text):
                yield from self._end_block()
                yield self._begin_block({"type": "text", "text": ""})
            yield self._delta(b'"text_delta","text"', read.text)

    def _begin_block(self, block: dict[str, Any]) -> bytes:
        self._block += 1
        self._open, self._is_text = True, block["type"] == "text"
        return sse("content_block_start", {"index": self._block, "content_block": block})

    def _delta(self, kind: bytes, text: str) -> bytes:
        return (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":%b:%b}}\n\n'
        ) % (self._block, kind, _encode(text))

    def _end_block(self) -> Iterator[bytes]:
        if self._open:
            self._open = False
            yield sse("content_block_stop", {"index": self._block})

    def _message(self, content: list[dict[str, Any]], stop: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": content, **stop, "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        return {"input_tokens": self.prompt_tokens, "output_tokens": self.choice.tokens}

    def _stop(self, event: TokenEvent) -> dict[str, Any]:
        """Returns why the answer ends with ``event``.

        1. `max_tokens` reached                        -> max_tokens
        2. the model's length reached before           -> model_context_window_exceeded
        3. a call                                      -> tool_use
        4. a stop sequence, which is not in the answer -> stop_sequence
        5. else                                        -> end_turn
        """
        if event.finish is FinishReason.LENGTH:
            reached = self.choice.tokens >= self.most_tokens
            reason = "max_tokens" if reached else "model_context_window_exceeded"  # 1, 2
        elif self._calls:
            reason = "tool_use"  # 3
        else:
            reason = "stop_sequence" if event.stop else "end_turn"  # 4, 5
        return {"stop_reason": reason, "stop_sequence": event.stop if reason == "stop_sequence" else None}


def messages_answer(exchange: Exchange, body: MessagesChat, choices: Sequence[Choice], suffix: str) -> MessagesAnswer:
    """Returns the writer of an answer; ``suffix`` is that of its id."""
    return MessagesAnswer(f"msg{suffix}", body.model, body.most_tokens, exchange.id, choices=choices)
