"""What the files of a checkpoint hold, as digests: kept, since reading hundreds of gigabytes again takes minutes."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import msgspec

from workers.artifacts.store.manifest import OURS

log = logging.getLogger(__name__)

KEPT = "digests.json"  # path -> stamp and digest
BLOCK = 1 << 24  # bytes read at once
READERS = 4  # files read at the same time: hashing keeps a thread busy, and disks and networks are faster than one

Stamp = tuple[int, int, int, int]  # device, inode, size, time of the last change in ns


def digest_of(source: Path, keep: Path) -> str:
    """Of the names and the whole contents of the files in ``source``, not of their times, nor of what a store adds.

    A file whose digest is known in the folder ``keep`` is not read again while its inode, size and time of change are
    the same.
    """
    files = _files(source)
    stamps = {path: _stamp(path) for path in files}
    known = _known(keep / KEPT)
    kept = {path: known[str(path)] for path in files if str(path) in known}
    digests = {path: digest for path, (stamp, digest) in kept.items() if stamp == stamps[path]}
    missing = [path for path in files if path not in digests]
    if missing:
        began = time.monotonic()
        size = sum(stamps[path][2] for path in missing)
        with ThreadPoolExecutor(READERS) as pool:
            digests |= zip(missing, pool.map(_read, missing), strict=True)
        log.info("read %.1f GB of %s in %.0f s: artifacts hold weights", size / 1e9, source, time.monotonic() - began)
        # One that is written to meanwhile has another stamp by now, and its digest is worth nothing.
        fresh = {str(path): (stamps[path], digests[path]) for path in missing if _stamp(path) == stamps[path]}
        _keep(keep / KEPT, fresh)
    found = blake2b(digest_size=16)
    for path in files:
        found.update(f"{path.name}\0{digests[path]}\0".encode())
    return found.hexdigest()


def unread_of(source: Path, keep: Path) -> tuple[Path, ...]:
    """The files that ``digest_of`` would have to read now."""
    known = _known(keep / KEPT)
    files = _files(source)
    return tuple(path for path in files if known.get(str(path), (None,))[0] != _stamp(path))


def _files(source: Path) -> list[Path]:
    return sorted(path for path in source.resolve().iterdir() if path.is_file() and path.name not in OURS)


def _stamp(path: Path) -> Stamp:
    """Of what a link leads to: the folders of a download are full of links."""
    about = path.stat()
    return (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)


def _read(path: Path) -> str:
    found = blake2b(digest_size=16)
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            found.update(block)
    return found.hexdigest()


def _known(file: Path) -> dict[str, tuple[Stamp, str]]:
    """Empty where nothing was kept, or what was kept cannot be read: then the files are."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, tuple[Stamp, str]])
    except (OSError, msgspec.DecodeError):
        return {}


def _keep(file: Path, fresh: dict[str, tuple[Stamp, str]]) -> None:
    """Of two processes that write at the same time one is forgotten, and reads its files once more."""
    written = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        written.write_bytes(msgspec.json.encode({**_known(file), **fresh}))
        written.replace(file)
    except OSError as error:
        log.info("the next start reads the same files again: %s", error)
