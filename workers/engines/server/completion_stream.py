"""Requests to a server's ``/v1/completions`` and ``/v1/embeddings`` with token ids, and the readers of its answers.

Pure. The facts about vLLM's server are of 0.11 to 0.32, measured or read:

- Only a finish reason is success. The stream of a rejected request also has status 200 and ends with ``[DONE]``.
- Sampling defaults come from the checkpoint, so requests name every parameter. Unknown fields are accepted silently.
- A chunk may have several tokens, and the first event of a stream comes before the request has a slot.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import msgspec

from workers.batching.logprobs import IMPOSSIBLE
from workers.messages.encoder_protocol import EncodeInput
from workers.messages.requests import GUIDE, AnswerConstraint, GenerateRequest, InvalidField, TokenLogprobs

GUIDED_BY_OUTPUTS = (0, 12)  # the first vLLM with `structured_outputs`; before, `guided_json`
BAD_GATEWAY = 502
UNAVAILABLE = 503  # the server's queue is full, it shuts down, or nothing of an answer has come: another may serve
LONGEST_EVENT = 16 * 2**20  # bytes
_TOKEN_ID = "token_id:"  # a token's name with `return_tokens_as_token_ids`
_DATA = b"data:"
_DONE = b"[DONE]"


class ServerError(Exception):
    """The server's description of a failed request. ``status`` is HTTP's, or that of an error in a stream."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Piece(msgspec.Struct, frozen=True):
    """Tokens that the server has generated since the last piece, and its finish reason with the last of them."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish: str | None
    prompt_logprobs: list[TokenLogprobs] = []


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _StreamedChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_StreamedChoice] = []
    error: Any = None


_chunks = msgspec.json.Decoder(_Chunk)


def completion_body(
    request: GenerateRequest, model: str, ending_ids: Collection[int], version: tuple[int, int]
) -> dict[str, Any]:
    """Returns the body of the request. ``ending_ids`` end the answer; ``version`` is vLLM's.

    Stop strings are not part of it: the replica finds them, and closes the connection.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt_ids,
        "stream": True,
        "return_token_ids": True,
        "n": 1,
        "max_tokens": max(1, request.max_tokens),  # 0 is only allowed with `echo`, and generates a token as well
        "min_tokens": request.min_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k or -1,
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "stop_token_ids": sorted(ending_ids),
        # vLLM's own EOS is the tokenizer's, which may not be the model's. A complete JSON can only end with it.
        "ignore_eos": request.guide is None,
        "skip_special_tokens": False,
    }
    if request.logit_bias:
        body["logit_bias"] = {str(id): bias for id, bias in request.logit_bias.items()}
    if request.seed is not None:
        body["seed"] = request.seed
    counts = [count for count in (request.logprobs, request.prompt_logprobs) if count is not None]
    if counts:
        body["logprobs"] = max(counts)
        body["return_tokens_as_token_ids"] = True  # texts of incomplete characters would be equal keys
    if request.prompt_logprobs is not None:  # the field of that name cannot be streamed
        body["echo"] = True
    if request.guide is not None:
        body |= constraint_fields(request.guide, version)
    return body


def constraint_fields(constraint: AnswerConstraint, version: tuple[int, int]) -> dict[str, Any]:
    """Returns the fields of a constraint. Raises InvalidField where this vLLM cannot express it."""
    kind, text, markers = constraint.kind, constraint.text, constraint.markers
    value = msgspec.json.decode(text) if kind in ("json", "choice") else text
    if version < GUIDED_BY_OUTPUTS:
        if markers.calls or markers.close or kind == "structural_tag":
            needs = f"vLLM {GUIDED_BY_OUTPUTS[0]}.{GUIDED_BY_OUTPUTS[1]} or later"
            raise InvalidField(GUIDE, f"a constraint beside tool calls or reasoning, and structural tags, need {needs}")
        return {f"guided_{kind}": value}
    if not (markers.calls or markers.close):
        return {"structured_outputs": {kind: value}}
    match kind:  # the formats of xgrammar's structural tags
        case "json":
            answer = {"type": "json_schema", "json_schema": value}
        case "regex":
            answer = {"type": "regex", "pattern": value}
        case "grammar":
            answer = {"type": "grammar", "grammar": value}
        case "choice":
            answer = _any_of([{"type": "const_string", "value": choice} for choice in value])
        case "structural_tag":
            raise InvalidField(GUIDE, "a structural tag cannot be combined with tool calls or reasoning on vLLM")
    calls = [_sequence({"type": "const_string", "value": call}, {"type": "any_text"}) for call in markers.calls]
    answer = _any_of([answer, *calls])
    if markers.close:
        begin = "" if markers.opened else markers.open
        reasoning = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": markers.close}
        answer = _any_of([_sequence(reasoning, answer)] if markers.opened else [answer, _sequence(reasoning, answer)])
    tag = {"type": "structural_tag", "format": answer}
    return {"structured_outputs": {"structural_tag": msgspec.json.encode(tag).decode()}}


