"""Writes the answers of the Messages API, complete or as server-sent events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import msgspec

from orchestrator.gateway.anthropic.chat_request import MessagesChat
from orchestrator.gateway.anthropic.errors import error_body
from orchestrator.gateway.http.exchange import JSON, Exchange
from orchestrator.gateway.openai.answer_parts import Text, events_of, whole_parts
from orchestrator.gateway.openai.answers import EVENTS, LARGE_BYTES, Choice
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.openai.toolcalls.events import CallArguments, CallBegin, Content, Event
from orchestrator.gateway.openai.toolcalls.json_scanner import completed_object
from workers.messages.requests import FinishReason, TokenEvent

_encode = msgspec.json.encode


def sse(kind: str, fields: dict[str, Any]) -> bytes:
    """Returns one server-sent event, which has its type twice."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


PING = sse("ping", {})


class MessagesAnswer(msgspec.Struct, eq=False):
    """Writes the answer of one choice, with the methods of `Answer`."""

    id: str
    model: str
    choice: Choice
    most_tokens: int  # `max_tokens` of the request
    request_id: str
    prompt_tokens: int = 0
    keep_alive: ClassVar[bytes] = PING
    stream_type: ClassVar[bytes] = EVENTS
    whole_type: ClassVar[bytes] = JSON
    _block: int = -1  # the index of the last content block
    _open: bool = False
    _is_text: bool = False  # the last block is text
    _calls: bool = False  # there was a call

    def __post_init__(self) -> None:
        self.count_prompts()

    def count_prompts(self) -> None:
        self.prompt_tokens = len(self.choice.prompt_ids)

    def add_logprobs(self, choice: Choice, events: list[TokenEvent], attempt: int = 0) -> None:
        """The API has none."""

    def whole(self, answers: Sequence[tuple[Choice, Sequence[TokenEvent]]]) -> bytes | list[bytes]:
        ((choice, events),) = answers
        content: list[dict[str, Any]] = []
        for part in whole_parts(choice, events):
            if isinstance(part, Text):
                content.append({"type": "text", "text": part.text})
            else:
                input = msgspec.Raw(completed_object(part.arguments).encode())
                content.append({"type": "tool_use", "id": part.id, "name": part.name, "input": input})
                self._calls = True
        choice.tokens += sum([len(event.token_ids) for event in events])
        body = _encode(self._message(content, self._stop(events[-1])))
        return [body] if len(body) > LARGE_BYTES else body

    def opening(self, choice: Choice) -> bytes:
        return sse("message_start", {"message": self._message([], _NO_STOP)}) + PING

    def events(self, choice: Choice, events: Sequence[TokenEvent]) -> bytes:
        pieces: list[bytes] = []
        for event in events:
            choice.tokens += len(event.token_ids)
            for read in events_of(choice, event):
                pieces += self._written(read)
            if event.finish is not None:
                pieces += self._end_block()
                fields = {"delta": self._stop(event), "usage": self._usage()}
                pieces += (sse("message_delta", fields), sse("message_stop", {}))
        return b"".join(pieces)

    def closing(self, *, include_usage: bool) -> bytes:
        return b""

    def failure(self, error: ApiError) -> bytes:
        """Returns the last event of a stream that failed after its start."""
        return b"event: error\ndata: %b\n\n" % _encode(error_body(error, self.request_id))

    def _written(self, read: Event) -> Iterator[bytes]:
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
    return MessagesAnswer(f"msg{suffix}", body.model, choices[0], body.most_tokens, exchange.id)


_NO_STOP = {"stop_reason": None, "stop_sequence": None}
