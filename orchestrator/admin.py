"""The admin API: HTTP of the controller, on loopback, for whoever holds the fleet's token."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from orchestrator.fleet import ADMIN_PATH, FleetSettings


class Fleet(Protocol):
    """What the API asks of the controller."""

    settings: FleetSettings

    def status(self) -> dict[str, Any]: ...


def admin_app(fleet: Fleet, ask_down: Callable[[], Awaitable[None]]) -> ASGIApp:
    """Routes under /admin/v1. ``ask_down`` tells the daemon that the fleet is to end."""

    async def status(_: Request) -> Response:
        return _json(fleet.status())

    async def spec(_: Request) -> Response:
        settings = fleet.settings
        return _json({"file": settings.spec_file, "base_dir": settings.base_dir, "text": settings.spec_text})

    async def down(_: Request) -> Response:
        await ask_down()
        return _json({"stopping": True}, 202)

    return Starlette(
        routes=[
            Route(f"{ADMIN_PATH}/status", status, methods=["GET"]),
            Route(f"{ADMIN_PATH}/spec", spec, methods=["GET"]),
            Route(f"{ADMIN_PATH}/down", down, methods=["POST"]),
        ],
        middleware=[Middleware(_TokenOnly, token=fleet.settings.token)],
    )


class _TokenOnly:
    """Refuses every request without the fleet's bearer token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        else:
            message = "The admin API needs the token of fleet.json: Authorization: Bearer TOKEN."
            await _json({"error": {"code": "invalid_token", "message": message}}, 401)(scope, receive, send)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def serve_admin(app: ASGIApp, port: int) -> None:
    """Serve the API on loopback until the task is cancelled."""
    import uvicorn

    config = uvicorn.Config(
        app, host="127.0.0.1", port=port, lifespan="off", access_log=False, log_config=None, server_header=False
    )
    server = uvicorn.Server(config)
    try:
        await server.serve()
    except asyncio.CancelledError:
        await server.shutdown()
        raise
