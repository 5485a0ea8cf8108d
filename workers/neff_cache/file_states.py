"""Files as they were: sizes and digests, and what of it is gone or other now."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import msgspec

BLOCK = 1 << 22  # bytes read at once
READERS = 4  # files read at the same time: hashing keeps a thread busy
# What a start reads anyway, and is small enough to be proven each time. Weights, hundreds of gigabytes, are not.
PROGRAMS = (".neff", ".pt", ".so")


class Part(msgspec.Struct, frozen=True):
    """One file."""

    size: int  # bytes
    digest: str  # BLAKE2b of 16 bytes, in hex


def part_of(path: Path) -> Part:
    """Reads the file. Raises OSError."""
    return Part(path.stat().st_size, digest(path))


def digest(path: Path) -> str:
    """Of a file's content. Raises OSError."""
    found = blake2b(digest_size=16)
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            found.update(block)
    return found.hexdigest()


def parts(folder: Path, without: Collection[str] = ()) -> dict[str, Part]:
    """Every file below ``folder`` but those named; by its path within it. Reads all of them. Raises OSError."""
    names = (path.relative_to(folder).as_posix() for path, _ in files_below(folder))
    kept = [name for name in names if name not in without]
    with ThreadPoolExecutor(READERS) as pool:
        return dict(zip(kept, pool.map(lambda name: part_of(folder / name), kept), strict=True))


def damaged(folder: Path, files: Mapping[str, Part]) -> tuple[str, ...]:
    """Those that are missing, or of another size; and of programs those with another content."""
    wrong = [name for name, part in files.items() if _size(folder / name) != part.size]
    proven = [name for name in files if name.endswith(PROGRAMS) and name not in wrong]
    with ThreadPoolExecutor(READERS) as pool:
        found = pool.map(lambda name: _digest(folder / name) == files[name].digest, proven)
        wrong += [name for name, same in zip(proven, found, strict=True) if not same]
    return tuple(sorted(wrong))


def sync_to_disk(path: Path) -> None:
    """Have a file's content, or the names in a folder, survive a power failure. A file that went meanwhile, and a file
    system that has no such call, are passed over; raises OSError where the disk did not take it."""
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
    """The same for all that is below it."""
    for path, _, names in os.walk(folder):
        for name in names:
            sync_to_disk(Path(path, name))
        sync_to_disk(Path(path))


def about(path: Path) -> os.stat_result | None:
    """None: it is not there, or went meanwhile; compilers make and remove files all the time."""
    try:
        return path.stat()
    except OSError:
        return None


def files_below(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """In the order of their paths; folders and files that go meanwhile are passed over."""
    for path in sorted(Path(held, name) for held, _, names in os.walk(folder) for name in names):
        if (found := about(path)) is not None and stat.S_ISREG(found.st_mode):
            yield path, found


def _size(path: Path) -> int:
    found = about(path)
    return -1 if found is None else found.st_size


def _digest(path: Path) -> str:
    with contextlib.suppress(OSError):
        return digest(path)
    return ""
