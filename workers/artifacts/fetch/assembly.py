"""Assembles one object on disk from ranges that arrive in any order."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from workers.artifacts.sources.checksums import CRC_BYTES, OF_RANGES, Checksum, Hash, combined, crc_of, hash_of
from workers.artifacts.sources.listing import RemoteFile, SourceError
from workers.artifacts.store.contents import PIECE_BYTES, ContentHash, of_pieces, piece


class Span(msgspec.Struct, frozen=True, order=True):
    """The byte range of one request."""

    start: int
    end: int  # exclusive

    @property
    def size(self) -> int:
        return self.end - self.start


class RangeLedger:
    """A file of lines ``START END CRC``, each written after its data.

    Data of a recorded range was written to the kernel before, however the process ends. The CRC detects what a crash
    of the machine loses.
    """

    def __init__(self, path: Path, file: RemoteFile, algorithm: str) -> None:
        """A ledger at ``path`` is used if it is of the same object and the same CRC algorithm."""
        self._path = path
        self._title = f"{file.tag} {file.size} {algorithm}\n"
        self._lock = threading.Lock()
        self._file = -1

    def read(self) -> dict[Span, int]:
        """Returns the complete ranges and their CRCs."""
        try:
            lines = self._path.read_text().splitlines(keepends=True)
        except (OSError, UnicodeDecodeError):
            return {}
        if not lines or lines[0] != self._title:
            return {}
        ranges = {}
        for line in lines[1:]:
            with contextlib.suppress(ValueError):  # a truncated line
                start, end, crc = line.split(" ")
                if line.endswith("\n"):
                    ranges[Span(int(start), int(end))] = int(crc, 16)
        return ranges

    def note(self, span: Span, crc: int) -> None:
        """Records a range whose data has been written."""
        with self._lock:
            if self._file < 0:
                self._file = self._open()
            os.write(self._file, f"{span.start} {span.end} {crc:x}\n".encode())

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def remove(self) -> None:
        self.close()
        self._path.unlink(missing_ok=True)

    def _open(self) -> int:
        """Opens the ledger for appending; clears it if it is of another object."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        file = os.open(self._path, flags, 0o644)
        header = os.pread(file, len(self._title), 0)
        if header.decode(errors="replace") != self._title:
            os.ftruncate(file, 0)
            os.write(file, self._title.encode())
        else:
            os.write(file, b"\n")  # terminates a truncated line
        return file


class OrderedHash:
    """Hashes ranges in order as soon as all earlier ones have arrived. Thread-safe."""

    def __init__(self, spans: Sequence[Span], new: Callable[[], Hash], read: Callable[[Span], Iterable[bytes]]) -> None:
        """``spans``: in order. ``read`` yields the bytes of a span that has arrived."""
        self._spans = spans
        self._new = new
        self._read = read
        self._lock = threading.Lock()  # guards the attributes below
        self._hash = new()
        self._done = 0

    def go_on(self, arrived: Container[Span], wait: bool = False) -> None:
        """Hashes up to the first missing span; without ``wait``, returns at once if another thread is hashing."""
        if not self._lock.acquire(blocking=wait):
            return
        try:
            while self._done < len(self._spans) and self._spans[self._done] in arrived:
                for data in self._read(self._spans[self._done]):
                    self._hash.update(data)
                self._done += 1
        finally:
            self._lock.release()

    def digest(self, arrived: Container[Span]) -> bytes:
        """Returns the hash, once all spans have arrived."""
        self.go_on(arrived, wait=True)
        return self._hash.digest()

    def forget(self) -> None:
        """Starts over: all spans are to arrive again."""
        with self._lock:
            self._hash, self._done = self._new(), 0


READ_BYTES = 2**20  # read size for data that is read back from disk
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def _no_op() -> None:
    pass


class RangeChecksum:
    """The checksum and digest of one range, updated as its bytes arrive."""

    def __init__(self, algorithm: str, *, hashed: bool) -> None:
        self._add = crc_of(algorithm)
        self._piece = piece() if hashed else None
        self.crc = 0
        self.size = 0  # bytes so far

    def add(self, data: Any) -> None:
        self.size += len(data)
        self.crc = self._add(data, self.crc)
        if self._piece is not None:
            self._piece.update(data)

    @property
    def digest(self) -> bytes:
        """The digest of the range as a piece of the content; empty if ranges are not pieces."""
        return b"" if self._piece is None else self._piece.digest()


class _Part:
    """One part of a multipart upload; an object whose parts do not matter has a single one."""

    def __init__(self, start: int, size: int, span_bytes: int) -> None:
        self.size = size
        end = start + size
        self.spans = [Span(at, min(at + span_bytes, end)) for at in range(start, end, span_bytes)]
        self.follower: OrderedHash | None = None  # where the checksum does not combine


