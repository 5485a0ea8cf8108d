"""Reads the answers of a server to forwarded requests, complete or as server-sent events, and passes them on.

Pure. Only the model's name changes, and the usage that was added to a stream is removed again. Only a finish reason of
every choice is success: a stream with status 200 may hold an error, end early, or end with ``[DONE]`` and no answer.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from workers.engines.server.completion_stream import (
    BAD_GATEWAY,
    LONGEST_EVENT,
    UNAVAILABLE,
    EventSplitter,
    ServerError,
    error_of,
)
from workers.messages.requests import AnswerPart, FinishReason, Forwarded

GENERATING = ("/v1/chat/completions", "/v1/completions")
"""The routes whose answers have finish reasons."""

WITHOUT_MODEL = ("/tokenize", "/detokenize")
"""The routes whose answers do not name a model."""

DONE = b"data: [DONE]\n\n"
_EMPTY = (b"null", b'""', b"[]", b"{}")


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Fields(msgspec.Struct):
    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: Any = None
    prompt: Any = None

    @property
    def choices(self) -> int:
        """The choices of an answer: ``n`` of each prompt."""
        several = isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
        return (self.n if type(self.n) is int and self.n > 0 else 1) * (len(self.prompt) if several else 1)


class _Choice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None
    delta: dict[str, msgspec.Raw] | None = None
    text: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_known = msgspec.json.Decoder(_Fields)
_answers = msgspec.json.Decoder(_Answer)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _with(body: bytes, **values: Any) -> bytes:
    """Returns the JSON object with other values of some keys; the bytes of all others stay."""
    fields = _fields.decode(body)
    return msgspec.json.encode({**fields, **values})


class ForwardedRequest:
    """A client's request as its server gets it, and what its answer depends on."""

    def __init__(self, request: Forwarded) -> None:
        """Raises ValueError for a body that a gateway should not have sent."""
        try:
            fields = _known.decode(request.body)
        except msgspec.DecodeError as error:
            raise ValueError(f"the body is not a request: {error}") from None
        options = fields.stream_options
        self.route = request.route
        self.model = fields.model  # as the client wrote it
        self.streams = bool(fields.stream)
        self.choices = fields.choices
        self.shows_usage = options is not None and options.include_usage
        self._body = request.body
        self._added: dict[str, Any] = {}
        if self.streams and not self.shows_usage and request.route in GENERATING:
            given = _fields.decode(request.body).get("stream_options")
            old = {} if given is None or bytes(given) == b"null" else _fields.decode(given)
            self._added["stream_options"] = {**old, "include_usage": True}

    def body_for(self, model: str) -> bytes:
        """Returns the body for the server, where the model has this name."""
        return _with(self._body, model=model, **self._added)


def whole_answer(request: ForwardedRequest, body: bytes) -> tuple[AnswerPart, FinishReason]:
    """Returns an answer that is not streamed. Raises ServerError for one without all finish reasons."""
    try:
        answer = _answers.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ServerError(f"the server's answer is not JSON of OpenAI's API: {error}", BAD_GATEWAY) from None
    if answer.error is not None:
        raise error_of(answer.error)
    reasons = [choice.finish_reason for choice in answer.choices or []]
    if request.route in GENERATING and (finished := sum(map(bool, reasons))) < max(request.choices, len(reasons)):
        raise ServerError(_unfinished(finished, request.choices), BAD_GATEWAY)
    usage = answer.usage or _Usage()
    data = body if request.route in WITHOUT_MODEL else _with(body, model=request.model)
    return AnswerPart(data, usage.completion_tokens or 0, usage.prompt_tokens), _finish(reasons)


def _unfinished(finished: int, choices: int) -> str:
    few = "without a finish reason" if choices == 1 else f"with finish reasons of {finished} of {choices} choices"
    return f"the server ended its answer {few}"


def _finish(reasons: Collection[str | None]) -> FinishReason:
    return FinishReason.LENGTH if "length" in reasons else FinishReason.STOP


class EventReader:
    """Passes on the events of a stream, however its bytes arrive."""

    def __init__(self, request: ForwardedRequest) -> None:
        self._request = request
        self._events = EventSplitter()
        self._held = b""  # events before the first with text, such as the role of a chat
        self._reasons: dict[int, str | None] = {}  # finish reasons by choice
        self._tokens = 0
        self._usage: _Usage | None = None

    def feed(self, data: bytes) -> AnswerPart | None:
        """Returns what ``data`` adds to the answer; None until there is text, so that until then another replica may
        answer. Raises ServerError for an error event or a malformed one."""
        before = self._tokens
        for event in self._events.feed(data):
            self._read(event)
            if len(self._held) > LONGEST_EVENT and not self._begun:
                raise ServerError(f"the server sent {LONGEST_EVENT} bytes of events without text", BAD_GATEWAY)
        if not self._held or not self._begun:
            return None
        held, self._held = self._held, b""
        return AnswerPart(held, self._tokens - before)

    def end(self) -> AnswerPart:
        """Returns the end of the answer, when the server's has ended. Raises ServerError if it is not complete."""
        if not self.complete:
            finished = sum(map(bool, self._reasons.values()))
            raise ServerError(_unfinished(finished, self._request.choices), UNAVAILABLE)
        usage = self._usage or _Usage(completion_tokens=self._tokens)
        return AnswerPart(DONE, (usage.completion_tokens or 0) - self._tokens, usage.prompt_tokens)

    @property
    def complete(self) -> bool:
        """Every choice has a finish reason: what is lost now is not part of the answer."""
        return len(self._reasons) >= self._request.choices and all(self._reasons.values())

    @property
    def finish(self) -> FinishReason:
        """Why a complete answer has ended."""
        return _finish(self._reasons.values())

    @property
    def _begun(self) -> bool:
        return self._tokens > 0 or any(self._reasons.values())

    def _read(self, event: bytes) -> None:
        try:
            chunk = _answers.decode(event)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ServerError(f"an event of the server is not of OpenAI's API: {error}", BAD_GATEWAY) from None
        if chunk.error is not None:
            raise error_of(chunk.error)
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices or ():
            self._tokens += _has_text(choice)
            self._reasons[choice.index] = choice.finish_reason or self._reasons.get(choice.index)
        if chunk.choices or chunk.usage is None or self._request.shows_usage:
            self._held += b"data: " + _with(event, model=self._request.model) + b"\n\n"


def _has_text(choice: _Choice) -> bool:
    """Returns whether a token has come: text, or a tool call, or whatever else a server adds beside the role."""
    return bool(choice.text) or any(
        name != "role" and bytes(value) not in _EMPTY for name, value in (choice.delta or {}).items()
    )
