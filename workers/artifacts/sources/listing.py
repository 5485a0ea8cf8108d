"""Listings of remote sources, and the protocol of a source."""

from __future__ import annotations

import stat
import threading
from hashlib import blake2s
from pathlib import Path
from typing import Protocol

import msgspec

from workers.artifacts.fetch.progress import Progress
from workers.host.file_lock import Stopped as Stopped

SMALL_BYTES = 16 * 2**20  # files up to this size are fetched first


class RemoteFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a source."""

    name: str  # path within the source, with slashes; never absolute, never with ".."
    size: int  # bytes
    tag: str  # changes when the content does: an ETag, a git blob id, a sha256
    checksum: str = ""  # "ALGORITHM:VALUE" of the content as the source reports it; empty: none

    def is_in(self, folder: Path) -> bool:
        """Returns whether the file is complete in the folder of a fetch: it gets its name there once it is verified."""
        return is_file(folder / self.name, self.size)


def is_file(path: Path, size: int) -> bool:
    """Returns whether the path is a regular file, not a symlink, of that size."""
    try:
        about = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(about.st_mode) and about.st_size == size


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of all files of a source, sorted by name."""

    source: str  # as written in the spec; holds no credentials
    revision: str = ""  # the commit that the hub's branch or tag pointed to
    files: tuple[RemoteFile, ...]

    @property
    def bytes(self) -> int:
        """The total size of all files."""
        return sum(file.size for file in self.files)

    @property
    def key(self) -> str:
        """32 hex digits: equal if source, names, sizes and tags are equal."""
        parts = [self.source, *(f"{file.name}\0{file.size}\0{file.tag}" for file in self.files)]
        return blake2s("\n".join(parts).encode(), digest_size=16).hexdigest()


class SourceError(Exception):
    """A source that cannot be listed or fetched. ``id`` is in docs/errors.md; the texts hold no credentials."""

    def __init__(self, id: str, what: str, hint: str = "") -> None:
        super().__init__(f"{id}: {what}" + (f"; {hint}" if hint else ""))
        self.id = id
        self.what = what
        self.hint = hint


class Remote(Protocol):
    """A remote source. Both methods block and raise SourceError."""

    def listing(self) -> Listing:
        """Returns the current files; makes small requests only."""
        ...

    def fetch(self, listing: Listing, folder: Path, progress: Progress, stop: threading.Event) -> None:
        """Fetches every file of ``listing`` into ``folder``, complete and verified, under its name.

        Resumes an earlier, interrupted fetch into ``folder``, and leaves nothing else in it. Raises Stopped soon after
        ``stop`` is set.
        """
        ...
