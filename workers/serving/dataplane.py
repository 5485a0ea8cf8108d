"""The replica's data-plane server: a unix socket for gateways of the same host, TCP with TLS for those of other hosts.

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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast
from urllib.parse import urlsplit

from workers.batching.step_loop import BatcherClosed
from workers.messages.credentials import Credentials, server_context
from workers.messages.requests import FinishReason, GenerateRequest, InvalidField, TokenEvent
from workers.messages.wire import (
    REPLICA_S,
    Cancel,
    FrameReader,
    Hello,
    Message,
    Refused,
    Room,
    Step,
    Submit,
    Taken,
    Welcome,
    WireError,
    encode,
    mismatch,
    watch_link,
)

log = logging.getLogger(__name__)

UNREAD_CHECK_S = 10.0  # between two checks of a gateway that leaves data unread
UNREAD_CHECKS = 3  # checks in a row without a byte read before a gateway is disconnected; one may follow a freeze
HELD_TOKENS = 1024  # buffered for a client that reads only the end of an answer: no message may become large
HELD_LOGPROBS = 16  # likewise, tokens with logprobs, at up to 2 KB each
FLUSH_S = 5.0  # for sending the last tokens of a drained replica
FLUSH_POLL_S = 0.005
GRANT_S = 0.05  # for a gateway to use a slot that `Room` granted
PATH_POLL_S = 1.0  # between two checks that the socket's path still exists
TLS_SCHEME = "tls"
HANDSHAKE_S = 5.0  # of TLS; a peer that takes longer is disconnected


class RequestTable(Protocol):
    """The batcher's methods that connections call. Both may be called from any thread."""

    def submit(self, request: GenerateRequest) -> None:
        """Raises ValueError when the request cannot be served, BatcherClosed when no requests are accepted."""
        ...

    def cancel(self, id: str) -> None: ...


