"""Compiled artifacts on this host: a folder for each manifest, complete or not there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.host.process_tree import watched
from workers.messages.engine_protocol import EngineLoadError
from workers.neff_cache.file_states import Part, parts, sync_folder, sync_to_disk
from workers.neff_cache.record import LOCK_FILE, missing_files, name_of, plain_of, record_of, write_record

log = logging.getLogger(__name__)

MANIFEST = "corewright.json"  # written last: a folder without it is what a compile that died has left


class Stopwatch:
    """Time that one thread spends, which others may read at any moment. Seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent: tuple[float, float | None] = (0.0, None)  # before, and since when it runs: replaced as one

    @property
    def seconds(self) -> float:
        """All the time that it has run."""
        before, since = self._spent
        return before if since is None else before + self._clock() - since

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """It runs inside; not to be entered twice."""
        self._spent = (self._spent[0], self._clock())
        try:
            yield
        finally:
            self._spent = (self.seconds, None)


SPENT = Stopwatch()
"""How long this process, which holds one engine, has compiled, or waited for another that compiles the same."""


def _always(path: Path) -> bool:
    return True


@dataclass(frozen=True)
class Entry:
    """One folder of artifacts, locked for whoever holds it: with others while it is complete, else alone."""

    path: Path
    manifest: Mapping[str, Any]
    is_whole: Callable[[Path], bool] = field(default=_always, compare=False)  # what the manifest alone does not tell

    @property
    def complete(self) -> bool:
        """Whether a compile of that very manifest has finished here, and left nothing missing."""
        try:
            same = bool(json.loads((self.path / MANIFEST).read_text()) == self.manifest)
        except (OSError, ValueError):
            return False
        return same and missing_files(self.path) == () and self.is_whole(self.path)

    def finish(self, source: str = "", files: Mapping[str, Part] | None = None) -> None:
        """Everything is in the folder, and from now on on the disk: after a power failure too.

        ``source`` is the model's, for people. Beside the files lies then their record, with the digest of each;
        ``files``: those, where they are known.
        """
        made = record_of(self.manifest, source, files=files or parts(self.path, (MANIFEST, LOCK_FILE)))
        sync_folder(self.path)
        write_record(self.path / LOCK_FILE, made)
        written = self.path / f"{MANIFEST}.new"
        written.write_text(json.dumps(self.manifest, indent=1, sort_keys=True))
        sync_to_disk(written)
        written.replace(self.path / MANIFEST)
        sync_to_disk(self.path)
        sync_to_disk(self.path.parent)

    def forget(self) -> None:
        """What is here is of no use: it is removed by the next one who asks for it, when nobody holds it any more."""
        try:
            (self.path / MANIFEST).unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(self.path.parent, error) from error


@contextlib.contextmanager
def entry(root: Path, manifest: Mapping[str, Any], is_whole: Callable[[Path], bool] = _always) -> Iterator[Entry]:
    """The entry of ``manifest``, which names all that the artifacts depend on: engine, versions, shapes, flags.

    Many may hold a complete one. Who finds it otherwise holds it alone, emptied; whoever comes meanwhile waits, and
    finds it complete. ``manifest`` is JSON. Raises EngineLoadError where ``root`` cannot be written, unless what is
    asked for is there already.
    """
    found = peek(root, manifest, is_whole)
    name = found.path.name
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = os.open(root / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if not found.complete:
            raise _unwritable(root, error) from error
        lock = None  # made elsewhere, and given to this host to read: nobody here can empty it
    if lock is None:
        yield found
        return
    alone = False
    with contextlib.suppress(OSError):
        os.utime(lock)  # when it was last used, for ``cache prune``
    try:  # the kernel releases the lock with the process
        alone = _hold(lock, found)
        yield found
    finally:
        if alone:
            os.ftruncate(lock, 0)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked inside has it open as well
        os.close(lock)


def peek(root: Path, manifest: Mapping[str, Any], is_whole: Callable[[Path], bool] = _always) -> Entry:
    """The entry as it stands, not locked: for who only looks."""
    plain = plain_of(manifest)
    return Entry(root / name_of(plain), plain, is_whole)


def _unwritable(root: Path, error: OSError) -> EngineLoadError:
    what = f"compiled artifacts cannot be kept in {root}: {error}"
    return EngineLoadError("compiled-unwritable", what, "is the disk full, or does the folder belong to another user?")


def _hold(lock: int, found: Entry) -> bool:
    """Get hold of the entry; True: alone, and emptied."""
    try:
        _acquire(lock, fcntl.LOCK_SH, found.path)
        while not found.complete:
            _acquire(lock, fcntl.LOCK_EX, found.path)  # lets go of the other first, so that no two wait for each other
            if not found.complete:
                _begin(lock, found.path)
                return True
            _acquire(lock, fcntl.LOCK_SH, found.path)  # somebody was faster
    except OSError as error:
        raise _unwritable(found.path.parent, error) from error
    return False


def _acquire(lock: int, kind: int, path: Path) -> None:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
        return
    except BlockingIOError:
        holder = os.pread(lock, 200, 0).decode(errors="replace").strip()
    began = time.monotonic()
    log.info("waiting for another process that holds %s%s", path, f": {holder}" if holder else "")
    with SPENT.running():
        fcntl.flock(lock, kind)
    log.info("waited %.0f s for %s", time.monotonic() - began, path)


def _begin(lock: int, path: Path) -> None:
    """Empty the folder, and say in the lock's file who compiles, for those who wait."""
    with contextlib.suppress(FileNotFoundError):
        (path / MANIFEST).unlink()  # first, so that a death in between leaves nothing complete
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"pid {os.getpid()} compiles since {time.strftime('%Y-%m-%d %H:%M:%S %Z')}".encode(), 0)


@contextlib.contextmanager
def compiling(what: str, where: str) -> Iterator[None]:
    """Say in the log that ``what`` is compiled from now on, and when that ends. ``where`` says how to follow it.

    The compilers end with this process.
    """
    began = time.monotonic()
    log.info("compiling %s; %s", what, where)
    try:
        with watched(), SPENT.running():
            yield
    except BaseException as error:
        log.info("compiling %s failed after %.0f s: %s", what, time.monotonic() - began, type(error).__name__)
        raise
    log.info("compiled %s in %.0f s", what, time.monotonic() - began)
