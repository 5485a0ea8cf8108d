"""The answers in the shapes of OpenAI, vLLM and Cohere: their types, and the writers of OpenAI's.

The gateway writes answers by hand, complete or as server-sent events; a test reads them as these types.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import msgspec
import msgspec.structs
from msgspec import UNSET, UnsetType

from orchestrator.gateway.http.exchange import JSON, Exchange
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.openai.protocol import ChatRequest, CompletionRequest, DocumentText
from orchestrator.gateway.reading.events import AnswerReader, CallArguments, CallBegin, Content, Event, Reasoning
from workers.messages.requests import FinishReason, TokenEvent, TokenLogprobs

_encode = msgspec.json.encode
EVENTS = b"text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"  # a comment, which clients of server-sent events skip
HIDDEN_TOKENS = 64  # of reasoning that is left out of a stream, between two comments or pings
LARGE_BYTES = 2**20  # a larger answer is written in parts: joining them would block all streams


class CalledFunction(msgspec.Struct):
    """``arguments`` is the text of a JSON object."""

    name: str
    arguments: str


class AnsweredCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(msgspec.Struct):
    """The assistant's message. ``content`` is null if the answer is only reasoning and calls. Both names of the
    reasoning have the same text. ``refusal`` is always null."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


class PromptLogprob(msgspec.Struct):
    """The logprob of one token. ``rank`` is null if the engine does not report it."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""vLLM's `prompt_logprobs`: for each token of a prompt, the token and its alternatives by id; null for the first."""


class ChatChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | UnsetType = UNSET


class TextChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Usage(msgspec.Struct):
    """The tokens of an answer. ``completion_tokens_details`` has the ``reasoning_tokens``, if there are any."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: dict[str, int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextCompletion(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class EncodedUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct):
    """``embedding`` is the numbers, or base64 of them as float32 in little endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EncodedUsage


class RankedDocument(msgspec.Struct):
    """``index`` is the document's place in the request."""

    index: int
    relevance_score: float
    document: DocumentText | UnsetType = UNSET


class Ranking(msgspec.Struct):
    """``results`` are sorted by score, highest first."""

    id: str
    model: str
    usage: EncodedUsage
    results: list[RankedDocument]


class Score(msgspec.Struct):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EncodedUsage


class Classification(msgspec.Struct):
    """``label`` is the most probable one, null if the checkpoint names none; ``probs`` are in the labels' order."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassificationList(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: EncodedUsage


class ModelCard(msgspec.Struct):
    """``root`` is the model's name in the spec; ``parent`` is the same for an alias, else null."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    kind: str


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelCard]


class VersionAnswer(msgspec.Struct):
    version: str


class ErrorDetails(msgspec.Struct):
    """``code`` is listed in docs/errors.md; null for a wrong value of the field ``param``."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """Every answer with a status of 400 or above, except those of the probes."""

    error: ErrorDetails


class WrittenLogprobs:
    """The logprobs of an answer that is not streamed, as JSON. They are encoded as they arrive: encoding all at the end
    would need hundreds of megabytes of objects, and block the event loop for seconds."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt  # of its request: a retry discards the earlier answer
        self.events = 0  # encoded so far
        self.prompt: list[bytes] = []  # the items of vLLM's `prompt_logprobs`
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

    def prompt_parts(self) -> tuple[bytes, ...]:
        """Returns the field with vLLM's ``prompt_logprobs``, in parts."""
        between = [b","] * (2 * len(self.prompt) - 1)
        between[::2] = self.prompt
        return (b',"prompt_logprobs":[', *between, b"]")


