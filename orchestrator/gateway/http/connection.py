"""HTTP/1.1 for the gateway: one protocol object for each connection, parsed by httptools, and no task for a request.

Why not a web framework stands in docs/decisions/0001-http-server.md: a token must cost no task switch, and every read
and write needs a deadline.
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

MAX_PIPELINED = 64  # requests that wait for their turn on one connection
MAX_HEADERS = 100
LARGE_BYTES = 2**16  # a body above this is not read before it is known who sends it
MAX_UNREAD_BYTES = 2**30  # of bodies that are not whole, of all connections
MAX_UNSENT_BYTES = 4 * 2**20  # of one connection, before a further piece: only who has stopped reading gets there
LEAST_READ_BYTES = 2**18  # of an answer that is larger, before each deadline
MOST_REFUSED = (
    32  # connections too many that are told so at a time; each is a file descriptor for as long as it lingers
)
LINGER_S = 2.0  # a refused client may go on sending for so long, so that it reads why
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
        """``handle`` answers a request, at once or by what it returns; it raises ApiError for a refusal. ``ended`` is
        told of every exchange that is over, answered or not; ``early`` may refuse by its headers one whose body is
        long. With ``evicts`` a connection too many is not refused where another one can be closed for it: the oldest
        that is without a request and that ``handle`` has not marked as ``known``. ``body_of`` gives the JSON of a
        refusal."""
        self.settings = settings
        self.max_connections = settings.max_connections
        self.handle = handle
        self.ended = ended
        self.early = early
        self.evicts = evicts
        self.body_of = body_of
        self.unread_bytes = 0  # of bodies that are not whole
        self.connections: set[HttpConnection] = set()
        self.per_key: Counter[str] = Counter()
        self.date = b""
        self.closing = False
        prefix = f"{time.time_ns():x}"[-10:]
        self.new_id: Callable[[], str] = map(f"{prefix}-%x".__mod__, itertools.count(1)).__next__
        self.sweep(time.monotonic())

    def sweep(self, now: float) -> None:
        """End what is past its deadline. To be called a few times a second."""
        self.date = b"date: %b\r\n" % email.utils.formatdate(usegmt=True).encode()
        for connection in [found for found in self.connections if found.deadline <= now]:
            connection.expire(now)

    def evict(self) -> bool:
        """Close one connection in favour of another; False where there is none to be closed."""
        idle = (found for found in self.connections if found.known is None and found.is_idle)
        oldest = min(idle, key=lambda found: found.deadline, default=None)
        if oldest is not None:
            self.connections.discard(oldest)
            oldest.abort()
        return oldest is not None

    def close(self) -> None:
        """End the connections without a request; the others end with their answer."""
        self.closing = True
        for connection in list(self.connections):
            connection.close_if_idle()

    def abort(self) -> None:
        for connection in list(self.connections):
            connection.abort()


class HttpConnection(asyncio.Protocol):
    """One client's connection: requests are answered one after the other, in their order."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_broken",
        "_current",
        "_head_bytes",
        "_headers",
        "_headers_size",
        "_heard",
        "_in_head",
        "_key",
        "_lingers",
        "_parser",
        "_paused",
        "_queued",
        "_reading",
        "_starting",
        "_task",
        "_transport",
        "_unsent",
        "_url",
        "deadline",
        "known",
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
        self._unsent = 0  # bytes, when the deadline for reading them was set
        self._key: str | None = None
        self.known: Any = None  # what the gate remembers of who it is
        self._paused = False
        self._reading = False  # a request has begun and is not complete
        self._in_head = True
        self._broken = False  # nothing more is read
        self._lingers = False  # the last answer is written
        self._starting = False
        self._head_bytes = 0  # since there was more than heads
        self._heard = 0  # heads, pieces of bodies and ends
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
        heard = self._heard
        while data:
            try:
                self._parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as error:
                data = self._without_offer(data[error.args[0] :])
            except httptools.HttpParserError as error:
                self._refuse(errors.not_http(str(error)))
                break
        if self._broken:
            return
        if self._heard == heard:  # no more than a piece of a head, or of trailers
            self._head_bytes += len(data)
            if self._head_bytes > self.server.settings.max_header_bytes:
                self._refuse(errors.headers_too_large(self.server.settings.max_header_bytes))
        else:
            self._head_bytes = 0

    def eof_received(self) -> None:
        """A client that will send nothing more is taken to be gone, as by other servers: the connection is closed."""

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
        self._drop_body()
        if self._current is None:
            self.deadline = time.monotonic() + self.server.settings.read_s

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer, which must not change what the head has said
        name = name.lower()
        self._headers_size += len(name) + len(value)
        if name in self._headers:  # joined, as RFC 9110 has it: two keys or two encodings are then none that is known
            value = self._headers[name] + b", " + value
        self._headers[name] = value

    def on_headers_complete(self) -> None:
        if self._broken:
            return
        settings, headers = self.server.settings, self._headers
        self._in_head = False
        self._heard += 1
        if self._headers_size + len(self._url) > settings.max_header_bytes or len(headers) > MAX_HEADERS:
            self._refuse(errors.headers_too_large(settings.max_header_bytes))
            return
        host = headers.get(b"host")
        if b"," in host if host is not None else self._parser.get_http_version() == "1.1":
            self._refuse(errors.not_http("it needs one Host header"))  # RFC 9112, 3.2; two are joined by a comma
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
        self._heard += 1
        server = self.server
        server.unread_bytes += len(body)
        if self._body_bytes > server.settings.max_body_bytes:
            self._refuse(errors.body_too_large(server.settings.max_body_bytes))
        elif server.unread_bytes > MAX_UNREAD_BYTES:
            self._refuse(errors.too_much_at_once())
        elif not self._body:
            self._body = body
        else:  # in one piece: of small ones each would take more memory than it holds
            if type(self._body) is bytes:
                self._body = bytearray(self._body)
            self._body += body

    def on_message_complete(self) -> None:
        self._reading = False
        self._in_head = True
        self._heard += 1
        parser = self._parser
        if self._broken or parser.should_upgrade():  # then the body is yet to be read, see _without_offer
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
        """The body of an answer that is whole, which is written as fast as the client reads it."""
        if self._transport is not None:
            self._transport.writelines(parts)

    def finished(self, exchange: Exchange) -> None:
        """The answer is written: go on with the next request."""
        if exchange is not self._current:
            return
        self._current = None
        self._task = None
        self.server.ended(exchange)
        if not exchange.request.keep_alive or self.server.closing:
            self._say_goodbye()
        elif self._queued:
            self._start_next()
        else:
            self._set_deadline(time.monotonic())

    def count_for(self, key: str | None) -> int:
        """Count this connection as one of the key's; gives how many the key has."""
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
        """Its deadline has passed."""
        unsent = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if unsent and unsent <= self._unsent - LEAST_READ_BYTES:  # a large answer, which its client goes on reading
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
        """Whether it has no request that is complete."""
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
            return  # it is below us on the stack: requests that are answered at once must not pile up there
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
        given = request.headers.get(b"x-request-id")
        exchange = Exchange(request, self, _id_of(given) or self.server.new_id())
        self._current = exchange
        try:
            later = self.server.handle(exchange)
        except ApiError as error:
            exchange.fail(error)
        except Exception:  # noqa: BLE001 - logged there
            self._failed(exchange)
        else:
            if later is not None:
                self._task = asyncio.ensure_future(self._finish_later(exchange, later))

    async def _finish_later(self, exchange: Exchange, later: Awaitable[None]) -> None:
        try:
            await later
        except ApiError as error:
            exchange.fail(error)
        except Exception:  # noqa: BLE001 - logged there
            self._failed(exchange)

    def _without_offer(self, rest: bytes) -> bytes:
        """A client that offers another protocol, as Java's does with every request, is answered in this one. The parser
        has left out the body; it is to read the request, which this gives, again without the offer."""
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._refuse(errors.method_not_allowed("CONNECT", "a proxy's target", "nothing"))
            return b""
        offer = (b"connection", b"upgrade", b"http2-settings")
        closes = b"close" in self._headers.get(b"connection", b"").lower().replace(b" ", b"").split(b",")
        fields = [b"connection: close\r\n"] if closes else []
        fields += [b"%b: %b\r\n" % (name, value) for name, value in self._headers.items() if name not in offer]
        version = self._parser.get_http_version().encode()
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._url, version, b"".join(fields))
        self._parser = httptools.HttpRequestParser(self)
        return head + rest

    def _failed(self, exchange: Exchange) -> None:
        log.exception("%s %s failed, request %s", exchange.request.method, exchange.request.path, exchange.id)
        if exchange.began:
            self.abort()  # a half-written answer must not look like a whole one
        else:
            exchange.fail(errors.our_fault())

    def _refuse(self, error: ApiError) -> None:
        """What comes is no request that we read. Answers that are under way go first."""
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

    def _say_goodbye(self) -> None:
        """Close after a while, in which what the client still sends is thrown away: a close at once would reset the
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
        """What is unsent is to be read by the next deadline, or ``LEAST_READ_BYTES`` of it."""
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


def _id_of(given: bytes | None) -> str | None:
    """A client's name for its request, if it is one that a header and a log can hold."""
    if not given or len(given) > LONGEST_ID:
        return None
    text = given.decode("latin-1")
    return text if text.isascii() and text.isprintable() else None


def _path_of(target: bytes) -> bytes:
    """The path of a target in absolute form, as to a proxy."""
    try:
        return httptools.parse_url(target).path or b"/"
    except httptools.HttpParserInvalidURLError:
        return target
