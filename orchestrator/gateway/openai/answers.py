"""Writes OpenAI's answers, complete or as server-sent events."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import msgspec
import msgspec.structs

from orchestrator.gateway.http.exchange import JSON, Exchange
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.openai.protocol import ChatRequest, CompletionRequest
from orchestrator.gateway.openai.toolcalls import writing as toolcalls
from orchestrator.gateway.openai.toolcalls.events import ToolParser
from workers.messages.requests import FinishReason, TokenEvent, TokenLogprobs

_encode = msgspec.json.encode
EVENTS = b"text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"  # a comment, which clients of server-sent events skip
LARGE_BYTES = 2**20  # a larger answer is written in parts: joining them would block all streams


class WrittenLogprobs:
    """The logprobs of an answer that is not streamed, as JSON. They are encoded as they arrive: encoding all at the end
    would need hundreds of megabytes of objects, and block the event loop for seconds."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt  # of its request: a retry discards the earlier answer
        self.events = 0  # encoded so far
        self._columns: dict[str, list[bytes]] = {}

    def add(self, columns: Mapping[str, Any]) -> None:
        """Appends to each column of the value; a column that is None stays null."""
        for name, column in columns.items():
            self._columns.setdefault(name, []).append(b"null" if column is None else _encode(column)[1:-1])

    def parts(self) -> Iterator[bytes]:
        """Yields the JSON value in small parts."""
        before = b"{"
        for name, pieces in self._columns.items():
            yield b'%b"%b":' % (before, name.encode())
            before = b","
            if pieces[0] == b"null":
                yield b"null"
                continue
            for i, piece in enumerate(pieces):
                yield b"," if i else b"["
                yield piece
            yield b"]"
        yield b"}" if self._columns else b"null"


class Choice(msgspec.Struct, eq=False):
    """One of the answers to a request: its prompt and the state of writing it."""

    index: int
    prompt_ids: Sequence[int]
    echo: str = ""  # the prompt's text, if it is to be repeated
    tokens: int = 0  # generated so far
    offset: int = 0  # characters of token text so far, for text_offset of completions
    parser: ToolParser | None = None  # if the answer may have tool calls
    written: WrittenLogprobs | None = None  # for logprobs in an answer that is not streamed
    plain: tuple[bytes, bytes] = (b"", b"")  # the bytes before and after the text of an event with text only


