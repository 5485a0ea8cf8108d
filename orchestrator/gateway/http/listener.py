"""Binds the socket that gateways listen on."""

from __future__ import annotations

import socket


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
