"""File locks between threads and between processes; the kernel releases those of a process that dies.

The holder of an exclusive lock may unlink its file; waiters then lock the next file of that name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from workers.artifacts.sources.listing import Stopped
from workers.host import file_lock

WAIT_S = 0.05  # between two attempts; a blocking flock could not be interrupted
READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def _nothing() -> None:
    pass


def exclusive(
    path: Path, stop: threading.Event | None = None, waiting: Callable[[], None] = _nothing
) -> contextlib.AbstractContextManager[int]:
    """Holds an exclusive lock on ``path``; yields its descriptor. ``waiting`` is called once if it has to wait.

    Raises Stopped when ``stop`` is set meanwhile, and OSError if the file can neither be created nor opened.
    """
    return _held(path, False, stop, waiting)


def shared(path: Path, stop: threading.Event | None = None) -> contextlib.AbstractContextManager[int]:
    """Holds a shared lock on ``path``; else as `exclusive`."""
    return _held(path, True, stop, _nothing)


@contextlib.contextmanager
def try_exclusive(path: Path) -> Iterator[bool]:
    """Tries to hold an exclusive lock on ``path`` without waiting; yields whether it is held."""
    lock = _open(path)
    try:
        yield file_lock.try_lock(lock) and file_lock.is_at(lock, path)
    finally:
        _release(lock)


@contextlib.contextmanager
def _held(path: Path, shared: bool, stop: threading.Event | None, waiting: Callable[[], None]) -> Iterator[int]:
    stop, notified = stop or threading.Event(), False
    lock = _open(path)
    try:
        while not (file_lock.try_lock(lock, shared=shared) and file_lock.is_at(lock, path)):
            if not file_lock.is_at(lock, path):
                _release(lock)
                lock = -1
                lock = _open(path)
                continue
            if not notified:
                notified = True
                waiting()
            if stop.wait(WAIT_S):
                raise Stopped(f"stopped while waiting for the lock {path}")
        yield lock
    finally:
        _release(lock)


def _open(path: Path) -> int:
    """Opens a new descriptor: flock locks belong to it, not to the process."""
    try:
        return file_lock.opened(path, 0o644)
    except OSError as error:
        if error.errno not in READ_ONLY or not path.exists():
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # enough for a lock


def _release(lock: int) -> None:
    """Unlocks explicitly, since a child that was forked meanwhile keeps the descriptor open."""
    if lock >= 0:
        file_lock.unlock(lock)
        os.close(lock)
