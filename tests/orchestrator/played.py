"""A server that a test plays: it answers as the test says, and records what it was asked."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Exchange:
    """One request to the server, and its way to answer."""

    method: str
    path: str
    headers: dict[str, str]
    asked: Any  # the JSON of the body
    writer: asyncio.StreamWriter

    async def json(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        await self.writer.drain()


Play = Callable[[Exchange], Awaitable[None]]


def prompt_tokens(request: Any) -> int:
    """Three for a chat's template, and one for the start of a text; one for each word."""
    if "messages" in request:
        return 3 + len(request["messages"][0]["content"].split())
    return 1 + len(request["prompt"].split())


async def whole(exchange: Exchange) -> None:
    """Answers as a good server: with as many tokens as were requested."""
    await answer(exchange, exchange.asked["max_tokens"])


async def answer(exchange: Exchange, output: int, prompt: int | None = None) -> None:
    """Answers with so many tokens, for a prompt of so many."""
    counted = prompt_tokens(exchange.asked) if prompt is None else prompt
    usage = {"prompt_tokens": counted, "completion_tokens": output}
    await exchange.json({"choices": [{"text": "x" * output}], "usage": usage})


class PlayedServer:
    """Serves `/v1/models` and hands every other request to ``play``; all of them are kept in ``seen``."""

    def __init__(
        self, play: Play, models: Sequence[dict[str, Any]] = ({"id": "parrot", "max_model_len": 4096},)
    ) -> None:
        self.play, self.models = play, list(models)
        self.seen: list[Exchange] = []
        self.url = ""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (exchange := await self._read(reader, writer)) is not None:
                if exchange.path.endswith("/v1/models"):
                    await exchange.json({"object": "list", "data": self.models})
                    continue
                self.seen.append(exchange)
                await self.play(exchange)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Exchange | None:
        line = await reader.readline()
        if not line:
            return None
        method, path, _ = line.decode().split()
        headers: dict[str, str] = {}
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return Exchange(method, path, headers, json.loads(body) if body else None, writer)


@asynccontextmanager
async def playing(play: Play = whole, tls: ssl.SSLContext | None = None, **how: Any) -> AsyncIterator[PlayedServer]:
    """A server in this event loop."""
    played = PlayedServer(play, **how)
    listening = await asyncio.start_server(played, "127.0.0.1", 0, ssl=tls)
    played.url = f"{'https' if tls else 'http'}://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield played
    finally:
        listening.close()
