"""One object that grows on this disk, out of ranges that arrive in any order."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from workers.artifacts.fetch.ordered_hash import OrderedHash
from workers.artifacts.sources.checksums import CRC_BYTES, OF_RANGES, Checksum, combined, crc_of, hash_of
from workers.artifacts.sources.listing import RemoteFile, SourceError
from workers.artifacts.store.content_digest import PIECE_BYTES, Content, of_pieces, piece
from workers.artifacts.store.range_ledger import RangeLedger, Span

READ_BYTES = 2**20  # of what is read again from the disk, at once
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def _nothing() -> None:
    pass


class Summing:
    """What is computed of one range's bytes, as they come."""

    def __init__(self, algorithm: str, *, hashed: bool) -> None:
        self._add = crc_of(algorithm)
        self._piece = piece() if hashed else None
        self.crc = 0

    def add(self, data: Any) -> None:
        self.crc = self._add(data, self.crc)
        if self._piece is not None:
            self._piece.update(data)

    @property
    def digest(self) -> bytes:
        """As a piece of the content; empty where its ranges are none."""
        return b"" if self._piece is None else self._piece.digest()


class _Part:
    """What was uploaded at once; of an object whose parts do not matter there is one."""

    def __init__(self, start: int, size: int, span_bytes: int) -> None:
        self.size = size
        end = start + size
        self.spans = [Span(at, min(at + span_bytes, end)) for at in range(start, end, span_bytes)]
        self.follower: OrderedHash | None = None  # where the checksum does not combine


