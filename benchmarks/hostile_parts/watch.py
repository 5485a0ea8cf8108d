"""A client that reads one stream after the other and records the longest time between two events."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from typing import Any

from benchmarks.gateway_parts.child import argument, say

POLL_S = 0.1


class Watch:
    """Streams from ``start`` to ``stop``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._stop = threading.Event()
        self._gap_s = 0.0
        self._events = 0
        self._cut = ""
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Returns with the first event."""
        self._thread.start()
        while not self._events and not self._cut:
            time.sleep(0.005)

    def stop(self) -> dict[str, Any]:
        self._stop.set()
        self._thread.join()
        return {"gap_ms": self._gap_s * 1000, "events": self._events, "cut": self._cut}

    def _run(self) -> None:
        while not self._stop.is_set() and not self._cut:
            self._read_stream()

    def _read_stream(self) -> None:
        """Reads one stream to its last token."""
        settings = self._settings
        fields = {"model": settings["model"], "prompt": "watch", "max_tokens": settings["tokens"], "stream": True}
        body = json.dumps({**fields, "ignore_eos": True, "temperature": 0}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {settings['key']}\r\n"
        last: float | None = None
        with socket.create_connection(("127.0.0.1", settings["port"])) as wire:
            wire.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            wire.settimeout(POLL_S)
            read = b""
            while not self._stop.is_set():
                try:
                    data = wire.recv(2**16)
                except TimeoutError:
                    continue
                now = time.monotonic()
                read = read[-600:] + data
                events = data.count(b"data: {")
                if events:
                    self._gap_s = max(self._gap_s, now - (last or now))
                    self._events += events
                    last = now
                if b"data: [DONE]" in read and b'"finish_reason":"length"' in read:
                    return
                if not data or b'"error"' in data:
                    self._cut = data.decode(errors="replace")[-200:] or "the connection ended"
                    return
        if last is not None:
            self._gap_s = max(self._gap_s, time.monotonic() - last)


def main() -> None:
    """Argument: ``port``, ``key``, ``model`` and the ``tokens`` of a stream. A line of input starts a stream, the next
    one ends it."""
    settings = argument()
    say({})
    while sys.stdin.readline():
        watch = Watch(settings)
        watch.start()
        say({})
        sys.stdin.readline()
        say(watch.stop())


if __name__ == "__main__":
    main()
