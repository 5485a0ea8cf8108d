"""Contents by their digests: equal files of several artifacts exist once."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable
from pathlib import Path

from workers.artifacts.sources.listing import Stopped
from workers.artifacts.store.content_digest import Content

BLOCK = 1 << 20  # bytes read at once: they are still in the CPU's cache when they are hashed


DAMAGE = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN})  # of the disk, or of its file system's own checksums


def _never() -> bool:
    return False


def is_of(path: Path, digest: str, stopped: Callable[[], bool] = _never) -> bool:
    """Whether the file has that content. One that the disk cannot read any more has not. Raises OSError and Stopped."""
    try:
        return digest_of(path, stopped) == digest
    except OSError as error:
        if error.errno not in DAMAGE:
            raise
        return False


def digest_of(path: Path, stopped: Callable[[], bool] = _never) -> str:
    """Of its content (content.py), 64 hex digits. Raises Stopped. Takes 0.3 CPU seconds for a GB of the page cache.

    It is read, not mapped: a file that is cut short meanwhile must not kill the process.
    """
    found = Content()
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(max(1, min(BLOCK, os.fstat(file.fileno()).st_size))))
        while count := file.readinto(buffer):
            if stopped():
                raise Stopped(f"stopped while {path} was read")
            found.update(buffer[:count])
    return found.digest().hex()


class Blobs:
    """The folder of contents. Each file is named by its digest, and linked into the artifacts that have it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, digest: str) -> Path:
        return self.root / digest

    def keep(self, path: Path, digest: str) -> bool:
        """``path``, whose content has just been found to have that digest, shares it with all others that have it.

        A content that was here before is read first: False when it has been damaged, and has now been replaced.
        """
        blob = self.path(digest)
        path.chmod(0o444)  # writing to it would change it under other names too
        with contextlib.suppress(OSError):  # a file system without links, or too many of them: it stays by itself
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
        """Make ``path`` out of a content that is here; whether it is. Its content is not read."""
        try:
            if self.path(digest).stat().st_size != size:
                return False
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(self.path(digest), path)
        except OSError:
            return False
        return True

    def sweep(self) -> int:
        """Remove what no artifact has; bytes. One that an artifact has is linked there before it comes here."""
        freed = 0
        for half in self.root.glob(".*"):  # of a process that died between two steps of `_replace`
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
        """``path`` becomes a name of ``content``, in one step."""
        name = path.with_name(f".{uuid.uuid4().hex}")
        os.link(content, name)
        name.replace(path)
