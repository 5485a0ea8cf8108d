"""The routes of the admin API in one table. Routing, audit, the OpenAPI document, the console's calls and the docs
follow from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType, UnionType
from typing import Any, get_args, get_type_hints

import msgspec

from orchestrator.api import preview, queries, replicas, revisions
from orchestrator.api.operation import OperatedFleet
from orchestrator.api.schemas import EmptyBody, Fields, Refusal
from orchestrator.gateway.http.route import components, json_content, json_response, operation_id
from orchestrator.messages.controller_settings import ADMIN_PATH
from orchestrator.process.version import corewright_version

REFUSALS: Mapping[int, str] = MappingProxyType(
    {
        400: "The request is malformed.",
        401: "The token or key is missing or wrong.",
        403: "The key does not have the scope admin.",
        404: "The object does not exist.",
        409: "The state of the fleet does not allow it.",
        413: "The body is too large.",
        422: "The spec has errors; `problems` lists them.",
        500: "The controller failed.",
        507: "The journal or the audit log cannot be written; nothing was changed.",
    }
)


@dataclass(frozen=True)
class AdminRoute:
    """One route below /admin/v1. The types of its request and answer are those in its handler's signature.

    The handler gets the fleet; then the ``request`` if it has one, decoded from the body of a POST, or from the path
    and query of a GET; then ``by``, the caller for the journal, if it ``changes`` the fleet.
    """

    method: str
    path: str
    summary: str
    handler: Callable[..., Any]
    refusals: tuple[int, ...] = ()  # statuses besides those of every route
    changes: bool = False  # recorded in the audit log, and continued if the client disconnects
    status: int = 200

    @property
    def name(self) -> str:
        """The operation's name, by which the console calls it."""
        return self.handler.__name__

    @cached_property
    def request(self) -> type[Fields]:
        """The type of the request; ``EmptyBody`` if it has no fields."""
        request: type[Fields] = get_type_hints(self.handler).get("request", EmptyBody)
        return request

    @cached_property
    def answers(self) -> tuple[type, ...]:
        """The types that the JSON of the response may have; none: any object."""
        answer = get_type_hints(self.handler)["return"]
        kinds = get_args(answer) if isinstance(answer, UnionType) else (answer,)
        return tuple(kind for kind in kinds if isinstance(kind, msgspec.StructMeta))

    async def call(self, fleet: OperatedFleet, request: Fields, by: str) -> Any:
        """Returns the answer. Raises OperationRefused."""
        arguments = [request] if self.request is not EmptyBody else []
        answer = self.handler(fleet, *arguments, *([by] if self.changes else []))
        return await answer if inspect.isawaitable(answer) else answer


def _get(path: str, summary: str, handler: Callable[..., Any], *refusals: int) -> AdminRoute:
    return AdminRoute("GET", path, summary, handler, refusals)


def _preview(path: str, summary: str, handler: Callable[..., Any], *refusals: int) -> AdminRoute:
    return AdminRoute("POST", path, summary, handler, (*refusals, 409))


def _change(path: str, summary: str, handler: Callable[..., Any], *refusals: int) -> AdminRoute:
    """Returns a route that the fleet's state may forbid (409), or a full disk (507: journal, audit log)."""
    return AdminRoute("POST", path, summary, handler, (*refusals, 409, 507), changes=True)


def documented(routes: Sequence[AdminRoute]) -> tuple[AdminRoute, ...]:
    """Returns the routes, and the one with their OpenAPI document."""

    def document(fleet: OperatedFleet) -> dict[str, Any]:
        return openapi(every)

    every = (*routes, _get("/openapi.json", "This API as an OpenAPI 3.1 document.", document))
    return every


