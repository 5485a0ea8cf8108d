"""The replica's end of the data plane: a unix socket server in front of a batcher.

Its event loop runs on a thread of its own, so that neither an engine step nor a Ray call delays a frame.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hmac
import logging
import os
import threading
from collections import defaultdict
from pathlib import Path
from typing import Protocol

from workers.batcher import BatcherClosed
from workers.requests import FinishReason, GenerateRequest, TokenEvent
from workers.wire import Cancel, FrameReader, Hello, Message, Refused, Step, Submit, Welcome, WireError, encode

log = logging.getLogger(__name__)

MAX_UNREAD_BYTES = 16 * 2**20  # a gateway that leaves this much unread is hung; it is disconnected
FLUSH_S = 5.0  # for the last tokens of a drained replica to be on their way
FLUSH_POLL_S = 0.005


class Requests(Protocol):
    """The two calls that a connection makes of the batcher. Both may be called from any thread."""

    def submit(self, request: GenerateRequest) -> None:
        """Raises ValueError when the request cannot be served, BatcherClosed when none is taken any more."""
        ...

    def cancel(self, id: str) -> None: ...


class DataPlane:
    """Serves ``batcher`` on the socket at ``path`` to whoever knows the token and the epoch."""

    def __init__(self, path: Path, *, welcome: Welcome, token: str, epoch: int, batcher: Requests) -> None:
        self._path = path
        self._welcome = welcome
        self._token = token
        self._epoch = epoch
        self._batcher = batcher
        self._owners: dict[str, _Connection] = {}  # request id -> who asked; the loop's thread only
        self._connections: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="data-plane", daemon=True)
        self._server: asyncio.AbstractServer | None = None

    def start(self) -> None:
        """Listen; returns when connections are accepted. Raises OSError when the socket cannot be made."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path.unlink(missing_ok=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    def emit(self, events: list[TokenEvent]) -> None:
        """Send the events of one engine step, one frame for each connection. Called from the batcher's thread."""
        if events:
            with contextlib.suppress(RuntimeError):  # closed meanwhile: nobody is connected any more
                self._loop.call_soon_threadsafe(self._send, events)

    def flush(self, deadline_s: float = FLUSH_S) -> bool:
        """Wait until the kernel has all that was emitted: then it outlives this process. False at the deadline."""
        try:
            asyncio.run_coroutine_threadsafe(self._flushed(), self._loop).result(deadline_s)
        except (TimeoutError, concurrent.futures.TimeoutError, RuntimeError):  # or closed meanwhile
            return False
        return True

    async def _flushed(self) -> None:
        while any(connection.unsent for connection in self._connections):  # noqa: ASYNC110
            await asyncio.sleep(FLUSH_POLL_S)

    def close(self) -> None:
        """Disconnect everyone and stop the thread."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _listen(self) -> None:
        previous = os.umask(0o177)
        try:
            self._server = await self._loop.create_unix_server(lambda: _Connection(self), str(self._path))
        finally:
            os.umask(previous)

    async def _shut(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.abort()

    def _send(self, events: list[TokenEvent]) -> None:
        by_connection: dict[_Connection, list[TokenEvent]] = defaultdict(list)
        for event in events:
            connection = self._owners.get(event.id)
            if connection is not None:
                by_connection[connection].append(event)
                if event.finish is not None:
                    del self._owners[event.id]
        for connection, own in by_connection.items():
            connection.write(Step(own))

    # What a connection calls, on the loop's thread.

    def _greet(self, hello: Hello) -> Welcome | Refused:
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            return Refused("wrong token")
        if hello.epoch != self._epoch:
            return Refused(f"this is epoch {self._epoch}, not {hello.epoch}")
        return self._welcome

    def _submit(self, connection: _Connection, request: GenerateRequest) -> None:
        if request.id in self._owners:  # its stream is somebody's already
            connection.write(Step([TokenEvent(id=request.id, finish=FinishReason.ERROR, error="duplicate request id")]))
            return
        self._owners[request.id] = connection  # before the submit: its first event may come at once
        try:
            self._batcher.submit(request)
        except BatcherClosed as error:
            self._send([TokenEvent(id=request.id, finish=FinishReason.REFUSED, error=str(error))])
        except ValueError as error:
            self._send([TokenEvent(id=request.id, finish=FinishReason.INVALID, error=str(error))])
        except Exception as error:  # one request must not end the connection that all share
            log.exception("a request could not be accepted")
            what = f"{type(error).__name__}: {error}"
            self._send([TokenEvent(id=request.id, finish=FinishReason.ERROR, error=what)])

    def _forget(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        for id in [id for id, owner in self._owners.items() if owner is connection]:
            del self._owners[id]
            self._batcher.cancel(id)


class _Connection(asyncio.Protocol):
    """One gateway."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._greeted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._plane._connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._receive(message)
        except WireError as error:
            log.warning("a gateway is disconnected: %s", error)
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._plane._forget(self)

    def write(self, message: Message) -> None:
        if self._transport is None:
            return
        self._transport.write(encode(message))
        if self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            log.warning("a gateway is disconnected: it left more than %d bytes unread", MAX_UNREAD_BYTES)
            self.abort()

    @property
    def unsent(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _receive(self, message: Message) -> None:
        if not self._greeted:
            if not isinstance(message, Hello):
                raise WireError(f"{type(message).__name__} before Hello")
            answer = self._plane._greet(message)
            self.write(answer)
            if isinstance(answer, Refused):
                assert self._transport is not None
                self._transport.close()
            self._greeted = isinstance(answer, Welcome)
        elif isinstance(message, Submit):
            self._plane._submit(self, message.request)
        elif isinstance(message, Cancel):
            self._plane._batcher.cancel(message.id)
        else:
            raise WireError(f"a gateway does not send {type(message).__name__}")
