"""The files of models that may return stay in the page cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from workers.host.page_cache import WINDOW, CachedBytes, cached_bytes, keep_cached

SIZE = 5 * WINDOW + 3 * 4096 + 10  # more than the kernel reads ahead by itself
FOREVER = float("inf")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose files are written to disk and no longer in memory."""
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"w" * SIZE)
    (weights.parent / "empty").touch()
    with weights.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_bytes(weights.parent).cached:
        pytest.skip("this filesystem keeps its files in memory")
    return weights.parent


def test_files_that_were_read_are_cached(folder: Path) -> None:
    """All pages of them, the last one too."""
    (folder / "model.safetensors").read_bytes()

    assert cached_bytes(folder) == CachedBytes(SIZE, SIZE)


def test_what_is_missing_is_read_again(folder: Path) -> None:
    """All of a file that the kernel has evicted."""
    assert keep_cached(folder, SIZE, FOREVER) == CachedBytes(0, SIZE)
    assert cached_bytes(folder) == CachedBytes(SIZE, SIZE)


@pytest.mark.parametrize(("spare", "until"), [(SIZE - 1, FOREVER), (SIZE, 0.0)])
def test_without_spare_memory_or_time_nothing_is_read(folder: Path, spare: int, until: float) -> None:
    """The pages would evict others; the rest is read in the next rounds."""
    keep_cached(folder, spare, until)

    assert cached_bytes(folder) == CachedBytes(0, SIZE)