ROUTES = documented(
    (
        _get("/status", "Models, replicas and hosts.", queries.status),
        _get("/spec", "The running spec.", revisions.spec),
        _get("/rollout", "The progress of the newest revision.", revisions.rollout),
        _get("/revisions", "All revisions in the journal, newest first.", revisions.revisions),
        _get("/revisions/{number}", "One revision.", revisions.revision, 404),
        _get("/events", "Events, oldest first; with `wait_s` the request waits for a new one.", queries.events, 404),
        _get("/logs", "The last lines of a replica's log, or what follows `offset`.", queries.logs, 404),
        _get("/trace", "The recorded requests: time, lengths, key and durations, without texts.", queries.trace),
        _get("/speeds", "The speeds that the fleet has measured, by the shape of the replicas.", queries.speeds),
        _get(
            "/load",
            "Queue, running requests, tokens per second and latencies of each model: a sample every 10 s of an hour.",
            queries.load_history,
        ),
        _get(
            "/requests",
            "The requests in queues and slots, and those that have ended while they were queried.",
            queries.requests,
        ),
        _get("/config", "The settings of this fleet.", queries.config),
        _preview(
            "/plan",
            "Preview an apply; with `defrag`, the moves that free that many contiguous cores.",
            preview.propose,
            422,
        ),
        _preview(
            "/explain",
            "Explain the placement of a model: why it is there or unplaced, and the remedies.",
            preview.explain,
            404,
            422,
        ),
        _preview("/preview", "Preview scale, load, unload, rollout/restart or drain.", preview.preview, 404),
        _change("/requests/cancel", "Cancel a request that is in a queue or a slot.", queries.cancel_request, 404),
        _change("/apply", "Make a spec the fleet's new revision.", revisions.apply, 422),
        _change("/rollout/undo", "Apply an earlier revision again.", revisions.undo, 404, 422),
        _change("/rollout/pause", "Pause the rollout: start no further replica.", revisions.pause),
        _change("/rollout/resume", "Resume a paused or failed rollout.", revisions.resume),
        _change("/rollout/promote", "End the canary and update every replica.", revisions.promote),
        _change("/rollout/restart", "Restart every replica of a model in a new process.", revisions.restart, 404),
        _change("/scale", "Set the number of a model's replicas.", replicas.scale, 404),
        _change("/load", "Load a model: start a replica if it has none.", replicas.load, 404),
        _change("/unload", "Unload a model: stop its replicas until it is loaded again.", replicas.unload, 404),
        _change("/cordon", "Exclude a host, or some of its cores, from new placements.", replicas.cordon, 404, 422),
        _change("/uncordon", "Remove a cordon.", replicas.uncordon, 404, 422),
        _change("/drain", "Drain and cordon a host, or replace a replica.", replicas.drain, 404),
        AdminRoute("POST", "/down", "Drain and stop the fleet.", queries.down, (507,), changes=True, status=202),
    )
)


def console_calls(routes: Sequence[AdminRoute]) -> dict[str, dict[str, str]]:
    """Returns method and path of each operation by its name, for the console's page."""
    return {route.name: {"method": route.method, "path": route.path} for route in routes}


def openapi(routes: Sequence[AdminRoute]) -> dict[str, Any]:
    """Returns the OpenAPI 3.1 document of the routes."""
    types = dict.fromkeys([kind for route in routes for kind in (route.request, *route.answers)] + [Refusal])
    references, schemas = components(list(types))
    queries = {route.request.__name__ for route in routes if route.method == "GET"} - {EmptyBody.__name__}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        kinds = [references[answer] for answer in route.answers] or [{"type": "object"}]
        answer_schema = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        operation: dict[str, Any] = {
            "operationId": operation_id(route.method, route.path),
            "summary": route.summary,
            "responses": {str(route.status): json_response(_contents(route), answer_schema)},
        }
        if route.method == "POST":
            required = bool(schemas[route.request.__name__].get("required"))
            operation["requestBody"] = {"required": required, "content": json_content(references[route.request])}
        elif route.request is not EmptyBody:
            operation["parameters"] = _parameters(route, schemas[route.request.__name__])
        common = (400, 401, 403, 413, 500) if route.method == "POST" else (400, 401, 403, 500)
        for status in sorted({*common, *route.refusals}):
            operation["responses"][str(status)] = json_response(REFUSALS[status], references[Refusal])
        paths.setdefault(f"{ADMIN_PATH}{route.path}", {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "corewright's admin API", "version": corewright_version()},
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": {name: schema for name, schema in schemas.items() if name not in queries},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _contents(route: AdminRoute) -> str:
    """Returns what the response contains: the first lines of the docstrings of its types."""
    return " Or: ".join((kind.__doc__ or "").partition("\n")[0] for kind in route.answers) or "The document."


def _parameters(route: AdminRoute, schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path" if f"{{{name}}}" in route.path else "query",
            "required": name in schema.get("required", ()),
            "schema": field,
        }
        for name, field in schema["properties"].items()
    ]
