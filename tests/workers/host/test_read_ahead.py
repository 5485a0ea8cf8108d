"""Files are read into the page cache before they are needed."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from tests.fleet import until
from workers.artifacts.fetch import arrival as module
from workers.artifacts.fetch.arrival import READ_AHEAD_BYTES, read_ahead

SIZE = 40 * READ_AHEAD_BYTES + 10  # more than the kernel reads ahead by itself
PAGES = -(-SIZE // mmap.PAGESIZE)
DEADLINE_S = 30.0


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file that is on disk and not in the page cache."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"w" * SIZE)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_pages(path):
        pytest.skip("this file system keeps its files in memory")
    return path


def cached_pages(path: Path) -> int:
    """How many of the file's pages are in the page cache, by mincore(2)."""
    pages = (ctypes.c_ubyte * PAGES)()
    # Private, since ctypes gives the address of writable memory only. Nothing is written.
    with path.open("rb") as file, mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_COPY) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None).mincore(ctypes.byref(start), ctypes.c_size_t(SIZE), pages)
        del start  # else the mapping cannot be closed
    assert not failed
    return sum(page & 1 for page in pages)


def test_all_of_a_file_is_read(weights: Path) -> None:
    """By requests that the kernel does not cut; a missing file is left out."""
    read_ahead([weights])
    until(lambda: cached_pages(weights) == PAGES, DEADLINE_S, "it is in the page cache")
    read_ahead([weights.with_name("missing")])


def test_files_that_do_not_fit_into_memory_are_not_read(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their pages would evict others before they are needed."""
    monkeypatch.setattr(module, "available_memory", lambda: SIZE - 1)
    read_ahead([weights])

    assert cached_pages(weights) == 0
