"""Computes content digests from pieces that may be hashed in any order.

Content of at most ``PIECE_BYTES``: its BLAKE3. Larger: the BLAKE3 of the concatenated BLAKE3s of its pieces, with a
context of its own, so that no file is mistaken for the piece list of another. Each arriving range can be hashed
while it is in the CPU's cache; a BLAKE3 of the whole would need another read of all of it, in order.
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.artifacts.sources.checksums import Hash

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
