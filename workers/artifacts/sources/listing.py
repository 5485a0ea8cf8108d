"""What a remote source consists of, before any of it is fetched."""

from __future__ import annotations

import threading
from hashlib import blake2s
from pathlib import Path
from typing import Protocol

import msgspec

from workers.artifacts.fetch.progress import Progress


class RemoteFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a source."""

    name: str  # its path within the source, with slashes; never absolute, never with ".."
    size: int  # bytes
    tag: str  # changes when the content does: an ETag, a git blob id, a sha256
    checksum: str = ""  # "ALGORITHM:VALUE" of the whole content as the source tells it; empty: it tells none


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """All files of a source at one moment, sorted by name."""

    source: str  # as the spec names it; holds no credentials
    revision: str = ""  # the commit that a hub's branch or tag stood at
    files: tuple[RemoteFile, ...]

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.size for file in self.files)

    @property
    def key(self) -> str:
        """32 hex digits: equal where source, names, sizes and tags are."""
        told = [self.source, *(f"{file.name}\0{file.size}\0{file.tag}" for file in self.files)]
        return blake2s("\n".join(told).encode(), digest_size=16).hexdigest()


class SourceError(Exception):
    """A source cannot be listed or fetched. ``id`` is in docs/errors.md; the texts hold no credentials."""

    def __init__(self, id: str, what: str, hint: str = "") -> None:
        super().__init__(f"{id}: {what}" + (f"; {hint}" if hint else ""))
        self.id = id
        self.what = what
        self.hint = hint


class Stopped(Exception):
    """Somebody has asked for the end of a fetch; what has arrived is kept for the next one."""


class Remote(Protocol):
    """A source elsewhere. Both methods block, and raise SourceError."""

    def listing(self) -> Listing:
        """What there is now: small requests only."""
        ...

    def fetch(self, listing: Listing, folder: Path, progress: Progress, stop: threading.Event) -> None:
        """Bring every file of ``listing`` into ``folder``, whole and verified, under its name.

        Goes on from what an earlier, interrupted fetch has left in ``folder``, and leaves nothing else in it when it
        returns. Raises Stopped soon after ``stop`` is set.
        """
        ...
