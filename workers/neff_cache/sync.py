"""Copies finished entries of a NEFF cache to this host and newly compiled ones back, each atomically.

A remote cache that does not answer is reported, and its users continue without it: its entries can be compiled or may
be on this host already, so that it costs time but no start.

Several hosts must not compile against one S3 URL, since the locking of Neuron's own S3 cache is not documented; and a
cache on a network file system does not show which compilers of other hosts are running. A process therefore gets a
folder of this host in both cases, and also for a read-only cache.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2s
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from workers.artifacts.fetch.progress import Progress
from workers.artifacts.fetch.retry_policy import RetryPolicy
from workers.artifacts.sources.listing import Listing, RemoteFile, SourceError, Stopped
from workers.artifacts.sources.s3 import Bucket
from workers.host import file_lock
from workers.neff_cache import compiler_cache
from workers.neff_cache.compiler_cache import LOG, NEFF
from workers.neff_cache.entries import DONE, OWN, EntryState, listed_entries, read_entries, read_entry
from workers.neff_cache.file_states import BLOCK, Part, about, digest, files_below, part_of, sync_folder, sync_to_disk
from workers.neff_cache.record import (
    SUFFIX,
    ManifestRecord,
    Proof,
    decoded,
    encoded,
    is_finished,
    place_of,
    read_record,
    records_in,
    write_record,
)

log = logging.getLogger(__name__)

AWAY = frozenset({"s3-unreachable", "neff-cache-unreadable"})  # transient; other errors need a fix
PATIENCE_S = 60.0  # retry deadline; shorter than for a model, which has no substitute

_logged: set[tuple[str, str]] = set()  # locations and error ids that this process has logged
_lock = threading.Lock()
URL = "NEURON_COMPILE_CACHE_URL"
S3 = "s3://"
STAGED = "staged-"  # prefix of files during a push to a folder
STRAY_S = 86400.0  # older ones were left by killed pushes
INCOMING = "incoming"  # work folder of a pull
# Prefix of empty marker files beside a remote NEFF; the digest of the compiled NEFF follows. Two hosts that push one
# graph at once leave two markers, and one of their NEFFs.
DIGEST = "corewright."
PULLING, PUSHING = "sync.lock", "push.lock"  # separate, so that an upload of gigabytes does not delay a start

DAMAGED: set[str] = set()
"""Remote entries that this process found damaged, as URL/NAME: its next push replaces them."""


def describe(location: str, error: SourceError) -> str:
    """Describes why the content of the cache at ``location`` is unknown."""
    shown = location if "@" not in location else f"s3://{location.rpartition('@')[2]}"  # without user and password
    how = "does not answer" if error.id in AWAY else "cannot be used"
    return f"the cache at {shown.partition('?')[0]} {how}: {error}"


def log_unavailable(location: str, error: SourceError) -> str:
    """Describes the error and logs it once per process; as an error unless it is transient."""
    text = describe(location, error)
    with _lock:
        is_new = (location, error.id) not in _logged
        _logged.add((location, error.id))
    if is_new:
        log.log(logging.WARNING if error.id in AWAY else logging.ERROR, "%s; continuing without it", text)
    return text


class Synced(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a pull or a push."""

    entries: tuple[str, ...] = ()
    records: tuple[str, ...] = ()
    bytes: int = 0


class CachePlace(Protocol):
    """A remote cache. Names are as in ``workers.artifacts.sources.listing``; every method blocks and raises
    SourceError."""

    @property
    def url(self) -> str: ...
    def files(self) -> Sequence[RemoteFile]: ...
    def read(self, name: str) -> bytes: ...
    def fetch(self, files: Sequence[RemoteFile], folder: Path, stop: threading.Event) -> None:
        """Fetches the files into ``folder``, complete and verified; resumes an earlier fetch."""
        ...

    def put_entry(self, name: str, folder: Path, files: Sequence[str], digest: str, replaced: bool = False) -> bool:
        """Uploads an entry so that readers never see a partial one as finished; ``digest``: of its NEFF.

        False: the entry is finished already, or is being compiled there. ``replaced``: replaces a finished one.
        """
        ...

    def put(self, name: str, path: Path) -> None:
        """Uploads a file atomically. Also raises OSError if it cannot be read."""
        ...

    def put_bytes(self, name: str, data: bytes) -> None: ...


