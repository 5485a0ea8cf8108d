"""Locks of files (flock): tried, or waited for until a deadline. The kernel releases those of a process that ends.

A lock belongs to the open descriptor, not to the process. Closing releases it, unless a child that was forked
meanwhile has the descriptor open, too.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

SPIN_S = 0.0002  # a lock that is held for microseconds is polled without sleeping for this long


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