class Choice(msgspec.Struct, eq=False):
    """One of the answers to a request: its prompt and the state of writing it."""

    index: int
    prompt_ids: Sequence[int]
    echo: str = ""  # the prompt's text, if it is to be repeated
    tokens: int = 0  # generated so far
    offset: int = 0  # characters of token text so far, for text_offset of completions
    prompt_offset: int = 0  # likewise, of the echoed prompt
    reader: AnswerReader | None = None  # if the answer may have reasoning or tool calls
    new_reader: Callable[[], AnswerReader] | None = None  # makes the reader of a retry
    shows_reasoning: bool = True  # False: the reasoning is counted, but left out
    reasoning_tokens: int = 0
    pending: int = 0  # tokens since the last text that was read, which are not assigned to a part yet
    hidden: int = 0  # tokens of reasoning at the last comment or ping
    gathered: list[Event] | None = None  # the events read so far, if the answer is not streamed
    taken: int = 0  # the number of token events that were gathered
    attempt: int = 0  # of the request; a retry discards ``gathered``
    written: WrittenLogprobs | None = None  # for logprobs in an answer that is not streamed
    plain: tuple[bytes, bytes] = (b"", b"")  # the bytes before and after the text of an event with text only

    def read(self, event: TokenEvent) -> list[Event]:
        """Returns what an event adds to the answer. An event with a finish reason is the last one."""
        reader = self.reader
        if reader is None:
            return [Content(event.text)] if event.text else []
        read = reader.push(event.text) if event.text else []
        if event.finish is not None:
            read = [*read, *reader.flush()]
        self.pending += len(event.token_ids)
        if read:
            if isinstance(read[0], Reasoning):
                self.reasoning_tokens += self.pending
            elif any(isinstance(part, Reasoning) for part in read):
                self.reasoning_tokens += len(event.token_ids)
            self.pending = 0
        return read if self.shows_reasoning else [part for part in read if not isinstance(part, Reasoning)]

    def gather(self, events: Sequence[TokenEvent], attempt: int = 0) -> list[Event]:
        """Reads the new events of an answer that is not streamed, and returns all that were read. ``events`` are the
        events of the ``attempt`` so far. Reading all of them at the end could block the event loop."""
        if attempt != self.attempt:
            assert self.new_reader is not None
            self.attempt, self.reader, self.gathered = attempt, self.new_reader(), None
            self.reasoning_tokens = self.pending = 0
        if self.gathered is None:
            self.gathered, self.taken = [], 0
        for position in range(self.taken, len(events)):
            self.gathered += self.read(events[position])
        self.taken = len(events)
        return self.gathered


class AnswerWriter(msgspec.Struct, eq=False, kw_only=True):
    """Writes the answer to one request in the shape of an API."""

    choices: Sequence[Choice]
    keep_alive: ClassVar[bytes] = WAITING  # what a stream gets while its request waits; empty: nothing
    stream_type: bytes = EVENTS  # the content type of a stream
    whole_type: bytes = JSON  # the content type of an answer that is not streamed

    @property
    def prompt_tokens(self) -> int:
        """The tokens of the prompts. The ``n`` choices of a prompt count it once."""
        choices = self.choices
        if len(choices) == 1:
            return len(choices[0].prompt_ids)
        return sum({id(choice.prompt_ids): len(choice.prompt_ids) for choice in choices}.values())

    @property
    def reasoning_tokens(self) -> int:
        """The tokens of all choices that were read as reasoning."""
        return sum([choice.reasoning_tokens for choice in self.choices])

    def add_logprobs(self, choice: Choice, events: list[TokenEvent], attempt: int = 0) -> None:
        """Encodes the logprobs since the last call, of an answer that is not streamed, and drops them from ``events``,
        which are all events of the ``attempt`` so far; does nothing in APIs without logprobs."""

    def whole(self, answers: Sequence[tuple[Choice, Sequence[TokenEvent]]]) -> bytes | list[bytes]:
        """Returns the JSON body of an answer; a large one in parts. The last event of each choice has its finish
        reason."""
        for choice, events in answers:
            choice.tokens += sum([len(event.token_ids) for event in events])
        body = self.body(answers)
        parts = [body] if isinstance(body, bytes) else body
        return parts if sum(map(len, parts)) > LARGE_BYTES else b"".join(parts)

    def body(self, answers: Sequence[tuple[Choice, Sequence[TokenEvent]]]) -> bytes | list[bytes]:
        """Returns what ``whole`` returns, in any number of parts, once the tokens are counted."""
        raise NotImplementedError

    def opening(self, choice: Choice) -> bytes:
        """Returns the first events of a choice of a stream."""
        return b""

    def events(self, choice: Choice, events: Sequence[TokenEvent]) -> bytes:
        """Returns server-sent events for the tokens since the last call, after ``opening``; empty for tokens without
        text so far."""
        raise NotImplementedError

    def silence(self, choice: Choice) -> bytes:
        """Returns what a stream gets when its events are empty: a comment or a ping after every ``HIDDEN_TOKENS`` of
        reasoning, so that proxies keep the connection open."""
        if choice.reasoning_tokens - choice.hidden < HIDDEN_TOKENS:
            return b""
        choice.hidden = choice.reasoning_tokens
        return self.keep_alive

    def closing(self, *, include_usage: bool) -> bytes:
        """Returns the end of a stream."""
        return b""

    def failure(self, error: ApiError) -> bytes:
        """Returns the last event of a stream that failed after its start."""
        return sse(error.body())


