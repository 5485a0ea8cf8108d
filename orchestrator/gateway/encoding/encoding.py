"""The requests that are encoded: from their tokenization to the answer, which is written piece by piece."""

from __future__ import annotations

import array
import asyncio
import binascii
import itertools
import math
import operator
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from orchestrator.gateway.encoding.requests import (
    KINDS_OF,
    ClassifyRequest,
    EmbeddingRequest,
    EncodingBody,
    RerankRequest,
    ScoreRequest,
    encode_inputs,
)
from orchestrator.gateway.generation import INLINE_BYTES, Generation
from orchestrator.gateway.http.exchange import Exchange
from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.answers import LARGE_BYTES
from orchestrator.gateway.openai.errors import ApiError, engine_failed, invalid
from orchestrator.gateway.openai.reply import REFUSED, ClientReply, Note, decision_headers, failure_of
from orchestrator.gateway.openai.request_builder import RequestLimits
from orchestrator.gateway.serving.model_queue import ModelQueue
from orchestrator.gateway.serving.ticket import Ticket, read_scheduling_parameters
from orchestrator.gateway.serving.tokenizers import Tokenizers
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.gateway.telemetry.gateway_metrics import GatewayMetrics
from orchestrator.messages.route_table import ModelRoutes
from workers.messages.encoder_protocol import EncodeInput
from workers.messages.requests import GenerateRequest
from workers.text.tokenizer import ByteTokenizer, PromptTokenizer

_encode = msgspec.json.encode
_FLOAT_BYTES = 4
_MIN_LENGTH = 1e-12  # a shorter vector is divided by this, as in torch


class Encoded(msgspec.Struct, frozen=True):
    """What a replica has answered to a request."""

    parts: Sequence[bytes]  # float32, row by row; a row may be in two parts
    count: int  # of the inputs
    width: int  # numbers of a row
    labels: Sequence[str]
    prompt_tokens: int

    def rows(self) -> Iterator[bytes]:
        """Yields the row of each input."""
        size, rest = self.width * _FLOAT_BYTES, b""
        for part in self.parts:
            data = rest + part
            end = len(data) - len(data) % size
            for start in range(0, end, size):
                yield data[start : start + size]
            rest = data[end:]

    @property
    def complete(self) -> bool:
        """There is a row for each input."""
        return sum(map(len, self.parts)) == self.count * self.width * _FLOAT_BYTES > 0

    @property
    def usage(self) -> bytes:
        return b'{"prompt_tokens":%d,"total_tokens":%d}' % (self.prompt_tokens, self.prompt_tokens)


class AnswerHead(msgspec.Struct, frozen=True):
    """The fields that identify an answer."""

    id: str
    created: int  # seconds since the epoch
    model: str


def written(body: EncodingBody, head: AnswerHead, encoded: Encoded) -> Iterator[bytes]:
    """Returns the JSON of the answer in small pieces. Raises ApiError if the model cannot answer the request."""
    if not encoded.complete:
        raise engine_failed(head.model, "its answer is not complete")
    if isinstance(body, EmbeddingRequest):
        if (error := too_many_dimensions(body, encoded.width)) is not None:
            raise error
        return _embeddings(body, head, encoded)
    if isinstance(body, ClassifyRequest):
        return _classes(head, encoded)
    if isinstance(body, ScoreRequest) and encoded.count == len(body.texts()):  # of an embedding model, not of pairs
        return _scores(head, encoded, cosines(list(map(_numbers, encoded.rows())), len(body.inputs())))
    if encoded.width != 1:
        message = f"the model {head.model!r} gives {encoded.width} numbers for a pair, not one score"
        raise invalid(message, param="model")
    scores = [float(_numbers(row)[0]) for row in encoded.rows()]
    return _results(body, head, encoded, scores) if isinstance(body, RerankRequest) else _scores(head, encoded, scores)


def too_many_dimensions(body: EncodingBody, width: int) -> ApiError | None:
    """Returns the error for more dimensions than the vectors of a model have; None if there are as many."""
    if not isinstance(body, EmbeddingRequest) or body.dimensions is None or body.dimensions <= width:
        return None
    message = f"dimensions: {body.dimensions} is out of range; it must be at least 1 and at most {width}"
    return invalid(message, param="dimensions")


def shortened(numbers: array.array[float], dimensions: int) -> array.array[float]:
    """Returns the first numbers of a vector, scaled to length 1."""
    first = numbers[:dimensions]
    length = max(math.hypot(*first), _MIN_LENGTH)
    return array.array("f", [number / length for number in first])


def cosines(vectors: Sequence[array.array[float]], pairs: int) -> list[float]:
    """Returns the cosine of each of the last ``pairs`` vectors and the vector that it is paired with."""
    first, second = vectors[:-pairs], vectors[-pairs:]
    lengths = [max(math.hypot(*vector), _MIN_LENGTH) for vector in vectors]
    return [
        sum(map(operator.mul, first[position % len(first)], vector))
        / lengths[position % len(first)]
        / lengths[position - pairs]
        for position, vector in enumerate(second)
    ]


