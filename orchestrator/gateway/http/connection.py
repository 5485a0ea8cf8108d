"""HTTP/1.1 for the gateway: one protocol object per connection, parsed by httptools, without a task per request.

docs/decisions/0001-http-server.md explains why no web framework is used: a token must not cost a task switch, and every
read and write needs a deadline.
"""

from __future__ import annotations

import asyncio
import email.utils
import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

import httptools

from orchestrator.gateway.http.exchange import Exchange, Request
from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.errors import ApiError

if TYPE_CHECKING:
    from orchestrator.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

MAX_PIPELINED = 64  # requests that wait on one connection
MAX_HEADERS = 100
LARGE_BYTES = 2**16  # a larger body is read only after its sender is authenticated
MAX_UNREAD_BYTES = 2**30  # of incomplete bodies, of all connections
MAX_UNSENT_BYTES = (
    4 * 2**20
)  # of one connection, before another piece: only a client that has stopped reading gets there
LEAST_READ_BYTES = 2**18  # a client must read this much of a large answer before each deadline
MOST_REFUSED = 32  # surplus connections that get an error at a time; each holds a file descriptor while it lingers
LINGER_S = 2.0  # a refused client may keep sending for this long, so that it reads the error
LONGEST_ID = 128
_NEVER = math.inf


Handler = Callable[[Exchange], Awaitable[None] | None]


class HttpServer:
    """The connections of one listener, their limits and their deadlines. One event loop."""

    def __init__(
        self,
        settings: GatewaySettings,
        handle: Handler,
        ended: Callable[[Exchange], None] = lambda exchange: None,
        early: Callable[[dict[bytes, bytes]], ApiError | None] = lambda headers: None,
        *,
        evicts: bool = False,
        body_of: Callable[[ApiError], Any] = lambda error: error.body(),
    ) -> None:
        """``handle`` answers a request, at once or by the awaitable that it returns, and raises ApiError to reject it.
        ``ended`` is called with every exchange that is over, answered or not. ``early`` may reject a request with a
        long body by its headers. With ``evicts``, a surplus connection replaces the oldest idle one for which
        ``handle`` has not set ``client``. ``body_of`` returns the JSON of an error."""
        self.settings = settings
        self.max_connections = settings.max_connections
        self.handle = handle
        self.ended = ended
        self.early = early
        self.evicts = evicts
        self.body_of = body_of
        self.unread_bytes = 0  # of incomplete bodies
        self.connections: set[HttpConnection] = set()
        self.per_key: Counter[str] = Counter()
        self.date = b""
        self.closing = False
        prefix = f"{time.time_ns():x}"[-10:]
        self.new_id: Callable[[], str] = map(f"{prefix}-%x".__mod__, itertools.count(1)).__next__
        self.sweep(time.monotonic())

    def sweep(self, now: float) -> None:
        """Ends connections that are past their deadline. To be called a few times a second."""
        self.date = b"date: %b\r\n" % email.utils.formatdate(usegmt=True).encode()
        for expired in [connection for connection in self.connections if connection.deadline <= now]:
            expired.expire(now)

    def evict(self) -> bool:
        """Closes one connection to make room for another; returns False when none may be closed."""
        idle = (connection for connection in self.connections if connection.client is None and connection.is_idle)
        oldest = min(idle, key=lambda connection: connection.deadline, default=None)
        if oldest is not None:
            self.connections.discard(oldest)
            oldest.abort()
        return oldest is not None

    def close(self) -> None:
        """Closes the connections without a request; the others close after their answer."""
        self.closing = True
        for connection in list(self.connections):
            connection.close_if_idle()

    def abort(self) -> None:
        for connection in list(self.connections):
            connection.abort()


