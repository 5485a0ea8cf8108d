"""Addresses to listen on: free ports, and which hosts are reachable from this machine alone."""

from __future__ import annotations

import contextlib
import ipaddress
import random
import socket
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 20_000  # below are those of servers, and those that Ray gives its workers (10002 to 19999)
_HIGHEST = 29_999  # above are Kubernetes' node ports (30000 to 32767), which may lead elsewhere
_ATTEMPTS = 100


def free_port() -> int:
    """A TCP port of loopback that nobody has, and that the kernel gives no connection of its own accord.

    Of the ephemeral ports, which a bind to port 0 gives, Ray's outgoing connections take some hundred while it starts,
    and nobody can listen on such a one.
    """
    ports = range(_LOWEST, max(_LOWEST, min(_first_ephemeral(), _HIGHEST + 1)))
    for port in random.sample(ports, min(_ATTEMPTS, len(ports))):  # no secret hangs on it
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found


def _first_ephemeral() -> int:
    try:
        return int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _LOWEST


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
