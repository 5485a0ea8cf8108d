"""From the events of an answer to what was measured."""

from __future__ import annotations

from typing import Any

import msgspec

from orchestrator.bench.measurement import Measured
from orchestrator.bench.timed_http import Answer

DONE = b"[DONE]"
SAID = 300  # characters of an error that are kept


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
    """What the answer to a streamed request showed.

    Kinds of errors: `connect`, `timeout`, `broken` (the connection ended in mid-answer), `malformed` (no HTTP, or no
    JSON), `http-STATUS`, `stream-error` (the server said so in mid-stream), `cut-off` (the stream ended without a
    finish reason and without [DONE]), `empty` (it brought no text).
    """
    chunks: list[float] = []
    finished = False
    usage = _Usage()
    error, what = answer.error, answer.what
    if error is None and answer.status != 200:
        error, what = f"http-{answer.status}", said(answer.body)
    elif error is None and not answer.stream:
        error, what = "malformed", "the answer is no stream of events"
    for at, data in answer.events:
        if data == DONE:
            finished = True
            break
        try:
            event = _decode(data)
        except msgspec.DecodeError as wrong:
            error, what = error or "malformed", what or f"an event that is not understood: {wrong}"
            break
        if event.error is not None or event.object == "error":
            error, what = error or "stream-error", what or said(data)
            break
        usage = event.usage or usage
        for choice in event.choices:
            finished = finished or choice.finish_reason is not None
            if choice.has_text():
                chunks.append(at)
    if error is None and not finished:
        error, what = "cut-off", "the stream ended before its answer did"
    if error is None and not chunks:
        error, what = "empty", "the answer has no text"
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
        what=what[:SAID],
    )


def said(body: bytes) -> str:
    """What a server says in an error's body."""
    try:
        told = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body.decode("utf-8", "replace")[:SAID]
    error = told.get("error", told) if isinstance(told, dict) else told
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:SAID]
