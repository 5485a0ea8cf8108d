"""Has the kernel watch the connections between hosts, so that a peer that is cut off is noticed within seconds.

TCP itself waits for a quarter of an hour. Every second without data the kernel sends a probe, which the kernel of the
peer acknowledges: so neither a busy or paused process at one of the ends nor a long pause between two tokens looks like
a lost host, and a token costs nothing.
"""

from __future__ import annotations

import socket
from typing import Any

PROBE_S = 1  # without data; also between two probes
GATEWAY_S = 4  # without an acknowledgement: the gateway gives the replica up, and sends its requests elsewhere
REPLICA_S = 30  # the replica gives the gateway up. Longer: a gateway that is paused, and reads nothing, also counts


def watch_link(connection: Any, silent_s: int) -> None:
    """End a connection whose peer has not acknowledged data or a probe for ``silent_s``. ``connection`` is a socket, or
    a transport's view of one."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, silent_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * silent_s)  # of data that was sent
