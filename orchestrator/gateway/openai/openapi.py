"""Builds the gateway's OpenAPI 3.1 document from the types of its requests and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from orchestrator.gateway.anthropic.answer_types import Message, MessageError, ModelInfo, ModelPage, TokenCount
from orchestrator.gateway.anthropic.protocol import CountTokensRequest, MessagesRequest
from orchestrator.gateway.encoding.protocol import (
    ClassifyRequest,
    DocumentText,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from orchestrator.gateway.http.openapi_parts import Schema, components, json_content, json_response, operation_id
from orchestrator.gateway.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from orchestrator.gateway.openai.tokenize import Detokenized, Tokenized
from orchestrator.gateway.responses.answer_types import Response
from orchestrator.gateway.responses.protocol import ResponsesRequest
from orchestrator.gateway.serving.scheduling_parameters import FLAGS, LONGEST_DEADLINE_MS, LONGEST_SESSION
from orchestrator.process.version import corewright_version

# The types of the answers. The gateway writes answers by hand; a test reads them as these types.


class CalledFunction(msgspec.Struct):
    """``arguments`` is the text of a JSON object."""

    name: str
    arguments: str


class AnsweredCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(msgspec.Struct):
    """``content`` is null if the answer is only calls."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


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


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET


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


@dataclass(frozen=True)
class GatewayRoute:
    """A route of the gateway. ``asks`` are the types of its body; ``answer`` None: text, object: any JSON."""

    method: str
    path: str
    summary: str
    answer: type | None
    asks: tuple[type, ...] = ()
    streams: bool = False  # the answer may be server-sent events
    encodes: bool = False  # the answer is written once its inputs are encoded
    probe: bool = False  # it needs no key, and its 503 is text
    of_a_model: bool = False  # the model may be unknown or not ready
    invokes: bool = False  # the body need not name the model, and may be JSON lines
    refused: tuple[tuple[int, str], ...] = ()  # statuses that only this route has
    error: type = ErrorAnswer
    to_anthropic: type | None = None  # the answer to a request with the header anthropic-version


def _encoding(path: str, summary: str, answer: type, asks: type) -> GatewayRoute:
    return GatewayRoute("POST", path, summary, answer, (asks,), encodes=True, of_a_model=True)


ROUTES = (
    GatewayRoute(
        "POST", "/v1/chat/completions", "Answer a chat.", ChatCompletion, (ChatRequest,), streams=True, of_a_model=True
    ),
    GatewayRoute(
        "POST",
        "/v1/completions",
        "Continue a prompt.",
        TextCompletion,
        (CompletionRequest,),
        streams=True,
        of_a_model=True,
    ),
    GatewayRoute(
        "POST",
        "/v1/messages",
        "Answer a chat in the shape of Anthropic's API.",
        Message,
        (MessagesRequest,),
        streams=True,
        of_a_model=True,
        error=MessageError,
    ),
    GatewayRoute(
        "POST",
        "/v1/messages/count_tokens",
        "Count the tokens of a chat's prompt.",
        TokenCount,
        (CountTokensRequest,),
        of_a_model=True,
        error=MessageError,
    ),
    GatewayRoute(
        "POST",
        "/v1/responses",
        "Answer a chat in the shape of OpenAI's Responses API; nothing is kept.",
        Response,
        (ResponsesRequest,),
        streams=True,
        of_a_model=True,
    ),
    _encoding("/v1/embeddings", "The vectors of texts.", EmbeddingList, EmbeddingRequest),
    _encoding("/v1/rerank", "Documents in the order of their relevance to a query.", Ranking, RerankRequest),
    _encoding("/v2/rerank", "As /v1/rerank.", Ranking, RerankRequest),
    _encoding("/rerank", "As /v1/rerank.", Ranking, RerankRequest),
    _encoding("/v1/score", "The scores of pairs of texts.", ScoreList, ScoreRequest),
    _encoding("/score", "As /v1/score.", ScoreList, ScoreRequest),
    _encoding("/classify", "The classes of texts.", ClassificationList, ClassifyRequest),
    GatewayRoute("GET", "/v1/models", "The models and their aliases.", ModelList, to_anthropic=ModelPage),
    GatewayRoute("GET", "/v1/models/{model}", "One model.", ModelCard, of_a_model=True, to_anthropic=ModelInfo),
    GatewayRoute(
        "POST",
        "/tokenize",
        "The tokens of a prompt or of a chat.",
        Tokenized,
        (TokenizeTextRequest, TokenizeChatRequest),
        of_a_model=True,
    ),
    GatewayRoute("POST", "/detokenize", "The text of tokens.", Detokenized, (DetokenizeRequest,), of_a_model=True),
    GatewayRoute("GET", "/version", "The version of corewright.", VersionAnswer),
    GatewayRoute("GET", "/metrics", "Metrics for Prometheus.", None),
    GatewayRoute("GET", "/openapi.json", "This document.", dict),
    GatewayRoute("GET", "/livez", "Liveness of the gateway.", None, probe=True),
    GatewayRoute("GET", "/readyz", "Readiness: every model has been ready.", None, probe=True),
    GatewayRoute("GET", "/health", "As /readyz.", None, probe=True),
    GatewayRoute("GET", "/ping", "As /readyz.", None, probe=True),
)