def place_at(location: str) -> CachePlace:
    """Opens the cache at ``s3://bucket/prefix`` or in a folder. Raises SourceError."""
    if location.startswith(S3):
        return BucketPlace.of(location, RetryPolicy(seconds=PATIENCE_S))
    return FolderPlace(Path(location.removeprefix("file://")))


class BucketPlace(Bucket):
    """A cache below a prefix in S3."""

    def fetch(self, files: Sequence[RemoteFile], folder: Path, stop: threading.Event) -> None:
        from workers.artifacts.fetch.transfer import S3Remote

        listing = Listing(source=self.url, files=tuple(sorted(files, key=lambda file: file.name)))
        S3Remote(self.url, retry_policy=self.retry_policy).fetch(listing, folder, Progress(self.url), stop)

    def put_entry(self, name: str, folder: Path, files: Sequence[str], digest: str, replaced: bool = False) -> bool:
        """Uploads ``model.done`` last: without it the entry is not finished."""
        present = {file.name for file in Bucket.of(f"{self.url}/{name}", self.retry_policy).files()}
        if DONE in present and not replaced:  # another host was faster
            return False
        self.put_bytes(f"{name}/{DIGEST}{digest}", b"")
        for file in (*(leaf for leaf in files if leaf != DONE), DONE):
            self.put(f"{name}/{file}", folder / file)
        return True


