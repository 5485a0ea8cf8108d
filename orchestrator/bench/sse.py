"""An incremental reader of server-sent events."""

from __future__ import annotations


class EventReader:
    """Returns the data of each complete event, however the bytes are split."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Returns the data of the events that ``chunk`` completes. Ignores comments and other fields."""
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r", b"")
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events: list[bytes] = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
        return events