class DataPlane:
    """Serves ``batcher`` at ``address`` to gateways that have the token and the epoch."""

    def __init__(
        self,
        path: Path | None,
        *,
        welcome: Welcome,
        token: str,
        epoch: int,
        batcher: RequestTable,
        listen: str = "",
        credentials: Credentials | None = None,
        taken: Callable[[str, int], None] = lambda id, count: None,
    ) -> None:
        """Listens on the unix socket at ``path``, if there is one, and on TCP by ``listen``, such as
        `tls://192.0.2.7:0`: port 0 is any free one, and peers must authenticate as a gateway by ``credentials``.
        ``taken`` is called with the bytes of a forwarded answer that its gateway has read."""
        self.address = ""  # of TCP, known once it listens there
        self._path = path
        self._listen_on = listen
        self._credentials = credentials
        self._welcome = welcome
        self._token = token
        self._epoch = epoch
        self._batcher = batcher
        self._taken = taken
        self._active: dict[str, _ActiveRequest] = {}  # by request id; the loop's thread only
        self._busy: dict[_Connection, None] = {}  # in the order of their BUSY replies
        self._grants: dict[_Connection, asyncio.TimerHandle] = {}  # one slot each, for GRANT_S
        self._connections: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="data-plane", daemon=True)
        self._server: asyncio.Server | None = None
        self._tcp_server: asyncio.Server | None = None
        self._path_watch: asyncio.Task[None] | None = None
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="schemas")  # starts its thread at the first schema

    def start(self) -> None:
        """Start to listen; returns when connections are accepted. Raises OSError when the socket cannot be created."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    def emit(self, events: list[TokenEvent]) -> None:
        """Send the events of one engine step, one frame for each connection. Called from the batcher's thread."""
        if events:
            with contextlib.suppress(RuntimeError):  # closed meanwhile: no connections are left
                self._loop.call_soon_threadsafe(self._send, events)

    def flush(self, deadline_s: float = FLUSH_S) -> bool:
        """Wait until the kernel has all emitted data: then it outlives this process. Returns False at the deadline."""
        try:
            asyncio.run_coroutine_threadsafe(self._wait_until_sent(), self._loop).result(deadline_s)
        except (TimeoutError, concurrent.futures.TimeoutError, RuntimeError):  # or closed meanwhile
            return False
        return True

    async def _wait_until_sent(self) -> None:
        while any(connection.unsent for connection in self._connections):  # noqa: ASYNC110
            await asyncio.sleep(FLUSH_POLL_S)

    def close(self) -> None:
        """Close all connections and stop the thread."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _listen(self) -> None:
        if self._listen_on:
            await self._listen_on_tcp()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            await self._listen_at(self._path)
            self._path_watch = self._loop.create_task(self._watch_path(self._path))

    async def _listen_at(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        before = self._server
        mask = os.umask(0o177)
        try:
            self._server = await self._loop.create_unix_server(lambda: _Connection(self), str(path))
        finally:
            os.umask(mask)
        if before is not None:
            before.close()  # its path is gone; its connections stay

    async def _watch_path(self, path: Path) -> None:
        """Listen again when the socket's path disappears: cleaners of temporary folders remove old files."""
        failed = False
        while True:
            await asyncio.sleep(PATH_POLL_S)
            if path.exists():
                continue
            try:
                await self._listen_at(path)
                log.warning("the socket %s was removed: listening there again", path)
                failed = False
            except OSError as error:
                if not failed:
                    log.error("the socket %s was removed and cannot be created again: %s", path, error)
                failed = True

    async def _listen_on_tcp(self) -> None:
        parts = urlsplit(self._listen_on)
        if parts.scheme != TLS_SCHEME or parts.port is None or self._credentials is None:
            raise OSError(f"cannot listen on {self._listen_on}: not a TLS address, or no credentials")
        self._tcp_server = await self._loop.create_server(
            lambda: _Connection(self, watched=True),
            parts.hostname,
            parts.port,
            ssl=server_context(self._credentials),
            ssl_handshake_timeout=HANDSHAKE_S,
        )
        host, port = self._tcp_server.sockets[0].getsockname()[:2]
        self.address = f"{TLS_SCHEME}://[{host}]:{port}" if ":" in host else f"{TLS_SCHEME}://{host}:{port}"

    async def _shut(self) -> None:
        if self._path_watch is not None:
            self._path_watch.cancel()
        for server in (self._server, self._tcp_server):
            if server is not None:
                server.close()
        for connection in list(self._connections):
            connection.abort()

    def _send(self, events: list[TokenEvent]) -> None:
        by_connection: dict[_Connection, list[TokenEvent]] = defaultdict(list)
        for event in events:
            active = self._active.get(event.id)
            if active is None:
                continue
            if event.finish is not None:
                del self._active[event.id]
            if event.prompt_logprobs:  # large: a message of its own each, so that no read takes a gateway long
                self._write(active.connection, [event])
            elif (ready := active.ready(event)) is not None:
                by_connection[active.connection].append(ready)
        for connection, own in by_connection.items():
            self._write(connection, own)
        if self._busy:  # a request has ended, or its answer could not be sent
            self._grant_room()

    def _write(self, connection: _Connection, events: list[TokenEvent]) -> None:
        """Write a step. If it cannot be encoded, only the request at fault ends, with an error."""
        try:
            connection.write(Step(events))
        except (WireError, UnicodeError, OverflowError) as error:
            if len(events) > 1:
                for event in events:
                    self._write(connection, [event])
                return
            id = events[0].id
            log.error("the answer to %s cannot be sent: %s", id, error)
            self._batcher.cancel(id)
            self._active.pop(id, None)
            message = "part of the answer is too large to send, or is not valid text"
            connection.write(Step([TokenEvent(id=id, finish=FinishReason.ERROR, error=message)]))

    def _grant_room(self) -> None:
        """Grant free slots to the gateways that got BUSY, in turn: otherwise one that already has slots would always be
        faster."""
        while self._busy and len(self._active) + len(self._grants) < self._welcome.slots:
            connection = next(iter(self._busy))
            del self._busy[connection]
            self._grants[connection] = self._loop.call_later(GRANT_S, self._revoke, connection)
            connection.write(Room(1))

    def _revoke(self, connection: _Connection) -> None:
        """Release a granted slot for all gateways."""
        timer = self._grants.pop(connection, None)
        if timer is not None:
            timer.cancel()
            self._grant_room()

    # Called by connections, on the loop's thread.

    def _greet(self, hello: Hello) -> Welcome | Refused:
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            return Refused("wrong token")
        if hello.epoch != self._epoch:
            return Refused(f"this is epoch {self._epoch}, not {hello.epoch}")
        if (reason := mismatch(hello.protocol)) is not None:
            return Refused(reason)
        return self._welcome

    def _submit(self, connection: _Connection, request: GenerateRequest) -> None:
        if request.id in self._active:  # its events belong to another request
            connection.write(Step([TokenEvent(id=request.id, finish=FinishReason.ERROR, error="duplicate request id")]))
            return
        grant = self._grants.pop(connection, None)
        if grant is not None:
            grant.cancel()
        if len(self._active) + len(self._grants) >= self._welcome.slots:
            self._busy[connection] = None
            connection.write(Step([TokenEvent(id=request.id, finish=FinishReason.BUSY)]))
            return
        active = _ActiveRequest(connection, request.whole)
        self._active[request.id] = active  # before the submit: an event may follow at once
        if request.guide is None:
            self._submit_to_batcher(request)
            return
        # A schema takes up to a second to compile: keep it off the loop that all streams share.
        future = self._loop.run_in_executor(self._compiler, self._compile_and_submit, active, request)
        future.add_done_callback(lambda future: self._guide_compiled(active, request.id, future))

    def _guide_compiled(self, active: _ActiveRequest, id: str, future: asyncio.Future[None]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:  # a Rust panic of llguidance
            log.error("a JSON schema could not be compiled", exc_info=error)
            self._send([TokenEvent(id=id, finish=FinishReason.ERROR, error="the JSON schema could not be compiled")])
        elif active.cancelled:  # meanwhile
            self._batcher.cancel(id)

    def _compile_and_submit(self, active: _ActiveRequest, request: GenerateRequest) -> None:
        """Runs on the compiler's thread. Skips requests that were cancelled while they waited."""
        if active.cancelled:
            self.emit([TokenEvent(id=request.id, finish=FinishReason.CANCELLED)])
        else:
            self._submit_to_batcher(request)

    def _submit_to_batcher(self, request: GenerateRequest) -> None:
        """Submit to the batcher; a refusal is the request's only event. Any thread."""
        try:
            self._batcher.submit(request)
        except BatcherClosed as error:
            self.emit([TokenEvent(id=request.id, finish=FinishReason.REFUSED, error=str(error))])
        except ValueError as error:
            param = error.param if isinstance(error, InvalidField) else ""
            self.emit([TokenEvent(id=request.id, finish=FinishReason.INVALID, error=str(error), param=param)])
        except Exception as error:  # one request must not end the shared connection
            log.exception("a request could not be accepted")
            message = f"{type(error).__name__}: {error}"
            self.emit([TokenEvent(id=request.id, finish=FinishReason.ERROR, error=message)])

    def _cancel(self, id: str) -> None:
        if (active := self._active.get(id)) is not None:
            active.cancelled = True
        self._batcher.cancel(id)

    def _remove(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._busy.pop(connection, None)
        self._revoke(connection)
        for id in [id for id, active in self._active.items() if active.connection is connection]:
            self._cancel(id)
            del self._active[id]
        if self._busy:
            self._grant_room()


@dataclass
class _ActiveRequest:
    """A request in progress."""

    connection: _Connection
    whole: bool  # after its first event, the rest is sent in few events
    begun: bool = False
    cancelled: bool = False
    held: list[TokenEvent] = field(default_factory=list)

    def ready(self, event: TokenEvent) -> TokenEvent | None:
        """Returns the event to send after ``event``, or None."""
        if not self.whole or (event.finish is not None and not self.held):
            return event
        if not self.begun and event.finish is None:
            self.begun = True
            return event
        self.held.append(event)
        if event.finish is None and len(self.held) < (HELD_LOGPROBS if event.logprobs else HELD_TOKENS):
            return None
        parts, self.held = self.held, []
        return TokenEvent(
            id=event.id,
            text="".join([part.text for part in parts]),
            token_ids=[id for part in parts for id in part.token_ids],
            logprobs=[item for part in parts for item in part.logprobs],
            finish=event.finish,
            error=event.error,
            stop=event.stop,
        )


class _Connection(asyncio.Protocol):
    """A connection to one gateway."""

    def __init__(self, plane: DataPlane, *, watched: bool = False) -> None:
        """``watched``: its host may be cut off."""
        self._plane = plane
        self._watched = watched
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._greeted = False
        self._written = 0  # bytes
        self._accepted = 0  # bytes that the kernel had accepted at the last check
        self._idle_checks = 0  # checks in a row without progress
        self._check: asyncio.TimerHandle | None = None  # set while data is unread

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)  # to be notified when data is left unread
        if self._watched:
            watch_link(transport.get_extra_info("socket"), REPLICA_S)
        self._plane._connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._receive(message)
        except WireError as error:
            log.warning("disconnecting a gateway: %s", error)
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.resume_writing()
        self._plane._remove(self)

    def pause_writing(self) -> None:
        """The kernel's buffer is full. A gateway is disconnected by how long it reads nothing, not by how much is
        unread: that is at most the answers of all slots, since a gateway whose slots are full sends no more."""
        self._accepted, self._idle_checks = self._written - self.unsent, 0
        self._check = self._plane._loop.call_later(UNREAD_CHECK_S, self._check_reading)

    def resume_writing(self) -> None:
        if self._check is not None:
            self._check.cancel()
            self._check = None

    def _check_reading(self) -> None:
        accepted = self._written - self.unsent
        self._idle_checks = self._idle_checks + 1 if accepted == self._accepted else 0
        self._accepted = accepted
        if self._idle_checks >= UNREAD_CHECKS:
            unread_s = UNREAD_CHECKS * UNREAD_CHECK_S
            log.warning(
                "disconnecting a gateway: it has read nothing for %.0f s, with %d bytes unread", unread_s, self.unsent
            )
            self.abort()
        else:
            self._check = self._plane._loop.call_later(UNREAD_CHECK_S, self._check_reading)

    def write(self, message: Message) -> None:
        if self._transport is not None:
            frames = encode(message)
            self._written += len(frames)
            self._transport.write(frames)

    @property
    def unsent(self) -> int:
        """The number of bytes that the kernel has not accepted yet."""
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
            self._plane._cancel(message.id)
        elif isinstance(message, Taken):
            self._plane._taken(message.id, message.count)
        else:
            raise WireError(f"a gateway does not send {type(message).__name__}")
