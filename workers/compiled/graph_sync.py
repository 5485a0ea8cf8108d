"""Copies finished graphs of a remote Neuron cache to this host and newly compiled ones back, each atomically.

Several hosts must not compile against one S3 URL, since the locking of Neuron's own S3 cache is not documented; and a
cache on a network file system does not show which compilers of other hosts are running. A process therefore gets a
folder of this host in both cases, and also for a read-only cache.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2s
from pathlib import Path
from typing import Any, Literal

import msgspec

from workers.artifacts.sources.listing import Listing, RemoteFile, SourceError
from workers.compiled import neuron_cache
from workers.compiled.file_states import Part, digest, part_of, sync_folder, sync_to_disk
from workers.compiled.graph_records import SUFFIX, Proof, record_file, records_in
from workers.compiled.manifest import ManifestRecord, decoded, encoded, read_record, record_of, write_record
from workers.compiled.neuron_cache import (
    DONE,
    LOG,
    NEFF,
    OWN,
    URL,
    EntryState,
    is_finished,
    listed_entries,
    read_entries,
)
from workers.compiled.storage import DAMAGED, S3, STRAY_S, FolderStorage, Storage, is_writable, listed_files, storage_at
from workers.host import file_lock

log = logging.getLogger(__name__)

INCOMING = "incoming"  # work folder of a pull
# Prefix of empty marker files beside a remote NEFF; the digest of the compiled NEFF follows. Two hosts that push one
# graph at once leave two markers, and one of their NEFFs.
DIGEST = "corewright."
PULLING, PUSHING = "sync.lock", "push.lock"  # separate, so that an upload of gigabytes does not delay a start


class Synced(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a pull or a push."""

    entries: tuple[str, ...] = ()
    records: tuple[str, ...] = ()
    bytes: int = 0


@dataclass(frozen=True)
class Localized:
    """A cache that is replaced by a folder of this host."""

    location: str  # as written in the spec
    path: Path  # the folder of this host
    why: Literal["s3", "shared", "read-only"]


def localized(environment: Mapping[str, str], keep: Path) -> Localized | None:
    """Returns the folder below ``keep`` for a process with this environment; None: it uses its cache directly.

    A ``--cache_dir`` in NEURON_CC_FLAGS is not replaced: the flags are part of the cache key of graphs.
    """
    if any(flag == "--no_cache" or flag.startswith("--cache_dir=") for flag in neuron_cache.flags_of(environment)):
        return None
    url = environment.get(URL) or neuron_cache.DEFAULT
    path = keep / blake2s(url.encode(), digest_size=8).hexdigest()
    if url.startswith(S3):
        return Localized(url, path, "s3")
    if "://" in url and not url.startswith("file://"):
        return None
    folder = Path(url.removeprefix("file://"))
    if not is_writable(folder):
        return Localized(url, path, "read-only")
    return Localized(url, path, "shared") if neuron_cache.file_system(folder) in neuron_cache.SHARED else None


def keep_of(root: Path) -> Path:
    """Returns the parent of the local folders of remote caches, beside the compiled artifacts in ``root``."""
    return root.parent / "neff"


def cache_of(environment: Mapping[str, str], root: Path | None) -> tuple[Path | None, Localized | None]:
    """Returns the folder of the cache for a process with this environment on this host, and what it replaces. None: no
    cache, or nothing. Local folders of remote caches are beside the compiled artifacts in ``root``."""
    place = None if root is None else localized(environment, keep_of(root))
    return (neuron_cache.location(environment), None) if place is None else (place.path, place)


def pull(
    storage: Storage,
    local: Path,
    *,
    record: str = "",
    compiler: str = "",
    stop: threading.Event | None = None,
) -> Synced:
    """Copies the finished entries that ``local`` lacks. One pull at a time runs on a host; later ones then find them.

    With a remote record named ``record``, only its graphs; else those of the version ``compiler``, or all. Finished
    and currently compiling entries of ``local`` are not touched. Raises SourceError, and OSError if ``local`` cannot be
    written.
    """
    stop = stop or threading.Event()
    with _serialized(local, PULLING, stop):
        try:
            return _pulled(storage, local, record, compiler, stop)
        except SourceError as error:
            if error.id != "s3-changed":
                raise
        return _pulled(storage, local, record, compiler, stop)  # another host has pushed a graph since the listing