class AnswerWriter(Protocol):
    """Writes the answer to one request in the shape of an API."""

    prompt_tokens: int

    @property
    def keep_alive(self) -> bytes:
        """What a stream gets while its request waits; empty: nothing."""
        ...

    @property
    def stream_type(self) -> bytes:
        """The content type of a stream."""
        ...

    @property
    def whole_type(self) -> bytes:
        """The content type of an answer that is not streamed."""
        ...

    def count_prompts(self) -> None:
        """Counts the tokens of the prompts; to be called when they have changed."""
        ...

    def add_logprobs(self, choice: Choice, events: list[TokenEvent], attempt: int = 0) -> None:
        """Encodes the logprobs since the last call, of an answer that is not streamed, and drops them from ``events``,
        which are all events of the ``attempt`` so far."""
        ...

    def whole(self, answers: Sequence[tuple[Choice, Sequence[TokenEvent]]]) -> bytes | list[bytes]:
        """Returns the JSON body of an answer; a large one in parts. The last event of each choice has its finish
        reason."""
        ...

    def opening(self, choice: Choice) -> bytes:
        """Returns the first events of a choice of a stream."""
        ...

    def events(self, choice: Choice, events: Sequence[TokenEvent]) -> bytes:
        """Returns server-sent events for the tokens since the last call, after ``opening``; empty for tokens without
        text so far."""
        ...

    def closing(self, *, include_usage: bool) -> bytes:
        """Returns the end of a stream."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """Returns the last event of a stream that failed after its start."""
        ...


class Answer(msgspec.Struct, eq=False):
    """Writes one request's choices in OpenAI's shape."""

    id: str
    model: str
    created: int  # seconds since the epoch
    chat: bool  # picks the shape
    choices: Sequence[Choice]
    with_ids: bool = False  # adds vLLM's token id fields
    prompt_tokens: int = 0
    keep_alive: ClassVar[bytes] = WAITING
    stream_type: ClassVar[bytes] = EVENTS
    whole_type: ClassVar[bytes] = JSON
    _head: dict[str, Any] = {}

    def __post_init__(self) -> None:
        self.count_prompts()

    @property
    def head(self) -> dict[str, Any]:
        """The fields at the start of every part of the answer."""
        if not self._head:
            kind = "chat.completion" if self.chat else "text_completion"
            self._head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return self._head

    def count_prompts(self) -> None:
        self.prompt_tokens = _prompt_tokens(self.choices)

    def add_logprobs(self, choice: Choice, events: list[TokenEvent], attempt: int = 0) -> None:
        written = choice.written
        if written is None or written.attempt != attempt:
            written = choice.written = WrittenLogprobs(attempt)
            choice.offset = 0
        for i in range(written.events, len(events)):
            if items := events[i].logprobs:
                written.add(self._logprobs(choice, items))
                events[i] = msgspec.structs.replace(events[i], logprobs=[])
        written.events = len(events)

    def whole(self, answers: Sequence[tuple[Choice, Sequence[TokenEvent]]]) -> bytes | list[bytes]:
        if len(answers) == 1 and not self.with_ids:
            choice, events = answers[0]
            if choice.parser is None and choice.written is None:
                return self._whole_text(choice, events)
        head, parts = dict(self.head), [b""]
        for choice, events in answers:
            text = choice.echo + "".join([event.text for event in events])
            finish = _finish(events[-1])
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if choice.parser is not None:
                message = toolcalls.message([*choice.parser.push(text), *choice.parser.flush()])
                finish = choice.parser.finish_reason(finish)
            content = {"message": message} if self.chat else {"text": text}
            tail: dict[str, Any] = {"finish_reason": finish}
            if self.with_ids:
                tail["token_ids"] = [id for event in events for id in event.token_ids]
                (head if self.chat else tail)["prompt_token_ids"] = list(choice.prompt_ids)
            choice.tokens += sum([len(event.token_ids) for event in events])
            parts += (
                b"," if len(parts) > 1 else b"",
                _encode({"index": choice.index, **content})[:-1],
                b',"logprobs":',
            )
            parts += (b"null",) if choice.written is None else choice.written.parts()
            parts += (b",", _encode(tail)[1:])
        parts[0] = _encode(head)[:-1] + b',"choices":['
        parts.append(b'],"usage":%b}' % _encode(self._usage()))
        return parts if sum(map(len, parts)) > LARGE_BYTES else b"".join(parts)

    def _whole_text(self, choice: Choice, events: Sequence[TokenEvent]) -> bytes:
        """Does what ``whole`` does for a single choice that is only text, in a third of the time."""
        choice.tokens += sum([len(event.token_ids) for event in events])
        prompt, completion = self.prompt_tokens, choice.tokens
        text = _encode(choice.echo + "".join([event.text for event in events]))
        return (
            b'{"id":%b,"object":"%b","created":%d,"model":%b,"choices":[{"index":0,%b,"logprobs":null,'
            b'"finish_reason":"%b"}],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}'
        ) % (
            _encode(self.id),
            b"chat.completion" if self.chat else b"text_completion",
            self.created,
            _encode(self.model),
            b'"message":{"role":"assistant","content":%b}' % text if self.chat else b'"text":%b' % text,
            _finish(events[-1]).encode(),
            prompt,
            completion,
            prompt + completion,
        )

    def opening(self, choice: Choice) -> bytes:
        """Returns the first event of a choice of a stream: the role of a chat, the echoed prompt of a completion."""
        self.head["object"] = "chat.completion.chunk" if self.chat else "text_completion"
        around = self._chunk(choice, {"content": ""} if self.chat else "", None, None)
        before, _, behind = around.rpartition(b'""')
        choice.plain = before, behind
        if self.chat:
            return self._chunk(choice, {"role": "assistant", "content": ""}, None, None)
        return self._chunk(choice, choice.echo, None, None) if choice.echo else b""

    def events(self, choice: Choice, events: Sequence[TokenEvent]) -> bytes:
        lines: list[bytes] = []
        before, behind = choice.plain
        parser, with_ids, tokens = choice.parser, self.with_ids, 0
        for event in events:
            tokens += len(event.token_ids)
            if parser is not None:
                lines += self._parsed(choice, parser, event)
                continue
            if event.text and not with_ids and not event.logprobs:
                lines += (before, _encode(event.text), behind)
            elif event.text or event.logprobs or (self.with_ids and event.token_ids):
                delta = {"content": event.text} if self.chat else event.text
                lines.append(self._chunk(choice, delta, None, event))
            if event.finish is not None:
                lines.append(self._chunk(choice, {} if self.chat else "", _finish(event), None))
        choice.tokens += tokens
        return b"".join(lines)

    def _parsed(self, choice: Choice, parser: ToolParser, event: TokenEvent) -> Iterable[bytes]:
        """Does what ``events`` does for one event of a text with tool calls."""
        read = parser.push(event.text) if event.text else []
        if event.finish is not None:
            read = [*read, *parser.flush()]
        delta = toolcalls.delta(read)
        if delta or event.logprobs or (self.with_ids and event.token_ids):
            yield self._chunk(choice, delta, None, event)
        if event.finish is not None:
            yield self._chunk(choice, {}, parser.finish_reason(_finish(event)), None)

    def closing(self, *, include_usage: bool) -> bytes:
        """Returns the end of a stream: the usage, if requested, and `[DONE]`."""
        return (sse({**self.head, "choices": [], "usage": self._usage()}) if include_usage else b"") + DONE

    def failure(self, error: ApiError) -> bytes:
        return sse(error.body())

    def _chunk(
        self, choice: Choice, delta: dict[str, Any] | str, finish: str | None, event: TokenEvent | None
    ) -> bytes:
        written: dict[str, Any] = {"index": choice.index}
        written |= {"delta": delta} if self.chat else {"text": delta}
        written["logprobs"] = self._logprobs(choice, event.logprobs) if event is not None and event.logprobs else None
        written["finish_reason"] = finish
        if self.with_ids:
            written["token_ids"] = event.token_ids if event is not None else []
        return sse({**self.head, "choices": [written]})

    def _logprobs(self, choice: Choice, items: Sequence[TokenLogprobs]) -> dict[str, Any]:
        if self.chat:
            content = [
                {
                    "token": item.text,
                    "logprob": item.logprob,
                    "bytes": item.bytes,
                    "top_logprobs": [
                        {"token": text, "logprob": logprob, "bytes": raw} for _, logprob, text, raw in item.top
                    ],
                }
                for item in items
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for item in items:
            offsets.append(len(choice.echo) + choice.offset)
            choice.offset += len(item.text)
        return {
            "tokens": [item.text for item in items],
            "token_logprobs": [item.logprob for item in items],
            "top_logprobs": [{text: logprob for _, logprob, text, _ in item.top} for item in items],
            "text_offset": offsets,
        }

    def _usage(self) -> dict[str, int]:
        prompt, completion = self.prompt_tokens, sum(choice.tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def openai_answer(
    exchange: Exchange, body: ChatRequest | CompletionRequest, choices: Sequence[Choice], suffix: str
) -> Answer:
    """Returns the writer of an answer; ``suffix`` is that of its id."""
    is_chat = isinstance(body, ChatRequest)
    id = ("chatcmpl" if is_chat else "cmpl") + suffix
    return Answer(id, body.model, int(time.time()), is_chat, choices, bool(body.return_token_ids))


class ForwardedAnswer(msgspec.Struct, eq=False):
    """Writes what a server has answered, with the methods of `Answer`."""

    prompt_tokens: int
    keep_alive: ClassVar[bytes] = WAITING
    stream_type: ClassVar[bytes] = EVENTS
    whole_type: ClassVar[bytes] = JSON

    def count_prompts(self) -> None:
        """The server counts them."""

    def add_logprobs(self, choice: Choice, events: list[TokenEvent], attempt: int = 0) -> None:
        """They are part of the server's answer."""

    def whole(self, answers: Sequence[tuple[Choice, Sequence[TokenEvent]]]) -> bytes | list[bytes]:
        parts = [event.part.data for _, events in answers for event in events if event.part is not None]
        return parts if sum(map(len, parts)) > LARGE_BYTES else b"".join(parts)

    def opening(self, choice: Choice) -> bytes:
        return b""

    def events(self, choice: Choice, events: Sequence[TokenEvent]) -> bytes:
        return b"".join([event.part.data for event in events if event.part is not None])

    def closing(self, *, include_usage: bool) -> bytes:
        return b""

    def failure(self, error: ApiError) -> bytes:
        return sse(error.body())


def _prompt_tokens(choices: Sequence[Choice]) -> int:
    """Returns the tokens of all prompts; the ``n`` choices of a prompt count it once."""
    if len(choices) == 1:
        return len(choices[0].prompt_ids)
    return sum({id(choice.prompt_ids): len(choice.prompt_ids) for choice in choices}.values())


def sse(value: Any) -> bytes:
    """Returns one server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"


def _finish(event: TokenEvent) -> str:
    return "length" if event.finish is FinishReason.LENGTH else "stop"