def _embeddings(body: EmbeddingRequest, head: AnswerHead, encoded: Encoded) -> Iterator[bytes]:
    base64 = body.encoding_format == "base64"
    before = b'{"object":"list","data":['
    for index, row in enumerate(encoded.rows()):
        if body.dimensions is not None:
            row = shortened(_numbers(row), body.dimensions).tobytes()
        value = b'"%b"' % binascii.b2a_base64(row, newline=False) if base64 else _encode(_numbers(row).tolist())
        yield b'%b{"object":"embedding","index":%d,"embedding":%b}' % (before, index, value)
        before = b","
    yield b'],"model":%b,"usage":%b}' % (_encode(head.model), encoded.usage)


def _results(body: RerankRequest, head: AnswerHead, encoded: Encoded, scores: Sequence[float]) -> Iterator[bytes]:
    texts = body.texts()
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    before = b'{"id":%b,"model":%b,"usage":%b,"results":[' % (_encode(head.id), _encode(head.model), encoded.usage)
    for index in order:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if body.return_documents:
            result["document"] = {"text": texts[index]}
        yield before + _encode(result)
        before = b","
    yield b"]}"


def _scores(head: AnswerHead, encoded: Encoded, scores: Sequence[float]) -> Iterator[bytes]:
    before = _list_head(head)
    for index, score in enumerate(scores):
        yield before + _encode({"index": index, "object": "score", "score": score})
        before = b","
    yield b'],"usage":%b}' % encoded.usage