class HttpConnection(asyncio.Protocol):
    """One client's connection; its requests are answered in order, one at a time."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_broken",
        "_current",
        "_head_bytes",
        "_headers",
        "_headers_size",
        "_in_head",
        "_key",
        "_lingers",
        "_parser",
        "_paused",
        "_progress",
        "_queued",
        "_reading",
        "_starting",
        "_task",
        "_transport",
        "_unsent",
        "_url",
        "client",
        "deadline",
        "server",
    )

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.deadline = _NEVER  # monotonic
        self._parser: Any = None
        self._transport: asyncio.Transport | None = None
        self._current: Exchange | None = None
        self._queued: deque[Request | ApiError] = deque()
        self._task: asyncio.Future[None] | None = None
        self._unsent = 0  # bytes that were unsent when the deadline was set
        self._key: str | None = None
        self.client: Any = None  # the authenticated client, as the handler keeps it; None: not authenticated
        self._paused = False
        self._reading = False  # a request has begun and is incomplete
        self._in_head = True
        self._broken = False  # nothing more is read
        self._lingers = False  # the last answer is written
        self._starting = False
        self._head_bytes = 0  # since the last complete head, piece of a body or end
        self._progress = 0  # complete heads, pieces of bodies and ends
        self._body_bytes = 0
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._headers_size = 0
        self._body: bytes | bytearray = b""

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)
        self.deadline = time.monotonic() + self.server.settings.read_s
        full = len(self.server.connections) >= self.server.max_connections
        full = full and not (self.server.evicts and self.server.evict())
        self.server.connections.add(self)
        if full and len(self.server.connections) > self.server.max_connections + MOST_REFUSED:
            self._broken = True
            self._transport.abort()
        elif full:
            self._refuse(errors.too_many_connections(self.server.max_connections))

    def data_received(self, data: bytes) -> None:
        if self._broken:
            return
        progress = self._progress
        while data:
            try:
                self._parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as error:
                data = self._without_upgrade(data[error.args[0] :])
            except httptools.HttpParserError as error:
                self._refuse(errors.not_http(str(error)))
                break
        if self._broken:
            return
        if self._progress == progress:  # only a piece of a head, or of trailers
            self._head_bytes += len(data)
            if self._head_bytes > self.server.settings.max_header_bytes:
                self._refuse(errors.headers_too_large(self.server.settings.max_header_bytes))
        else:
            self._head_bytes = 0

    def eof_received(self) -> None:
        """Closes the connection: as in other servers, a client that half-closes counts as gone."""

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        self._transport = None
        self._parser = None
        self._broken = True
        self._queued.clear()
        self._drop_body()
        self.count_for(None)
        if self._task is not None:
            self._task.cancel()
        if self._current is not None:
            exchange, self._current = self._current, None
            exchange.gone()
            self.server.ended(exchange)

    def pause_writing(self) -> None:
        self._paused = True
        self._wait_for_reader(time.monotonic())

    def resume_writing(self) -> None:
        self._paused = False
        self._set_deadline(time.monotonic())

    # httptools

    def on_message_begin(self) -> None:
        if self._broken:
            return
        self._reading = True
        self._in_head = True
        self._url = b""
        self._headers = {}
        self._headers_size = 0
        if self._body_bytes:
            self._drop_body()
        if self._current is None:
            self.deadline = time.monotonic() + self.server.settings.read_s

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer must not change the head
        name, headers = name.lower(), self._headers
        self._headers_size += len(name) + len(value)
        if name in headers:  # joined as in RFC 9110: two keys or two encodings become one that is unknown
            value = headers[name] + b", " + value
        headers[name] = value

    def on_headers_complete(self) -> None:
        if self._broken:
            return
        settings, headers = self.server.settings, self._headers
        self._in_head = False
        self._progress += 1
        if self._headers_size + len(self._url) > settings.max_header_bytes or len(headers) > MAX_HEADERS:
            self._refuse(errors.headers_too_large(settings.max_header_bytes))
            return
        host = headers.get(b"host")
        if b"," in host if host is not None else self._parser.get_http_version() == "1.1":
            self._refuse(errors.not_http("exactly one Host header is required"))  # RFC 9112, 3.2; two are joined above
            return
        size, encoding = int(headers.get(b"content-length") or 0), headers.get(b"transfer-encoding")
        if encoding is not None and (encoding.lower() != b"chunked" or self._parser.get_http_version() != "1.1"):
            self._refuse(errors.unknown_encoding("transfer-encoding", encoding.lower()))
        elif b"content-encoding" in headers and headers[b"content-encoding"].lower() != b"identity":
            self._refuse(errors.unknown_encoding("content-encoding", headers[b"content-encoding"]))
        elif size > settings.max_body_bytes:
            self._refuse(errors.body_too_large(settings.max_body_bytes))
        elif (size > LARGE_BYTES or encoding is not None) and (error := self.server.early(headers)):
            self._refuse(error)
        elif b"expect" in headers and headers[b"expect"].lower() == b"100-continue" and self._current is None:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        if self._broken:
            return
        self._body_bytes += len(body)
        self._progress += 1
        server = self.server
        server.unread_bytes += len(body)
        if self._body_bytes > server.settings.max_body_bytes:
            self._refuse(errors.body_too_large(server.settings.max_body_bytes))
        elif server.unread_bytes > MAX_UNREAD_BYTES:
            self._refuse(errors.too_many_bodies())
        elif not self._body:
            self._body = body
        else:  # one buffer: a list of small pieces would take more memory than their bytes
            if type(self._body) is bytes:
                self._body = bytearray(self._body)
            self._body += body

    def on_message_complete(self) -> None:
        self._reading = False
        self._in_head = True
        self._progress += 1
        parser = self._parser
        if self._broken or parser.should_upgrade():  # the body is still to be read, see _without_upgrade
            return
        path, _, query = self._url.partition(b"?")
        if not path.startswith(b"/") and path != b"*":
            path = _path_of(path)
        try:
            request = Request(
                parser.get_method().decode("ascii"),
                path.decode("ascii"),
                query.decode("ascii"),
                self._headers,
                bytes(self._body),
                parser.get_http_version(),
                parser.should_keep_alive(),
                time.monotonic(),
            )
        except UnicodeDecodeError:
            self._refuse(errors.not_http("the target is not ASCII"))
            return
        self._headers = {}
        self._drop_body()
        if self._current is None and not self._queued and not self._starting and not self._lingers:
            self._start(request)
            return
        queued = sum(len(item.body) for item in self._queued if isinstance(item, Request))
        if len(self._queued) >= MAX_PIPELINED or queued + len(request.body) > self.server.settings.max_body_bytes:
            self.abort()
            return
        self._queued.append(request)
        self._start_next()

    # For Exchange and the server

    def write(self, data: bytes) -> None:
        transport = self._transport
        if transport is None:
            return
        if self._paused and transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.abort()
        else:
            transport.write(data)

    def write_large(self, parts: list[bytes]) -> None:
        """Writes the body of a complete answer, as fast as the client reads it."""
        if self._transport is not None:
            self._transport.writelines(parts)

    def finished(self, exchange: Exchange) -> None:
        """Continues with the next request after an answer is written."""
        if exchange is not self._current:
            return
        self._current = None
        self._task = None
        self.server.ended(exchange)
        if not exchange.request.keep_alive or self.server.closing:
            self._linger()
        elif self._queued:
            self._start_next()
        else:
            self._set_deadline(time.monotonic())

    def count_for(self, key: str | None) -> int:
        """Counts this connection for the key, and returns the key's connections."""
        counts = self.server.per_key
        if key != self._key:
            if self._key is not None:
                counts[self._key] -= 1
                if counts[self._key] <= 0:
                    del counts[self._key]
            if key is not None:
                counts[key] += 1
            self._key = key
        return counts[key] if key is not None else 0

    def expire(self, now: float) -> None:
        """Handles a deadline that has passed."""
        unsent = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if unsent and unsent <= self._unsent - LEAST_READ_BYTES:  # the client keeps reading a large answer
            self._wait_for_reader(now)
            return
        if self._paused or self._lingers or self._transport is None or unsent:
            self.abort()
        elif self._reading and self._current is None:
            self._refuse(errors.request_timeout(self.server.settings.read_s))
            return
        elif self._current is None:
            self._transport.close()
        self.deadline = now + self.server.settings.write_s if self._transport is not None else _NEVER

    @property
    def is_idle(self) -> bool:
        """True while the connection has no complete request."""
        return self._current is None and not self._queued and self._transport is not None

    def close_if_idle(self) -> None:
        if self.is_idle and self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # Inside

    def _start_next(self) -> None:
        if self._starting:
            return  # it is on the stack already: requests that are answered at once must not recurse
        self._starting = True
        try:
            while self._queued and self._current is None and self._transport is not None and not self._lingers:
                item = self._queued.popleft()
                if isinstance(item, ApiError):
                    self._answer_and_close(item)
                else:
                    self._start(item)
        finally:
            self._starting = False

    def _start(self, request: Request) -> None:
        self.deadline = self.deadline if self._paused else _NEVER
        client_id = request.headers.get(b"x-request-id")
        exchange = Exchange(request, self, _id_of(client_id) or self.server.new_id())
        self._current = exchange
        try:
            pending = self.server.handle(exchange)
        except ApiError as error:
            exchange.fail(error)
        except Exception:  # noqa: BLE001 - logged there
            self._failed(exchange)
        else:
            if pending is not None:
                self._task = asyncio.ensure_future(self._finish_later(exchange, pending))

    async def _finish_later(self, exchange: Exchange, pending: Awaitable[None]) -> None:
        try:
            await pending
        except ApiError as error:
            exchange.fail(error)
        except Exception:  # noqa: BLE001 - logged there
            self._failed(exchange)

    def _without_upgrade(self, body: bytes) -> bytes:
        """Returns the request without its offer of another protocol, to be parsed again: Java's client sends such an
        offer with every request, and httptools stops before the ``body`` of one. The answer is HTTP/1.1."""
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._refuse(errors.method_not_allowed("CONNECT", "the target of a proxy", ""))
            return b""
        offer = (b"connection", b"upgrade", b"http2-settings")
        closes = b"close" in self._headers.get(b"connection", b"").lower().replace(b" ", b"").split(b",")
        fields = [b"connection: close\r\n"] if closes else []
        fields += [b"%b: %b\r\n" % (name, value) for name, value in self._headers.items() if name not in offer]
        version = self._parser.get_http_version().encode()
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._url, version, b"".join(fields))
        self._parser = httptools.HttpRequestParser(self)
        return head + body

    def _failed(self, exchange: Exchange) -> None:
        log.exception("%s %s failed, request %s", exchange.request.method, exchange.request.path, exchange.id)
        if exchange.began:
            self.abort()  # an incomplete answer must not look like a complete one
        else:
            exchange.fail(errors.internal_error())

    def _refuse(self, error: ApiError) -> None:
        """Stops reading and answers with ``error``, after the answers that are under way."""
        if self._broken:
            return
        self._broken = True
        self._reading = False
        self._drop_body()
        self._queued.append(error)
        self._start_next()

    def _drop_body(self) -> None:
        self.server.unread_bytes -= self._body_bytes
        self._body_bytes = 0
        self._body = b""

    def _answer_and_close(self, error: ApiError) -> None:
        request = Request("GET", "", "", {}, b"", "1.1", False, time.monotonic())
        self._current = exchange = Exchange(request, self, self.server.new_id())
        exchange.fail(error)

    def _linger(self) -> None:
        """Closes the connection after a delay in which further input is discarded: an immediate close would reset the
        connection, and the client might never read the answer."""
        transport = self._transport
        if transport is None:
            return
        self._broken = True
        self._lingers = True
        self._queued.clear()
        if transport.get_write_buffer_size():
            self._wait_for_reader(time.monotonic())
        else:
            self.deadline = time.monotonic() + LINGER_S
        if transport.can_write_eof():
            transport.write_eof()
        else:
            transport.close()

    def _wait_for_reader(self, now: float) -> None:
        """Sets the deadline by which the client must read the unsent bytes, or ``LEAST_READ_BYTES`` of them."""
        self._unsent = 0 if self._transport is None else self._transport.get_write_buffer_size()
        self.deadline = now + self.server.settings.write_s

    def _set_deadline(self, now: float) -> None:
        if self._paused or self._lingers:
            return
        settings = self.server.settings
        if self._current is not None:
            self.deadline = _NEVER
        else:
            self.deadline = now + (settings.read_s if self._reading else settings.idle_s)


def _id_of(header: bytes | None) -> str | None:
    """Returns a client's request id; None when a header or a log could not hold it."""
    if not header or len(header) > LONGEST_ID:
        return None
    text = header.decode("latin-1")
    return text if text.isascii() and text.isprintable() else None


def _path_of(target: bytes) -> bytes:
    """Returns the path of a target in absolute form, as sent to a proxy."""
    try:
        return httptools.parse_url(target).path or b"/"
    except httptools.HttpParserInvalidURLError:
        return target
