"""The replica that all stacks share: an echo engine behind the real batcher, with two faces in one process.

One is the real data plane, on a unix socket. The other speaks HTTP, ready for a client: it is what the bare proxy
forwards, and costs the proxied process nothing that a gateway would have to do.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import uvloop

import workers
from benchmarks.gateway_parts.child import argument, say
from orchestrator.process.version import corewright_version
from workers.batching.batcher import Batcher
from workers.engines.echo.engine import EchoEngine
from workers.messages.requests import GenerateRequest, TokenEvent
from workers.messages.wire import Welcome
from workers.serving.dataplane import DataPlane
from workers.text.tokenizer import load_tokenizer

TOKEN = "secret"
EPOCH = 3
ID = "cmpl-00000000000000000000000000000000"
_encode = msgspec.json.encode
_BEFORE = (
    b'data: {"id":"cmpl-00000000000000000000000000000000","object":"text_completion","created":1790000000,'
    b'"model":"echo","choices":[{"index":0,"text":'
)
_AFTER = b',"logprobs":null,"finish_reason":null}]}\n\n'
_LAST = _BEFORE + b'"","logprobs":null,"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
_STREAM = (
    b"HTTP/1.1 200 OK\r\ndate: Sun, 01 Nov 2026 00:00:00 GMT\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
_WHOLE = b"HTTP/1.1 200 OK\r\ndate: Sun, 01 Nov 2026 00:00:00 GMT\r\ncontent-type: application/json\r\ncontent-length: "


class Asked(msgspec.Struct):
    prompt: str
    max_tokens: int
    stream: bool = False


_read = msgspec.json.Decoder(Asked).decode


def event_of(text: str) -> bytes:
    """The server-sent event of a token, as the gateway writes it."""
    return _BEFORE + _encode(text) + _AFTER


def last_event() -> bytes:
    return _LAST


def whole(text: str, request: Asked) -> bytes:
    """The body of an answer that is no stream."""
    usage = {"prompt_tokens": len(request.prompt), "completion_tokens": request.max_tokens}
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}
    head = {"id": ID, "object": "text_completion", "created": 1790000000, "model": "echo"}
    return _encode({**head, "choices": [choice], "usage": usage})


class HttpFace:
    """Ready answers over HTTP/1.1, on a thread of its own. Only for the load generator: it trusts what it reads."""

    def __init__(self) -> None:
        self.owners: dict[str, _Client] = {}
        self.batcher: Batcher | None = None
        self.port = 0
        self._loop = uvloop.new_event_loop()
        self._listens = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()
        self._listens.wait()

    def emit(self, events: list[TokenEvent]) -> None:
        if self.owners:
            self._loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            client = self.owners.get(event.id)
            if client is not None:
                client.deliver(event)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        numbers = itertools.count()
        making = self._loop.create_server(lambda: _Client(self, numbers), "127.0.0.1", 0, backlog=4096)
        server: Any = self._loop.run_until_complete(making)
        self.port = server.sockets[0].getsockname()[1]
        self._listens.set()
        self._loop.run_forever()


class _Client(asyncio.Protocol):
    def __init__(self, face: HttpFace, numbers: Any) -> None:
        self._face = face
        self._numbers = numbers
        self._buffer = b""
        self._asked: Asked | None = None
        self._text = ""
        self._began = False
        self._id = ""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        if not separator or len(body) < int(head.rpartition(b"content-length: ")[2]):
            return
        self._buffer = b""
        self._asked = request = _read(body)
        self._text, self._began = "", False
        self._id = f"http-{next(self._numbers)}"
        self._face.owners[self._id] = self
        ids = list(request.prompt.encode())
        assert self._face.batcher is not None
        self._face.batcher.submit(
            GenerateRequest(id=self._id, prompt_ids=ids, max_tokens=request.max_tokens, temperature=0.0)
        )

    def connection_lost(self, error: Exception | None) -> None:
        if self._face.owners.pop(self._id, None) is not None and self._face.batcher is not None:
            self._face.batcher.cancel(self._id)

    def deliver(self, event: TokenEvent) -> None:
        request = self._asked
        assert request is not None
        if event.finish is not None:
            del self._face.owners[self._id]
        if not request.stream:
            self._text += event.text
            if event.finish is not None:
                body = whole(self._text, request)
                self._transport.write(b"%b%d\r\n\r\n%b" % (_WHOLE, len(body), body))
            return
        piece = event_of(event.text)
        chunk = b"%x\r\n%b\r\n" % (len(piece), piece)
        if not self._began:
            self._began = True
            chunk = _STREAM + chunk
        if event.finish is not None:
            chunk += b"%x\r\n%b\r\n0\r\n\r\n" % (len(_LAST), _LAST)
        self._transport.write(chunk)


def main() -> None:
    """Argument: ``socket``, ``slots``, ``max_len``, ``step_ms``. Says the ``port`` of the HTTP face. A line of
    input with another ``step_ms`` is answered when it holds."""
    settings = argument()
    sys.setswitchinterval(0.001)
    engine = EchoEngine(slots=settings["slots"], max_len=settings["max_len"], step_ms=settings["step_ms"])
    engine.load()
    face = HttpFace()

    def emit(events: list[TokenEvent]) -> None:
        face.emit(events)
        plane.emit(events)

    batcher = Batcher(engine, load_tokenizer("echo", None), emit)
    face.batcher = batcher
    package = str(Path(workers.__file__).parent)
    welcome = Welcome(corewright_version(), package, settings["slots"], settings["max_len"], settings["max_len"], 257)
    plane = DataPlane(Path(settings["socket"]), welcome=welcome, token=TOKEN, epoch=EPOCH, batcher=batcher)
    plane.start()
    threading.Thread(target=batcher.run, daemon=True).start()
    say({"port": face.port})
    for line in sys.stdin:
        engine.step_ms = json.loads(line)["step_ms"]
        say({})


if __name__ == "__main__":
    main()
