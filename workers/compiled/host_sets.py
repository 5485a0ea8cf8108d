"""The sets of compiled artifacts on this host: one folder per manifest, completed atomically."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from placements.engines.registry import capabilities
from workers.compiled.file_states import Part, parts, sync_folder, sync_to_disk
from workers.compiled.manifest import LOCK_FILE, missing_files, name_of, plain_of, record_of, write_record
from workers.host import file_lock
from workers.host.process_tree import watched
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig

log = logging.getLogger(__name__)

MANIFEST = "corewright.json"  # written last: a folder without it was left by a killed compile


class Stopwatch:
    """Measures the time that one thread spends, in seconds; other threads may read it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent: tuple[float, float | None] = (0.0, None)  # total, start of the run: replaced as a pair

    @property
    def seconds(self) -> float:
        """The total running time."""
        before, since = self._spent
        return before if since is None else before + self._clock() - since

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Runs the stopwatch inside the context; not reentrant."""
        self._spent = (self._spent[0], self._clock())
        try:
            yield
        finally:
            self._spent = (self.seconds, None)


SPENT = Stopwatch()
"""How long this process has compiled, or waited for another process that compiles the same."""


def always(path: Path) -> bool:
    """The check of artifacts that are complete if all their files are."""
    return True


@dataclass(frozen=True)
class LockedEntry:
    """A locked folder of artifacts: the lock is shared if it is complete, else exclusive."""

    path: Path
    manifest: Mapping[str, Any]
    is_whole: Callable[[Path], bool] = field(default=always, compare=False)  # what the manifest alone does not tell
    # The descriptor of an exclusive lock: a process of its own that fills the folder keeps it open until it ends.
    lock: int | None = field(default=None, compare=False)

    @property
    def complete(self) -> bool:
        """Returns whether artifacts of exactly this manifest are finished here, with no file missing."""
        same = read_manifest(self.path) == self.manifest
        return same and missing_files(self.path) == () and self.is_whole(self.path)

    def finish(self, source: str = "", files: Mapping[str, Part] | None = None) -> None:
        """Marks the folder as complete and syncs it to disk, so that it survives a power failure.

        Writes the record with the digest of each file; ``files``: the digests, if known. ``source``: the model's
        source, for display.
        """
        record = record_of(self.manifest, source, files=files or parts(self.path, (MANIFEST, LOCK_FILE)))
        sync_folder(self.path)
        write_record(self.path / LOCK_FILE, record)
        written = self.path / f"{MANIFEST}.new"
        written.write_text(json.dumps(self.manifest, indent=1, sort_keys=True))
        sync_to_disk(written)
        written.replace(self.path / MANIFEST)
        sync_to_disk(self.path)
        sync_to_disk(self.path.parent)

    def forget(self) -> None:
        """Marks the artifacts as unusable: the next process that needs them removes them once they are unlocked."""
        try:
            (self.path / MANIFEST).unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(self.path.parent, error) from error


def read_manifest(folder: Path) -> Any:
    """Returns the manifest of a finished folder; None: it is not finished."""
    try:
        return json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def entry(root: Path, manifest: Mapping[str, Any], is_whole: Callable[[Path], bool] = always) -> Iterator[LockedEntry]:
    """Holds the entry of ``manifest``, which lists all that the artifacts depend on: engine, versions, shapes, flags.

    A complete entry is held with a shared lock. An incomplete one is emptied and held exclusively; later callers wait
    and then find it complete. ``manifest`` is JSON. Raises EngineLoadError if ``root`` cannot be written, unless the
    entry is complete.
    """
    held = peek(root, manifest, is_whole)
    name = held.path.name
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = file_lock.opened(root / f"{name}.lock")
    except OSError as error:
        if not held.complete:
            raise _unwritable(root, error) from error
        lock = None  # read-only and complete: it cannot be emptied
    if lock is None:
        yield held
        return
    exclusive = False
    with contextlib.suppress(OSError):
        os.utime(lock)  # the time of the last use, for ``cache prune``
    try:  # the kernel releases the lock with the process
        exclusive = _hold(lock, held)
        yield replace(held, lock=lock) if exclusive else held
    finally:
        if exclusive:
            os.ftruncate(lock, 0)
        with contextlib.suppress(OSError):
            file_lock.unlock(lock)  # a child that was forked inside has it open, too
        os.close(lock)


def peek(root: Path, manifest: Mapping[str, Any], is_whole: Callable[[Path], bool] = always) -> LockedEntry:
    """Returns the entry without a lock, for reading its state only."""
    plain = plain_of(manifest)
    return LockedEntry(root / name_of(plain), plain, is_whole)


def check_room(folder: Path, needed: int) -> None:
    """Raises EngineLoadError if the disk of ``folder`` has less than ``needed`` free bytes, before hours of work."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        fact = f"{folder} needs {needed / 2**30:.1f} GiB, and its disk has {free / 2**30:.1f} GiB free"
        hint = "free disk space, such as with `corewright cache prune`, or put COREWRIGHT_HOME on a larger disk"
        raise EngineLoadError("disk-full", fact, hint)


