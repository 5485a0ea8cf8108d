"""The replica's end of the data plane: a server in front of a batcher, on a unix socket for gateways of the same host,
on TCP with TLS for those of another one.

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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast
from urllib.parse import urlsplit

from workers.batching.batcher import BatcherClosed
from workers.messages.credentials import Credentials, server_context
from workers.messages.requests import FinishReason, GenerateRequest, TokenEvent
from workers.messages.wire import (
    Cancel,
    FrameReader,
    Hello,
    Message,
    Refused,
    Room,
    Step,
    Submit,
    Welcome,
    WireError,
    encode,
)

log = logging.getLogger(__name__)

UNREAD_CHECK_S = 10.0  # between two looks at a gateway that leaves something unread
UNREAD_CHECKS = 3  # after so many in a row without a byte taken it is hung, and disconnected; one may follow a freeze
HELD_TOKENS = 1024  # of an answer that is read at its end, before they are sent: no message may become large
HELD_LOGPROBS = 16  # likewise, of tokens with logprobs, at up to 2 KB each
FLUSH_S = 5.0  # for the last tokens of a drained replica to be on their way
FLUSH_POLL_S = 0.005
PROMISE_S = 0.05  # in which a gateway that was told of room takes it
PATH_POLL_S = 1.0  # between two checks that the socket's path is still there
TLS_SCHEME = "tls"
HANDSHAKE_S = 5.0  # of TLS; a peer that takes longer is disconnected


class RequestTable(Protocol):
    """The two calls that a connection makes of the batcher. Both may be called from any thread."""

    def submit(self, request: GenerateRequest) -> None:
        """Raises ValueError when the request cannot be served, BatcherClosed when none is taken any more."""
        ...

    def cancel(self, id: str) -> None: ...


class DataPlane:
    """Serves ``batcher`` at ``address`` to whoever knows the token and the epoch."""

    def __init__(
        self,
        path: Path,
        *,
        welcome: Welcome,
        token: str,
        epoch: int,
        batcher: RequestTable,
        listen: str = "",
        credentials: Credentials | None = None,
    ) -> None:
        """Listens on the unix socket at ``path``; with ``listen``, such as `tls://192.0.2.7:0`, on TCP there instead,
        where port 0 is any free one, and a peer must be a gateway by ``credentials`` before it may say a word."""
        self.address = str(path)  # where it listens; of a free port once it is known
        self._path = None if listen else path
        self._listen_on = listen
        self._credentials = credentials
        self._welcome = welcome
        self._token = token
        self._epoch = epoch
        self._batcher = batcher
        self._asked: dict[str, _Asked] = {}  # by request id; the loop's thread only
        self._told_busy: dict[_Connection, None] = {}  # in their order
        self._promised: dict[_Connection, asyncio.TimerHandle] = {}  # a slot for each, for a moment
        self._connections: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="data-plane", daemon=True)
        self._server: asyncio.Server | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="schemas")  # starts its thread at the first schema

    def start(self) -> None:
        """Listen; returns when connections are accepted. Raises OSError when the socket cannot be made."""
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
        if self._path is None:
            await self._listen_on_tcp()
            return
        self._path.unlink(missing_ok=True)
        await self._listen_at(self._path)
        self._keeping = self._loop.create_task(self._keep(self._path))

    async def _listen_at(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        before = self._server
        mask = os.umask(0o177)
        try:
            self._server = await self._loop.create_unix_server(lambda: _Connection(self), str(path))
        finally:
            os.umask(mask)
        if before is not None:
            before.close()  # of a path that is gone; its connections stay

    async def _keep(self, path: Path) -> None:
        """Listen again when the socket's path is gone: cleaners of temporary folders remove what looks old."""
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
                    log.error("the socket %s was removed and cannot be made again: %s", path, error)
                failed = True

    async def _listen_on_tcp(self) -> None:
        parts = urlsplit(self._listen_on)
        if parts.scheme != TLS_SCHEME or parts.port is None or self._credentials is None:
            raise OSError(f"{self._listen_on} is no address to listen on with TLS, or there are no credentials")
        self._server = await self._loop.create_server(
            lambda: _Connection(self),
            parts.hostname,
            parts.port,
            ssl=server_context(self._credentials),
            ssl_handshake_timeout=HANDSHAKE_S,
        )
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{TLS_SCHEME}://[{host}]:{port}" if ":" in host else f"{TLS_SCHEME}://{host}:{port}"

    async def _shut(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.abort()

    def _send(self, events: list[TokenEvent]) -> None:
        by_connection: dict[_Connection, list[TokenEvent]] = defaultdict(list)
        ended = False
        for event in events:
            asked = self._asked.get(event.id)
            if asked is None:
                continue
            if event.finish is not None:
                ended = True
                del self._asked[event.id]
            if (ready := asked.ready(event)) is not None:
                by_connection[asked.connection].append(ready)
        for connection, own in by_connection.items():
            self._write(connection, own)
        if ended and self._told_busy:
            self._tell_room()

    def _write(self, connection: _Connection, events: list[TokenEvent]) -> None:
        """Write a step. Where it cannot be encoded, only the request at fault ends, with an error."""
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
            self._asked.pop(id, None)
            what = "a part of the answer is too large to be sent, or is not valid text"
            connection.write(Step([TokenEvent(id=id, finish=FinishReason.ERROR, error=what)]))

    def _tell_room(self) -> None:
        """Promise what is free to those that were told BUSY, one after the other: whoever has a slot already would
        else be faster each time."""
        while self._told_busy and len(self._asked) + len(self._promised) < self._welcome.slots:
            connection = next(iter(self._told_busy))
            del self._told_busy[connection]
            self._promised[connection] = self._loop.call_later(PROMISE_S, self._take_back, connection)
            connection.write(Room(1))

    def _take_back(self, connection: _Connection) -> None:
        """The slot that was promised is anyone's again."""
        timer = self._promised.pop(connection, None)
        if timer is not None:
            timer.cancel()
            self._tell_room()

    # What a connection calls, on the loop's thread.

    def _greet(self, hello: Hello) -> Welcome | Refused:
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            return Refused("wrong token")
        if hello.epoch != self._epoch:
            return Refused(f"this is epoch {self._epoch}, not {hello.epoch}")
        return self._welcome

    def _submit(self, connection: _Connection, request: GenerateRequest) -> None:
        if request.id in self._asked:  # its stream is somebody's already
            connection.write(Step([TokenEvent(id=request.id, finish=FinishReason.ERROR, error="duplicate request id")]))
            return
        promise = self._promised.pop(connection, None)
        if promise is not None:
            promise.cancel()
        if len(self._asked) + len(self._promised) >= self._welcome.slots:
            self._told_busy[connection] = None
            connection.write(Step([TokenEvent(id=request.id, finish=FinishReason.BUSY)]))
            return
        asked = _Asked(connection, request.whole)
        self._asked[request.id] = asked  # before the submit: an event may come at once
        if request.guide is None:
            self._hand_over(request)
            return
        # A schema takes up to a second to compile: not on the loop that all streams share.
        future = self._loop.run_in_executor(self._compiler, self._compile_and_hand_over, asked, request)
        future.add_done_callback(lambda future: self._handed_over(asked, request.id, future))

    def _handed_over(self, asked: _Asked, id: str, future: asyncio.Future[None]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:  # a panic of llguidance's Rust
            log.error("a JSON schema could not be compiled", exc_info=error)
            self._send([TokenEvent(id=id, finish=FinishReason.ERROR, error="the JSON schema could not be compiled")])
        elif asked.cancelled:  # meanwhile
            self._batcher.cancel(id)

    def _compile_and_hand_over(self, asked: _Asked, request: GenerateRequest) -> None:
        """On the compiler's thread. The requests that nobody waits for any more cost nothing there."""
        if asked.cancelled:
            self.emit([TokenEvent(id=request.id, finish=FinishReason.CANCELLED)])
        else:
            self._hand_over(request)

    def _hand_over(self, request: GenerateRequest) -> None:
        """Submit to the batcher; a refusal is the request's only event. On any thread."""
        try:
            self._batcher.submit(request)
        except BatcherClosed as error:
            self.emit([TokenEvent(id=request.id, finish=FinishReason.REFUSED, error=str(error))])
        except ValueError as error:
            self.emit([TokenEvent(id=request.id, finish=FinishReason.INVALID, error=str(error))])
        except Exception as error:  # one request must not end the connection that all share
            log.exception("a request could not be accepted")
            what = f"{type(error).__name__}: {error}"
            self.emit([TokenEvent(id=request.id, finish=FinishReason.ERROR, error=what)])

    def _cancel(self, id: str) -> None:
        if (asked := self._asked.get(id)) is not None:
            asked.cancelled = True
        self._batcher.cancel(id)

    def _forget(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._told_busy.pop(connection, None)
        self._take_back(connection)
        for id in [id for id, asked in self._asked.items() if asked.connection is connection]:
            self._cancel(id)
            del self._asked[id]
        if self._told_busy:
            self._tell_room()


@dataclass
class _Asked:
    """A request that is on its way."""

    connection: _Connection
    whole: bool  # after its first event the others come many in one
    begun: bool = False
    cancelled: bool = False
    held: list[TokenEvent] = field(default_factory=list)

    def ready(self, event: TokenEvent) -> TokenEvent | None:
        """What is to be sent now that ``event`` has come."""
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
        )


class _Connection(asyncio.Protocol):
    """One gateway."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._greeted = False
        self._written = 0  # bytes
        self._taken = 0  # of these, what the kernel had taken at the last check
        self._idle_checks = 0  # in a row, in which it has taken none
        self._check: asyncio.TimerHandle | None = None  # while something is unread

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)  # so that it is known when something is left unread
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
        self.resume_writing()
        self._plane._forget(self)

    def pause_writing(self) -> None:
        """The kernel takes no more. A gateway is disconnected by the time for which it reads nothing, and not by how
        much it has to read; that is at most the answers of all slots, since one with its slots full sends no more."""
        self._taken, self._idle_checks = self._written - self.unsent, 0
        self._check = self._plane._loop.call_later(UNREAD_CHECK_S, self._check_reading)

    def resume_writing(self) -> None:
        if self._check is not None:
            self._check.cancel()
            self._check = None

    def _check_reading(self) -> None:
        taken = self._written - self.unsent
        self._idle_checks = self._idle_checks + 1 if taken == self._taken else 0
        self._taken = taken
        if self._idle_checks >= UNREAD_CHECKS:
            unread_s = UNREAD_CHECKS * UNREAD_CHECK_S
            log.warning("a gateway is disconnected: it has read nothing for %.0f s, of %d bytes", unread_s, self.unsent)
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
            self._plane._cancel(message.id)
        else:
            raise WireError(f"a gateway does not send {type(message).__name__}")
