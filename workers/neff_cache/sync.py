"""Bringing a NEFF cache to this host, and what was compiled here back: finished entries only, each of them at once.

Several hosts must not compile against one S3 URL, for how Neuron's own S3 cache locks is not public; and of a cache on
a network file system nobody sees which compilers are at work. So a process gets a folder of this host in both cases,
and where the cache can only be read as well.
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
from workers.artifacts.store import locks
from workers.neff_cache import compiler_cache
from workers.neff_cache.compiler_cache import LOG, NEFF
from workers.neff_cache.entries import DONE, OWN, State, listed_entries, read_entries, read_entry
from workers.neff_cache.file_states import BLOCK, Part, about, digest, files_below, part_of, sync_folder, sync_to_disk
from workers.neff_cache.record import (
    SUFFIX,
    Proof,
    Record,
    decoded,
    encoded,
    is_finished,
    place_of,
    read_record,
    records_in,
    write_record,
)
from workers.neff_cache.unavailable import PATIENCE_S

log = logging.getLogger(__name__)

URL = "NEURON_COMPILE_CACHE_URL"
S3 = "s3://"
STAGED = "staged-"  # what is just being pushed to a folder
STRAY_S = 86400.0  # older ones are what pushes that were killed have left
INCOMING = "incoming"  # in the folder of a cache that is corewright's own: what is just being fetched
# Begins the names of empty files beside a NEFF elsewhere: the digest of what was compiled follows. Two hosts that send
# one graph at once leave two, and one of their NEFFs.
DIGEST = "corewright."
PULLING, PUSHING = "sync.lock", "push.lock"  # there too: an upload of gigabytes keeps no start waiting

DAMAGED: set[str] = set()
"""What this process has found elsewhere to be other than it was compiled, as URL/NAME: its next push replaces it."""


class Synced(msgspec.Struct, frozen=True, kw_only=True):
    """What was moved."""

    entries: tuple[str, ...] = ()
    records: tuple[str, ...] = ()
    bytes: int = 0


class CachePlace(Protocol):
    """A cache elsewhere. Names are as in ``workers.artifacts.sources.listing``; every method blocks, and raises
    SourceError."""

    @property
    def url(self) -> str: ...
    def files(self) -> Sequence[RemoteFile]: ...
    def read(self, name: str) -> bytes: ...
    def fetch(self, files: Sequence[RemoteFile], folder: Path, stop: threading.Event) -> None:
        """Bring them into ``folder``, whole and verified, going on from what an earlier fetch left; nothing else."""
        ...

    def put_entry(self, name: str, folder: Path, files: Sequence[str], digest: str, replaced: bool = False) -> bool:
        """Upload an entry so that whoever looks meanwhile sees no finished one; ``digest`` is that of its NEFF.

        False: somebody has finished it by now, or compiles it there. ``replaced``: a finished one is replaced.
        """
        ...

    def put(self, name: str, path: Path) -> None:
        """Upload a file, which appears whole. Raises OSError too, where it cannot be read."""
        ...

    def put_bytes(self, name: str, data: bytes) -> None: ...


def place_at(location: str) -> CachePlace:
    """``s3://bucket/prefix``, or a folder. Raises SourceError."""
    return BucketPlace(location) if location.startswith(S3) else FolderPlace(Path(location.removeprefix("file://")))


