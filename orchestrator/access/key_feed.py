"""The key file of the controller's machine for gateways on other machines, by a long poll."""

from __future__ import annotations

import asyncio
import hashlib

from orchestrator.access.keys import KeyFile, KeyRing, encoded

POLL_S = 0.5  # between two looks at the file; each is one `stat`


class KeyFeed:
    """The file as its last valid content, with a digest as its version: it stays the same in a restarted controller."""

    def __init__(self, file: KeyFile) -> None:
        self._file = file
        self._ring: KeyRing | None = None
        self._content = b""
        self._version = ""

    async def next(self, seen: str, timeout_s: float) -> tuple[str, bytes]:
        """Returns the version and the content once the version is not ``seen``, or after ``timeout_s``. The content is
        empty if this home never had a key."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        self._read()
        while self._version == seen and loop.time() < deadline:
            await asyncio.sleep(min(POLL_S, timeout_s))
            self._read()
        return self._version, self._content

    def _read(self) -> None:
        ring = self._file.current()
        if ring is not self._ring:
            is_new = not ring.keys and ring.keyless_until is None  # such as a new head's
            self._ring, self._content = ring, b"" if is_new else encoded(ring.keys, ring.keyless_until)
            self._version = hashlib.sha256(self._content).hexdigest()
