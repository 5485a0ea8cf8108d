"""Makes room for artifacts: accounts for disk usage and evicts those that are cheapest to fetch again.

Greedy-dual (Young 1994; with sizes, Cao and Irani 1997): an artifact's credit is the cost of fetching a GiB of it
again, plus the level at its last use. The level is the credit of the last evicted artifact; it rises, so any unused
artifact is evicted eventually, however expensive it is.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from workers.artifacts.fetch.progress import size_text
from workers.artifacts.sources.listing import Listing, SourceError
from workers.artifacts.store import manifest
from workers.artifacts.store.artifact_uses import ArtifactUses
from workers.artifacts.store.contents import Blobs
from workers.host import file_lock

log = logging.getLogger(__name__)

GRACE_S = 60.0  # for a process to lock the folder of a finished fetch
SPARE_BYTES, SPARE_SHARE = 1 << 30, 0.05  # disk space left for journals and logs: the smaller of the two
REMEDY = "use a larger disk or budget, or fewer models at a time: artifacts in use are never removed"
GIB = float(1 << 30)
FIXED_S = 1.0  # fixed cost of a reload: listing, connecting, publishing


class StoredArtifact(msgspec.Struct, frozen=True, kw_only=True):
    """An artifact of the store, as eviction sees it."""

    key: str
    files: Mapping[str, int]  # content -> bytes; content shared by several entries exists once
    reload_s: float  # cost of fetching it again
    level: float = 0.0  # of the store at the last use
    used_at: float = 0.0  # seconds since the epoch
    spare: bool = True  # not in use

    @property
    def bytes(self) -> int:
        """The size of all its files, shared ones included."""
        return sum(self.files.values())

    @property
    def credit(self) -> float:
        """Seconds per GiB, plus the level."""
        return self.level + self.reload_s * GIB / max(self.bytes, 1)


class Eviction(msgspec.Struct, frozen=True, kw_only=True):
    """The artifacts to evict."""

    keys: tuple[str, ...] = ()  # the cheapest first
    freed: int = 0  # bytes
    level: float = 0.0  # the store's level afterwards


def occupied_bytes(entries: Iterable[StoredArtifact]) -> int:
    """Returns the bytes that the entries occupy together."""
    return sum({content: size for entry in entries for content, size in entry.files.items()}.values())


def choose_evictions(entries: Sequence[StoredArtifact], want: int, level: float = 0.0) -> Eviction | None:
    """Returns what to evict to free at least ``want`` bytes; None: the unused artifacts are not enough.

    Takes the cheapest first, then puts back those that are not needed because a larger one was taken later.
    ``level``: the store's current level.
    """
    if want <= 0:
        return Eviction(level=level)
    order = sorted(
        (entry for entry in entries if entry.spare), key=lambda entry: (entry.credit, entry.used_at, entry.key)
    )
    going, freed = [], _Freed(entries)
    for entry in order:
        if freed.bytes >= want:
            break
        going.append(entry)
        freed.add(entry)
    if freed.bytes < want:
        return None
    staying = set()
    for entry in reversed(going):
        freed.take_back(entry)
        if freed.bytes >= want:
            staying.add(entry.key)
        else:
            freed.add(entry)
    going = [entry for entry in going if entry.key not in staying]
    return Eviction(
        keys=tuple(entry.key for entry in going),
        freed=freed.bytes,
        level=max(level, *(entry.credit for entry in going)),
    )


class _Freed:
    """The bytes that an eviction frees, without shared content; incremental, for stores with hundreds of models."""

    def __init__(self, entries: Iterable[StoredArtifact]) -> None:
        self._users = Counter(content for entry in entries for content in entry.files)
        self.bytes = 0

    def add(self, entry: StoredArtifact) -> None:
        for content, size in entry.files.items():
            self._users[content] -= 1
            self.bytes += size if not self._users[content] else 0

    def take_back(self, entry: StoredArtifact) -> None:
        for content, size in entry.files.items():
            self.bytes -= size if not self._users[content] else 0
            self._users[content] += 1


class DiskRoom:
    """The disk space of one store. Callers that make room hold ``uses.room`` exclusively."""

    def __init__(self, root: Path, budget: int | None, grace_s: float) -> None:
        self.root = root
        self.artifacts = root / "artifacts"
        self.uses = ArtifactUses(root / "locks")
        self.blobs = Blobs(root / "blobs")
        self._budget = budget
        self._grace_s = grace_s

    def folders(self) -> list[Path]:
        """Returns the folders of all artifacts, complete or not."""
        try:
            return sorted(self.artifacts.iterdir())
        except FileNotFoundError:
            return []

    def make(self, folder: Path, listing: Listing) -> None:
        """Makes room for the rest of ``listing`` in ``folder``, where a fetch is recorded. Raises SourceError
        (store-full)."""
        while (lacking := max(self._over_budget(), self._lacking_on_disk(folder, listing))) > 0:
            if self._evict(lacking):
                continue
            in_use = occupied_bytes(entry for entry in self._entries() if not entry.spare and entry.key != folder.name)
            room = f"a budget of {size_text(self._budget)} (store_bytes)" if self._budget is not None else "no budget"
            room += f", {size_text(shutil.disk_usage(self.root).free)} free on its disk, and {size_text(in_use)} in use"
            message = f"{listing.source} needs {size_text(listing.bytes)}; {self.root} has {room}"
            raise SourceError("store-full", message, REMEDY)

    def make_more(self, folder: Path, listing: Listing) -> None:
        """Makes room again after other programs have filled the disk during a fetch. Raises as `make`."""
        disk = shutil.disk_usage(self.root)
        if not self._evict(max(1, self._lacking_on_disk(folder, listing) - _spare(disk.total))):
            message = f"the disk of {self.root} is full, and {listing.source} needs {size_text(listing.bytes)}"
            raise SourceError("store-full", message, REMEDY)

    def remove(self, key: str, *, ignore_grace: bool = False) -> bool:
        """Removes an artifact and returns True; False: it is being fetched or used.

        Without ``ignore_grace``, also False within ``grace_s`` after it was returned to a caller.
        """
        folder = self.artifacts / key
        if not folder.is_dir():
            return True
        with self.uses.try_idle(key) as is_idle:
            if not is_idle:
                return False
            complete = manifest.complete(folder)
            if complete is not None and not ignore_grace and self._is_in_grace(key, complete):
                return False
            manifest.unpublish(folder)  # first: a kill in between leaves nothing that looks complete
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(folder)
            self.uses.forget(key)
        self.blobs.sweep()
        return True

    def is_spare(self, key: str) -> bool:
        """Returns whether `remove` would remove it now."""
        return self._entry(self.artifacts / key).spare

    def sweep(self) -> None:
        """Removes content without artifacts, and locks of artifacts that no longer exist."""
        self.blobs.sweep()
        for key in self.uses.known():
            with self.uses.try_idle(key) as is_idle:
                if is_idle and not (self.artifacts / key).exists():
                    self.uses.forget(key)

    def _over_budget(self) -> int:
        return occupied_bytes(self._entries()) - self._budget if self._budget is not None else 0

    def _lacking_on_disk(self, folder: Path, listing: Listing) -> int:
        """Returns the bytes to free for the rest of this fetch and of other running fetches."""
        disk = shutil.disk_usage(self.root)
        promised = max(0, listing.bytes - _blocks(folder))
        for other in self.folders():
            fetch = manifest.unfinished(other)
            if other != folder and fetch is not None and file_lock.is_locked(self.uses.flight(other.name)):
                promised += max(0, fetch.listing.bytes - _blocks(other))
        return promised + _spare(disk.total) - disk.free

    def _evict(self, want: int) -> bool:
        """Evicts the cheapest artifacts; False: even all unused ones are not enough."""
        chosen = choose_evictions(self._entries(), want, self.uses.level())
        if chosen is None:
            return False
        for key in chosen.keys:
            if self.remove(key):  # else it has come into use meanwhile
                log.info("removed artifact %s to make room", key)
        self.uses.set_level(chosen.level)
        return True

    def _entries(self) -> list[StoredArtifact]:
        """Returns an entry for each artifact, incomplete ones included."""
        return [self._entry(folder) for folder in self.folders()]

    def _entry(self, folder: Path) -> StoredArtifact:
        key = folder.name
        busy = self.uses.is_busy(key)
        published, fetch = manifest.published(folder), manifest.unfinished(folder)
        if published is not None:
            used_at, level = self.uses.last(key)
            return StoredArtifact(
                key=key,
                files={file.digest: file.size for file in published.files.values()},
                reload_s=published.fetch_s + FIXED_S,
                level=level,
                used_at=max(used_at, published.fetched_at),
                spare=not busy and not self._is_in_grace(key, published),
            )
        if fetch is None:
            return StoredArtifact(key=key, files={key: _blocks(folder)}, reload_s=0.0, spare=not busy)
        sizes = {file.name: file.size for file in fetch.listing.files}
        seeded = {digest: sizes[name] for name, digest in fetch.seeds.items() if name in sizes}
        unshared = (fetch.listing.bytes if busy else min(fetch.listing.bytes, _blocks(folder))) - sum(seeded.values())
        return StoredArtifact(key=key, files={**seeded, key: max(0, unshared)}, reload_s=0.0, spare=not busy)

    def _is_in_grace(self, key: str, complete: manifest.Manifest) -> bool:
        """Returns whether it was returned to a caller that may not have locked it yet. Tolerates a clock that is set
        back by less than the grace period."""
        used_at = max(self.uses.last(key)[0], complete.fetched_at)
        return abs(time.time() - used_at) < self._grace_s


def is_disk_full(error: BaseException | None) -> bool:
    """Returns whether the error, or one of its causes, is a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if isinstance(error, SourceError) and error.id.endswith("disk-full"):
            return True
        error = error.__cause__
    return False


def _spare(disk: int) -> int:
    return int(min(SPARE_BYTES, disk * SPARE_SHARE))


def _blocks(folder: Path) -> int:
    """Returns the disk usage of a folder's files in bytes; sparse files count by their allocated blocks."""
    size = 0
    for at, _, names in os.walk(folder):  # tolerates a concurrent removal
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size += Path(at, name).lstat().st_blocks * 512
    return size
