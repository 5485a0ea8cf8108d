"""Locks of files: among the threads of one process as among processes, released by the kernel with their holder.

Who holds one alone may unlink its file; who waits for it then takes the file of that name which comes after it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from workers.artifacts.sources.listing import Stopped

WAIT_S = 0.05  # between two tries; a blocking flock could not be told to stop
READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def _nothing() -> None:
    pass


@contextlib.contextmanager
def alone(path: Path, stop: threading.Event | None = None, waiting: Callable[[], None] = _nothing) -> Iterator[int]:
    """Hold ``path`` alone; its descriptor. ``waiting`` is called once if another holds it.

    Raises Stopped when ``stop`` is set meanwhile, and OSError where the file can neither be made nor opened.
    """
    with _held(path, fcntl.LOCK_EX, stop, waiting) as lock:
        yield lock


@contextlib.contextmanager
def shared(path: Path, stop: threading.Event | None = None) -> Iterator[int]:
    """Hold ``path`` together with others who do not want it alone; else as `alone`."""
    with _held(path, fcntl.LOCK_SH, stop, _nothing) as lock:
        yield lock


@contextlib.contextmanager
def at_once(path: Path) -> Iterator[bool]:
    """Hold ``path`` alone if nobody else holds it: whether that is so."""
    lock = _opened(path)
    try:
        yield _try(lock, fcntl.LOCK_EX) and _is_at(lock, path)
    finally:
        _let_go(lock)


def is_held(path: Path) -> bool:
    """Whether anybody holds it, alone or with others. It is held for a moment to find out."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _try(lock, fcntl.LOCK_EX)
    finally:
        _let_go(lock)


@contextlib.contextmanager
def _held(path: Path, kind: int, stop: threading.Event | None, waiting: Callable[[], None]) -> Iterator[int]:
    stop, told = stop or threading.Event(), False
    lock = _opened(path)
    try:
        while not (_try(lock, kind) and _is_at(lock, path)):
            if not _is_at(lock, path):
                _let_go(lock)
                lock = -1
                lock = _opened(path)
                continue
            if not told:
                told = True
                waiting()
            if stop.wait(WAIT_S):
                raise Stopped(f"stopped while another held {path}")
        yield lock
    finally:
        _let_go(lock)


def _opened(path: Path) -> int:
    """A descriptor of its own: locks belong to it, and not to the process."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno not in READ_ONLY or not path.exists():
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # enough for a lock


def _let_go(lock: int) -> None:
    """Not by closing it alone: a child that was forked meanwhile has the descriptor too."""
    if lock >= 0:
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _is_at(lock: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False


def _try(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