def _unwritable(root: Path, error: OSError) -> EngineLoadError:
    message = f"cannot write compiled artifacts to {root}: {error}"
    return EngineLoadError("compiled-unwritable", message, "check the free disk space and the owner of the folder")


def _hold(lock: int, held: LockedEntry) -> bool:
    """Locks the entry; True: exclusively, and emptied."""
    try:
        _acquire(lock, held.path, shared=True)
        while not held.complete:
            _acquire(lock, held.path, shared=False)  # releases the shared lock first, so that no two deadlock
            if not held.complete:
                _begin(lock, held.path)
                return True
            _acquire(lock, held.path, shared=True)  # another process was faster
    except OSError as error:
        raise _unwritable(held.path.parent, error) from error
    return False


def _acquire(lock: int, path: Path, *, shared: bool) -> None:
    if file_lock.try_lock(lock, shared=shared):
        return
    holder = os.pread(lock, 200, 0).decode(errors="replace").strip()
    began = time.monotonic()
    log.info("waiting for the process that holds %s%s", path, f": {holder}" if holder else "")
    with SPENT.running():
        file_lock.lock(lock, shared=shared)
    log.info("waited %.0f s for %s", time.monotonic() - began, path)


def _begin(lock: int, path: Path) -> None:
    """Empties the folder, and writes the compiling process to the lock file for the logs of waiters."""
    with contextlib.suppress(FileNotFoundError):
        (path / MANIFEST).unlink()  # first, so that a kill in between leaves nothing complete
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"pid {os.getpid()}, compiling since {time.strftime('%Y-%m-%d %H:%M:%S %Z')}".encode(), 0)


@contextlib.contextmanager
def compiling(name: str, where: str) -> Iterator[None]:
    """Logs the start and the end of compiling ``name``. ``where`` describes how to follow it.

    The compiler processes end with this process.
    """
    began = time.monotonic()
    log.info("compiling %s; %s", name, where)
    try:
        with watched(), SPENT.running():
            yield
    except BaseException as error:
        log.info("compiling %s failed after %.0f s: %s", name, time.monotonic() - began, type(error).__name__)
        raise
    log.info("compiled %s in %.0f s", name, time.monotonic() - began)


def compiles(config: ReplicaConfig) -> bool:
    """Returns whether a start of ``config`` compiles artifacts that are kept."""
    model = config.model
    return capabilities(model.engine).compiles(model.engine_options, emulated=config.place.claims is not None)


Tell = Callable[[int, int], None]
"""Reports progress: compiled graphs, total graphs."""


@dataclass(frozen=True, kw_only=True)
class Buildable:
    """A set of compiled artifacts that a start needs."""

    role: Literal["model", "draft"] = "model"
    source: Path  # checkpoint folder
    manifest: Mapping[str, Any]  # everything the artifacts depend on, as JSON
    is_whole: Callable[[Path], bool] = always  # further check of an entry's completeness
    # Compiles into an exclusively locked entry and finishes it; None: only a start can compile, on its cores.
    make: Callable[[LockedEntry, Tell], None] | None = None
    kept: bool = True  # False: kept by the package's own cache only
    unread: tuple[str, ...] = ()  # files that must be read for their digests in the manifest
