"""One answering process for ``benchmarks.choices``: the same two answers behind whichever HTTP server is named.

The answer's text is what the echo engine would say, made ready beforehand, so that only the server costs anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from benchmarks.gateway_parts.child import argument, say, wait_for_the_end
from orchestrator.process.addresses import free_port
from workers.engines.echo.engine import echo_tokens

CLOCK_S = 0.002
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
JSON = [(b"content-type", b"application/json")]
_BEFORE = (
    b'data: {"id":"cmpl-00000000000000000000000000000000","object":"text_completion","created":1790000000,'
    b'"model":"echo","choices":[{"index":0,"text":'
)
_AFTER = b',"logprobs":null,"finish_reason":null}]}\n\n'
_LAST = _BEFORE + b'"","logprobs":null,"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'


class Asked(msgspec.Struct):
    prompt: str
    max_tokens: int
    stream: bool = False


_read = msgspec.json.Decoder(Asked).decode
_pieces: dict[str, list[bytes]] = {}
_wholes: dict[str, bytes] = {}


def pieces(wanted: Asked) -> list[bytes]:
    """The ready events of an answer."""
    kept = _pieces.get(wanted.prompt)
    if kept is None:
        text = bytes(echo_tokens(list(wanted.prompt.encode()), wanted.max_tokens)).decode()
        kept = [_BEFORE + json.dumps(letter).encode() + _AFTER for letter in text]
        kept[-1] += _LAST
        _pieces[wanted.prompt] = kept
    return kept


def whole(wanted: Asked) -> bytes:
    kept = _wholes.get(wanted.prompt)
    if kept is None:
        text = bytes(echo_tokens(list(wanted.prompt.encode()), wanted.max_tokens)).decode()
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}
        head = {"id": "cmpl-0", "object": "text_completion", "created": 1790000000, "model": "echo"}
        kept = _wholes[wanted.prompt] = json.dumps({**head, "choices": [choice]}).encode()
    return kept


class Clock:
    """Calls every subscriber once in CLOCK_S."""

    def __init__(self) -> None:
        self._sinks: set[Callable[[], None]] = set()
        self._ticks = False

    def add(self, sink: Callable[[], None]) -> None:
        self._sinks.add(sink)
        if not self._ticks:
            self._ticks = True
            asyncio.get_running_loop().call_later(CLOCK_S, self._tick)

    def drop(self, sink: Callable[[], None]) -> None:
        self._sinks.discard(sink)

    def _tick(self) -> None:
        for sink in list(self._sinks):
            sink()
        self._ticks = bool(self._sinks)
        if self._ticks:
            asyncio.get_running_loop().call_later(CLOCK_S, self._tick)


clock = Clock()


class Stream:
    """What an ASGI handler or a coroutine waits on."""

    def __init__(self, wanted: Asked) -> None:
        self._coming = iter(pieces(wanted))
        self._came: list[bytes] = []
        self._ended = False
        self._news = asyncio.Event()
        clock.add(self._tick)

    def _tick(self) -> None:
        piece = next(self._coming, None)
        if piece is None:
            clock.drop(self._tick)
            self._ended = True
        else:
            self._came.append(piece)
        self._news.set()

    async def take(self) -> bytes:
        """Empty at the end."""
        while not self._came:
            if self._ended:
                return b""
            await self._news.wait()
            self._news.clear()
        came, self._came = self._came, []
        return b"".join(came)


async def raw(scope: Any, receive: Any, send: Any) -> None:
    """The ASGI application without a framework."""
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    wanted = _read(body)
    if not wanted.stream:
        answer = whole(wanted)
        length = [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": JSON + length})
        await send({"type": "http.response.body", "body": answer})
        return
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    stream = Stream(wanted)
    while piece := await stream.take():
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def framework() -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    async def answer(request: Request) -> Response:
        wanted = _read(await request.body())
        if not wanted.stream:
            return Response(whole(wanted), media_type="application/json")
        stream = Stream(wanted)

        async def coming() -> Any:
            while piece := await stream.take():
                yield piece

        return StreamingResponse(coming(), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])])


class Protocol(asyncio.Protocol):
    """The least of a server over httptools."""

    def connection_made(self, transport: Any) -> None:
        import httptools

        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._headers: dict[bytes, bytes] = {}
        self._body = b""

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        wanted = _read(self._body)
        if not wanted.stream:
            answer = whole(wanted)
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer)
            self._transport.write(head + answer)
            return
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self._transport.write(head)
        self._coming = iter(pieces(wanted))
        clock.add(self._tick)

    def _tick(self) -> None:
        piece = next(self._coming, None)
        if piece is None:
            clock.drop(self._tick)
            self._transport.write(b"0\r\n\r\n")
        else:
            self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


async def run_protocol() -> None:
    server = await asyncio.get_running_loop().create_server(Protocol, "127.0.0.1", 0, backlog=2048)
    say({"port": server.sockets[0].getsockname()[1]})
    await asyncio.to_thread(wait_for_the_end)


def say_when_open(port: int) -> None:
    """From a thread: servers that run on the main thread say nothing themselves."""

    def wait() -> None:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
        say({"port": port})
        wait_for_the_end()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def run_uvicorn(app: Any, http: str) -> None:
    import uvicorn

    port = free_port()
    say_when_open(port)
    uvicorn.run(app, host="127.0.0.1", port=port, http=http, loop="uvloop", log_level="error", access_log=False)


async def run_aiohttp() -> None:
    from aiohttp import web

    async def answer(request: web.Request) -> web.StreamResponse:
        wanted = _read(await request.read())
        if not wanted.stream:
            return web.Response(body=whole(wanted), content_type="application/json")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        stream = Stream(wanted)
        while piece := await stream.take():
            await response.write(piece)
        await response.write_eof()
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    say({"port": port})
    await asyncio.to_thread(wait_for_the_end)


def run_granian() -> None:
    granian: Any = importlib.import_module("granian")  # no dependency of this project, as hypercorn is none
    port = free_port()
    say_when_open(port)
    granian.Granian(
        "benchmarks.gateway_parts.served_by:raw",
        address="127.0.0.1",
        port=port,
        interface=granian.constants.Interfaces.ASGI,
        workers=1,
        log_enabled=False,
    ).serve()


def run_hypercorn() -> None:
    config = importlib.import_module("hypercorn.config").Config()
    port = free_port()
    config.bind = [f"127.0.0.1:{port}"]
    config.errorlog = None
    say_when_open(port)
    asyncio.run(importlib.import_module("hypercorn.asyncio").serve(raw, config))


def main() -> None:
    """Argument: the name of the server."""
    name = argument()
    if name != "protocol-asyncio" and name not in ("granian",):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    if name.startswith("protocol"):
        asyncio.run(run_protocol())
    elif name == "aiohttp":
        asyncio.run(run_aiohttp())
    elif name == "granian":
        run_granian()
    elif name == "hypercorn":
        run_hypercorn()
    elif name == "starlette":
        run_uvicorn(framework(), "httptools")
    else:
        run_uvicorn(raw, name.partition("-")[2])


if __name__ == "__main__":
    main()
