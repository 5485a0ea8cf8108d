"""Lists and prunes the sets of this host and caches of graphs, and clears failures for a retry."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from workers.compiled import neuron_cache
from workers.compiled.file_states import about, damaged, files_below
from workers.compiled.graph_records import record_file, records_in
from workers.compiled.host_sets import MANIFEST, read_manifest
from workers.compiled.manifest import LOCK_FILE, ManifestRecord, read_record
from workers.compiled.neuron_cache import NEFF, CacheEntry, EntryState, listed_entries, read_entries
from workers.compiled.storage import S3, storage_at
from workers.host import file_lock

YOUNG_S = 3600.0  # a younger entry without a NEFF may be a compile that has just started


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A set of compiled artifacts on this host."""

    name: str
    state: str  # whole, damaged, unfinished; compiling: locked exclusively
    bytes: int
    used_at: float  # time of the last use; seconds since the epoch
    record: ManifestRecord | None = None
    damaged: tuple[str, ...] = ()


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """An item that was removed, or would be in a dry run."""

    path: str
    why: str
    bytes: int = 0


def kept_in(root: Path) -> list[Kept]:
    """Returns the sets of this host. Reads programs to verify their digests."""
    return [_kept(folder) for folder in sorted(root.glob("*")) if folder.is_dir()]


def prune_compiled(root: Path, older_than_s: float, dry_run: bool = False) -> Iterator[Removed]:
    """Removes unlocked sets that are unfinished, damaged, or unused for ``older_than_s``."""
    for kept in kept_in(root):
        why = _reason_to_remove(kept, older_than_s)
        if why and dry_run:
            yield Removed(path=str(root / kept.name), why=why, bytes=kept.bytes)
        elif why and (removed := _remove_unused(root, kept.name, older_than_s)) is not None:
            yield removed


def prune_cache(cache: Path, older_than_s: float, dry_run: bool = False) -> Iterator[Removed]:
    """Removes stale locks, empty entries, graphs not read for ``older_than_s``, and records without remaining graphs.
    Keeps failures, which explain why a start fails."""
    now = time.time()
    if not dry_run:
        before = {entry.name for entry in read_entries(cache) if entry.state is EntryState.STALE}
        neuron_cache.remove_stale_locks(cache)
        stale = {entry.name for entry in read_entries(cache) if entry.state is EntryState.STALE}
        yield from (Removed(path=str(cache / name), why="its lock was stale") for name in sorted(before - stale))
    started: dict[str, float] = {}
    for record in records_in(cache):
        started |= {name: max(record.made_at, started.get(name, 0.0)) for name in record.graphs}
    for entry in read_entries(cache):
        why = _reason_to_prune(cache, entry, now, older_than_s, started.get(entry.name, 0.0))
        if why and (dry_run or neuron_cache.remove(cache / entry.name)):
            yield Removed(path=str(cache / entry.name), why=why, bytes=entry.bytes)
    for record in records_in(cache):
        file = record_file(cache, record.name)
        is_left = any((cache / name).exists() for name in (*record.graphs, *record.failed))
        if not is_left and now - record.made_at > YOUNG_S and (dry_run or neuron_cache.remove(file)):
            yield Removed(path=str(file), why="none of its graphs is left", bytes=0)


def retry(location: str, names: Collection[str] = (), dry_run: bool = False) -> Iterator[Removed]:
    """Removes failures, all or those of the named graphs, so that the next start compiles them again: from a folder, or
    from a cache in S3 that compilers use directly. Raises SourceError."""
    storage = storage_at(location)
    is_remote = location.startswith(S3)
    files = storage.files() if is_remote else ()
    for entry in listed_entries(files) if is_remote else read_entries(Path(location)):
        if entry.state is not EntryState.FAILED or (names and entry.name not in names and entry.module not in names):
            continue
        for file in files if not dry_run else ():
            if file.name.startswith(f"{entry.name}/"):
                storage.delete(file.name)
        if is_remote or dry_run or neuron_cache.remove(Path(location, entry.name)):
            yield Removed(path=f"{storage.url}/{entry.name}", why=entry.words or "failed", bytes=entry.bytes)


def _reason_to_prune(cache: Path, entry: CacheEntry, now: float, older_than_s: float, started_at: float) -> str:
    """Returns why an entry is removed; empty: it is kept. ``started_at``: the last record of a start that uses it,
    since not every file system has access times; 0: never."""
    if entry.state is EntryState.EMPTY and now - entry.changed_at > YOUNG_S:
        return "nothing was compiled"
    if entry.state is EntryState.STALE:
        return "its lock is stale"
    if entry.state is EntryState.SUCCESS:
        status = about(cache / entry.name / NEFF)
        used = max(entry.changed_at, started_at, 0.0 if status is None else status.st_atime)
        if now - used > older_than_s:
            return f"not read for {(now - used) / 86400:.0f} days"
    return ""


def _reason_to_remove(kept: Kept, older_than_s: float) -> str:
    """Returns why a set is removed; empty: it is kept."""
    age = time.time() - kept.used_at
    if kept.state == "whole":
        return f"not used for {age / 86400:.0f} days" if age > older_than_s else ""
    return "" if kept.state == "compiling" else kept.state


def _kept(folder: Path, is_mine: bool = False) -> Kept:
    """Reads the state of a folder; ``is_mine``: the caller holds its exclusive lock."""
    record = read_record(folder / LOCK_FILE)
    missing = (LOCK_FILE,) if record is None else damaged(folder, record.files)
    lock = folder.with_name(f"{folder.name}.lock")
    if read_manifest(folder) is not None:
        state = "damaged" if missing else "whole"
    else:
        state = "compiling" if not is_mine and _is_compiling(lock) else "unfinished"
    return Kept(
        name=folder.name,
        state=state,
        bytes=sum(status.st_size for _, status in files_below(folder)),
        used_at=max((status.st_mtime for path in (folder, lock) if (status := about(path)) is not None), default=0.0),
        record=record,
        damaged=missing,
    )


def _is_compiling(lock: Path) -> bool:
    with contextlib.suppress(OSError):
        return file_lock.is_locked(lock, shared=True)
    return False


def _remove_unused(root: Path, name: str, older_than_s: float) -> Removed | None:
    """Locks and removes a folder; None: it is in use, or a compile has finished in it meanwhile.

    Removes the manifest first, so that a kill in between leaves nothing complete.
    """
    try:
        with file_lock.try_exclusive(root / f"{name}.lock") as is_held:
            now = _kept(root / name, is_mine=True)
            if not is_held or not (why := _reason_to_remove(now, older_than_s)):
                return None
            (root / name / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(root / name)
            return Removed(path=str(root / name), why=why, bytes=now.bytes)
    except OSError:
        return None