def _any_of(elements: list[dict[str, Any]]) -> dict[str, Any]:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


class _Embedding(msgspec.Struct):
    index: int
    embedding: str


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]


def embedding_body(inputs: Sequence[EncodeInput], model: str) -> dict[str, Any]:
    """Returns the body of a request to ``/v1/embeddings`` with token ids."""
    return {"model": model, "input": [input.ids for input in inputs], "encoding_format": "base64"}


def read_embeddings(body: bytes, count: int) -> bytes:
    """Returns the float32 numbers of ``count`` inputs, row by row. Raises ServerError for another answer."""
    try:
        rows = {item.index: binascii.a2b_base64(item.embedding) for item in _embeddings.decode(body).data}
        data = [rows[index] for index in range(count)]
    except (ValueError, RecursionError, KeyError) as error:
        raise ServerError(
            f"the server sent an answer that is not of {count} embeddings: {error}", BAD_GATEWAY
        ) from None
    if len(set(map(len, data))) != 1 or not data[0] or len(data[0]) % 4:
        raise ServerError("the server sent embeddings of different lengths, or not of float32 numbers", BAD_GATEWAY)
    return b"".join(data)


def error_message(body: bytes) -> str:
    """Returns the message of an error response: OpenAI's shape, a bare string, or the text itself."""
    try:
        error = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode(errors="replace").strip()[:500] or "no description"
    return message_of(error.get("error", error) if isinstance(error, dict) else error)


def message_of(error: Any) -> str:
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:500]


def error_of(error: Any) -> ServerError:
    """Returns the error of an answer with status 200: its code is the status, if it can be one."""
    code = error.get("code") if isinstance(error, dict) else None
    return ServerError(message_of(error), code if isinstance(code, int) and 400 <= code < 600 else 500)


_embeddings = msgspec.json.Decoder(_Embeddings)


class EventSplitter:
    """Splits the bytes of server-sent events into the data of each, however they arrive."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the events that ``data`` completes, without `[DONE]`. Raises ServerError for one that is too long."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_EVENT:
            raise ServerError(f"an event of the server is over {LONGEST_EVENT} bytes", BAD_GATEWAY)
        # other lines are blank, comments that keep the connection open, or other fields
        events = [line[len(_DATA) :].strip() for line in lines if line.startswith(_DATA)]
        return [event for event in events if event and event != _DONE]


class StreamReader:
    """Reads the tokens of a stream, however its bytes arrive."""

    def __init__(self, token_bytes: Callable[[int], bytes], prompt: Sequence[int] = ()) -> None:
        """``prompt``: the tokens whose logprobs come before those of the first token of the answer."""
        self._token_bytes = token_bytes
        self._prompt = prompt
        self._events = EventSplitter()

    def feed(self, data: bytes) -> Iterator[Piece]:
        """Yields the pieces that ``data`` completes. Raises ServerError for an error event or a malformed one."""
        for event in self._events.feed(data):
            try:
                chunk = _chunks.decode(event)
                if chunk.error is not None:
                    raise error_of(chunk.error)
                if chunk.choices:
                    yield self._piece(chunk.choices[0])
            except (ValueError, RecursionError) as error:  # of msgspec, or of logprobs that do not fit the tokens
                message = f"the server sent an event that is not a completion: {error}"
                raise ServerError(message, BAD_GATEWAY) from None

    def _piece(self, choice: _StreamedChoice) -> Piece:
        ids, prompt = choice.token_ids or [], self._prompt
        if choice.logprobs is None:
            return Piece(ids, [], choice.finish_reason)
        self._prompt = ()
        items = list(self._logprobs([*prompt, *ids], choice.logprobs))
        if prompt:
            items[0] = msgspec.structs.replace(items[0], logprob=None)
        return Piece(ids, items[len(prompt) :], choice.finish_reason, items[: len(prompt)])

    def _logprobs(self, ids: list[int], answer: _Logprobs) -> Iterator[TokenLogprobs]:
        tops = answer.top_logprobs or [None] * len(ids)
        for id, logprob, top in zip(ids, answer.token_logprobs, tops, strict=True):
            ranked = sorted(
                ((int(name.removeprefix(_TOKEN_ID)), value) for name, value in (top or {}).items()),
                key=lambda alternative: (-alternative[1], alternative[0]),
            )
            yield TokenLogprobs(
                *self._described(id, logprob), [self._described(other, value) for other, value in ranked]
            )

    def _described(self, id: int, logprob: float | None) -> tuple[int, float, str, list[int]]:
        raw = self._token_bytes(id)
        value = IMPOSSIBLE if logprob is None else max(logprob, IMPOSSIBLE)
        return id, value, raw.decode(errors="replace"), list(raw)
