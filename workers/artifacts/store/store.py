"""The artifacts of this host: each fetched once, whole or not there, within a budget of disk.

Under the root:

- ``artifacts/<key>/``: an artifact under its final name from the start; its manifest is written last;
- ``blobs/<digest>``: contents, linked into the artifacts that have them;
- ``locks/``: see uses.py.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, wait
from pathlib import Path

import msgspec

from workers.artifacts.fetch.progress import Progress
from workers.artifacts.sources.layout import checked
from workers.artifacts.sources.listing import Listing, Remote, SourceError, Stopped
from workers.artifacts.store import locks, manifest
from workers.artifacts.store.artifact_uses import using
from workers.artifacts.store.blobs import is_of
from workers.artifacts.store.eviction import GRACE_S, REMEDY, DiskRoom, says_full
from workers.artifacts.store.file_digests import Digests
from workers.artifacts.store.local_source import DIGEST, LocalSource
from workers.artifacts.store.manifest import Artifact as Artifact
from workers.artifacts.store.manifest import KeptFile, Manifest
from workers.host import lifetime

log = logging.getLogger(__name__)

ASSUMED_RATE = 1e9  # bytes a second, of a fetch that was not seen
LOOK_S = 0.1  # between two looks whether somebody has asked for the end
ATTEMPTS = 3  # to fetch what turns out to be damaged when all of it is here


class Store:
    """Blocks; may be used by any number of threads and processes at once. A folder of a local disk.

    ``budget``: bytes of ``root`` that artifacts may take; None: what the disk has. ``memory``: a folder of a tmpfs,
    where those that fit into ``memory_budget`` are copied to, to be loaded from there.
    """

    def __init__(
        self,
        root: Path,
        *,
        budget: int | None = None,
        memory: Path | None = None,
        memory_budget: int | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        self.root = Path(root)
        self._memory = Store(memory, budget=memory_budget, grace_s=grace_s) if memory is not None else None
        self._room: DiskRoom = DiskRoom(
            self.root, budget, grace_s, above=self._memory._room if self._memory is not None else None
        )
        self._artifacts = self._room.artifacts
        self._uses = self._room.uses
        self._blobs = self._room.blobs

    # What there is

    def get(self, remote: Remote, progress: Progress | None = None, stop: threading.Event | None = None) -> Artifact:
        """What ``remote`` lists now, from this host if it is here, else fetched. Raises SourceError and Stopped.

        Whoever asks for what another fetches waits for it. What is returned is not removed for ``GRACE_S``, but by
        `remove`; hold it with `using` for longer.
        """
        progress, stop = progress or Progress(""), stop or threading.Event()
        try:
            progress.enter("listing")
            listing = checked(manifest.without_ours(_listed(remote, stop)))
            progress.expect(listing.bytes)
            with self._writing():
                found = self._fetched(listing.key, listing, remote, progress, stop)
                found = self._promoted(found, listing, remote, progress, stop)
        except BaseException:
            progress.enter("failed")
            raise
        progress.enter("done")
        return found

    def held(self, source: str, revision: str = "") -> Artifact | None:
        """The newest whole one of ``source``, without asking it. ``revision`` is a commit of the hub; empty: any."""
        source = source.rstrip("/")
        found = [
            one for one in self.artifacts() if one.source == source and revision in ("", one.revision, *one.earlier)
        ]
        return max(found, key=lambda one: one.fetched_at, default=None)

    def artifacts(self) -> tuple[Artifact, ...]:
        """All whole ones, by key. Those that are in memory have their folder there."""
        found = {folder.name: one for folder in self._room.folders() if (one := self._artifact(folder)) is not None}
        if self._memory is not None:
            for copy in self._memory.artifacts():
                if (one := found.get(copy.key)) is not None:
                    used_at = max(one.used_at, copy.used_at)
                    found[copy.key] = msgspec.structs.replace(one, folder=copy.folder, used_at=used_at)
        return tuple(found[key] for key in sorted(found))

    def growing(self, source: str) -> Path | None:
        """The folder into which ``source`` is being fetched now. Who loads from it waits for files by arriving.py."""
        for folder in self._room.folders():
            going = manifest.growing(folder)
            if (
                going is not None
                and going.listing.source == source.rstrip("/")
                and locks.is_held(self._uses.flight(folder.name))
            ):
                return folder
        return None

    # What goes

    def remove(self, key: str) -> None:
        """It is not here any more. Raises SourceError where it is used or fetched (store-in-use), or not there."""
        if not self._folder(key).is_dir():
            raise self._gone(key)
        with self._writing():
            for _ in range(3):  # who looks whether it is used holds it for a moment
                if self._room.remove(key, though_given=True):
                    return
                time.sleep(locks.WAIT_S)
        what = f"artifact {key} is used by a replica, or is being fetched"
        raise SourceError("store-in-use", what, "unload the model first")

    def prune(self, keep: Collection[str] = (), *, dry_run: bool = False) -> list[Artifact]:
        """Remove all that nobody uses, or was given lately, but those whose key or source is in ``keep``; what died
        fetches have left goes as well. The removed ones; with ``dry_run`` those that would be, and nothing goes."""
        if dry_run:
            kept = [one for one in self.artifacts() if one.key in keep or one.source in keep]
            return [one for one in self.artifacts() if one not in kept and self._room.is_spare(one.key)]
        gone = []
        with self._writing():
            for folder in self._room.folders():
                one = self._artifact(folder)
                if one is not None and (one.key in keep or one.source in keep):
                    continue
                if self._room.remove(folder.name) and one is not None:
                    gone.append(one)
            self._room.sweep()
        if self._memory is not None:
            self._memory.prune([folder.name for folder in self._room.folders()])
        return gone

    def verify(self, key: str, stop: threading.Event | None = None) -> list[str]:
        """Read all files of an artifact, and compare them with their digests. The names of the damaged ones.

        These are removed, from every artifact that has them, which are then no longer whole: the next `get` fetches
        them again, and nothing else. Raises SourceError (store-gone), and Stopped.
        """
        folder, stop = self._folder(key), stop or threading.Event()
        found = manifest.published(folder)
        if found is None:
            raise self._gone(key)
        with self._writing(), locks.alone(self._uses.flight(key), stop):
            damaged = self._damaged(folder, found, stop)
        if self._memory is not None and manifest.published(self._memory._artifacts / key) is not None:
            damaged += self._memory.verify(key, stop)
        return sorted(set(damaged))

    def _folder(self, key: str) -> Path:
        """Raises SourceError where it is no key: it would name a folder that is no artifact."""
        if len(key) != 32 or not key.isalnum():
            raise self._gone(key)
        return self._artifacts / key

    def _gone(self, key: str) -> SourceError:
        return SourceError("store-gone", f"no artifact {key} is in {self.root}")

    # Fetching

    def _fetched(
        self, key: str, listing: Listing, remote: Remote, progress: Progress, stop: threading.Event
    ) -> Artifact:
        found = self._here(key, progress, stop)
        if found is None:
            for folder in (self._artifacts, self._uses.folder, self._blobs.root):
                folder.mkdir(parents=True, exist_ok=True)
            with self._flight(key, progress, stop), self._uses.hold(key, stop):
                found = self._ready(key) or self._proven(key, progress, stop)
                if found is None:
                    return self._fetch(key, listing, remote, progress, stop)
        progress.expect(listing.bytes, listing.bytes)
        return found if found.revision == listing.revision else self._moved_on(found, listing.revision, stop)

    def _moved_on(self, found: Artifact, revision: str, stop: threading.Event) -> Artifact:
        """The same content stands at another commit now. It is found by both."""
        folder = Path(found.folder)
        with contextlib.suppress(OSError), locks.alone(self._uses.flight(found.key), stop):
            kept = manifest.published(folder)
            if kept is not None:
                manifest.publish(folder, kept.moved_on(revision))
        return msgspec.structs.replace(found, revision=revision)

    def _here(self, key: str, progress: Progress, stop: threading.Event) -> Artifact | None:
        """What is whole here. Where nobody has looked since the machine has started, it is read first."""
        if (found := self._ready(key)) is not None or manifest.whole(self._artifacts / key) is None:
            return found
        try:
            with self._flight(key, progress, stop):
                return self._ready(key) or self._proven(key, progress, stop)
        except OSError as error:
            if error.errno not in locks.READ_ONLY:
                raise
        return self._proven(key, progress, stop)

    def _flight(self, key: str, progress: Progress, stop: threading.Event) -> contextlib.AbstractContextManager[int]:
        """The right to fetch it, or to look at it alone."""
        return locks.alone(self._uses.flight(key), stop, lambda: progress.enter("waiting"))

    def _fetch(self, key: str, listing: Listing, remote: Remote, progress: Progress, stop: threading.Event) -> Artifact:
        """Alone, and in use."""
        folder = self._artifacts / key
        began, moved = time.monotonic(), progress.moved
        told = progress.digests
        told.clear()  # of what was fetched before with that progress
        for _ in range(ATTEMPTS):
            seeds = self._begin(folder, listing, stop)
            with Digests(folder, (file.name for file in listing.files), told, stop) as digests:
                progress.enter("fetching")
                self._bring(folder, listing, remote, progress, stop)
                progress.enter("verifying")
                _tidy(folder, listing)
                files = self._checked(folder, listing, seeds, digests.all())
            if len(files) == len(listing.files):
                break
        else:
            lacking = sorted({file.name for file in listing.files} - set(files))
            what = f"{listing.source} was fetched, and {lacking[0]} is not what it lists ({len(lacking)} such files)"
            raise SourceError("store-incomplete", what, "does it change meanwhile? then try again")
        made = Manifest(
            source=listing.source,
            revision=listing.revision,
            files=files,
            fetched_at=self._now(listing.source),
            fetch_s=_whole_fetch_s(listing.bytes, progress.moved - moved, time.monotonic() - began),
            boot=lifetime.boot(),
        )
        manifest.publish(folder, made)
        return made.artifact(folder, time.time())

    def _now(self, source: str) -> float:
        """The time, later than all that was fetched of the source, even where the clock was set back since."""
        every = filter(None, map(manifest.published, self._room.folders()))
        return max([time.time(), *(one.fetched_at + 0.001 for one in every if one.source == source)])

    def _begin(self, folder: Path, listing: Listing, stop: threading.Event) -> dict[str, str]:
        """Make room, and say that it is taken from now on. The seeds."""
        folder.mkdir(exist_ok=True)
        with locks.alone(self._uses.room, stop):
            manifest.regrow(folder)
            before = manifest.growing(folder)
            if before is None or before.boot != lifetime.boot():
                _empty(folder)  # the machine has crashed since, and nobody knows what had reached the disk
                before = None
            self._forget_older(folder, listing)
            known = before.seeds if before is not None else {}
            seeds = {name: digest for name, digest in known.items() if (folder / name).exists()}
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
        """What a fetch has left that died, of a source that has other content now: nobody will go on with it."""
        for other in self._room.folders():
            left = manifest.growing(other)
            if other != folder and left is not None and left.listing.source == listing.source:
                self._room.remove(other.name)

    def _seed(self, folder: Path, listing: Listing) -> dict[str, str]:
        """Link what an earlier version of the source had already; name -> digest."""
        known: dict[tuple[str, ...], KeptFile] = {}
        for other in filter(None, map(manifest.published, self._room.folders())):
            for name, had in other.files.items():
                if other.source == listing.source and had.tag:
                    known[(name, str(had.size), had.tag)] = had
                if had.checksum.startswith("sha256:"):
                    known[(had.checksum,)] = had
        seeds = {}
        for file in listing.files:
            same = known.get((file.name, str(file.size), file.tag)) or known.get((file.checksum,))
            if same is None or same.size != file.size or (folder / file.name).exists():
                continue
            if self._blobs.link(same.digest, same.size, folder / file.name):
                seeds[file.name] = same.digest
        return seeds

    def _bring(self, folder: Path, listing: Listing, remote: Remote, progress: Progress, stop: threading.Event) -> None:
        """Have ``remote`` fetch, and make room again where others have filled the disk meanwhile."""
        while True:
            try:
                remote.fetch(listing, folder, progress, stop)
                return
            except (OSError, SourceError) as error:
                if not says_full(error):
                    raise
                with locks.alone(self._uses.room, stop):
                    self._room.make_more(folder, listing)

    def _checked(
        self, folder: Path, listing: Listing, seeds: Mapping[str, str], digests: Mapping[str, str]
    ) -> dict[str, KeptFile]:
        """Those that are what they should be, made one with equal contents. Others are removed."""
        files = {}
        for file in listing.files:
            name, digest = file.name, digests.get(file.name)
            if digest is None:
                continue
            told = file.checksum.removeprefix(DIGEST) if file.checksum.startswith(DIGEST) else digest
            if not digest or told != digest:  # of a copy: it is not what it is a copy of
                (folder / name).unlink(missing_ok=True)
                self._distrust(seeds.get(name, ""))
                continue
            if seeds.get(name, digest) != digest:
                (folder / name).unlink()
                self._distrust(seeds[name])
                continue
            if not self._blobs.keep(folder / name, digest):
                self._distrust(digest)
            files[name] = manifest.kept(file, digest)
        return files

    # Trust

    def _ready(self, key: str) -> Artifact | None:
        """The artifact, where it is whole and was compared with its digests since the machine has started."""
        folder = self._artifacts / key
        if manifest.published(folder) is None:
            return None
        with self._uses.hold(key):
            found = manifest.whole(folder)
            return found.artifact(folder, time.time()) if found is not None and found.boot == lifetime.boot() else None

    def _proven(self, key: str, progress: Progress, stop: threading.Event) -> Artifact | None:
        """The artifact, where it is whole and its files have their digests still. Alone."""
        folder = self._artifacts / key
        found = manifest.whole(folder)
        if found is None:
            return None
        progress.enter("verifying")
        if self._damaged(folder, found, stop):
            return None
        with contextlib.suppress(OSError):  # it can only be read: the next one compares again
            manifest.publish(folder, msgspec.structs.replace(found, boot=lifetime.boot()))
        return found.artifact(folder, time.time())

    def _damaged(self, folder: Path, found: Manifest, stop: threading.Event) -> list[str]:
        """The names of files that are not what the manifest says. They are gone afterwards, here and elsewhere."""
        damaged = []
        for name, file in found.files.items():
            path = folder / name
            if manifest.is_file(path, file.size) and is_of(path, file.digest, stop.is_set):
                continue
            damaged.append(name)
            self._give_up(folder, name)
            self._distrust(file.digest)
        if damaged:
            log.warning("%s of %s is damaged: it is fetched again when it is next asked for", damaged, found.source)
        return damaged

    def _distrust(self, digest: str) -> None:
        """Some copy of a content is damaged. All that are go; artifacts that lose theirs are not whole any more.
        Empty: of none that is known."""
        if not digest:
            return
        blob = self._blobs.path(digest)
        if _differs(blob, digest):
            blob.unlink(missing_ok=True)
        for folder in self._room.folders():
            found = manifest.published(folder)
            for name, file in found.files.items() if found is not None else ():
                if file.digest == digest and _differs(folder / name, digest):
                    self._give_up(folder, name)

    def _give_up(self, folder: Path, name: str) -> None:
        """A file of a whole artifact is damaged: the rest stays, as what a fetch has left."""
        with contextlib.suppress(FileNotFoundError):  # it is being removed as a whole
            manifest.regrow(folder)
        (folder / name).unlink(missing_ok=True)

    # Memory

    def _promoted(
        self, found: Artifact, listing: Listing, remote: Remote, progress: Progress, stop: threading.Event
    ) -> Artifact:
        """The artifact in memory, if there is room for it; else as it is."""
        if self._memory is None:
            return found
        for again in (True, False):
            try:
                progress.enter("copying")
                return self._memory._copied(found, stop)
            except SourceError as error:
                if again and error.id == "store-incomplete":  # perhaps what is copied is damaged
                    self.verify(found.key, stop)
                    found = self._fetched(found.key, listing, remote, progress, stop)
                    continue
                log.info("%s is loaded from %s, and not from memory: %s", found.source, found.folder, error)
        return found

    def _copied(self, found: Artifact, stop: threading.Event) -> Artifact:
        """Of another store's."""
        remote = LocalSource(found)
        with self._writing(), using(found.folder):
            return self._fetched(found.key, remote.listing(), remote, Progress(found.source), stop)

    # Files

    def _artifact(self, folder: Path) -> Artifact | None:
        found = manifest.whole(folder)
        return found.artifact(folder, self._uses.last(folder.name)[0]) if found is not None else None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Say of what the disk refuses where that was."""
        try:
            yield
        except (ConnectionError, TimeoutError):
            raise
        except OSError as error:
            if says_full(error):
                raise SourceError("store-full", f"{self.root}: {error.strerror}", REMEDY) from error
            what = f"artifacts cannot be kept in {self.root}: {error}"
            raise SourceError("store-unwritable", what, "does the folder belong to another user?") from error


def _listed(remote: Remote, stop: threading.Event) -> Listing:
    """What it lists; Stopped soon after ``stop`` is set, for which a source that is away does not look."""
    answer: Future[Listing] = Future()

    def ask() -> None:
        try:
            answer.set_result(remote.listing())
        except BaseException as error:  # noqa: BLE001 - it is raised where the answer is waited for
            answer.set_exception(error)

    threading.Thread(target=ask, name="listing", daemon=True).start()
    while not answer.done():
        wait([answer], LOOK_S)
        if stop.is_set() and not answer.done():
            raise Stopped("stopped before it was listed")
    return answer.result()


def _whole_fetch_s(size: int, moved: int, seconds: float) -> float:
    """What fetching all ``size`` bytes takes, seen that ``moved`` of them took so long. Too few tell nothing."""
    return seconds * max(1.0, size / moved) if 2 * moved >= size > 0 else max(seconds, size / ASSUMED_RATE)


def _differs(path: Path, digest: str) -> bool:
    """Whether it is there, with another content."""
    try:
        return not is_of(path, digest)
    except FileNotFoundError:
        return False


def _tidy(folder: Path, listing: Listing) -> None:
    """Remove what does not belong to it, or is not whole."""
    wanted = {file.name: file.size for file in listing.files}
    for path in sorted(folder.rglob("*"), reverse=True):  # what is in a folder before the folder
        name = path.relative_to(folder).as_posix()
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):
                path.rmdir()  # where it is empty
        elif name not in manifest.OURS and (name not in wanted or not manifest.is_file(path, wanted[name])):
            path.unlink()


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