def pull_for(place: Localized, manifest: Mapping[str, Any]) -> Synced:
    """Copies the graphs of a manifest from the cache that ``place`` replaces; see `pull`."""
    record = record_of(manifest)
    return pull(storage_at(place.location), place.path, record=record.name, compiler=record.compiler)


def _pulled(storage: Storage, local: Path, record: str, compiler: str, stop: threading.Event) -> Synced:
    files = storage.files()
    named = _graphs_of(storage, files, record)
    missing = [
        entry.name
        for entry in listed_entries(files)
        if entry.state is EntryState.SUCCESS
        and (entry.name in named if named is not None else not compiler or entry.compiler == compiler)
        and neuron_cache.read_entry(local, entry.name).state not in (EntryState.SUCCESS, EntryState.LOCKED)
    ]
    expected = {name: [part.digest] for name, part in (named or {}).items()} | _digests(files)
    moved = [file for file in files if file.name.rpartition("/")[0] in missing and _belongs(file.name)]
    # A folder for each listing: a killed pull may have left files of an older one.
    incoming = local / OWN / INCOMING / Listing(source=storage.url, files=tuple(moved)).key
    pulled = []
    if moved:
        storage.fetch(moved, incoming, stop)
    for name in missing:
        if name in expected and digest(incoming / name / NEFF) not in expected[name]:
            log.warning("skipping %s of %s: its NEFF does not match its recorded digest", name, storage.url)
            DAMAGED.add(f"{storage.url}/{name}")
            continue
        move_in(incoming / name, local / name)
        pulled.append(name)
    shutil.rmtree(local / OWN / INCOMING, ignore_errors=True)
    records = _pull_records(storage, files, local, pulled)
    return Synced(entries=tuple(pulled), records=records, bytes=sum(file.size for file in moved))


def push(local: Path, storage: Storage) -> Synced:
    """Uploads the finished entries that ``storage`` lacks, then the records whose graphs are all there.

    Entries that do not match their record are skipped. Finished remote entries are replaced only if this process found
    them damaged. Raises SourceError.
    """
    with _serialized(local, PUSHING, threading.Event()):
        files = storage.files()
        present = {entry.name for entry in listed_entries(files) if entry.state is EntryState.SUCCESS}
        proof = Proof(local, records_in(local))
        sent, size = [], 0
        for entry in read_entries(local):
            is_damaged = f"{storage.url}/{entry.name}" in DAMAGED
            if entry.state is not EntryState.SUCCESS or (entry.name in present and not is_damaged):
                continue
            part = proof.part(entry.name)
            if part is None or proof.is_refuted(entry.name):
                log.warning("not pushing %s to %s: its NEFF does not match its record", entry.name, storage.url)
            elif _put_entry(storage, local, entry.name, part.digest, replaced=is_damaged):
                DAMAGED.discard(f"{storage.url}/{entry.name}")
                sent.append(entry.name)
                size += entry.bytes
        records = _push_records(local, storage, {file.name for file in files}, present | set(sent))
    return Synced(entries=tuple(sent), records=records, bytes=size)


def _put_entry(storage: Storage, local: Path, name: str, digest: str, *, replaced: bool) -> bool:
    """Uploads an entry, ``model.done`` last: without it the entry is not finished. ``digest``: of its NEFF.

    False: the entry is finished already, since another host was faster, or is being compiled in that folder: it has a
    lock of the last 24 hours. ``replaced``: replaces a finished one.
    """
    present = listed_files(storage_at(f"{storage.url}/{name}"))
    if any(file.name == DONE for file in present) and not replaced:
        return False
    locks = [file for file in present if file.name.endswith(".lock")] if isinstance(storage, FolderStorage) else []
    if any(time.time() - int(lock.tag) / 1e9 < STRAY_S for lock in locks):
        return False
    for lock in locks:
        storage.delete(f"{name}/{lock.name}")
    storage.put_bytes(f"{name}/{DIGEST}{digest}", b"")
    names = sorted(path.name for path in (local / name).iterdir() if path.is_file() and _belongs(path.name))
    for leaf in sorted(names, key=lambda leaf: leaf == DONE):
        storage.put(f"{name}/{leaf}", local / name / leaf)
    return True