REFUSED: Mapping[int, str] = MappingProxyType(
    {
        400: "The request cannot be read, or the model cannot serve it.",
        401: "The API key is missing or not valid.",
        403: "The API key or the browser page is not allowed to do this.",
        404: "The model or route does not exist.",
        405: "The route does not have this method.",
        408: "The request arrived too slowly.",
        413: "The body is too large.",
        415: "The body is not `application/json`, or it is compressed.",
        429: "The queue is full, the deadline cannot be met, or a limit of the key is reached.",
        431: "The request line and headers are too large.",
        500: "The engine or the gateway failed.",
        503: "The model or the fleet is not ready, or there are too many connections.",
        504: "The deadline passed while the request waited.",
    }
)
_OF_ALL = (400, 401, 403, 405, 408, 413, 429, 431, 500, 503)
LINES = "application/jsonlines"
_HEADERS: Mapping[str, tuple[str, Schema]] = MappingProxyType(  # of a request that waits for a slot
    {
        "x-session-id": (
            "Requests with the same value go to the same replica while it has a free slot.",
            {"type": "string", "maxLength": LONGEST_SESSION},
        ),
        "x-deadline-ms": (
            "Deadline for the first token, in milliseconds from now.",
            {"type": "number", "exclusiveMinimum": 0, "maximum": LONGEST_DEADLINE_MS},
        ),
        "x-corewright-explain": ("The answer reports its routing decision.", {"type": "string", "enum": [*FLAGS]}),
    }
)


def openapi(*, needs_key: bool, routes: Sequence[GatewayRoute] = ROUTES) -> Schema:
    """Returns the document of the routes; ``needs_key``: requests need an API key."""
    named = [kind for route in routes for kind in (*route.asks, route.answer, route.to_anthropic)]
    kinds = [kind for kind in named if kind not in (None, dict, object)]
    references, schemas = components([*dict.fromkeys([*(route.error for route in routes), *kinds])])
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation = _operation(route, references, needs_key)
        if route.asks:
            operation["requestBody"] = _body(route, references, schemas)
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "corewright's gateway",
            "version": corewright_version(),
            "description": "OpenAI's and Anthropic's APIs for the models of a fleet; see docs/api.md.",
        },
        "security": [{"bearer": []}, {"apiKey": []}] if needs_key else [],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": schemes if needs_key else {}},
    }


def _operation(route: GatewayRoute, references: Mapping[type, Schema], needs_key: bool) -> dict[str, Any]:
    responses = {"200": _answer(route, references)}
    statuses = {*_OF_ALL, *((404,) if route.of_a_model else ()), *((415,) if route.asks else ())}
    statuses |= {status for status, _ in route.refused}
    if route.streams or route.encodes:
        statuses.add(504)
    if route.probe:
        statuses -= {401, 429}
    for status in sorted(statuses):
        response = json_response({**REFUSED, **dict(route.refused)}[status], references[route.error])
        if route.probe and status == 503:
            response["content"]["text/plain"] = {"schema": {"type": "string"}}
        if status in (429, 503) and not route.probe:
            response["headers"] = {
                "retry-after": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}
            }
        responses[str(status)] = response
    operation: dict[str, Any] = {
        "operationId": operation_id(route.method, route.path),
        "summary": route.summary,
        "responses": responses,
    }
    parameters: list[dict[str, Any]] = []
    if "{model}" in route.path:
        name = {"type": "string", "minLength": 1}
        parameters.append({"name": "model", "in": "path", "required": True, "schema": name})
    if route.streams or route.encodes:
        parameters += [
            {"name": name, "in": "header", "required": False, "description": description, "schema": schema}
            for name, (description, schema) in _HEADERS.items()
        ]
    if parameters:
        operation["parameters"] = parameters
    if route.probe and needs_key:
        operation["security"] = []
    return operation


def _answer(route: GatewayRoute, references: Mapping[type, Schema]) -> dict[str, Any]:
    if route.answer is None:
        return {"description": route.summary, "content": {"text/plain": {"schema": {"type": "string"}}}}
    schema: Schema = {} if route.answer is object else references.get(route.answer, {"type": "object"})
    if route.to_anthropic is not None:
        schema = {"anyOf": [schema, references[route.to_anthropic]]}
    answer = json_response(route.summary, schema)
    if route.streams:
        answer["content"]["text/event-stream"] = {"schema": _EVENT}
    if route.invokes:
        lines = {"type": "string", "description": "A line of JSON for each input or token."}
        answer["content"][LINES] = {"schema": lines}
    return answer


def _body(route: GatewayRoute, references: Mapping[type, Schema], schemas: Mapping[str, Schema]) -> Schema:
    bodies = [references[kind] for kind in route.asks]
    if route.invokes:
        bodies = [_without_model(schemas[body["$ref"].rpartition("/")[2]]) for body in bodies]
    content = json_content(bodies[0] if len(bodies) == 1 else {"anyOf": bodies})
    if route.invokes:
        description = "LMI's requests, which differ in `inputs` only."
        content[LINES] = {"schema": {"type": "string", "description": description}}
    return {"required": True, "content": content}


def _without_model(schema: Schema) -> Schema:
    """Returns the schema of a body whose model may be missing."""
    return {**schema, "required": [name for name in schema["required"] if name != "model"]}


_EVENT: Schema = {  # before OpenAPI 3.2 the schema of a stream is that of each event
    "type": "object",
    "properties": {"data": {"type": "string", "description": "A piece of the answer in JSON; `[DONE]` in the last."}},
    "required": ["data"],
}
