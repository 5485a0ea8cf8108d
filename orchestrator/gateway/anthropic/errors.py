"""Errors in the shape of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from orchestrator.gateway.openai.errors import ApiError

_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
)


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Returns the JSON value of an error; its type depends on the status alone."""
    described = {"type": _TYPES.get(error.status, "invalid_request_error"), "message": error.message}
    return {"type": "error", "error": described, "request_id": request_id}
