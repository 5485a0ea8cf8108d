"""File contents by their digest, so that equal files of several artifacts exist once.

A digest is computed from pieces that may be hashed in any order. Content of at most ``PIECE_BYTES``: its BLAKE3.
Larger: the BLAKE3 of the concatenated BLAKE3s of its pieces, with a context of its own, so that no file is mistaken for
the piece list of another. Each arriving range can be hashed while it is in the CPU's cache; a BLAKE3 of the whole would
need another read of all of it, in order.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from workers.artifacts.sources.checksums import Hash
from workers.artifacts.sources.listing import Stopped

PIECE_BYTES = 8 * 2**20
CONTEXT = "corewright 2026-11-22 contents by pieces of 8 MiB"


def piece() -> Hash:
    """Returns a hash object for one piece of at most ``PIECE_BYTES``."""
    from blake3 import blake3

    return blake3()


def of_pieces(digests: Sequence[bytes]) -> bytes:
    """Returns the digest of a content from the digests of its pieces: ``PIECE_BYTES`` each, the last one at most."""
    from blake3 import blake3

    if not digests:
        return piece().digest()
    return digests[0] if len(digests) == 1 else blake3(b"".join(digests), derive_key_context=CONTEXT).digest()


class ContentHash:
    """The hash object of a content whose bytes arrive in order."""

    def __init__(self) -> None:
        self._done: list[bytes] = []
        self._piece = piece()
        self._left = PIECE_BYTES  # in the current piece

    def update(self, data: bytes | memoryview, /) -> None:
        view = memoryview(data)
        while view:
            if not self._left:
                self._done.append(self._piece.digest())
                self._piece, self._left = piece(), PIECE_BYTES
            part = view[: self._left]
            self._piece.update(part)
            self._left -= len(part)
            view = view[len(part) :]

    def digest(self) -> bytes:
        """Returns 32 bytes."""
        return of_pieces([*self._done, self._piece.digest()])


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
    """Returns the content digest (see above), 64 hex digits. Raises Stopped.

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
