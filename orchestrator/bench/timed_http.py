"""An HTTP/1.1 client for benchmarks, over httptools: no task per chunk, and timestamps taken as bytes arrive."""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

from orchestrator.bench.sse import EventReader

CONNECT_S = 10.0
clock = time.monotonic


@dataclass
class Answer:
    """A response. ``error`` is None for a complete one, whatever its status."""

    sent: float
    status: int = 0
    stream: bool = False  # whether it is a stream of server-sent events
    events: list[tuple[float, bytes]] = field(default_factory=list)  # of a stream: arrival time and data
    body: bytes = b""  # of any other response
    ended: float | None = None
    error: str | None = None  # `connect`, `timeout`, `broken` or `malformed`
    what: str = ""


@dataclass(frozen=True)
class Origin:
    """The address of a server."""

    host: str
    port: int
    tls: bool
    path: str  # before /v1, without a trailing slash

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Raises ValueError for an invalid URL."""
        parts = urlsplit(url)
        port = parts.port
        if parts.scheme not in ("http", "https") or not parts.hostname or any(ord(c) <= 32 for c in url):
            raise ValueError(f"{url!r} is not an http(s) URL")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, path)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.path}"


class Client:
    """A client of one origin with a pool of connections, as many as there are concurrent requests. Use it in one event
    loop."""

    def __init__(self, origin: Origin, key: str | None = None, address: str | None = None) -> None:
        """``address`` replaces the origin's host for the connection, but not for its certificate."""
        self.origin = origin
        self._address = address or origin.host
        lines = [f"Host: {origin.authority}", "User-Agent: corewright-bench", "Accept: */*"]
        if key:
            lines.append(f"Authorization: Bearer {key}")
        self._lines = "\r\n".join(lines)
        self._tls = ssl.create_default_context() if origin.tls else None
        self._idle: list[_Connection] = []

    async def ask(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Answer:
        """Sends one request and returns its response within ``timeout_s``. Never raises."""
        answer = Answer(clock())
        try:
            return await asyncio.wait_for(self._ask(method, path, body, answer), timeout_s)
        except asyncio.TimeoutError:  # not the builtin before Python 3.11
            answer.error, answer.what = "timeout", f"no complete response within {timeout_s:g} s"
        return answer

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _ask(self, method: str, path: str, body: bytes | None, answer: Answer) -> Answer:
        message = self._message(method, path, body)
        while True:
            reused = self._idle.pop() if self._idle else None
            try:
                connection = reused or await self._connect()
            except (OSError, UnicodeError, asyncio.TimeoutError) as error:  # UnicodeError: an invalid host name
                answer.error, answer.what = "connect", str(error) or f"no connection within {CONNECT_S:g} s"
                return answer
            try:
                await connection.exchange(message, answer)
            finally:
                if connection.usable:
                    self._idle.append(connection)
                else:
                    connection.close()
            if answer.error == "broken" and reused is not None and not answer.status:
                answer.error, answer.what = None, ""  # the server had closed an idle connection: retry
                continue
            return answer

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        name = self.origin.host if self._tls else None
        making = loop.create_connection(
            _Connection, self._address, self.origin.port, ssl=self._tls, server_hostname=name
        )
        _, connection = await asyncio.wait_for(making, CONNECT_S)
        return connection

    def _message(self, method: str, path: str, body: bytes | None) -> bytes:
        more = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        head = f"{method} {self.origin.path}{path} HTTP/1.1\r\n{self._lines}\r\n{more}\r\n"
        return head.encode() + (body or b"")


class _Connection(asyncio.Protocol):
    """One connection; one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._keeps = False
        self._framed = False
        self._at = 0.0

    async def exchange(self, message: bytes, answer: Answer) -> None:
        """Sends the request and waits for the complete response, or for the end of the connection."""
        self._keeps = False
        if self._transport is None or self._transport.is_closing():
            answer.error, answer.what = "broken", "the connection was closed"
            return
        self._parser = httptools.HttpResponseParser(self)
        self._reader = EventReader()
        self._answer, self._framed = answer, False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        try:
            await self._done
        finally:
            self._answer = self._done = None

    @property
    def usable(self) -> bool:
        return self._keeps and self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports are not subclasses

    def data_received(self, data: bytes) -> None:
        self._at = clock()
        if self._answer is None:
            self.close()  # an unsolicited response
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._end("malformed", f"invalid HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._keeps = False
        if self._answer is None:
            return
        if self._answer.status and not self._framed and error is None:
            self._at = clock()
            self._end(None, "")  # a message without a length ends with its connection
        else:
            self._end("broken", str(error) if error else "the connection was closed during the response")

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._answer is not None
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._framed = True
        elif name == b"content-type":
            self._answer.stream = value.lower().startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        assert self._answer is not None
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        answer = self._answer
        if answer is None:
            return
        if answer.stream:
            at = self._at
            for data in self._reader.feed(body):
                answer.events.append((at, data))
        else:
            answer.body += body

    def on_message_complete(self) -> None:
        assert self._answer is not None
        if 100 <= self._answer.status < 200:
            return
        self._keeps = self._parser.should_keep_alive()
        self._end(None, "")

    def _end(self, error: str | None, what: str) -> None:
        answer, done = self._answer, self._done
        if answer is None or done is None or done.done():
            return
        answer.error, answer.what = error, what
        answer.ended = self._at if error is None else clock()
        done.set_result(None)
