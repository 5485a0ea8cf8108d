"""Looking after caches and compiled artifacts: what is of no use to anybody goes, what failed may be tried again."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from workers.neff_cache import compiler_cache
from workers.neff_cache.compiled_artifacts import MANIFEST
from workers.neff_cache.compiler_cache import NEFF
from workers.neff_cache.entries import CacheEntry, State, listed_entries, read_entries
from workers.neff_cache.file_states import about, files_below
from workers.neff_cache.record import LOCK_FILE, Record, missing_files, place_of, read_record, records_in

YOUNG_S = 3600.0  # an entry without a NEFF may be that of a compile that just begins


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """One folder of compiled artifacts."""

    name: str
    state: str  # whole, damaged, unfinished; compiling: somebody holds it alone
    bytes: int
    used_at: float  # when a process last asked for it; seconds since the epoch
    record: Record | None = None
    damaged: tuple[str, ...] = ()


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed, or would be."""

    path: str
    why: str
    bytes: int = 0


def kept_in(root: Path) -> list[Kept]:
    """The compiled artifacts of this host. Reads programs, to compare them with their digests."""
    return [_kept(folder) for folder in sorted(root.glob("*")) if folder.is_dir()]


def prune_compiled(root: Path, older_than_s: float, dry_run: bool = False) -> Iterator[Removed]:
    """Those that nobody holds and that are unfinished, damaged, or were not asked for in that time."""
    for seen in kept_in(root):
        if dry_run:
            if why := _useless(seen, older_than_s):
                yield Removed(path=str(root / seen.name), why=why, bytes=seen.bytes)
        elif _useless(seen, older_than_s) and (gone := _removed_alone(root, seen.name, older_than_s)) is not None:
            yield gone


def prune_cache(cache: Path, older_than_s: float, dry_run: bool = False) -> Iterator[Removed]:
    """Stale locks, entries without anything in them, graphs that were not read in that time, and records of which
    nothing is left. Failures stay: they tell why."""
    now = time.time()
    if not dry_run:
        before = {entry.name for entry in read_entries(cache) if entry.state is State.STALE}
        compiler_cache.remove_stale_locks(cache)
        left = {entry.name for entry in read_entries(cache) if entry.state is State.STALE}
        yield from (Removed(path=str(cache / name), why="its lock was stale") for name in sorted(before - left))
    started: dict[str, float] = {}
    for told in records_in(cache):
        started |= {name: max(told.made_at, started.get(name, 0.0)) for name in told.graphs}
    for entry in read_entries(cache):
        why = _why(cache, entry, now, older_than_s, started.get(entry.name, 0.0))
        if why and (dry_run or compiler_cache.remove(cache / entry.name)):
            yield Removed(path=str(cache / entry.name), why=why, bytes=entry.bytes)
    for told in records_in(cache):
        file = place_of(cache, told.name)
        is_left = any((cache / name).exists() for name in (*told.graphs, *told.failed))
        if not is_left and now - told.made_at > YOUNG_S and (dry_run or compiler_cache.remove(file)):
            yield Removed(path=str(file), why="none of its graphs is left", bytes=0)


def retry(cache: Path, names: Collection[str] = (), dry_run: bool = False) -> Iterator[Removed]:
    """Forget failures, all or those of the graphs named: the next start compiles them again."""
    for entry in read_entries(cache):
        is_meant = not names or entry.name in names or entry.module in names
        if entry.state is State.FAILED and is_meant and (dry_run or compiler_cache.remove(cache / entry.name)):
            yield Removed(path=str(cache / entry.name), why=entry.words or "failed", bytes=entry.bytes)


def retry_in_bucket(url: str, names: Collection[str] = (), dry_run: bool = False) -> Iterator[Removed]:
    """The same in S3, where a compiler has left failures that worked there itself. Raises SourceError."""
    from workers.artifacts.sources.s3 import Bucket

    bucket = Bucket.of(url)
    files = bucket.files()
    for entry in listed_entries(files):
        if entry.state is State.FAILED and (not names or entry.name in names or entry.module in names):
            for file in files if not dry_run else ():
                if file.name.startswith(f"{entry.name}/"):
                    bucket.delete(file.name)
            yield Removed(path=f"{bucket.url}/{entry.name}", why="failed", bytes=entry.bytes)


def _why(cache: Path, entry: CacheEntry, now: float, older_than_s: float, started_at: float) -> str:
    """Why it goes; empty: it stays. ``started_at``: when a start last wrote down that it is the graph of its model,
    for not every file system tells when a file was read; 0: never."""
    if entry.state is State.EMPTY and now - entry.changed_at > YOUNG_S:
        return "nothing was compiled"
    if entry.state is State.STALE:
        return "its lock is stale"
    if entry.state is State.SUCCESS:
        found = about(cache / entry.name / NEFF)
        used = max(entry.changed_at, started_at, 0.0 if found is None else found.st_atime)
        if now - used > older_than_s:
            return f"not read for {(now - used) / 86400:.0f} days"
    return ""


def _useless(one: Kept, older_than_s: float) -> str:
    """Why it goes; empty: it stays."""
    age = time.time() - one.used_at
    if one.state == "whole":
        return f"not used for {age / 86400:.0f} days" if age > older_than_s else ""
    return "" if one.state == "compiling" else one.state


def _kept(folder: Path, is_mine: bool = False) -> Kept:
    """``is_mine``: the caller holds it alone."""
    told = read_record(folder / LOCK_FILE)
    missing = (LOCK_FILE,) if told is None else missing_files(folder)
    size = sum(found.st_size for _, found in files_below(folder))
    try:
        json.loads((folder / MANIFEST).read_text())
        finished = True
    except (OSError, ValueError):
        finished = False
    lock = folder.with_name(f"{folder.name}.lock")
    if finished:
        state = "damaged" if missing else "whole"
    else:
        state = "compiling" if not is_mine and _is_held(lock) else "unfinished"
    return Kept(
        name=folder.name,
        state=state,
        bytes=size,
        used_at=max((found.st_mtime for path in (folder, lock) if (found := about(path)) is not None), default=0.0),
        record=told,
        damaged=missing or (),
    )


def _is_held(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


def _removed_alone(root: Path, name: str, older_than_s: float) -> Removed | None:
    """None: somebody holds it, or it is of use by now: a compile may have ended since it was looked at.

    The manifest goes first, so that a death in between leaves nothing complete.
    """
    try:
        lock = os.open(root / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        now = _kept(root / name, is_mine=True)
        if not (why := _useless(now, older_than_s)):
            return None
        (root / name / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(root / name)
        return Removed(path=str(root / name), why=why, bytes=now.bytes)
    except OSError:
        return None
    finally:
        os.close(lock)