def _classes(head: AnswerHead, encoded: Encoded) -> Iterator[bytes]:
    before = _list_head(head)
    for index, row in enumerate(encoded.rows()):
        probs = _numbers(row).tolist()
        best = max(range(len(probs)), key=probs.__getitem__)
        label = encoded.labels[best] if best < len(encoded.labels) else None
        yield before + _encode({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
        before = b","
    yield b'],"usage":%b}' % encoded.usage


def _list_head(head: AnswerHead) -> bytes:
    fields = _encode({"id": head.id, "object": "list", "created": head.created, "model": head.model})
    return fields[:-1] + b',"data":['


def _numbers(row: bytes) -> array.array[float]:
    numbers = array.array("f")
    numbers.frombytes(row)
    return numbers


def id_prefix(body: EncodingBody) -> str:
    """Returns the first part of an answer's id."""
    return {RerankRequest: "rerank", ScoreRequest: "score", ClassifyRequest: "classify"}.get(type(body), "embd")


SLICE_S = 0.002  # of the event loop: a large answer is written in many of them, so that no other request waits long


class EncodedReply(ClientReply, eq=False):
    """The ``Sink`` of the one ticket of a request: all its vectors are of one replica."""

    body: EncodingBody
    head: AnswerHead
    ticket: Ticket | None = None  # None once it is over
    _parts: list[bytes] = msgspec.field(default_factory=list)  # of the answer

    @property
    def tickets(self) -> list[Ticket]:
        return [] if self.ticket is None else [self.ticket]

    def abort(self) -> None:
        if self.ticket is not None:
            self._queue.leave(self.ticket)
            self._end(self.ticket, time.monotonic(), "abort")

    # Sink

    def on_wait(self) -> None:
        """Nothing is sent before the answer."""

    def on_events(self, ticket: Ticket, now: float) -> None:
        last = ticket.stream.events[-1]
        if last.finish is None:
            return  # a part; the others follow
        if last.finish in REFUSED:
            self._end(ticket, now, "error")
            self.fail(failure_of(last, self._note.model))
            return
        stream, inputs = ticket.stream, ticket.request.inputs
        welcome = None if stream.link is None else stream.link.welcome
        if welcome is None:
            self.fail(errors.replica_lost(self._note.model))
            return
        parts = [event.part.data for event in stream.take() if event.part is not None]
        encoded = Encoded(parts, len(inputs), welcome.width, welcome.labels, ticket.tokens)
        headers = self._headers(ticket, now)
        self._answered(ticket, now)
        try:
            pieces = written(self.body, self.head, encoded)
        except ApiError as error:
            self.exchange.fail(error)
            return
        self._write(pieces, headers)

    def on_failure(self, ticket: Ticket, error: ApiError) -> None:
        self._end(ticket, time.monotonic(), "error")
        self.exchange.fail(error)

    # Inside

    def _write(self, pieces: Iterator[bytes], headers: list[tuple[bytes, bytes]]) -> None:
        """Makes pieces of the answer for SLICE_S, then continues in the next turn of the event loop."""
        until = time.monotonic() + SLICE_S
        for piece in pieces:
            self._parts.append(piece)
            if time.monotonic() > until:
                if not self.exchange.ended:  # the client is still there
                    asyncio.get_running_loop().call_soon(self._write, pieces, headers)
                return
        parts, self._parts = self._parts, []
        small = sum(map(len, parts)) <= LARGE_BYTES
        self.exchange.respond(200, b"".join(parts) if small else parts, headers=headers)

    def _headers(self, ticket: Ticket, now: float) -> list[tuple[bytes, bytes]]:
        stream = ticket.stream
        assert stream.link is not None
        version = stream.link.route.version.encode()
        return [(b"x-corewright-model-version", version), *decision_headers(self.exchange, self._note, ticket, now)]

    def _answered(self, ticket: Ticket, now: float) -> None:
        """Counts a request that was answered."""
        stream, received_at = ticket.stream, self.exchange.request.received_at
        if ticket.trace is not None:
            ticket.trace.first_token()
        self._queue.record.began(ticket, now)
        assert stream.link is not None
        metrics = self._metrics.model(self._note.model, stream.link.replica)
        waited_s, held_s = stream.sent_at - ticket.arrived_at, now - stream.sent_at
        metrics.encoded(len(ticket.request.inputs), now - received_at, waited_s, held_s)
        self._end(ticket, now, "stop")

    def _end(self, ticket: Ticket, now: float, reason: str) -> None:
        """Counts the end of the request, once."""
        if self.ticket is None:
            return
        self.ticket = None
        self._note.reason = reason
        link = ticket.stream.link
        if reason == "abort" and link is not None and self.exchange.grant is not None:
            self.exchange.grant.least = ticket.tokens
        metrics = self._metrics.model(self._note.model, None if link is None else link.replica)
        metrics.ended(reason, ticket.tokens, 0, now - self.exchange.request.received_at, 0.0)


class Encoding:
    """The encoded requests of one gateway on their way into the queues. Used from one event loop."""

    def __init__(
        self,
        settings: GatewaySettings,
        gateway: str,
        tokenizers: Tokenizers,
        generation: Generation,
        metrics: GatewayMetrics,
    ) -> None:
        self._settings = settings
        self._tokenizers = tokenizers
        self._generation = generation
        self._metrics = metrics
        self._answer_ids = map(f"-{gateway}%x".__mod__, itertools.count())

    def start(self, exchange: Exchange, body: EncodingBody, queue: ModelQueue) -> Awaitable[None] | None:
        """Starts a request, at once or by the awaitable that it returns. Raises ApiError."""
        self._check(exchange, body, queue, queue.routes)
        tokenizer = self._tokenizers.loaded(queue.routes)
        if not isinstance(tokenizer, ByteTokenizer) or len(exchange.request.body) > INLINE_BYTES:
            return self._start_later(exchange, body, queue)
        self._submit(exchange, body, queue, encode_inputs(body, tokenizer, queue.routes, self._limits(queue)))
        return None

    async def _start_later(self, exchange: Exchange, body: EncodingBody, queue: ModelQueue) -> None:
        self._submit(exchange, body, queue, await self._inputs(exchange, body, queue))

    async def _inputs(self, exchange: Exchange, body: EncodingBody, queue: ModelQueue) -> list[EncodeInput]:
        """Tokenizes the inputs on a thread. Raises ApiError."""

        def work(tokenizer: PromptTokenizer, routes: ModelRoutes) -> Callable[[], list[EncodeInput]]:
            self._check(exchange, body, queue, routes)
            return partial(encode_inputs, body, tokenizer, routes, self._limits(queue))

        return await self._generation.tokenized(exchange, queue, work)

    def _limits(self, queue: ModelQueue) -> RequestLimits:
        return queue.links.limits.within(self._settings.max_prompt_tokens)

    def _check(self, exchange: Exchange, body: EncodingBody, queue: ModelQueue, routes: ModelRoutes) -> None:
        """Raises ApiError for a request that the model cannot answer."""
        if routes.kind not in KINDS_OF[type(body)]:
            raise errors.other_kind(queue.name, routes.kind, exchange.request.path)
        width = queue.links.width
        if width and (error := too_many_dimensions(body, width)) is not None:
            raise error

    def _submit(self, exchange: Exchange, body: EncodingBody, queue: ModelQueue, inputs: list[EncodeInput]) -> None:
        """Puts the request into the queue; its EncodedReply does the rest. Raises ApiError."""
        if exchange.ended:
            return  # the client disconnected
        tokens = sum(len(input.ids) for input in inputs)
        terms = read_scheduling_parameters(exchange.request.headers, exchange.key, body.priority, time.monotonic())
        self._generation.take(exchange, tokens, None)
        note = Note(queue.names.label(body.model), stream=False, prompt_tokens=tokens)
        head = AnswerHead(id_prefix(body) + next(self._answer_ids), int(time.time()), body.model)
        reply = EncodedReply(exchange, queue, note, self._metrics, self._renew, body, head)
        self._generation.trace(exchange, queue)
        request = GenerateRequest(id=next(self._generation.request_ids), prompt_ids=[], max_tokens=1, inputs=inputs)
        reply.ticket = queue.submit(request, reply, exchange.trace, terms, exchange.id)

    async def _renew(self, queue: ModelQueue, reply: EncodedReply) -> None:
        """Tokenizes a waiting request again. Raises ApiError."""
        inputs = await self._inputs(reply.exchange, reply.body, queue)
        if (ticket := reply.ticket) is not None and ticket.stream.link is None:
            queue.renew(ticket, msgspec.structs.replace(ticket.request, inputs=inputs))
            reply.exchange.note.prompt_tokens = ticket.tokens