class PartsWriter(AnswerWriter, eq=False, kw_only=True):
    """Writes the one choice of an API whose answers are texts and calls in their order."""

    @property
    def choice(self) -> Choice:
        return self.choices[0]

    def events(self, choice: Choice, events: Sequence[TokenEvent]) -> bytes:
        pieces: list[bytes] = []
        for event in events:
            choice.tokens += len(event.token_ids)
            for read in choice.read(event):
                pieces += self.written(read)
            if event.finish is not None:
                pieces += self.ending(event)
        return b"".join(pieces)

    def written(self, read: Event) -> Iterator[bytes]:
        """Yields the server-sent events of the next piece of a text or call."""
        raise NotImplementedError

    def ending(self, event: TokenEvent) -> Iterator[bytes]:
        """Yields the last server-sent events, after ``event``."""
        raise NotImplementedError


class Answer(AnswerWriter, eq=False):
    """Writes one request's choices in OpenAI's shape."""

    id: str
    model: str
    created: int  # seconds since the epoch
    chat: bool  # picks the shape
    with_ids: bool = False  # adds vLLM's token id fields
    scores_echo: bool = False  # the logprobs of a completion begin with those of its prompt
    scores_prompt: bool = False  # adds vLLM's prompt_logprobs
    _head: dict[str, Any] = {}

    @property
    def head(self) -> dict[str, Any]:
        """The fields at the start of every part of the answer."""
        if not self._head:
            kind = "chat.completion" if self.chat else "text_completion"
            self._head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return self._head

    def add_logprobs(self, choice: Choice, events: list[TokenEvent], attempt: int = 0) -> None:
        written = choice.written
        if written is None or written.attempt != attempt:
            written = choice.written = WrittenLogprobs(attempt)
            choice.offset = choice.prompt_offset = 0
        for i in range(written.events, len(events)):
            if items := events[i].prompt_logprobs:
                if self.scores_echo:
                    written.add(self._echoed(choice, items))
                if self.scores_prompt:
                    written.prompt.append(_encode([_prompt_logprobs(item) for item in items])[1:-1])
                events[i] = msgspec.structs.replace(events[i], prompt_logprobs=[])
            if items := events[i].logprobs:
                written.add(self._logprobs(choice, items))
                events[i] = msgspec.structs.replace(events[i], logprobs=[])
        written.events = len(events)

    def body(self, answers: Sequence[tuple[Choice, Sequence[TokenEvent]]]) -> bytes | list[bytes]:
        if len(answers) == 1 and not self.with_ids:
            choice, events = answers[0]
            if choice.reader is None and choice.written is None:
                return self._whole_text(choice, events)
        head, parts = dict(self.head), [b""]
        for choice, events in answers:
            text = choice.echo + "".join([event.text for event in events])
            finish = _finish(events[-1])
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if choice.reader is not None:
                message = message_of(choice.gather(events, choice.attempt))
                finish = choice.reader.finish_reason(finish)
            content = {"message": message} if self.chat else {"text": text}
            tail: dict[str, Any] = {"finish_reason": finish}
            if self.with_ids:
                tail["token_ids"] = [id for event in events for id in event.token_ids]
                (head if self.chat else tail)["prompt_token_ids"] = list(choice.prompt_ids)
            parts += (
                b"," if len(parts) > 1 else b"",
                _encode({"index": choice.index, **content})[:-1],
                b',"logprobs":',
            )
            parts += (b"null",) if choice.written is None else choice.written.parts()
            scored = () if choice.written is None or not self.scores_prompt else choice.written.prompt_parts()
            parts += (*(() if self.chat else scored), b",", _encode(tail)[1:])
        parts[0] = _encode(head)[:-1] + b',"choices":['
        parts += (b"]", *(scored if self.chat else ()), b',"usage":%b}' % _encode(self._usage()))
        return parts

    def _whole_text(self, choice: Choice, events: Sequence[TokenEvent]) -> bytes:
        """Does what ``body`` does for a single choice that is only text, in a third of the time."""
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
            b'"message":{"role":"assistant","content":%b,"refusal":null}' % text if self.chat else b'"text":%b' % text,
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
        reader, with_ids, tokens = choice.reader, self.with_ids, 0
        for event in events:
            tokens += len(event.token_ids)
            if reader is not None:
                lines += self._read(choice, reader, event)
                continue
            if event.text and not with_ids and not event.logprobs:
                lines += (before, _encode(event.text), behind)
            elif event.text or event.logprobs or event.prompt_logprobs or (self.with_ids and event.token_ids):
                delta = {"content": event.text} if self.chat else event.text
                lines.append(self._chunk(choice, delta, None, event))
            if event.finish is not None:
                lines.append(self._chunk(choice, {} if self.chat else "", _finish(event), None))
        choice.tokens += tokens
        return b"".join(lines)

    def _read(self, choice: Choice, reader: AnswerReader, event: TokenEvent) -> Iterable[bytes]:
        """Does what ``events`` does for one event of a text with reasoning or tool calls."""
        delta = delta_of(choice.read(event))
        if delta or event.logprobs or (self.with_ids and event.token_ids):
            yield self._chunk(choice, delta, None, event)
        if event.finish is not None:
            yield self._chunk(choice, {}, reader.finish_reason(_finish(event)), None)

    def closing(self, *, include_usage: bool) -> bytes:
        """Returns the end of a stream: the usage, if requested, and `[DONE]`."""
        return (sse({**self.head, "choices": [], "usage": self._usage()}) if include_usage else b"") + DONE

    def _chunk(
        self, choice: Choice, delta: dict[str, Any] | str, finish: str | None, event: TokenEvent | None
    ) -> bytes:
        written: dict[str, Any] = {"index": choice.index}
        written |= {"delta": delta} if self.chat else {"text": delta}
        written["logprobs"] = None
        if event is not None and event.logprobs:
            written["logprobs"] = self._logprobs(choice, event.logprobs)
        elif event is not None and event.prompt_logprobs:
            written["logprobs"] = self._echoed(choice, event.prompt_logprobs)
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
        return _columns(items, offsets)

    def _echoed(self, choice: Choice, items: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Returns the logprobs of tokens of the prompt, in the format of a completion. A special token at the start of
        the prompt is not part of the echoed text, so its length is 0."""
        offsets = []
        for item in items:
            offsets.append(choice.prompt_offset)
            if item.logprob is not None or choice.echo.startswith(item.text):
                choice.prompt_offset += len(item.text)
        return _columns(items, offsets)

    def _usage(self) -> dict[str, Any]:
        prompt, completion = self.prompt_tokens, sum(choice.tokens for choice in self.choices)
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        reasoning = self.reasoning_tokens
        return {**usage, "completion_tokens_details": {"reasoning_tokens": reasoning}} if reasoning else usage


def openai_answer(
    exchange: Exchange, body: ChatRequest | CompletionRequest, choices: Sequence[Choice], suffix: str
) -> Answer:
    """Returns the writer of an answer; ``suffix`` is that of its id."""
    is_chat = isinstance(body, ChatRequest)
    if isinstance(body, ChatRequest) and not body.shows_reasoning:
        for choice in choices:
            choice.shows_reasoning = False
    id = ("chatcmpl" if is_chat else "cmpl") + suffix
    echoes = isinstance(body, CompletionRequest) and bool(body.echo) and body.logprobs is not None
    scored = body.prompt_logprobs is not None
    with_ids = bool(body.return_token_ids)
    return Answer(id, body.model, int(time.time()), is_chat, with_ids, echoes, scored, choices=choices)


class ForwardedAnswer(AnswerWriter, eq=False):
    """Writes what a server has answered."""

    prompt_tokens: int  # an estimate until the server reports the usage

    def body(self, answers: Sequence[tuple[Choice, Sequence[TokenEvent]]]) -> bytes | list[bytes]:
        return [event.part.data for _, events in answers for event in events if event.part is not None]

    def events(self, choice: Choice, events: Sequence[TokenEvent]) -> bytes:
        return b"".join([event.part.data for event in events if event.part is not None])


def _columns(items: Sequence[TokenLogprobs], offsets: list[int]) -> dict[str, Any]:
    """Returns the logprobs of a completion. Of alternatives with the same text, the most probable one is kept."""
    return {
        "tokens": [item.text for item in items],
        "token_logprobs": [item.logprob for item in items],
        "top_logprobs": [
            None if item.logprob is None else {text: value for _, value, text, _ in reversed(item.top)}
            for item in items
        ],
        "text_offset": offsets,
    }


def _prompt_logprobs(item: TokenLogprobs) -> dict[int, PromptLogprob] | None:
    """Returns vLLM's entry for a token of a prompt: first the token itself, then its alternatives."""
    if item.logprob is None:
        return None
    ranked = {id: PromptLogprob(value, rank, text) for rank, (id, value, text, _) in enumerate(item.top, 1)}
    rank = item.rank or (ranked[item.id].rank if item.id in ranked else None)
    return {item.id: PromptLogprob(item.logprob, rank, item.text)} | {
        id: each for id, each in ranked.items() if id != item.id
    }


def sse(value: Any) -> bytes:
    """Returns one server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"


def _finish(event: TokenEvent) -> str:
    return "length" if event.finish is FinishReason.LENGTH else "stop"


def message_of(events: Sequence[Event]) -> dict[str, Any]:
    """Returns the message for all events of an answer; without reasoning and calls, the same as without a reader."""
    message = {"role": "assistant", "content": "", "refusal": None, **_texts_of(events)}
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, CallBegin):
            calls.append({"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}})
        elif isinstance(event, CallArguments):
            calls[-1]["function"]["arguments"] += event.text
    if calls or "reasoning" in message:
        message["content"] = message["content"] or None
    return {**message, "tool_calls": calls} if calls else message


def _texts_of(events: Sequence[Event]) -> dict[str, Any]:
    """Returns the content and the reasoning of events, if there are any. vLLM has renamed `reasoning_content` to
    `reasoning`, and each client reads one of the names."""
    content = "".join([event.text for event in events if isinstance(event, Content)])
    reasoning = "".join([event.text for event in events if isinstance(event, Reasoning)])
    fields: dict[str, Any] = {"content": content} if content else {}
    return {**fields, "reasoning_content": reasoning, "reasoning": reasoning} if reasoning else fields


def delta_of(events: Sequence[Event]) -> dict[str, Any]:
    """Returns the delta for the events of one piece of text; empty without events."""
    fields = _texts_of(events)
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, CallBegin):
            function = {"name": event.name, "arguments": ""}
            calls.append({"index": event.index, "id": event.id, "type": "function", "function": function})
        elif isinstance(event, CallArguments):
            if not calls or calls[-1]["index"] != event.index:
                calls.append({"index": event.index, "function": {"arguments": ""}})
            calls[-1]["function"]["arguments"] += event.text
    if calls:
        fields["tool_calls"] = calls
    return fields


@dataclass
class Text:
    """Text between reasoning and calls, in pieces that are not joined yet."""

    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Thought(Text):
    """Reasoning before, between or after texts and calls."""


@dataclass
class Call:
    """A call of a tool; ``pieces`` are those of the JSON text of its arguments."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


Part = Text | Call


def begun_part(event: Event, last: Part | None) -> Part | None:
    """Returns the part that an event begins; None if it continues the ``last`` one."""
    if isinstance(event, CallBegin):
        return Call(event.id, event.name)
    kind = Thought if isinstance(event, Reasoning) else Text
    return None if isinstance(event, CallArguments) or type(last) is kind else kind()


def whole_parts(choice: Choice, events: Sequence[TokenEvent]) -> list[Part]:
    """Returns the parts of a complete answer."""
    parts: list[Part] = []
    for event in choice.gather(events, choice.attempt):
        part = begun_part(event, parts[-1] if parts else None)
        if part is not None:
            parts.append(part)
        if not isinstance(event, CallBegin):
            parts[-1].pieces.append(event.text)
    return parts
