"""Listen addresses: finds free ports, and detects loopback hosts."""

from __future__ import annotations

import contextlib
import ipaddress
import random
import socket
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 20_000  # above the usual ports of servers, and those of Ray's workers (10002 to 19999)
_HIGHEST = 29_999  # below the node ports of Kubernetes (30000 to 32767), which may be redirected
_ATTEMPTS = 100


def free_port(*preferred: int) -> int:
    """Returns a free TCP port of loopback: the first of ``preferred``, or one outside the kernel's ephemeral range if
    possible.

    A bind to port 0 gives an ephemeral port, and Ray's outgoing connections use hundreds of these while it starts.
    """
    ports = range(_LOWEST, max(_LOWEST, min(_first_ephemeral(), _HIGHEST + 1)))
    for port in (*preferred, *random.sample(ports, min(_ATTEMPTS, len(ports)))):  # not security-relevant
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of its last server may linger
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        kernel_port: int = probe.getsockname()[1]
        return kernel_port


def _first_ephemeral() -> int:
    try:
        return int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _LOWEST


def is_loopback(host: str) -> bool:
    """Returns whether only processes of this machine can reach the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