def records_at(storage: Storage, files: Sequence[RemoteFile]) -> Iterator[ManifestRecord]:
    """Yields the records of a remote cache with these files. A record's name is its file's: a cache has more writers
    than this host, and a name may lead out of it."""
    for file in files:
        record = decoded(storage.read(file.name)) if _is_record(file.name) else None
        if record is not None and file.name == f"{OWN}/{record.name}{SUFFIX}":
            yield record


def move_in(staged: Path, target: Path) -> None:
    """Moves a finished entry to its place atomically and syncs it to disk. If a finished one is there, it stays and
    the staged one is discarded. Raises OSError."""
    sync_folder(staged)
    target.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(2):
        try:
            staged.rename(target)  # replaces only an empty folder
            break
        except OSError:
            if is_finished(target.parent, target.name):
                break
            if target.is_dir():
                target.rename(staged.with_name(f"{staged.name}.before"))
            elif not staged.is_dir():
                raise
    sync_to_disk(target.parent)
    for leftover in (staged, staged.with_name(f"{staged.name}.before")):
        shutil.rmtree(leftover, ignore_errors=True)


def _pull_records(
    storage: Storage, files: Sequence[RemoteFile], local: Path, pulled: Collection[str]
) -> tuple[str, ...]:
    """Copies new records whose graphs are all here now.

    Digests are replaced by those of the local NEFFs, in earlier records as well: two hosts that compile the same graph
    produce different bytes.
    """
    for record in records_in(local):
        if fresh := {name: part_of(local / name / NEFF) for name in record.graphs if name in pulled}:
            write_record(record_file(local, record.name), msgspec.structs.replace(record, graphs=record.graphs | fresh))
    new = [file for file in files if _is_record(file.name) and not _is_complete_record(local, local / file.name)]
    written = []
    for remote_record in records_at(storage, new):
        if remote_record.graphs and all(is_finished(local, name) for name in remote_record.graphs):
            graphs = {name: part_of(local / name / NEFF) for name in remote_record.graphs}
            write_record(record_file(local, remote_record.name), msgspec.structs.replace(remote_record, graphs=graphs))
            written.append(remote_record.name)
    return tuple(written)


def _push_records(local: Path, storage: Storage, present: set[str], finished: set[str]) -> tuple[str, ...]:
    sent = []
    for record in records_in(local):
        name = f"{OWN}/{record.name}{SUFFIX}"
        if name in present or not record.graphs or record.failed or not finished.issuperset(record.graphs):
            continue
        storage.put_bytes(name, encoded(record))
        sent.append(record.name)
    return tuple(sent)


def _digests(files: Sequence[RemoteFile]) -> dict[str, list[str]]:
    """Returns the digests of NEFFs by entry, from the marker files."""
    digests: dict[str, list[str]] = {}
    for file in files:
        name, _, leaf = file.name.rpartition("/")
        if leaf.startswith(DIGEST):
            digests.setdefault(name, []).append(leaf.removeprefix(DIGEST))
    return digests


def _graphs_of(storage: Storage, files: Sequence[RemoteFile], name: str) -> Mapping[str, Part] | None:
    """Returns the graphs of the remote record; None if it does not exist."""
    named = [file for file in files if file.name == f"{OWN}/{name}{SUFFIX}"]
    return next((record.graphs for record in records_at(storage, named) if record.graphs), None)


def _is_complete_record(local: Path, file: Path) -> bool:
    record = read_record(file)
    return record is not None and not record.failed and all(is_finished(local, name) for name in record.graphs)


def _belongs(name: str) -> bool:
    """Returns whether a file is part of a finished entry: not a lock, a log of an earlier failure, or a marker."""
    file = name.rpartition("/")[2]
    return not file.endswith(".lock") and file != LOG and not file.startswith(DIGEST)


def _is_record(name: str) -> bool:
    return name.startswith(f"{OWN}/") and name.endswith(SUFFIX) and name.count("/") == 1


@contextlib.contextmanager
def _serialized(local: Path, lock: str, stop: threading.Event) -> Iterator[None]:
    """Serializes the pulls, or the pushes, of a folder across processes and threads; the kernel releases the lock with
    the process. Raises Stopped when ``stop`` is set meanwhile."""
    own = local / OWN
    own.mkdir(parents=True, exist_ok=True)
    with file_lock.exclusive(own / lock, stop, lambda: log.info("waiting for another process that syncs %s", local)):
        yield
