"""Files that only this user can read or write: appended to in whole lines, rotated, or replaced at once.

No function follows a link in the last part of a path. All raise OSError.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def open_to_append(path: Path) -> int:
    """Opens a file to append to, and creates it if it is missing."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def create(path: Path) -> int:
    """Opens a new file in place of an old one."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def write_all(file: int, data: bytes) -> None:
    """Writes everything. After a partial write, the next call raises its cause."""
    remainder = memoryview(data)
    while remainder:
        remainder = remainder[os.write(file, remainder) :]


def append(file: int, data: bytes, *, sync: bool) -> None:
    """Appends everything or, if it raises, nothing. ``sync``: on return it is on disk.

    No other process may write meanwhile."""
    size = os.fstat(file).st_size
    try:
        write_all(file, data)
        if sync:
            os.fsync(file)
    except OSError:
        os.ftruncate(file, size)
        raise


def ends_whole(file: int) -> bool:
    """Returns whether the last line is complete; a crash may have truncated it."""
    size = os.fstat(file).st_size
    return not size or os.pread(file, 1, size - 1) == b"\n"


def rotated(path: Path, number: int) -> Path:
    """Returns the path of a rotated file; 1 is the newest, 0 the file itself."""
    return path.with_name(f"{path.name}.{number}") if number else path


def rotate(path: Path, most: int) -> None:
    """Renames a file to `NAME.1` and so on; the one numbered ``most`` is deleted."""
    for number in range(most, 0, -1):
        with contextlib.suppress(FileNotFoundError):
            rotated(path, number - 1).replace(rotated(path, number))


def replace(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Writes a new file and renames it to ``path``, so that readers find the old or the new content."""
    draft = path.with_suffix(".new")
    try:
        file = create(draft)
        try:
            write_all(file, content)
            if sync:
                os.fsync(file)
        finally:
            os.close(file)
        draft.rename(path)
        if sync:
            sync_names(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def sync_names(folder: Path) -> None:
    """Syncs the names of a folder's files to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