class Assembly:
    """Written at ``work``, and beside it a ledger; moved to ``target`` when it is whole and right."""

    def __init__(
        self,
        file: RemoteFile,
        target: Path,
        work: Path,
        checksum: Checksum | None,
        sizes: Sequence[int],
        span_bytes: int,
        go_on: Callable[[], None] = _nothing,
    ) -> None:
        """``sizes``: of the parts that the checksum is made of. ``span_bytes``: the most that is asked for at once.
        ``go_on`` is called again and again by whatever reads from the disk, and raises where that is to end."""
        self.file = file
        self.checksum = checksum
        self.algorithm = checksum.algorithm if checksum is not None and checksum.combines else OF_RANGES
        self.damaged = 0  # so often it was whole and wrong
        self._target = target
        self._work = work
        self._lock = threading.Lock()
        self._data = -1
        self._sums: dict[Span, int] = {}
        self._parts: list[_Part] = []
        self._go_on = go_on
        for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
            self._parts.append(_Part(start, size, span_bytes))
        self.spans = [span for part in self._parts for span in part.spans]
        if checksum is not None and not checksum.combines:
            for part in self._parts:
                part.follower = OrderedHash(part.spans, partial(hash_of, checksum.algorithm), self._read)
        self._follower_of = {span: part.follower for part in self._parts for span in part.spans}
        self._digests: dict[Span, bytes] = {}  # of the pieces of the content, where the ranges are those
        by_pieces = span_bytes == PIECE_BYTES and all(span.start % PIECE_BYTES == 0 for span in self.spans)
        self._content = None if by_pieces else OrderedHash(self.spans, Content, self._read)
        self._ledger = RangeLedger(work.with_name(f"{work.name}.ranges"), file, self.algorithm)

    def noted(self) -> dict[Span, int]:
        """What an earlier attempt has left, and its CRCs: to be checked before it is accepted."""
        if not self._work.exists():
            return {}
        known = set(self.spans)
        return {span: crc for span, crc in self._ledger.read().items() if span in known}

    def write(self, data: Any, at: int) -> None:
        """Raises SourceError s3-disk-full, s3-disk-unwritable."""
        try:
            file = self._opened()
            view = memoryview(data)
            while view:
                count = os.pwrite(file, view, at)
                view, at = view[count:], at + count
        except OSError as error:
            raise disk_error(error, self._work.parent, self.file.size) from error

    def summing(self) -> Summing:
        """For a range that is to come."""
        return Summing(self.algorithm, hashed=self._content is None)

    def read(self, span: Span) -> Summing:
        """Of the range as the disk holds it."""
        found = self.summing()
        for data in self._read(span):
            found.add(data)
        return found

    def accept(self, span: Span, found: Summing, noted: bool = False) -> bool:
        """The range is written, or was found as ``noted``. True: it was the last one."""
        if not noted:
            try:
                self._ledger.note(span, found.crc)
            except OSError as error:
                raise disk_error(error, self._work.parent, self.file.size) from error
        with self._lock:
            self._sums[span], self._digests[span] = found.crc, found.digest
            last = len(self._sums) == len(self.spans)
        for follower in (self._follower_of[span], self._content):
            if follower is not None:
                follower.go_on(self._sums)
        return last

    def right(self) -> bool:
        """When all ranges are accepted: whether the content is what S3 says. Without a checksum nobody knows better."""
        if self.checksum is None:
            return True
        return self.checksum.fits([self._digest(part) for part in self._parts], [part.size for part in self._parts])

    def forget(self) -> None:
        """All that has arrived is of no use."""
        self.damaged += 1
        self._ledger.remove()
        with self._lock:
            self._sums.clear()
            self._digests.clear()
        for follower in {*self._follower_of.values(), self._content}:
            if follower is not None:
                follower.forget()

    def content(self) -> str:
        """When all ranges are accepted: the digest of the content (content.py), in hex."""
        if self._content is not None:
            return self._content.digest(self._sums).hex()
        return of_pieces([self._digests[span] for span in self.spans]).hex()

    def publish(self) -> None:
        """Under its name. Nothing of the work is left."""
        try:
            self._opened()  # also of an object without a byte
            self.close()
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._work.replace(self._target)
            self._ledger.remove()
        except OSError as error:
            raise disk_error(error, self._target.parent, 0) from error

    def close(self) -> None:
        with self._lock:
            file, self._data = self._data, -1
        if file >= 0:
            os.close(file)
        self._ledger.close()

    def found(self) -> bool:
        """Whether ``target`` is there already, and right by a checksum: all of it is read."""
        if self.checksum is None or not self._target.is_file() or self._target.stat().st_size != self.file.size:
            return False
        digests = []
        with self._target.open("rb") as file:
            for part in self._parts:
                crc, add, hashed = (
                    0,
                    crc_of(self.algorithm),
                    None if self.checksum.combines else hash_of(self.checksum.algorithm),
                )
                left = part.size
                while left and (data := file.read(min(left, READ_BYTES))):
                    self._go_on()
                    left -= len(data)
                    if hashed is None:
                        crc = add(data, crc)
                    else:
                        hashed.update(data)
                digests.append(crc.to_bytes(CRC_BYTES[self.algorithm], "big") if hashed is None else hashed.digest())
        return self.checksum.fits(digests, [part.size for part in self._parts])

    def _opened(self) -> int:
        with self._lock:
            if self._data < 0:
                self._data = os.open(self._work, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
                os.ftruncate(self._data, self.file.size)
            return self._data

    def _read(self, span: Span) -> Iterator[bytes]:
        file = self._opened()
        for at in range(span.start, span.end, READ_BYTES):
            self._go_on()
            yield os.pread(file, min(READ_BYTES, span.end - at), at)

    def _digest(self, part: _Part) -> bytes:
        assert self.checksum is not None
        if self.checksum.combines:
            width = CRC_BYTES[self.algorithm]
            crcs = [self._sums[span].to_bytes(width, "big") for span in part.spans]
            return combined(self.algorithm, crcs, [span.size for span in part.spans])
        assert part.follower is not None
        return part.follower.digest(self._sums)


def disk_error(error: OSError, folder: Path, size: int) -> SourceError:
    """What the disk complains of. ``size``: of what was to be written."""
    if error.errno in FULL:
        free = shutil.disk_usage(folder).free if folder.exists() else 0
        return SourceError(
            "s3-disk-full",
            f"{folder}: no room for {size} bytes, {free} are free ({os.strerror(error.errno or 0)})",
            "free some of the disk, or move the store to a larger one",
        )
    return SourceError("s3-disk-unwritable", f"{folder}: {os.strerror(error.errno or 0)}", "see docs/artifacts.md")
