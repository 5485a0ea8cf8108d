"""HTTP/1.1 for the gateway: one protocol object per connection, without a task per request.

docs/decisions/0001-http-server.md explains why no web framework is used: a token must not cost a task switch, and every
read and write needs a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, cast

from orchestrator.gateway.http.exchange import Exchange, Request
from orchestrator.gateway.http.request_reader import RequestReader
from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.errors import ApiError

if TYPE_CHECKING:
    from orchestrator.gateway.http.http_server import HttpServer

log = logging.getLogger(__name__)

MAX_QUEUED_REQUESTS = 64  # requests that wait on one connection
MAX_UNSENT_BYTES = 4 * 2**20  # of one connection, before another piece: only a client that does not read gets there
MIN_READ_BYTES = 2**18  # a client must read this much of a large answer before each deadline
MAX_REFUSED_CONNECTIONS = (
    32  # surplus connections that get an error at a time; each holds a file descriptor while it lingers
)
LINGER_S = 2.0  # a refused client may keep sending for this long, so that it reads the error
MAX_REQUEST_ID_BYTES = 128
_NEVER = math.inf


class HttpConnection(asyncio.Protocol):
    """One client's connection; its requests are answered in order, one at a time. As in other servers, a client that
    half-closes counts as gone."""

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.deadline = _NEVER  # monotonic
        self._reader = RequestReader(self)
        self._transport: asyncio.Transport | None = None
        self._current: Exchange | None = None
        self._queued: deque[Request | tuple[ApiError, str]] = deque()  # an error for the path is the last answer
        self._task: asyncio.Future[None] | None = None
        self._unsent = 0  # bytes that were unsent when the deadline was set
        self.key: str | None = None  # the id of the API key for which the server counts it
        self.client: Any = None  # the authenticated client, as the handler keeps it; None: not authenticated
        self._paused = False
        self._lingers = False  # the last answer is written
        self._starting = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.deadline = time.monotonic() + self.server.settings.read_s
        full = len(self.server.connections) >= self.server.max_connections
        full = full and not (self.server.evicts and self.server.evict())
        self.server.connections.add(self)
        if full and len(self.server.connections) > self.server.max_connections + MAX_REFUSED_CONNECTIONS:
            self._reader.stop()
            self._transport.abort()
        elif full:
            self.refuse(errors.too_many_connections(self.server.max_connections))

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        self._transport = None
        self._reader.close()
        self._queued.clear()
        if self.key is not None:
            self.server.count_for(self, None)
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

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)

    # For RequestReader

    @property
    def is_waiting(self) -> bool:
        """True while no request is being answered."""
        return self._current is None

    def begun(self) -> None:
        """Sets the deadline of a request whose first byte has arrived."""
        if self._current is None:
            self.deadline = time.monotonic() + self.server.settings.read_s

    def received(self, request: Request) -> None:
        """Answers a complete request, or queues it."""
        if self._current is None and not self._queued and not self._starting and not self._lingers:
            self._start(request)
            return
        queued = sum(len(item.body) for item in self._queued if isinstance(item, Request))
        if len(self._queued) >= MAX_QUEUED_REQUESTS or queued + len(request.body) > self.server.settings.max_body_bytes:
            self.abort()
            return
        self._queued.append(request)
        self._start_next()

    def refuse(self, error: ApiError) -> None:
        """Stops reading and answers with ``error``, after the answers that are under way."""
        if self._reader.stopped:
            return
        self._queued.append((error, self._reader.path))
        self._reader.stop()
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

    def expire(self, now: float) -> None:
        """Handles a deadline that has passed."""
        unsent = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if unsent and unsent <= self._unsent - MIN_READ_BYTES:  # the client keeps reading a large answer
            self._wait_for_reader(now)
            return
        if self._paused or self._lingers or self._transport is None or unsent:
            self.abort()
        elif self._reader.reading and self._current is None:
            self.refuse(errors.request_timeout(self.server.settings.read_s))
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
                if isinstance(item, Request):
                    self._start(item)
                    continue
                error, path = item
                unread = Request("GET", path, "", {}, b"", "1.1", False, time.monotonic())
                self._current = exchange = Exchange(unread, self, self.server.new_id())
                exchange.fail(error)
        finally:
            self._starting = False

    def _start(self, request: Request) -> None:
        self.deadline = self.deadline if self._paused else _NEVER
        if self.server.retiring:
            request.keep_alive = False
        client_id = request.headers.get(b"x-request-id")
        exchange = Exchange(request, self, _id_of(client_id) or self.server.new_id())
        self._current = exchange
        try:
            pending = self.server.handle(exchange)
        except Exception as error:  # noqa: BLE001 - logged there
            self._fail(exchange, error)
        else:
            if pending is not None:
                self._task = asyncio.ensure_future(self._finish_later(exchange, pending))

    async def _finish_later(self, exchange: Exchange, pending: Awaitable[None]) -> None:
        try:
            await pending
        except Exception as error:  # noqa: BLE001 - logged there
            self._fail(exchange, error)

    def _fail(self, exchange: Exchange, error: Exception) -> None:
        if isinstance(error, ApiError):
            exchange.fail(error)
            return
        log.exception("%s %s failed, request %s", exchange.request.method, exchange.request.path, exchange.id)
        if exchange.began:
            self.abort()  # an incomplete answer must not look like a complete one
        else:
            exchange.fail(errors.internal_error())

    def _linger(self) -> None:
        """Closes the connection after a delay in which further input is discarded: an immediate close would reset the
        connection, and the client might never read the answer."""
        transport = self._transport
        if transport is None:
            return
        self._reader.stop()
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
        """Sets the deadline by which the client must read the unsent bytes, or ``MIN_READ_BYTES`` of them."""
        self._unsent = 0 if self._transport is None else self._transport.get_write_buffer_size()
        self.deadline = now + self.server.settings.write_s

    def _set_deadline(self, now: float) -> None:
        if self._paused or self._lingers:
            return
        settings = self.server.settings
        if self._current is not None:
            self.deadline = _NEVER
        else:
            self.deadline = now + (settings.read_s if self._reader.reading else settings.idle_s)


def _id_of(header: bytes | None) -> str | None:
    """Returns a client's request id; None when a header or a log could not hold it."""
    if not header or len(header) > MAX_REQUEST_ID_BYTES:
        return None
    text = header.decode("latin-1")
    return text if text.isascii() and text.isprintable() else None
