"""Passes the playground's chats on to a gateway, so that the page talks to its own origin only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from orchestrator.console.page import CONSOLE_PATH, STREAMED
from orchestrator.gateway.http.exchange import Exchange
from orchestrator.gateway.openai.errors import ApiError

log = logging.getLogger(__name__)

CHAT = "/v1/chat/completions"
PLAYGROUND_PATH = f"{CONSOLE_PATH}/gateway{CHAT}"
KEY = b"x-corewright-inference-key"  # the request's own key has opened the console
PASSED = ("content-type", "x-corewright-replica", "x-corewright-decision", "x-corewright-overhead-ms", "retry-after")


class Entrance(NamedTuple):
    """A gateway that serves clients."""

    url: str
    nearby: bool  # on the controller's machine: its certificate need not be for that address


class Playground:
    """Forwards one chat after another, streamed. A page that leaves ends its request."""

    def __init__(self, entrance: Callable[[], Entrance | None]) -> None:
        self._entrance = entrance

    async def chat(self, exchange: Exchange) -> None:
        """Answers with what the gateway answers. Raises ApiError 502 if none can be reached."""
        import aiohttp  # not with the first status of a controller

        entrance = self._entrance()
        if entrance is None:
            raise ApiError(502, "No gateway of the fleet serves.", code="gateway_unreachable")
        request = exchange.request
        headers = {"content-type": "application/json", "x-corewright-explain": "true", "x-request-id": exchange.id}
        if key := request.headers.get(KEY):
            headers["authorization"] = f"Bearer {key.decode('latin-1')}"
        connector = aiohttp.TCPConnector(ssl=False) if entrance.nearby else aiohttp.TCPConnector()
        timeout = aiohttp.ClientTimeout(total=None, connect=10.0)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.post(entrance.url + CHAT, data=request.body, headers=headers, allow_redirects=False) as answer,
            ):
                passed = [(name.encode(), answer.headers[name].encode()) for name in PASSED if name in answer.headers]
                exchange.begin(answer.status, (*STREAMED, *passed))
                async for piece in answer.content.iter_any():
                    exchange.write(piece)
                exchange.end()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("the playground's request to %s failed: %s", entrance.url, error)
            if exchange.began:
                exchange.connection.abort()  # an incomplete answer must not look like a complete one
                return
            raise ApiError(502, f"The gateway at {entrance.url}: {error}", code="gateway_unreachable") from None
