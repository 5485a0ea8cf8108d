"""Keeps the files of a model that may return in the page cache, so that its next load reads no disk."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

WINDOW = 8 << 20  # bytes that are looked at, and read, at once; a multiple of the page size


class CachedBytes(msgspec.Struct, frozen=True):
    """How much of a folder is in the page cache."""

    cached: int
    total: int


def cached_bytes(folder: Path) -> CachedBytes:
    """Returns the bytes of a folder's files, and those in the page cache, in whole pages. Linux counts all pages of a
    file that this user neither owns nor can write (mincore(2)). Raises OSError."""
    files = _files(folder)
    return CachedBytes(sum(cached for file in files for _, _, cached in _windows(file)), _size(files))


def keep_cached(folder: Path, spare: int, until: float) -> CachedBytes:
    """Reads what is missing in the page cache if all of the folder fits into ``spare`` bytes, since its cached pages
    count as available memory, too; not after the time ``until`` of time.monotonic(). Returns what was there before.
    Raises OSError."""
    before, files = cached_bytes(folder), _files(folder)
    if before.cached < before.total <= spare:
        buffer = bytearray(WINDOW)
        for path in files:
            with path.open("rb", buffering=0) as file:
                for offset, length, cached in _windows(path):
                    if time.monotonic() > until:
                        return before
                    if cached < length:
                        file.seek(offset)
                        file.readinto(buffer)
    return before


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _size(files: list[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def _windows(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yields the offset and the length of each window of a file, and how many of its bytes are in the page cache."""
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for offset in range(0, size, WINDOW):
            length = min(WINDOW, size - offset)
            residence = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
            # Private, since ctypes gives the address of writable memory only. Nothing is written.
            with mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=offset) as mapped:
                start = ctypes.c_char.from_buffer(mapped)
                failed = mincore(ctypes.byref(start), ctypes.c_size_t(length), residence)
                del start  # else the mapping cannot be closed
            if failed:
                raise OSError(ctypes.get_errno(), "mincore failed", str(path))
            yield offset, length, min(length, bytes(residence).count(1) * mmap.PAGESIZE)
