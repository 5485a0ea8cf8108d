"""A server that a test plays: it answers as it is told, and writes down when it wrote what."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Exchange:
    """One request to the server, and its way to answer."""

    method: str
    path: str
    headers: dict[str, str]
    asked: Any  # the JSON of the body
    writer: asyncio.StreamWriter
    read_at: float
    wrote: list[float] = field(default_factory=list)  # when each chunk with text was written

    async def json(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        await self.writer.drain()

    async def event(self, value: Any) -> None:
        """One server-sent event as one HTTP chunk."""
        data = b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"
        self.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self.writer.drain()

    async def text(self, text: str, finish: str | None = None) -> None:
        self.wrote.append(time.monotonic())
        await self.event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})

    def begin(self) -> None:
        self.writer.write(STREAM)

    async def end(self, completion: int | None = None) -> None:
        if completion is not None:
            usage = {"prompt_tokens": prompt_tokens(self.asked), "completion_tokens": completion}
            await self.event({"choices": [], "usage": usage})
        await self.event(b"[DONE]")
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()


Play = Callable[[Exchange], Awaitable[None]]


def prompt_tokens(request: Any) -> int:
    """Two for a chat's template and one for each word of a text; token ids are what they are."""
    if "messages" in request:
        return 2 + len(request["messages"][0]["content"].split())
    prompt = request["prompt"]
    return len(prompt) if isinstance(prompt, list) else 1 + len(prompt.split())


async def whole(exchange: Exchange, gaps: Sequence[float] = ()) -> None:
    """Answer as a good server: as many chunks as tokens were asked for, with those pauses before them."""
    count = exchange.asked["max_tokens"]
    if not exchange.asked.get("stream"):
        usage = {"prompt_tokens": prompt_tokens(exchange.asked), "completion_tokens": count}
        await exchange.json({"choices": [{"text": "x" * count}], "usage": usage})
        return
    exchange.begin()
    for i in range(count):
        await asyncio.sleep(gaps[i] if i < len(gaps) else 0)
        await exchange.text("x", "length" if i == count - 1 else None)
    await exchange.end(count)


class PlayedServer:
    """Serves `/v1/models` and hands every other request to ``play``; all of them are kept in ``seen``."""

    def __init__(
        self, play: Play, models: Sequence[dict[str, Any]] = ({"id": "parrot", "max_model_len": 4096},)
    ) -> None:
        self.play, self.models = play, list(models)
        self.seen: list[Exchange] = []
        self.connections = 0
        self.url = ""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
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
        return Exchange(method, path, headers, json.loads(body) if body else None, writer, time.monotonic())


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
