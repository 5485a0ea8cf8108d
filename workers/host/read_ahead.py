"""Reads files into the page cache before they are needed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from workers.host.host_facts import available_memory

PIECE_BYTES = 128 << 10  # Linux's default for one read-ahead: it may read no more of a longer piece


def read_ahead(files: Collection[Path]) -> None:
    """Reads the files into the page cache if all of them fit into the available memory. Returns once the reads are
    requested. A missing or unreadable file ends it: the load reports that."""
    with contextlib.suppress(OSError):
        sizes = {file: file.stat().st_size for file in files}
        if sum(sizes.values()) > available_memory():
            return
        for file, size in sizes.items():
            with file.open("rb", buffering=0) as opened:
                for offset in range(0, size, PIECE_BYTES):
                    os.posix_fadvise(opened.fileno(), offset, PIECE_BYTES, os.POSIX_FADV_WILLNEED)
