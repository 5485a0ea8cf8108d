"""The gateway's routes as records, and the OpenAPI 3.1 document that is made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from orchestrator.gateway.anthropic.answers import MessageError
from orchestrator.gateway.anthropic.answers import error_body as anthropic_error
from orchestrator.gateway.http.route import HttpRoute, Schema, components, json_content, json_response, operation_id
from orchestrator.gateway.openai.answers import ErrorAnswer
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.serving.ticket import FLAGS, MAX_DEADLINE_MS, MAX_SESSION_BYTES, STRICT
from orchestrator.process.version import corewright_version

_OF_ALL = (400, 401, 403, 405, 408, 413, 429, 431, 500, 503)
LINES = "application/jsonlines"


@dataclass(frozen=True)
class ErrorShape:
    """The shape of an API's errors: the type of their JSON, and the function that makes it for a request's id."""

    answer: type
    body: Callable[[ApiError, str], Any]


OPENAI = ErrorShape(ErrorAnswer, lambda error, request_id: error.body())
ANTHROPIC = ErrorShape(MessageError, anthropic_error)


@dataclass(frozen=True, kw_only=True)
class GatewayRoute(HttpRoute):
    """A route of the gateway. ``handler`` takes the gateway and the exchange."""

    reads: Callable[..., Any] | None = None  # decodes the body
    writes: Callable[..., Any] | None = None  # makes the answer, or the writer of the answer
    operation: str = ""  # OpenTelemetry's
    streams: bool = False  # the answer may be server-sent events
    queues: bool = False  # the request waits for a slot
    charged: bool = False  # the tokens count for the limits of the key
    forwards: bool = False  # a model with a server of its own gets the client's body
    invokes: bool = False  # the body need not name the model, and may be JSON lines
    errors: ErrorShape = OPENAI
    to_anthropic: type | None = None  # the answer to a request with the header anthropic-version

    @cached_property
    def is_probe(self) -> bool:
        """It needs no key, and its 503 is text."""
        return self.scope is None


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
_HEADERS: Mapping[str, tuple[str, Schema]] = MappingProxyType(  # of a request that waits for a slot
    {
        "x-session-id": (
            "Requests with the same value go to the same replica while it has a free slot.",
            {"type": "string", "maxLength": MAX_SESSION_BYTES},
        ),
        "x-deadline-ms": (
            "Deadline for the first token, in milliseconds from now.",
            {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DEADLINE_MS},
        ),
        STRICT.decode(): ("Unknown fields are an error.", {"type": "string", "enum": [*FLAGS]}),
        "x-corewright-explain": ("The answer reports its routing decision.", {"type": "string", "enum": [*FLAGS]}),
    }
)


def openapi(*, needs_key: bool, routes: Sequence[GatewayRoute]) -> Schema:
    """Returns the document of the routes; ``needs_key``: requests need an API key."""
    routes = [route for route in routes if route.listed]
    named = [kind for route in routes for kind in (*route.body, route.answer, route.to_anthropic)]
    kinds = [kind for kind in named if kind not in (None, dict, object)]
    references, schemas = components([*dict.fromkeys([*(route.errors.answer for route in routes), *kinds])])
    for schema in schemas.values():  # an unknown field is an error only with `x-corewright-strict`
        schema.pop("additionalProperties", None)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation = _operation(route, references, needs_key)
        if route.body:
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
    statuses = {*_OF_ALL, *route.refusals, *((415,) if route.body else ()), *((504,) if route.queues else ())}
    if route.is_probe:
        statuses -= {401, 429}
    for status in sorted(statuses):
        response = json_response(route.refusal_texts.get(status) or REFUSED[status], references[route.errors.answer])
        if route.is_probe and status == 503:
            response["content"]["text/plain"] = {"schema": {"type": "string"}}
        if status in (429, 503) and not route.is_probe:
            response["headers"] = {
                "retry-after": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}
            }
        responses[str(status)] = response
    operation: dict[str, Any] = {
        "operationId": operation_id(route.method, route.path),
        "summary": route.summary,
        "responses": responses,
    }
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in route.path_parameters
    ]
    parameters += [
        {"name": name, "in": "header", "required": False, "description": description, "schema": schema}
        for name, (description, schema) in _HEADERS.items()
        if route.queues or (route.reads is not None and name == STRICT.decode())
    ]
    if parameters:
        operation["parameters"] = parameters
    if route.is_probe and needs_key:
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
    bodies = [references[kind] for kind in route.body]
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
