"""Reads the events of a streamed response and returns its measurement."""

from __future__ import annotations

from typing import Any

import msgspec

from orchestrator.bench.measurement import Measured
from orchestrator.bench.timed_http import Answer

DONE = b"[DONE]"
LONGEST_MESSAGE = 300  # characters of an error message


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def has_text(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)))


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None


_decode = msgspec.json.Decoder(_Event).decode


def measured(answer: Answer, *, due: float, prompt: int, output: int) -> Measured:
    """Returns the measurement of a streamed request.

    Kinds of errors: `connect`, `timeout`, `broken` (the connection was closed during the response), `malformed`
    (invalid HTTP or JSON), `http-STATUS`, `stream-error` (an error event in the stream), `cut-off` (the stream ended
    without a finish reason and without [DONE]), `empty` (no text).
    """
    chunks: list[float] = []
    finished = False
    usage = _Usage()
    error, what = answer.error, answer.what
    if error is None and answer.status != 200:
        error, what = f"http-{answer.status}", error_message(answer.body)
    elif error is None and not answer.stream:
        error, what = "malformed", "the response is not an event stream"
    for at, data in answer.events:
        if data == DONE:
            finished = True
            break
        try:
            event = _decode(data)
        except msgspec.DecodeError as wrong:
            error, what = error or "malformed", what or f"invalid event: {wrong}"
            break
        if event.error is not None or event.object == "error":
            error, what = error or "stream-error", what or error_message(data)
            break
        usage = event.usage or usage
        for choice in event.choices:
            finished = finished or choice.finish_reason is not None
            if choice.has_text():
                chunks.append(at)
    if error is None and not finished:
        error, what = "cut-off", "the stream ended without a finish reason"
    if error is None and not chunks:
        error, what = "empty", "the response has no text"
    return Measured(
        prompt_wanted=prompt,
        output_wanted=output,
        due=due,
        sent=answer.sent,
        chunks=tuple(chunks),
        ended=answer.ended,
        prompt_tokens=usage.prompt_tokens,
        output_tokens=len(chunks) if usage.completion_tokens is None else usage.completion_tokens,
        error=error,
        what=what[:LONGEST_MESSAGE],
    )


def error_message(body: bytes) -> str:
    """Returns the message in the body of an error response."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body.decode("utf-8", "replace")[:LONGEST_MESSAGE]
    error = decoded.get("error", decoded) if isinstance(decoded, dict) else decoded
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:LONGEST_MESSAGE]
