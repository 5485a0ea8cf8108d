"""Server-sent events, as they come in pieces."""

from __future__ import annotations


class EventReader:
    """Gives the data of each event whose end has come: however the bytes are cut, the same events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that ``chunk`` completes. Comments and other fields are passed over."""
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r", b"")
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        found: list[bytes] = []
        for line in lines:
            if not line:
                if self._data:
                    found.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
        return found

    @property
    def whole(self) -> bool:
        """Whether nothing of an event is left over."""
        return not self._data and not self._rest