class BucketPlace:
    """A prefix in S3."""

    def __init__(self, url: str) -> None:
        from workers.artifacts.sources.s3 import Bucket

        self._patience = RetryPolicy(seconds=PATIENCE_S)
        self._bucket = Bucket.of(url, self._patience)

    @property
    def url(self) -> str:
        return self._bucket.url

    def files(self) -> Sequence[RemoteFile]:
        return self._bucket.files()

    def read(self, name: str) -> bytes:
        return self._bucket.read(name)

    def fetch(self, files: Sequence[RemoteFile], folder: Path, stop: threading.Event) -> None:
        from workers.artifacts.fetch.transfer import S3Remote

        listing = Listing(source=self.url, files=tuple(sorted(files, key=lambda file: file.name)))
        S3Remote(self.url, patience=self._patience).fetch(listing, folder, Progress(self.url), stop)

    def put_entry(self, name: str, folder: Path, files: Sequence[str], digest: str, replaced: bool = False) -> bool:
        """``model.done`` comes last: without it an entry is none."""
        from workers.artifacts.sources.s3 import Bucket

        there = {file.name for file in Bucket.of(f"{self.url}/{name}", self._patience).files()}
        if DONE in there and not replaced:  # another host was faster
            return False
        self._bucket.put_bytes(f"{name}/{DIGEST}{digest}", b"")
        for file in (*(one for one in files if one != DONE), DONE):
            self._bucket.put(f"{name}/{file}", folder / file)
        return True

    def put(self, name: str, path: Path) -> None:
        self._bucket.put(name, path)

    def put_bytes(self, name: str, data: bytes) -> None:
        self._bucket.put_bytes(name, data)


class FolderPlace:
    """A folder, as of a network file system."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def url(self) -> str:
        return str(self._root)

    def files(self) -> Sequence[RemoteFile]:
        found = []
        with _told("neff-cache-unreadable", self.url):
            if not self._root.is_dir():
                raise NotADirectoryError(f"{self._root} is no folder")
            for path, about in files_below(self._root):
                name = path.relative_to(self._root).as_posix()
                found.append(RemoteFile(name=name, size=about.st_size, tag=str(about.st_mtime_ns)))
        return found

    def read(self, name: str) -> bytes:
        with _told("neff-cache-unreadable", self.url):
            return (self._root / name).read_bytes()

    def fetch(self, files: Sequence[RemoteFile], folder: Path, stop: threading.Event) -> None:
        with _told("neff-cache-unreadable", self.url):
            shutil.rmtree(folder, ignore_errors=True)
            for file in files:
                (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
                _copy(self._root / file.name, folder / file.name, stop)

    def put_entry(self, name: str, folder: Path, files: Sequence[str], digest: str, replaced: bool = False) -> bool:
        target = self._root / name
        with _told("neff-cache-unwritable", self.url):
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
        with path.open("rb"), _told("neff-cache-unwritable", self.url):
            staged = self._staged()
            shutil.copyfile(path, staged)
            self._move(staged, name)

    def put_bytes(self, name: str, data: bytes) -> None:
        with _told("neff-cache-unwritable", self.url):
            staged = self._staged()
            staged.write_bytes(data)
            self._move(staged, name)

    def _move(self, staged: Path, name: str) -> None:
        target = self._root / name
        sync_to_disk(staged)
        target.parent.mkdir(parents=True, exist_ok=True)
        staged.replace(target)

    def _staged(self) -> Path:
        """Where something may lie until it is whole; it is made as the umask has it, for other hosts' users read it.
        What pushes that were killed have left goes."""
        own = self._root / OWN
        own.mkdir(parents=True, exist_ok=True)
        for stray in own.glob(f"{STAGED}*"):
            if (found := about(stray)) is not None and time.time() - found.st_mtime > STRAY_S:
                compiler_cache.remove(stray)
        return own / f"{STAGED}{secrets.token_hex(8)}"


@dataclass(frozen=True)
class Localized:
    """A cache that a process does not use where it is."""

    location: str  # as the spec names it
    path: Path  # the folder of this host that takes its place
    why: Literal["s3", "shared", "read-only"]


def localized(environment: Mapping[str, str], keep: Path) -> Localized | None:
    """The folder below ``keep`` that a process with this environment uses; None: it uses the cache where it is.

    A ``--cache_dir`` in NEURON_CC_FLAGS is left alone: the flags are a part of what graphs are found by.
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
    """Tried out: modes do not tell of a file system that is mounted to be read. Of a folder that is to be made, whether
    it can be."""
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
    """Bring the finished entries that ``local`` lacks. One at a time on a host; who waits finds all there.

    Where there is a record of the name ``record``, only its graphs; else those of the version ``compiler``, or all.
    Finished entries of ``local`` stay as they are, and so does what somebody compiles there. Raises SourceError, and
    OSError where ``local`` cannot be written.
    """
    stop = stop or threading.Event()
    with _alone(local, PULLING, stop):
        try:
            return _pulled(place, local, record, compiler, stop)
        except SourceError as error:
            if error.id != "s3-changed":
                raise
        return _pulled(place, local, record, compiler, stop)  # another host has sent a graph since they were listed


