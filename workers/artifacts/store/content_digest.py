"""The digest that a content is known by.

Of at most ``PIECE_BYTES``: its BLAKE3. Of more: the BLAKE3 of the BLAKE3s of its pieces, one after the other, under a
context of its own, so that no file is taken for the list of another's pieces. So a range that arrives can be hashed
while it is in the CPU's cache, whichever it is; for a BLAKE3 of the whole all would have to be read again, in order.
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.artifacts.sources.checksums import Hash

PIECE_BYTES = 8 * 2**20
CONTEXT = "corewright 2026-11-22 contents by pieces of 8 MiB"


def piece() -> Hash:
    """Of at most ``PIECE_BYTES``."""
    from blake3 import blake3

    return blake3()


def of_pieces(digests: Sequence[bytes]) -> bytes:
    """Of a content whose pieces have these digests: of the last one at most ``PIECE_BYTES``, of the others so many."""
    from blake3 import blake3

    if not digests:
        return piece().digest()
    return digests[0] if len(digests) == 1 else blake3(b"".join(digests), derive_key_context=CONTEXT).digest()


class Content:
    """Its digest, of bytes that come in order."""

    def __init__(self) -> None:
        self._done: list[bytes] = []
        self._piece = piece()
        self._left = PIECE_BYTES  # of the piece

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
        """32 bytes."""
        return of_pieces([*self._done, self._piece.digest()])
