"""Reading a request and writing an answer, by ASGI's own messages: no task or copy more than is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from orchestrator.gateway import errors
from orchestrator.gateway.errors import ApiError

T = TypeVar("T")
Handler = Callable[[bytes, Receive, Send], Awaitable[None]]


class ClientGone(Exception):
    """Nobody reads the answer any more."""


class JsonEndpoint:
    """An ASGI endpoint that reads a JSON body within the limit and writes its own answer."""

    def __init__(self, handler: Handler, limit: int) -> None:
        """``limit`` in bytes."""
        self._handler = handler
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            _check_content_type(scope)
            body = await _read_body(receive, self._limit)
            await self._handler(body, receive, send)
        except ApiError as error:
            await respond(send, error.status, msgspec.json.encode(error.body()), error.headers())
        except ClientGone:
            return


def _check_content_type(scope: Scope) -> None:
    """JSON, or nothing said. A form is a client's mistake, such as `curl -d` without a header."""
    given = dict(scope["headers"]).get(b"content-type", b"").decode("latin-1")
    if given and given.split(";")[0].strip().lower() != "application/json":
        raise errors.wrong_content_type(given)


async def _read_body(receive: Receive, limit: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limit:
            raise errors.body_too_large(limit)
        if not message.get("more_body"):
            return bytes(body)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled as soon as the client hangs up. Raises ClientGone then."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(send: Send, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    raw = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
