"""The artifact store of this host: fetches each artifact once, atomically, within a disk budget.

Under the root:

- ``artifacts/<key>/``: an artifact under its final name from the start; its manifest is written last;
- ``blobs/<digest>``: contents, hard-linked into the artifacts that share them;
- ``locks/``: see artifact_uses.py.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import msgspec

from workers.artifacts.fetch.progress import Progress
from workers.artifacts.sources.layout import checked
from workers.artifacts.sources.listing import Listing, Remote, SourceError, Stopped, is_file
from workers.artifacts.store import manifest
from workers.artifacts.store.contents import is_of, readable_digest_of
from workers.artifacts.store.eviction import GRACE_S, REMEDY, DiskRoom, is_disk_full
from workers.artifacts.store.manifest import Artifact as Artifact
from workers.artifacts.store.manifest import KeptFile, Manifest
from workers.host import file_lock, lifetime

log = logging.getLogger(__name__)

ASSUMED_RATE = 1e9  # bytes per second, if the rate was not measured
LOOK_S = 0.1  # interval of the check for a stop
ATTEMPTS = 3  # to fetch files that turn out to be damaged at the end
READERS = 4  # files that are read at once


class Store:
    """A store in a folder of a local disk. Methods block; any number of threads and processes may share it.

    ``budget``: bytes of ``root`` that artifacts may use; None: the disk's free space.
    """

    def __init__(self, root: Path, *, budget: int | None = None, grace_s: float = GRACE_S) -> None:
        self.root = Path(root)
        self._room = DiskRoom(self.root, budget, grace_s)
        self._artifacts = self._room.artifacts
        self._uses = self._room.uses
        self._blobs = self._room.blobs

    # Reading

    def get(self, remote: Remote, progress: Progress | None = None, stop: threading.Event | None = None) -> Artifact:
        """Returns the artifact that ``remote`` lists now, fetched if needed. Raises SourceError and Stopped.

        Waits if another caller is fetching it. The artifact is not evicted for ``GRACE_S``; hold it longer with
        `using`.
        """
        progress, stop = progress or Progress(""), stop or threading.Event()
        try:
            progress.enter("listing")
            listing = checked(_listed(remote, stop))
            progress.expect(listing.bytes)
            with self._disk_errors():
                artifact = self._fetched(listing, remote, progress, stop)
        except BaseException:
            progress.enter("failed")
            raise
        progress.enter("done")
        return artifact

    def newest(self, source: str, revision: str = "") -> Artifact | None:
        """Returns the newest complete artifact of ``source`` without a request; ``revision``: a commit, empty: any."""
        source = source.rstrip("/")
        candidates = [
            artifact
            for artifact in self.artifacts()
            if artifact.source == source and revision in ("", artifact.revision, *artifact.earlier)
        ]
        return max(candidates, key=lambda artifact: artifact.fetched_at, default=None)

    def artifacts(self) -> tuple[Artifact, ...]:
        """Returns all complete artifacts, by key."""
        return tuple(artifact for folder in self._room.folders() if (artifact := self._artifact(folder)) is not None)

    # Removal

    def remove(self, key: str) -> None:
        """Removes an artifact. Raises SourceError if it is in use or being fetched (store-in-use), or missing."""
        if not self._folder(key).is_dir():
            raise self._missing(key)
        with self._disk_errors():
            for _ in range(3):  # a concurrent check for use holds the lock for a moment
                if self._room.remove(key, ignore_grace=True):
                    return
                time.sleep(file_lock.WAIT_S)
        message = f"artifact {key} is in use by a replica or being fetched"
        raise SourceError("store-in-use", message, "unload the model first")

    def prune(self, keep: Collection[str] = (), *, dry_run: bool = False) -> list[Artifact]:
        """Removes all unused artifacts and leftovers of dead fetches; returns the removed artifacts.

        Keeps those whose key or source is in ``keep``, and those that were returned to a caller within the grace
        period. With ``dry_run`` only returns what would be removed.
        """
        removed = []
        with self._disk_errors():
            for folder in self._room.folders():
                artifact = self._artifact(folder)
                if artifact is not None and (artifact.key in keep or artifact.source in keep):
                    continue
                is_gone = self._room.is_spare(folder.name) if dry_run else self._room.remove(folder.name)
                if is_gone and artifact is not None:
                    removed.append(artifact)
            if not dry_run:
                self._room.sweep()
        return removed

    def verify(self, key: str, stop: threading.Event | None = None) -> list[str]:
        """Compares all files of an artifact with their digests and returns the names of damaged ones.

        Damaged files are removed from every artifact that shares them; the next `get` fetches only these again.
        Raises SourceError (store-gone), and Stopped.
        """
        folder, stop = self._folder(key), stop or threading.Event()
        published = manifest.published(folder)
        if published is None:
            raise self._missing(key)
        with self._disk_errors(), file_lock.exclusive(self._uses.flight(key), stop):
            return sorted(self._remove_mismatches(folder, published, stop))

    def _folder(self, key: str) -> Path:
        """Returns the folder of a key. Raises SourceError if the key is malformed and could name another folder."""
        if len(key) != 32 or not key.isalnum():
            raise self._missing(key)
        return self._artifacts / key

    def _missing(self, key: str) -> SourceError:
        return SourceError("store-gone", f"{self.root} has no artifact {key}")

    # Fetching

    def _fetched(self, listing: Listing, remote: Remote, progress: Progress, stop: threading.Event) -> Artifact:
        key = listing.key
        artifact = self._stored(key, progress, stop)
        if artifact is None:
            for folder in (self._artifacts, self._uses.folder, self._blobs.root):
                folder.mkdir(parents=True, exist_ok=True)
            with self._flight(key, progress, stop), self._uses.hold(key, stop):
                artifact = self._ready(key) or self._verified(key, progress, stop)
                if artifact is None:
                    return self._fetch(key, listing, remote, progress, stop)
        progress.expect(listing.bytes, listing.bytes)
        return (
            artifact if artifact.revision == listing.revision else self._with_revision(artifact, listing.revision, stop)
        )

    def _with_revision(self, artifact: Artifact, revision: str, stop: threading.Event) -> Artifact:
        """Records another commit of the same content, so that it is found by both."""
        folder = Path(artifact.folder)
        with contextlib.suppress(OSError), file_lock.exclusive(self._uses.flight(artifact.key), stop):
            published = manifest.published(folder)
            if published is not None:
                manifest.publish(folder, published.with_revision(revision))
        return msgspec.structs.replace(artifact, revision=revision)

    def _stored(self, key: str, progress: Progress, stop: threading.Event) -> Artifact | None:
        """Returns the artifact if it is complete. Verifies it first if that has not been done since boot."""
        if (artifact := self._ready(key)) is not None or manifest.complete(self._artifacts / key) is None:
            return artifact
        try:
            with self._flight(key, progress, stop):
                return self._ready(key) or self._verified(key, progress, stop)
        except OSError as error:
            if error.errno not in file_lock.READ_ONLY:
                raise
        return self._verified(key, progress, stop)

    def _flight(self, key: str, progress: Progress, stop: threading.Event) -> contextlib.AbstractContextManager[int]:
        """Holds the exclusive right to fetch or verify the artifact."""
        return file_lock.exclusive(self._uses.flight(key), stop, lambda: progress.enter("waiting"))

    def _fetch(self, key: str, listing: Listing, remote: Remote, progress: Progress, stop: threading.Event) -> Artifact:
        """Fetches the artifact. The caller holds its flight and use locks."""
        folder = self._artifacts / key
        began, moved = time.monotonic(), progress.moved
        progress.digests.clear()  # left by an earlier fetch with the same progress
        for _ in range(ATTEMPTS):
            seeds = self._begin(folder, listing, stop)
            progress.enter("fetching")
            progress.folder = str(folder)
            self._transfer(folder, listing, remote, progress, stop)
            progress.enter("verifying")
            _tidy(folder, listing)
            files = self._matching_files(folder, listing, seeds, progress.digests, stop)
            if len(files) == len(listing.files):
                break
        else:
            lacking = sorted({file.name for file in listing.files} - set(files))
            message = f"{lacking[0]} of {listing.source} does not match the listing ({len(lacking)} such files)"
            raise SourceError("store-incomplete", message, "try again once the source no longer changes")
        published = Manifest(
            source=listing.source,
            revision=listing.revision,
            files=files,
            fetched_at=self._now(listing.source),
            fetch_s=_whole_fetch_s(listing.bytes, progress.moved - moved, time.monotonic() - began),
            boot=lifetime.boot(),
        )
        manifest.publish(folder, published)
        return published.artifact(folder, time.time())

    def _now(self, source: str) -> float:
        """Returns the time, but later than every earlier fetch of the source, even if the clock was set back."""
        every = filter(None, map(manifest.published, self._room.folders()))
        return max([time.time(), *(published.fetched_at + 0.001 for published in every if published.source == source)])

    def _begin(self, folder: Path, listing: Listing, stop: threading.Event) -> dict[str, str]:
        """Makes room, records the fetch in the folder, and returns the seeds."""
        folder.mkdir(exist_ok=True)
        with file_lock.exclusive(self._uses.room, stop):
            manifest.reopen(folder)
            before = manifest.unfinished(folder)
            if before is None or before.boot != lifetime.boot():
                _empty(folder)  # after a reboot it is unknown what had reached the disk
                before = None
            self._forget_older(folder, listing)
            old_seeds = before.seeds if before is not None else {}
            seeds = {name: digest for name, digest in old_seeds.items() if (folder / name).exists()}
            seeds |= self._seed(folder, listing)
            manifest.begin(folder, listing, seeds)
            try:
                self._room.make(folder, listing)
            except SourceError:
                if before is None:
                    shutil.rmtree(folder)
                raise
        return seeds

    def _forget_older(self, folder: Path, listing: Listing) -> None:
        """Removes leftovers of dead fetches of older content of this source, which will not be resumed."""
        for other in self._room.folders():
            unfinished = manifest.unfinished(other)
            if other != folder and unfinished is not None and unfinished.listing.source == listing.source:
                self._room.remove(other.name)

    def _seed(self, folder: Path, listing: Listing) -> dict[str, str]:
        """Links files that an earlier version of the source has; returns name -> digest."""
        candidates: dict[tuple[str, ...], KeptFile] = {}
        for other in filter(None, map(manifest.published, self._room.folders())):
            for name, had in other.files.items():
                if other.source == listing.source and had.tag:
                    candidates[(name, str(had.size), had.tag)] = had
                if had.checksum.startswith("sha256:"):
                    candidates[(had.checksum,)] = had
        seeds = {}
        for file in listing.files:
            same = candidates.get((file.name, str(file.size), file.tag)) or candidates.get((file.checksum,))
            if same is None or same.size != file.size or (folder / file.name).exists():
                continue
            if self._blobs.link(same.digest, same.size, folder / file.name):
                seeds[file.name] = same.digest
        return seeds

    def _transfer(
        self, folder: Path, listing: Listing, remote: Remote, progress: Progress, stop: threading.Event
    ) -> None:
        """Fetches from ``remote``; makes room again if other programs fill the disk meanwhile."""
        while True:
            try:
                remote.fetch(listing, folder, progress, stop)
                return
            except (OSError, SourceError) as error:
                if not is_disk_full(error):
                    raise
                with file_lock.exclusive(self._uses.room, stop):
                    self._room.make_more(folder, listing)

    # Verification

    def _ready(self, key: str) -> Artifact | None:
        """Returns the artifact if it is complete and was verified since boot."""
        folder = self._artifacts / key
        if manifest.published(folder) is None:
            return None
        with self._uses.hold(key):
            complete = manifest.complete(folder)
            return (
                complete.artifact(folder, time.time())
                if complete is not None and complete.boot == lifetime.boot()
                else None
            )

    def _verified(self, key: str, progress: Progress, stop: threading.Event) -> Artifact | None:
        """Verifies the artifact and returns it if it is complete. The caller holds its flight lock."""
        folder = self._artifacts / key
        complete = manifest.complete(folder)
        if complete is None:
            return None
        progress.enter("verifying")
        if self._remove_mismatches(folder, complete, stop):
            return None
        with contextlib.suppress(OSError):  # read-only: the next caller verifies again
            manifest.publish(folder, msgspec.structs.replace(complete, boot=lifetime.boot()))
        return complete.artifact(folder, time.time())

    def _matching_files(
        self,
        folder: Path,
        listing: Listing,
        seeds: Mapping[str, str],
        computed: Mapping[str, str],
        stop: threading.Event,
    ) -> dict[str, KeptFile]:
        """Returns the files of a fetch that match, after deduplicating them by content; removes the others.

        Reads the files whose digest the transfer has not ``computed``. Raises Stopped and OSError.
        """

        def digest_of(name: str) -> str:
            return computed.get(name) or readable_digest_of(folder / name, stop.is_set)

        present = [file for file in listing.files if (folder / file.name).exists()]
        with ThreadPoolExecutor(READERS, thread_name_prefix="digests") as pool:
            digests = list(pool.map(digest_of, [file.name for file in present]))
        files = {}
        for file, digest in zip(present, digests, strict=True):
            name = file.name
            if not digest or seeds.get(name, digest) != digest:
                (folder / name).unlink(missing_ok=True)
                self._remove_copies(seeds.get(name, ""))
                continue
            if not self._blobs.keep(folder / name, digest):
                self._remove_copies(digest)
            files[name] = KeptFile(size=file.size, digest=digest, tag=file.tag, checksum=file.checksum)
        return files

    def _remove_mismatches(self, folder: Path, published: Manifest, stop: threading.Event) -> list[str]:
        """Removes files that do not match the manifest, here and in other artifacts; returns their names."""
        damaged = []
        for name, file in published.files.items():
            if is_file(folder / name, file.size) and is_of(folder / name, file.digest, stop.is_set):
                continue
            damaged.append(name)
            _reopen(folder, name)
            self._remove_copies(file.digest)
        if damaged:
            log.warning(
                "damaged files of %s: %s; they will be fetched again on the next use", published.source, damaged
            )
        return damaged

    def _remove_copies(self, digest: str) -> None:
        """Removes all damaged copies of a content; artifacts that lose a file become incomplete. An empty digest is
        ignored."""
        if not digest:
            return
        blob = self._blobs.path(digest)
        if _differs(blob, digest):
            blob.unlink(missing_ok=True)
        for folder in self._room.folders():
            published = manifest.published(folder)
            for name, file in published.files.items() if published is not None else ():
                if file.digest == digest and _differs(folder / name, digest):
                    _reopen(folder, name)

    # Files

    def _artifact(self, folder: Path) -> Artifact | None:
        complete = manifest.complete(folder)
        return complete.artifact(folder, self._uses.last(folder.name)[0]) if complete is not None else None

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Translates disk errors to SourceErrors that name the folder."""
        try:
            yield
        except (ConnectionError, TimeoutError):
            raise
        except OSError as error:
            if is_disk_full(error):
                raise SourceError("store-full", f"{self.root}: {error.strerror}", REMEDY) from error
            message = f"cannot write artifacts to {self.root}: {error}"
            raise SourceError("store-unwritable", message, "check the owner and permissions of the folder") from error


