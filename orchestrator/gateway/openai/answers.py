"""OpenAI's answers: whole, or as server-sent events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import msgspec.structs

from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.openai.toolcalls import ToolParser
from orchestrator.gateway.openai.toolcalls import writing as toolcalls
from workers.messages.requests import FinishReason, TokenEvent, TokenLogprobs

_encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"
LARGE_BYTES = 2**20  # an answer above this is written in parts: to join them would hold up all streams


class WrittenLogprobs:
    """The logprobs of an answer that is not streamed, as JSON: written as they come, since all of them at its end would
    take objects of hundreds of megabytes, and hold up the event loop for seconds."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt  # of its request, whose answer may be thrown away and made again
        self.events = 0  # that it has taken
        self._columns: dict[str, list[bytes]] = {}

    def add(self, columns: Mapping[str, Any]) -> None:
        """Append to each column of the value; one that is None is never filled."""
        for name, column in columns.items():
            self._columns.setdefault(name, []).append(b"null" if column is None else _encode(column)[1:-1])

    def parts(self) -> Iterator[bytes]:
        """The JSON value, in parts that are small enough to be written one by one."""
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
    """One of the answers to a request: which prompt it continues, and how much of it is written."""

    index: int
    prompt_ids: Sequence[int]
    echo: str = ""  # the prompt's text, where it is to be repeated
    tokens: int = 0  # generated so far
    offset: int = 0  # characters of token text so far, for the completions' text_offset
    parser: ToolParser | None = None  # where the answer may hold calls of tools
    written: WrittenLogprobs | None = None  # where logprobs are asked for, and nothing is streamed
    plain: tuple[bytes, bytes] = (b"", b"")  # what stands around the text of an event that holds nothing else


class Answer(msgspec.Struct, eq=False):
    """Writes one request's choices."""

    id: str
    model: str
    created: int  # seconds since the epoch
    chat: bool  # picks the shape
    choices: Sequence[Choice]
    with_ids: bool = False  # adds vLLM's token id fields
    prompt_tokens: int = 0
    _head: dict[str, Any] = {}

    def __post_init__(self) -> None:
        self.count_prompts()

    @property
    def head(self) -> dict[str, Any]:
        """The fields that every part of the answer begins with."""
        if not self._head:
            kind = "chat.completion" if self.chat else "text_completion"
            self._head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return self._head

    def count_prompts(self) -> None:
        """The choices have their prompts."""
        self.prompt_tokens = _prompt_tokens(self.choices)

    def add_logprobs(self, choice: Choice, events: list[TokenEvent], attempt: int = 0) -> None:
        """Write the logprobs that have come since the last call, of an answer that is not streamed, and drop them from
        ``events``, which are all of the ``attempt`` so far."""
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
        """The JSON body of an answer; a large one in parts, to be written one after the other. The last event of each
        choice says why it ended."""
        if len(answers) == 1 and not self.with_ids:
            choice, events = answers[0]
            if choice.parser is None and choice.written is None:
                return self._whole_of_one(choice, events)
        head, parts = dict(self.head), [b""]
        for choice, events in answers:
            text = choice.echo + "".join([event.text for event in events])
            finish = _finish(events[-1])
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if choice.parser is not None:
                message = toolcalls.message([*choice.parser.push(text), *choice.parser.flush()])
                finish = choice.parser.finish_reason(finish)
            said = {"message": message} if self.chat else {"text": text}
            rest: dict[str, Any] = {"finish_reason": finish}
            if self.with_ids:
                rest["token_ids"] = [id for event in events for id in event.token_ids]
                (head if self.chat else rest)["prompt_token_ids"] = list(choice.prompt_ids)
            choice.tokens += sum([len(event.token_ids) for event in events])
            parts += (b"," if len(parts) > 1 else b"", _encode({"index": choice.index, **said})[:-1], b',"logprobs":')
            parts += (b"null",) if choice.written is None else choice.written.parts()
            parts += (b",", _encode(rest)[1:])
        parts[0] = _encode(head)[:-1] + b',"choices":['
        parts.append(b'],"usage":%b}' % _encode(self._usage()))
        return parts if sum(map(len, parts)) > LARGE_BYTES else b"".join(parts)

    def _whole_of_one(self, choice: Choice, events: Sequence[TokenEvent]) -> bytes:
        """As ``whole``, of one choice that is only text: written out, at a third of the time."""
        choice.tokens += sum([len(event.token_ids) for event in events])
        prompt, made = self.prompt_tokens, choice.tokens
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
            made,
            prompt + made,
        )

    def opening(self, choice: Choice) -> bytes:
        """The event that begins a choice of a stream: a chat names its role, a completion its echoed prompt."""
        self.head["object"] = "chat.completion.chunk" if self.chat else "text_completion"
        around = self._chunk(choice, {"content": ""} if self.chat else "", None, None)
        before, _, behind = around.rpartition(b'""')
        choice.plain = before, behind
        if self.chat:
            return self._chunk(choice, {"role": "assistant", "content": ""}, None, None)
        return self._chunk(choice, choice.echo, None, None) if choice.echo else b""

    def events(self, choice: Choice, events: Sequence[TokenEvent]) -> bytes:
        """Server-sent events for what came since the last call, after ``opening``; nothing for tokens that gave no text
        yet."""
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
        """As ``events``, where the text may hold calls."""
        read = parser.push(event.text) if event.text else []
        if event.finish is not None:
            read = [*read, *parser.flush()]
        delta = toolcalls.delta(read)
        if delta or event.logprobs or (self.with_ids and event.token_ids):
            yield self._chunk(choice, delta, None, event)
        if event.finish is not None:
            yield self._chunk(choice, {}, parser.finish_reason(_finish(event)), None)

    def closing(self, *, include_usage: bool) -> bytes:
        """What ends a stream: usage where it was asked for, and `[DONE]`."""
        return (sse({**self.head, "choices": [], "usage": self._usage()}) if include_usage else b"") + DONE

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


def _prompt_tokens(choices: Sequence[Choice]) -> int:
    """Of all prompts: ``n`` choices of one share it."""
    if len(choices) == 1:
        return len(choices[0].prompt_ids)
    return sum({id(choice.prompt_ids): len(choice.prompt_ids) for choice in choices}.values())


def error_event(error: ApiError) -> bytes:
    """What ends a stream that fails after it has begun."""
    return sse(error.body())


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"


def _finish(event: TokenEvent) -> str:
    return "length" if event.finish is FinishReason.LENGTH else "stop"
