"""Opens connections to replicas: unix sockets on the gateway's host, TLS over watched TCP to other hosts."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

from workers.messages.credentials import REPLICA, Credentials, client_context
from workers.messages.link_watch import GATEWAY_S, watch_link
from workers.serving.dataplane import HANDSHAKE_S, TLS_SCHEME

P = TypeVar("P", bound=asyncio.Protocol)


async def open_link(
    loop: asyncio.AbstractEventLoop, factory: Callable[[], P], address: str, credentials: Credentials | None
) -> tuple[asyncio.Transport, P]:
    """Connects ``factory()`` to the replica at ``address``: the path of a unix socket, or `tls://host:port`.

    Raises OSError when nothing listens there, and when the peer is not a replica of the fleet of ``credentials``.
    """
    if not address.startswith(f"{TLS_SCHEME}://"):
        transport, protocol = await loop.create_unix_connection(factory, address)
        return transport, protocol
    if credentials is None:
        raise ConnectionError(f"{address} requires credentials, but this gateway has none")
    parts = urlsplit(address)
    assert parts.hostname is not None
    assert parts.port is not None
    try:
        transport, protocol = await loop.create_connection(
            factory,
            parts.hostname,
            parts.port,
            ssl=client_context(credentials),
            server_hostname=REPLICA,
            ssl_handshake_timeout=HANDSHAKE_S,
        )
    except ssl.CertificateError as error:
        raise ConnectionError(f"{address} is not a replica of this fleet: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise ConnectionError(f"the TLS handshake with {address} failed: {error.reason or error}") from None
    watch_link(transport.get_extra_info("socket"), GATEWAY_S)
    return transport, protocol