class FolderPlace:
    """A cache in a folder, such as on a network file system."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def url(self) -> str:
        return str(self._root)

    def files(self) -> Sequence[RemoteFile]:
        listed = []
        with _source_errors("neff-cache-unreadable", self.url):
            if not self._root.is_dir():
                raise NotADirectoryError(f"{self._root} is not a folder")
            for path, about in files_below(self._root):
                name = path.relative_to(self._root).as_posix()
                listed.append(RemoteFile(name=name, size=about.st_size, tag=str(about.st_mtime_ns)))
        return listed

    def read(self, name: str) -> bytes:
        with _source_errors("neff-cache-unreadable", self.url):
            return (self._root / name).read_bytes()

    def fetch(self, files: Sequence[RemoteFile], folder: Path, stop: threading.Event) -> None:
        with _source_errors("neff-cache-unreadable", self.url):
            shutil.rmtree(folder, ignore_errors=True)
            for file in files:
                (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
                _copy(self._root / file.name, folder / file.name, stop)

    def put_entry(self, name: str, folder: Path, files: Sequence[str], digest: str, replaced: bool = False) -> bool:
        target = self._root / name
        with _source_errors("neff-cache-unwritable", self.url):
            if _is_compiled(target) or (is_finished(self._root, name) and not replaced):
                return False
            staged = self._staged()
            staged.mkdir()
            for file in files:
                shutil.copyfile(folder / file, staged / file)
            (staged / f"{DIGEST}{digest}").touch()
            if replaced and target.is_dir():
                target.rename(staged.with_name(f"{staged.name}.before"))
            move_in(staged, target)
        return True

    def put(self, name: str, path: Path) -> None:
        with path.open("rb"), _source_errors("neff-cache-unwritable", self.url):
            staged = self._staged()
            shutil.copyfile(path, staged)
            self._move(staged, name)

    def put_bytes(self, name: str, data: bytes) -> None:
        with _source_errors("neff-cache-unwritable", self.url):
            staged = self._staged()
            staged.write_bytes(data)
            self._move(staged, name)

    def _move(self, staged: Path, name: str) -> None:
        target = self._root / name
        sync_to_disk(staged)
        target.parent.mkdir(parents=True, exist_ok=True)
        staged.replace(target)

    def _staged(self) -> Path:
        """Returns a new staging path, with permissions by the umask, since users of other hosts read it. Removes
        leftovers of killed pushes."""
        own = self._root / OWN
        own.mkdir(parents=True, exist_ok=True)
        for stray in own.glob(f"{STAGED}*"):
            if (status := about(stray)) is not None and time.time() - status.st_mtime > STRAY_S:
                compiler_cache.remove(stray)
        return own / f"{STAGED}{secrets.token_hex(8)}"


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
    flags = environment.get("NEURON_CC_FLAGS", "").split()
    if any(flag == "--no_cache" or flag.startswith("--cache_dir=") for flag in flags):
        return None
    url = environment.get(URL) or compiler_cache.DEFAULT
    path = keep / blake2s(url.encode(), digest_size=8).hexdigest()
    if url.startswith(S3):
        return Localized(url, path, "s3")
    if "://" in url and not url.startswith("file://"):
        return None
    folder = Path(url.removeprefix("file://"))
    if not is_writable(folder):
        return Localized(url, path, "read-only")
    if compiler_cache.file_system(folder) in compiler_cache.SHARED:
        return Localized(url, path, "shared")
    return None


def is_writable(folder: Path) -> bool:
    """Returns whether files can be created in a folder, or in its nearest existing parent.

    Creates a file to find out: permissions do not show a read-only mount.
    """
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        descriptor, name = tempfile.mkstemp(prefix=".corewright-", dir=folder)
    except OSError:
        return False
    os.close(descriptor)
    with contextlib.suppress(OSError):
        Path(name).unlink()
    return True


def pull(
    place: CachePlace,
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
            return _pulled(place, local, record, compiler, stop)
        except SourceError as error:
            if error.id != "s3-changed":
                raise
        return _pulled(place, local, record, compiler, stop)  # another host has pushed a graph since the listing


def _pulled(place: CachePlace, local: Path, record: str, compiler: str, stop: threading.Event) -> Synced:
    files = place.files()
    named = _graphs_of(place, files, record)
    missing = [
        entry.name
        for entry in listed_entries(files)
        if entry.state is EntryState.SUCCESS
        and (entry.name in named if named is not None else not compiler or entry.compiler == compiler)
        and read_entry(local, entry.name).state not in (EntryState.SUCCESS, EntryState.LOCKED)
    ]
    expected = {name: [part.digest] for name, part in (named or {}).items()} | _digests(files)
    moved = [file for file in files if file.name.rpartition("/")[0] in missing and _belongs(file.name)]
    # Of one listing: a killed pull may have left files of an older one.
    incoming = local / OWN / INCOMING / Listing(source=place.url, files=tuple(moved)).key
    pulled = []
    if moved:
        place.fetch(moved, incoming, stop)
    for name in missing:
        if name in expected and digest(incoming / name / NEFF) not in expected[name]:
            log.warning("skipping %s of %s: its NEFF does not match its recorded digest", name, place.url)
            DAMAGED.add(f"{place.url}/{name}")
            continue
        move_in(incoming / name, local / name)
        pulled.append(name)
    shutil.rmtree(local / OWN / INCOMING, ignore_errors=True)
    records = _pull_records(place, files, local, pulled)
    return Synced(entries=tuple(pulled), records=records, bytes=sum(file.size for file in moved))


def push(local: Path, place: CachePlace) -> Synced:
    """Uploads the finished entries that ``place`` lacks, then the records whose graphs are all there.

    Entries that do not match their record are skipped. Finished remote entries are replaced only if this process found
    them damaged. Raises SourceError.
    """
    with _serialized(local, PUSHING, threading.Event()):
        files = place.files()
        present = {entry.name for entry in listed_entries(files) if entry.state is EntryState.SUCCESS}
        proof = Proof(local, records_in(local))
        sent, size = [], 0
        for entry in read_entries(local):
            at = f"{place.url}/{entry.name}"
            if entry.state is not EntryState.SUCCESS or (entry.name in present and at not in DAMAGED):
                continue
            part = proof.part(entry.name)
            if part is None or proof.is_refuted(entry.name):
                log.warning("not pushing %s to %s: its NEFF does not match its record", entry.name, place.url)
                continue
            folder = local / entry.name
            names = sorted(path.name for path in folder.iterdir() if path.is_file() and _belongs(path.name))
            if place.put_entry(entry.name, folder, names, part.digest, at in DAMAGED):
                DAMAGED.discard(at)
                sent.append(entry.name)
                size += entry.bytes
        records = _push_records(local, place, {file.name for file in files}, present | set(sent))
    return Synced(entries=tuple(sent), records=records, bytes=size)


def records_at(place: CachePlace, files: Sequence[RemoteFile]) -> Iterator[ManifestRecord]:
    """Yields the records of a remote cache with these files. A record's name is its file's: a cache has more writers
    than this host, and a name may lead out of it."""
    for file in files:
        record = decoded(place.read(file.name)) if _is_record(file.name) else None
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
    place: CachePlace, files: Sequence[RemoteFile], local: Path, pulled: Collection[str]
) -> tuple[str, ...]:
    """Copies new records whose graphs are all here now.

    Digests are replaced by those of the local NEFFs, in earlier records as well: two hosts that compile the same graph
    produce different bytes.
    """
    for record in records_in(local):
        if fresh := {name: part_of(local / name / NEFF) for name in record.graphs if name in pulled}:
            write_record(place_of(local, record.name), msgspec.structs.replace(record, graphs=record.graphs | fresh))
    new = [file for file in files if _is_record(file.name) and not _is_complete_record(local, local / file.name)]
    written = []
    for remote_record in records_at(place, new):
        if remote_record.graphs and all(is_finished(local, name) for name in remote_record.graphs):
            graphs = {name: part_of(local / name / NEFF) for name in remote_record.graphs}
            write_record(place_of(local, remote_record.name), msgspec.structs.replace(remote_record, graphs=graphs))
            written.append(remote_record.name)
    return tuple(written)


def _digests(files: Sequence[RemoteFile]) -> dict[str, list[str]]:
    """Returns the digests of NEFFs by entry, from the marker files."""
    digests: dict[str, list[str]] = {}
    for file in files:
        name, _, leaf = file.name.rpartition("/")
        if leaf.startswith(DIGEST):
            digests.setdefault(name, []).append(leaf.removeprefix(DIGEST))
    return digests


def _graphs_of(place: CachePlace, files: Sequence[RemoteFile], name: str) -> Mapping[str, Part] | None:
    """Returns the graphs of the remote record; None: there is no such record."""
    named = [file for file in files if file.name == f"{OWN}/{name}{SUFFIX}"]
    return next((record.graphs for record in records_at(place, named) if record.graphs), None)


def _is_complete_record(local: Path, file: Path) -> bool:
    record = read_record(file)
    return record is not None and not record.failed and all(is_finished(local, name) for name in record.graphs)


def _push_records(local: Path, place: CachePlace, present: set[str], finished: set[str]) -> tuple[str, ...]:
    sent = []
    for record in records_in(local):
        name = f"{OWN}/{record.name}{SUFFIX}"
        if name in present or not record.graphs or record.failed or not finished.issuperset(record.graphs):
            continue
        place.put_bytes(name, encoded(record))
        sent.append(record.name)
    return tuple(sent)


def _belongs(name: str) -> bool:
    """Returns whether a file is part of a finished entry: not a lock, a log of an earlier failure, or a marker."""
    file = name.rpartition("/")[2]
    return not file.endswith(".lock") and file != LOG and not file.startswith(DIGEST)


def _is_record(name: str) -> bool:
    return name.startswith(f"{OWN}/") and name.endswith(SUFFIX) and name.count("/") == 1


def _is_compiled(folder: Path) -> bool:
    """Returns whether a host is compiling an entry of a shared folder: it has a lock of the last 24 hours."""
    statuses = [about(lock) for lock in folder.glob("*.lock")]
    return any(lock_status is not None and time.time() - lock_status.st_mtime < STRAY_S for lock_status in statuses)


def _copy(source: Path, target: Path, stop: threading.Event) -> None:
    """Copies a file. Raises OSError, and Stopped soon after ``stop`` is set."""
    with source.open("rb", buffering=0) as reader, target.open("wb") as writer:
        while block := reader.read(BLOCK):
            if stop.is_set():
                raise Stopped
            writer.write(block)


@contextlib.contextmanager
def _serialized(local: Path, lock: str, stop: threading.Event) -> Iterator[None]:
    """Serializes the pulls, or the pushes, of a folder across processes and threads; the kernel releases the lock with
    the process. Raises Stopped when ``stop`` is set meanwhile."""
    own = local / OWN
    own.mkdir(parents=True, exist_ok=True)
    with file_lock.exclusive(own / lock, stop, lambda: log.info("waiting for another process that syncs %s", local)):
        yield


@contextlib.contextmanager
def _source_errors(id: str, where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SourceError(id, f"the NEFF cache {where}: {error}", "check its mount and owner") from error
