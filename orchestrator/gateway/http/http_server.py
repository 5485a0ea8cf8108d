"""The connections of one listener, their limits and their deadlines."""

from __future__ import annotations

import email.utils
import itertools
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from orchestrator.gateway.http.exchange import Exchange
from orchestrator.gateway.openai.errors import ApiError

if TYPE_CHECKING:
    from orchestrator.gateway.http.connection import HttpConnection
    from orchestrator.gateway.settings import GatewaySettings


Handler = Callable[[Exchange], Awaitable[None] | None]


class HttpServer:
    """Accepts connections for one handler. Used from one event loop."""

    def __init__(
        self,
        settings: GatewaySettings,
        handle: Handler,
        ended: Callable[[Exchange], None] = lambda exchange: None,
        early: Callable[[dict[bytes, bytes]], ApiError | None] = lambda headers: None,
        *,
        evicts: bool = False,
        body_of: Callable[[ApiError, Exchange], Any] = lambda error, exchange: error.body(),
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
        self._per_key: Counter[str] = Counter()
        self.date = b""
        self.retiring = False
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

    def count_for(self, connection: HttpConnection, key: str | None) -> int:
        """Counts the connection for the API key of that id, and returns the key's connections."""
        if key != connection.key:
            if connection.key is not None:
                self._per_key[connection.key] -= 1
                if self._per_key[connection.key] <= 0:
                    del self._per_key[connection.key]
            if key is not None:
                self._per_key[key] += 1
            connection.key = key
        return self._per_key[key] if key is not None else 0

    def retire(self) -> None:
        """Makes each connection end with its next answer, which announces it: a client whose idle connection is closed
        may just be sending a request."""
        self.retiring = True

    @property
    def is_idle(self) -> bool:
        """True while no connection has a request."""
        return all(connection.is_idle for connection in self.connections)

    def close(self) -> None:
        """Closes the connections without a request; the others close after their answer."""
        self.closing = True
        for connection in list(self.connections):
            connection.close_if_idle()

    def abort(self) -> None:
        for connection in list(self.connections):
            connection.abort()


def bind(host: str, port: int, *, shared: bool) -> socket.socket:
    """Returns a bound socket that does not listen yet. ``shared`` lets several gateways of the fleet use the port.
    Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener
