"""The OpenAPI document of the admin API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.api.schemas import EmptyBody, Refusal
from orchestrator.fleet.controller_settings import ADMIN_PATH
from orchestrator.gateway.http.route import components as schema_components
from orchestrator.gateway.http.route import json_content, json_response, operation_id
from orchestrator.process.version import corewright_version

if TYPE_CHECKING:
    from orchestrator.api.routes import AdminRoute

_REFUSALS = {
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


def openapi(routes: Sequence[AdminRoute]) -> dict[str, Any]:
    """Returns the OpenAPI 3.1 document of the routes."""
    references, components = schema_components([*dict.fromkeys(route.schema for route in routes), Refusal])
    bodies = {route.schema.__name__ for route in routes if route.method == "POST"}
    queries = {route.schema.__name__ for route in routes} - bodies
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation: dict[str, Any] = {
            "operationId": operation_id(route.method, route.path),
            "summary": route.summary,
            "responses": {str(route.status): json_response(route.response, {"type": "object"})},
        }
        if route.method == "POST":
            required = bool(components[route.schema.__name__].get("required"))
            operation["requestBody"] = {"required": required, "content": json_content(references[route.schema])}
        elif route.schema is not EmptyBody:
            operation["parameters"] = _parameters(route, components[route.schema.__name__])
        common = (400, 401, 403, 413, 500) if route.method == "POST" else (400, 401, 403, 500)
        for status in sorted({*common, *route.refusals}):
            operation["responses"][str(status)] = json_response(_REFUSALS[status], references[Refusal])
        paths.setdefault(f"{ADMIN_PATH}{route.path}", {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "corewright's admin API", "version": corewright_version()},
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": {name: schema for name, schema in components.items() if name not in queries},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


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