def _pulled(place: CachePlace, local: Path, record: str, compiler: str, stop: threading.Event) -> Synced:
    files = place.files()
    named = _graphs_of(place, files, record)
    wanted = [
        entry.name
        for entry in listed_entries(files)
        if entry.state is State.SUCCESS
        and (entry.name in named if named is not None else not compiler or entry.compiler == compiler)
        and read_entry(local, entry.name).state not in (State.SUCCESS, State.LOCKED)
    ]
    told = {name: [part.digest] for name, part in (named or {}).items()} | _digests(files)
    incoming = local / OWN / INCOMING
    moved = [file for file in files if file.name.rpartition("/")[0] in wanted and _belongs(file.name)]
    came = []
    if moved:
        place.fetch(moved, incoming, stop)
    for name in wanted:
        if name in told and digest(incoming / name / NEFF) not in told[name]:
            log.warning("%s of %s is not taken: its NEFF is not what was compiled", name, place.url)
            DAMAGED.add(f"{place.url}/{name}")
            continue
        move_in(incoming / name, local / name)
        came.append(name)
    shutil.rmtree(incoming, ignore_errors=True)
    records = _pull_records(place, files, local, came)
    return Synced(entries=tuple(came), records=records, bytes=sum(file.size for file in moved))


def push(local: Path, place: CachePlace) -> Synced:
    """Bring back the finished entries that ``place`` lacks, then the records whose graphs are all there.

    What is not as its record has it stays here. No finished entry is replaced, but for one that this process has found
    damaged. Raises SourceError.
    """
    with _alone(local, PUSHING, threading.Event()):
        files = place.files()
        there = {entry.name for entry in listed_entries(files) if entry.state is State.SUCCESS}
        proof = Proof(local, records_in(local))
        sent, size = [], 0
        for entry in read_entries(local):
            at = f"{place.url}/{entry.name}"
            if entry.state is not State.SUCCESS or (entry.name in there and at not in DAMAGED):
                continue
            part = proof.part(entry.name)
            if part is None or proof.is_refuted(entry.name):
                log.warning("%s is not sent to %s: its NEFF is not what was compiled", entry.name, place.url)
                continue
            folder = local / entry.name
            names = sorted(path.name for path in folder.iterdir() if path.is_file() and _belongs(path.name))
            if place.put_entry(entry.name, folder, names, part.digest, at in DAMAGED):
                DAMAGED.discard(at)
                sent.append(entry.name)
                size += entry.bytes
        records = _push_records(local, place, {file.name for file in files}, there | set(sent))
    return Synced(entries=tuple(sent), records=records, bytes=size)


def records_at(place: CachePlace, files: Sequence[RemoteFile]) -> Iterator[Record]:
    """The records of a cache elsewhere, of which ``files`` are."""
    for file in files:
        if _is_record(file.name) and (told := decoded(place.read(file.name))) is not None:
            yield told


def move_in(staged: Path, target: Path) -> None:
    """Put a finished entry in its place, at once, and on the disk. One that is finished there stays, and the other is
    thrown away. Raises OSError."""
    sync_folder(staged)
    target.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(2):
        try:
            staged.rename(target)  # takes the place of an empty folder, and of no other
            break
        except OSError:
            if is_finished(target.parent, target.name):
                break
            if target.is_dir():
                target.rename(staged.with_name(f"{staged.name}.before"))
            elif not staged.is_dir():
                raise
    sync_to_disk(target.parent)
    for left in (staged, staged.with_name(f"{staged.name}.before")):
        shutil.rmtree(left, ignore_errors=True)


