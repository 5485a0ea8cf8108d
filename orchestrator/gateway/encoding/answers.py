"""Writes the answers to encoded requests, piece by piece, from the rows of numbers that a replica has sent."""

from __future__ import annotations

import array
import binascii
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from orchestrator.gateway.encoding.requests import (
    ClassifyRequest,
    EmbeddingRequest,
    EncodingBody,
    RerankRequest,
    ScoreRequest,
)
from orchestrator.gateway.openai.errors import ApiError, engine_failed, invalid

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
        sum(map(operator.mul, first[place % len(first)], vector)) / lengths[place % len(first)] / lengths[place - pairs]
        for place, vector in enumerate(second)
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
