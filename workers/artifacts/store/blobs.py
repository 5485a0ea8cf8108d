"""Stores file contents by digest, so that equal files of several artifacts exist once."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable
from pathlib import Path

from workers.artifacts.sources.listing import Stopped
from workers.artifacts.store.content_digest import ContentHash

BLOCK = 1 << 20  # read size; small enough to stay in the CPU's cache while it is hashed


DAMAGE = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN})  # bad disk blocks, or checksum errors of the file system


def _never() -> bool:
    return False


def is_of(path: Path, digest: str, stopped: Callable[[], bool] = _never) -> bool:
    """Returns whether the file has that content; False if the disk cannot read it. Raises OSError and Stopped."""
    return readable_digest_of(path, stopped) == digest


def readable_digest_of(path: Path, stopped: Callable[[], bool] = _never) -> str:
    """Returns the content digest as `digest_of`, or an empty text if the disk cannot read the file."""
    try:
        return digest_of(path, stopped)
    except OSError as error:
        if error.errno not in DAMAGE:
            raise
        return ""


def digest_of(path: Path, stopped: Callable[[], bool] = _never) -> str:
    """Returns the content digest (content_digest.py), 64 hex digits. Raises Stopped.

    Takes 0.3 CPU seconds per GB from the page cache. Reads instead of mapping the file: a concurrent truncation must
    not kill the process.
    """
    content = ContentHash()
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(max(1, min(BLOCK, os.fstat(file.fileno()).st_size))))
        while count := file.readinto(buffer):
            if stopped():
                raise Stopped(f"stopped while reading {path}")
            content.update(buffer[:count])
    return content.digest().hex()


class Blobs:
    """The folder of contents. Each file is named by its digest and hard-linked into the artifacts that have it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, digest: str) -> Path:
        return self.root / digest

    def keep(self, path: Path, digest: str) -> bool:
        """Deduplicates ``path``, whose content was just verified to have that digest.

        Verifies existing content first; False: it was damaged and has been replaced.
        """
        blob = self.path(digest)
        path.chmod(0o444)  # a write would change all links
        with contextlib.suppress(OSError):  # no hard links, or too many: the file stays separate
            try:
                os.link(path, blob)
            except FileExistsError:
                if path.samefile(blob):
                    return True
                if not is_of(blob, digest):
                    self._replace(blob, path)
                    return False
                self._replace(path, blob)
        return True

    def link(self, digest: str, size: int, path: Path) -> bool:
        """Links existing content to ``path`` without reading it; False: it does not exist with that size."""
        try:
            if self.path(digest).stat().st_size != size:
                return False
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(self.path(digest), path)
        except OSError:
            return False
        return True

    def sweep(self) -> int:
        """Removes content that no artifact has; returns the freed bytes. Content is always linked to its artifact
        before it is added here, so a link count of 1 means unused."""
        freed = 0
        for half in self.root.glob(".*"):  # left by a process that died in `_replace`
            half.unlink(missing_ok=True)
        for blob in self.root.glob("*"):
            with contextlib.suppress(FileNotFoundError):
                about = blob.stat()
                if about.st_nlink == 1:
                    blob.unlink()
                    freed += about.st_size
        return freed

    @staticmethod
    def _replace(path: Path, content: Path) -> None:
        """Atomically makes ``path`` a hard link to ``content``."""
        name = path.with_name(f".{uuid.uuid4().hex}")
        os.link(content, name)
        name.replace(path)
