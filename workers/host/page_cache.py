"""Keeps the files of a model that may return in the page cache, so that its next load reads no disk."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import msgspec


class CachedBytes(msgspec.Struct, frozen=True):
    """How much of a folder is in the page cache."""

    cached: int
    total: int


def cached_bytes(folder: Path) -> CachedBytes:
    """Returns the bytes of a folder's files, and those in the page cache, in whole pages. Raises OSError."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return CachedBytes(sum(map(_cached, files)), sum(path.stat().st_size for path in files))


def keep_cached(folder: Path, spare: int) -> CachedBytes:
    """Reads what is missing into the page cache if ``spare`` bytes suffice. Returns what was there before, since the
    kernel reads in the background. Raises OSError."""
    before = cached_bytes(folder)
    if 0 < before.total - before.cached <= spare:
        for path in folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
    return before


def _cached(path: Path) -> int:
    size = path.stat().st_size
    if not size:
        return 0
    pages = -(-size // mmap.PAGESIZE)
    residence = (ctypes.c_ubyte * pages)()
    # A private mapping, since ctypes gives the address of writable memory only. Nothing is written.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None, use_errno=True).mincore(ctypes.byref(start), ctypes.c_size_t(size), residence)
        del start  # else the mapping cannot be closed
        if failed:
            raise OSError(ctypes.get_errno(), "mincore failed", str(path))
    return min(size, sum(each & 1 for each in residence) * mmap.PAGESIZE)
