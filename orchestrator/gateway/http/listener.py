"""The socket that gateways listen on."""

from __future__ import annotations

import socket


def bind(host: str, port: int, *, shared: bool) -> socket.socket:
    """A bound socket; ``shared`` lets a second gateway of the fleet have the same port. Until it listens the kernel
    gives it no connection. Raises OSError."""
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
