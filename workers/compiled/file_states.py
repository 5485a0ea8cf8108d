"""Records sizes and digests of files, finds changed ones, and syncs files to disk."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import compress
from pathlib import Path

import msgspec

BLOCK = 1 << 22  # read size in bytes
READERS = 4  # files read in parallel: hashing keeps a thread busy
# Files that a start reads anyway, small enough to verify each time. Weights of hundreds of gigabytes are not.
PROGRAMS = (".neff", ".pt", ".so")


class Part(msgspec.Struct, frozen=True):
    """The recorded state of one file."""

    size: int  # bytes
    digest: str  # BLAKE2b of 16 bytes, in hex


def part_of(path: Path) -> Part:
    """Reads a file and returns its state. Raises OSError."""
    return Part(path.stat().st_size, digest(path))


def digest(path: Path) -> str:
    """Returns the digest of a file's content. Raises OSError."""
    content = blake2b(digest_size=16)
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            content.update(block)
    return content.hexdigest()


def parts(folder: Path, without: Collection[str] = ()) -> dict[str, Part]:
    """Reads all files below ``folder`` except those in ``without``; returns their states by relative path. Raises
    OSError."""
    names = (path.relative_to(folder).as_posix() for path, _ in files_below(folder))
    included = [name for name in names if name not in without]
    with ThreadPoolExecutor(READERS) as pool:
        return dict(zip(included, pool.map(lambda name: part_of(folder / name), included), strict=True))


def part_at(path: Path) -> Part | None:
    """Returns the state of a file; None: it cannot be read."""
    with contextlib.suppress(OSError):
        return part_of(path)
    return None


def damaged(folder: Path, files: Mapping[str, Part]) -> tuple[str, ...]:
    """Returns the files that are missing or have another size, and programs with another content."""

    def is_damaged(name: str) -> bool:
        status = about(folder / name)
        if status is None or status.st_size != files[name].size:
            return True
        return name.endswith(PROGRAMS) and part_at(folder / name) != files[name]

    with ThreadPoolExecutor(READERS) as pool:
        return tuple(sorted(compress(files, pool.map(is_damaged, files))))


def sync_to_disk(path: Path) -> None:
    """Syncs a file's content, or a folder's names, to disk, so that it survives a power failure.

    Ignores a missing file and a file system without fsync; raises OSError if the write fails.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):
            raise
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Syncs a folder and everything below it to disk."""
    for path, _, names in os.walk(folder):
        for name in names:
            sync_to_disk(Path(path, name))
        sync_to_disk(Path(path))


def about(path: Path) -> os.stat_result | None:
    """Returns the stat of a path; None: it does not exist. Compilers create and remove files at any time."""
    try:
        return path.stat()
    except OSError:
        return None


def files_below(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yields the regular files below a folder, sorted by path; skips those that disappear meanwhile."""
    for path in sorted(Path(held, name) for held, _, names in os.walk(folder) for name in names):
        if (status := about(path)) is not None and stat.S_ISREG(status.st_mode):
            yield path, status
