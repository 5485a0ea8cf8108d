"""Lets a replica load an artifact while the rest of it is still being fetched.

A file appears under its final name when it is complete. A loader therefore waits for each file before it reads it, and
for the whole artifact before it serves requests: only then has all of it been verified against the listing. Complete
artifacts and folders outside a store need no waiting. The folder has its final name from the start; a manifest marks it
as complete (store.py).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

from workers.artifacts.sources.listing import SMALL_BYTES, SourceError
from workers.artifacts.store import manifest
from workers.artifacts.store.artifact_uses import uses_of
from workers.host import file_lock
from workers.host.host_facts import available_memory

LOOK_S = 0.05
READ_AHEAD_BYTES = 128 << 10  # Linux's default for one read-ahead: it may read no more of a longer piece
HANDOVER_S = 15.0
"""Longest gap between a fetch that dies and the one that resumes it: a host actor that was killed restarts within
seconds and is called again at once. A fetch that fails is reported to replicas by other means."""


def pending_files(folder: Path) -> frozenset[str]:
    """Returns the names of the files that are being fetched into ``folder`` and are not complete yet."""
    fetch = manifest.unfinished(folder)
    if fetch is None:
        return frozenset()
    # Seeds are linked from other artifacts and are verified last; they may turn out to be damaged.
    return frozenset(file.name for file in fetch.listing.files if file.name in fetch.seeds or not file.is_in(folder))


def wait_for(folder: Path, name: str) -> Path:
    """Waits until the file is complete and returns its path; returns at once if it is not being fetched.

    Raises SourceError (fetch-ended) if the fetch ends without it.
    """
    _wait_while(lambda: name in pending_files(folder), folder, f"{name} arrived")
    return folder / name


def wait_for_all(folder: Path) -> None:
    """Waits until the artifact is complete and verified. Raises as `wait_for`."""
    _wait_while(lambda: manifest.unfinished(folder) is not None, folder, "all files arrived")


def wait_for_small(folder: Path) -> None:
    """Waits for the small files: the config, the tokenizer, the index of the shards. Raises as `wait_for`."""
    fetch = manifest.unfinished(folder)
    for file in fetch.listing.files if fetch is not None else ():
        if file.size <= SMALL_BYTES:
            wait_for(folder, file.name)


def _wait_while(lacks: Callable[[], bool], folder: Path, state: str) -> None:
    """Waits while ``lacks()`` and a fetch into the folder is running; ``state`` is the awaited state for errors."""
    since, uses = time.monotonic(), uses_of(folder)
    while uses is not None and lacks():
        now = time.monotonic()
        if file_lock.is_locked(uses.flight(folder.name)):
            since = now
        elif now - since > HANDOVER_S and lacks():
            message = f"the fetch into {folder} ended before {state}"
            raise SourceError("fetch-ended", message, "the next start resumes it")
        time.sleep(LOOK_S)


def read_ahead(files: Collection[Path]) -> None:
    """Reads the files into the page cache if all of them fit into the available memory. Returns once the reads are
    requested. A missing or unreadable file ends it: the load reports that."""
    with contextlib.suppress(OSError):
        sizes = {file: file.stat().st_size for file in files}
        if sum(sizes.values()) > available_memory():
            return
        for file, size in sizes.items():
            with file.open("rb", buffering=0) as opened:
                for offset in range(0, size, READ_AHEAD_BYTES):
                    os.posix_fadvise(opened.fileno(), offset, READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
