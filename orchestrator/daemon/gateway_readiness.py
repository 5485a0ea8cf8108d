"""Waits until the gateway of a fleet that has just started can serve: it may still load tokenizers."""

from __future__ import annotations

import contextlib
import http.client
import ssl
import time
from collections.abc import Callable
from urllib.parse import urlsplit

ANSWER_S = 2.0
WAIT_S = 60.0  # a tokenizer that takes longer delays only the requests of its model
POLL_S = 0.1


def is_waiting(url: str) -> bool:
    """Returns whether the gateway at that address is not ready yet; False if it cannot be queried, as with mutual
    TLS."""
    address = urlsplit(url)
    host, port = address.hostname or "", address.port
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
        if address.scheme == "https":
            anyone = ssl._create_unverified_context()  # nothing is sent, and only a status is read
            connection = http.client.HTTPSConnection(host, port, timeout=ANSWER_S, context=anyone)
        with contextlib.closing(connection):
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 503
    return False


def wait_for_gateway(url: str, between: Callable[[], None]) -> None:
    """Returns when the gateway is ready, or after ``WAIT_S``. ``between`` is called between two queries."""
    deadline = time.monotonic() + WAIT_S
    while is_waiting(url) and time.monotonic() < deadline:
        between()
        time.sleep(POLL_S)
