"""Opening the gateway's end of the data plane: a unix socket on its own host, TLS over TCP to another one."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

from workers.messages.credentials import REPLICA, Credentials, client_context
from workers.serving.dataplane import HANDSHAKE_S, TLS_SCHEME

P = TypeVar("P", bound=asyncio.Protocol)


async def open_link(
    loop: asyncio.AbstractEventLoop, factory: Callable[[], P], address: str, credentials: Credentials | None
) -> tuple[asyncio.Transport, P]:
    """Connect ``factory()`` to the replica at ``address``: the path of a unix socket, or `tls://host:port`.

    Raises OSError when nobody is there, and when the peer is not a replica of the fleet that ``credentials`` are of.
    """
    if not address.startswith(f"{TLS_SCHEME}://"):
        made, protocol = await loop.create_unix_connection(factory, address)
        return made, protocol
    if credentials is None:
        raise ConnectionError(f"{address} asks for credentials, and there are none")
    parts = urlsplit(address)
    assert parts.hostname is not None
    assert parts.port is not None
    try:
        made, protocol = await loop.create_connection(
            factory,
            parts.hostname,
            parts.port,
            ssl=client_context(credentials),
            server_hostname=REPLICA,
            ssl_handshake_timeout=HANDSHAKE_S,
        )
    except ssl.CertificateError as error:
        raise ConnectionError(f"{address} is no replica of this fleet: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise ConnectionError(f"{address} does not speak our TLS: {error.reason or error}") from None
    return made, protocol