class Assembly:
    """A file written at ``work`` with a range ledger beside it; moved to ``target`` when complete and verified."""

    def __init__(
        self,
        file: RemoteFile,
        target: Path,
        work: Path,
        checksum: Checksum | None,
        sizes: Sequence[int],
        span_bytes: int,
        go_on: Callable[[], None] = _no_op,
    ) -> None:
        """``sizes``: sizes of the parts that the checksum covers. ``span_bytes``: largest range of one request.
        ``go_on`` is called between disk reads and raises to abort them."""
        self.file = file
        self.checksum = checksum
        self.algorithm = checksum.algorithm if checksum is not None and checksum.combines else OF_RANGES
        self.damaged = 0  # how many times it was complete with a wrong checksum
        self._target = target
        self._work = work
        self._lock = threading.Lock()
        self._data = -1
        self._sums: dict[Span, int] = {}
        self._go_on = go_on
        starts = accumulate(sizes, initial=0)
        self._parts = [_Part(start, size, span_bytes) for start, size in zip(starts, sizes, strict=False)]
        self.spans = [span for part in self._parts for span in part.spans]
        if checksum is not None and not checksum.combines:
            for part in self._parts:
                part.follower = OrderedHash(part.spans, partial(hash_of, checksum.algorithm), self._read)
        self._follower_of = {span: part.follower for part in self._parts for span in part.spans}
        self._digests: dict[Span, bytes] = {}  # piece digests, if ranges are pieces of the content
        by_pieces = span_bytes == PIECE_BYTES and all(span.start % PIECE_BYTES == 0 for span in self.spans)
        self._content = None if by_pieces else OrderedHash(self.spans, ContentHash, self._read)
        self._ledger = RangeLedger(work.with_name(f"{work.name}.ranges"), file, self.algorithm)

    def recorded_ranges(self) -> dict[Span, int]:
        """Returns the ranges and CRCs that an earlier attempt left; they must be verified before `accept`."""
        if not self._work.exists():
            return {}
        expected = set(self.spans)
        return {span: crc for span, crc in self._ledger.read().items() if span in expected}

    def write(self, data: Any, at: int) -> None:
        """Raises SourceError s3-disk-full, s3-disk-unwritable."""
        try:
            file = self._open()
            view = memoryview(data)
            while view:
                count = os.pwrite(file, view, at)
                view, at = view[count:], at + count
        except OSError as error:
            raise disk_error(error, self._work.parent, self.file.size) from error

    def new_checksum(self) -> RangeChecksum:
        """Returns an empty checksum for a range that is to arrive."""
        return RangeChecksum(self.algorithm, hashed=self._content is None)

    def read(self, span: Span) -> RangeChecksum:
        """Returns the checksum of the range as it is on disk."""
        checksum = self.new_checksum()
        for data in self._read(span):
            checksum.add(data)
        return checksum

    def accept(self, span: Span, checksum: RangeChecksum, recorded: bool = False) -> bool:
        """Records a range that was written, or that was ``recorded`` earlier. True: all ranges are complete."""
        if not recorded:
            try:
                self._ledger.note(span, checksum.crc)
            except OSError as error:
                raise disk_error(error, self._work.parent, self.file.size) from error
        with self._lock:
            self._sums[span], self._digests[span] = checksum.crc, checksum.digest
            last = len(self._sums) == len(self.spans)
        for follower in (self._follower_of[span], self._content):
            if follower is not None:
                follower.go_on(self._sums)
        return last

    def is_valid(self) -> bool:
        """Returns whether the content matches S3's checksum, once all ranges are accepted. True without a checksum."""
        if self.checksum is None:
            return True
        return self.checksum.fits([self._digest(part) for part in self._parts], [part.size for part in self._parts])

    def discard(self) -> None:
        """Discards everything that has arrived."""
        self.damaged += 1
        self._ledger.remove()
        with self._lock:
            self._sums.clear()
            self._digests.clear()
        for follower in {*self._follower_of.values(), self._content}:
            if follower is not None:
                follower.forget()

    def content(self) -> str:
        """Returns the content digest (contents.py) in hex, once all ranges are accepted."""
        if self._content is not None:
            return self._content.digest(self._sums).hex()
        return of_pieces([self._digests[span] for span in self.spans]).hex()

    def publish(self) -> None:
        """Moves the file to its final name and removes the work files."""
        try:
            self._open()  # creates the file of an empty object
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

    def is_already_complete(self) -> bool:
        """Returns whether ``target`` exists with the right checksum. Reads all of it."""
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
                remaining = part.size
                while remaining and (data := file.read(min(remaining, READ_BYTES))):
                    self._go_on()
                    remaining -= len(data)
                    if hashed is None:
                        crc = add(data, crc)
                    else:
                        hashed.update(data)
                digests.append(crc.to_bytes(CRC_BYTES[self.algorithm], "big") if hashed is None else hashed.digest())
        return self.checksum.fits(digests, [part.size for part in self._parts])

    def _open(self) -> int:
        with self._lock:
            if self._data < 0:
                self._data = os.open(self._work, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
                os.ftruncate(self._data, self.file.size)
            return self._data

    def _read(self, span: Span) -> Iterator[bytes]:
        file = self._open()
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
    """Returns the SourceError of a disk error; ``size``: bytes that were to be written."""
    if error.errno in FULL:
        free = shutil.disk_usage(folder).free if folder.exists() else 0
        return SourceError(
            "s3-disk-full",
            f"{folder}: {size} bytes needed, {free} free ({os.strerror(error.errno or 0)})",
            "free disk space, or move the store to a larger disk",
        )
    return SourceError("s3-disk-unwritable", f"{folder}: {os.strerror(error.errno or 0)}", "see docs/artifacts.md")
