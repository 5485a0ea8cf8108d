"""Locks of files (flock): tried, or waited for until a deadline or a stop. The kernel releases those of a process that
ends.

A lock belongs to the open descriptor, not to the process. Closing releases it, unless a child that was forked
meanwhile has the descriptor open, too. The holder of an exclusive lock may remove its file; those that wait for its
path then lock the next file there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

SPIN_S = 0.0002  # a lock that is held for microseconds is polled without sleeping for this long
WAIT_S = 0.05  # between two attempts; a blocking flock could not be interrupted
READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


class Stopped(Exception):
    """The caller stopped a wait for a lock, a fetch or a compile. What has arrived of a fetch is kept for the next."""


def _nothing() -> None:
    pass


def opened(path: Path, mode: int = 0o600) -> int:
    """Opens a lock file, and creates it if it is missing. Raises OSError, also for a link."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Takes the lock if no other descriptor holds one that excludes it. Raises OSError without support for locks."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock(descriptor: int, *, shared: bool = False) -> None:
    """Waits for the lock without a deadline."""
    fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def lock_within(descriptor: int, wait_s: float, poll_s: float) -> bool:
    """Waits for the exclusive lock, at most ``wait_s``; returns whether it is held."""
    began = time.monotonic()
    while not try_lock(descriptor):
        waited_s = time.monotonic() - began
        if waited_s >= wait_s:
            return False
        if waited_s > SPIN_S:
            time.sleep(poll_s)
    return True


def unlock(descriptor: int) -> None:
    """Releases the lock, also where a forked child has the descriptor open."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def take(path: Path) -> int | None:
    """Returns a descriptor that holds the exclusive lock until it is closed; None if another process holds one."""
    descriptor = opened(path)
    try:
        held = try_lock(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    if held:
        return descriptor
    os.close(descriptor)
    return None


def is_locked(path: Path, *, shared: bool = False) -> bool:
    """Returns whether another descriptor excludes an exclusive (or ``shared``) lock, by taking it for a moment.

    A missing file is not locked. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor, shared=shared)
    finally:
        unlock(descriptor)
        os.close(descriptor)


def is_at(descriptor: int, path: Path) -> bool:
    """Returns whether the path leads to the open file, which may have been removed or replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


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
        yield try_lock(lock) and is_at(lock, path)
    finally:
        _release(lock)


@contextlib.contextmanager
def _held(path: Path, shared: bool, stop: threading.Event | None, waiting: Callable[[], None]) -> Iterator[int]:
    stop, notified = stop or threading.Event(), False
    lock = _open(path)
    try:
        while not (try_lock(lock, shared=shared) and is_at(lock, path)):
            if not is_at(lock, path):
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
        return opened(path, 0o644)
    except OSError as error:
        if error.errno not in READ_ONLY or not path.exists():
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # enough for a lock


def _release(lock: int) -> None:
    """Unlocks explicitly, since a child that was forked meanwhile keeps the descriptor open."""
    if lock >= 0:
        unlock(lock)
        os.close(lock)