def _reopen(folder: Path, name: str) -> None:
    """Removes a damaged file of a complete artifact; the rest stays, as after an interrupted fetch."""
    with contextlib.suppress(FileNotFoundError):  # the artifact is being removed
        manifest.reopen(folder)
    (folder / name).unlink(missing_ok=True)


def _differs(path: Path, digest: str) -> bool:
    """Returns whether the file exists with another content."""
    try:
        return not is_of(path, digest)
    except FileNotFoundError:
        return False


def _listed(remote: Remote, stop: threading.Event) -> Listing:
    """Returns the remote's listing; raises Stopped soon after ``stop`` is set, even if the remote does not answer."""
    answer: Future[Listing] = Future()

    def ask() -> None:
        try:
            answer.set_result(remote.listing())
        except BaseException as error:  # noqa: BLE001 - re-raised in the waiting thread
            answer.set_exception(error)

    threading.Thread(target=ask, name="listing", daemon=True).start()
    while not answer.done():
        wait([answer], LOOK_S)
        if stop.is_set() and not answer.done():
            raise Stopped("stopped while the source was being listed")
    return answer.result()


def _whole_fetch_s(size: int, moved: int, seconds: float) -> float:
    """Extrapolates the time of ``moved`` bytes to ``size``; uses an assumed rate if less than half was moved."""
    return seconds * max(1.0, size / moved) if 2 * moved >= size > 0 else max(seconds, size / ASSUMED_RATE)


def _tidy(folder: Path, listing: Listing) -> None:
    """Removes files that are not in the listing or not complete."""
    sizes = {file.name: file.size for file in listing.files}
    for path in sorted(folder.rglob("*"), reverse=True):  # contents before their folder
        name = path.relative_to(folder).as_posix()
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):
                path.rmdir()  # only if it is empty
        elif name not in manifest.OURS and (name not in sizes or not is_file(path, sizes[name])):
            path.unlink()


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The location and the limits of a host's store, as a value that can be sent between processes."""

    root: str
    budget: int | None = None  # bytes on disk; None: the disk's free space

    def open(self) -> Store:
        """Opens the store without creating folders."""
        return Store(Path(self.root), budget=self.budget)