def _pull_records(
    place: CachePlace, files: Sequence[RemoteFile], local: Path, came: Collection[str]
) -> tuple[str, ...]:
    """Those that are new, and of whose graphs every one is here by now.

    The digests are those of what is here, of earlier records as well: two hosts that compile a graph at once do not
    make the same bytes of it.
    """
    for known in records_in(local):
        if fresh := {name: part_of(local / name / NEFF) for name in known.graphs if name in came}:
            write_record(place_of(local, known.name), msgspec.structs.replace(known, graphs=known.graphs | fresh))
    new = [file for file in files if _is_record(file.name) and not _is_good(local, local / file.name)]
    kept = []
    for told in records_at(place, new):
        if told.graphs and all(is_finished(local, name) for name in told.graphs):
            graphs = {name: part_of(local / name / NEFF) for name in told.graphs}
            write_record(place_of(local, told.name), msgspec.structs.replace(told, graphs=graphs))
            kept.append(told.name)
    return tuple(kept)


def _digests(files: Sequence[RemoteFile]) -> dict[str, list[str]]:
    """Of the entries elsewhere whose senders have told what was compiled."""
    found: dict[str, list[str]] = {}
    for file in files:
        name, _, leaf = file.name.rpartition("/")
        if leaf.startswith(DIGEST):
            found.setdefault(name, []).append(leaf.removeprefix(DIGEST))
    return found


def _graphs_of(place: CachePlace, files: Sequence[RemoteFile], record: str) -> Mapping[str, Part] | None:
    """None: there is no such record."""
    named = [file for file in files if file.name == f"{OWN}/{record}{SUFFIX}"]
    return next((told.graphs for told in records_at(place, named) if told.graphs), None)


def _is_good(local: Path, file: Path) -> bool:
    told = read_record(file)
    return told is not None and not told.failed and all(is_finished(local, name) for name in told.graphs)


def _push_records(local: Path, place: CachePlace, there: set[str], finished: set[str]) -> tuple[str, ...]:
    sent = []
    for told in records_in(local):
        name = f"{OWN}/{told.name}{SUFFIX}"
        if name in there or not told.graphs or told.failed or not finished.issuperset(told.graphs):
            continue
        place.put_bytes(name, encoded(told))
        sent.append(told.name)
    return tuple(sent)


def _belongs(name: str) -> bool:
    """To a finished entry: no lock, and no log of a failure before; no digest, for records keep it here."""
    file = name.rpartition("/")[2]
    return not file.endswith(".lock") and file != LOG and not file.startswith(DIGEST)


def _is_record(name: str) -> bool:
    return name.startswith(f"{OWN}/") and name.endswith(SUFFIX) and name.count("/") == 1


def _is_compiled(folder: Path) -> bool:
    """Whether somebody is at work in an entry of a folder of many hosts: it has a lock, of this day at least."""
    seen = [about(lock) for lock in folder.glob("*.lock")]
    return any(found is not None and time.time() - found.st_mtime < STRAY_S for found in seen)


def _copy(source: Path, target: Path, stop: threading.Event) -> None:
    """Raises Stopped soon after ``stop`` is set, and OSError."""
    with source.open("rb", buffering=0) as given, target.open("wb") as made:
        while block := given.read(BLOCK):
            if stop.is_set():
                raise Stopped
            made.write(block)


@contextlib.contextmanager
def _alone(local: Path, lock: str, stop: threading.Event) -> Iterator[None]:
    """One pull and one push of that folder at a time, of all processes and threads; the kernel ends it with the
    process. Raises Stopped when ``stop`` is set meanwhile."""
    own = local / OWN
    own.mkdir(parents=True, exist_ok=True)
    with locks.alone(own / lock, stop, lambda: log.info("waiting for another process that syncs %s", local)):
        yield


@contextlib.contextmanager
def _told(id: str, where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SourceError(id, f"the NEFF cache {where}: {error}", "is the folder mounted, and whose is it?") from error
