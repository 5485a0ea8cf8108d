"""Room for artifacts: what takes how much of it, and what goes when more is wanted."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import time
from pathlib import Path

from workers.artifacts.fetch.progress import size_text
from workers.artifacts.sources.listing import Listing, SourceError
from workers.artifacts.store import locks, manifest
from workers.artifacts.store.artifact_uses import ArtifactUses
from workers.artifacts.store.blobs import Blobs
from workers.artifacts.store.budget import FIXED_S, Entry, held, to_free

log = logging.getLogger(__name__)

GRACE_S = 60.0  # between the end of a fetch and the process that holds its folder
SPARE_BYTES, SPARE_SHARE = 1 << 30, 0.05  # of the disk are left to journals and logs, whichever is less
REMEDY = "a larger disk or budget, or fewer models at a time: what replicas use is never removed"


class DiskRoom:
    """Of one store. Whoever makes room holds ``uses.room``, alone."""

    def __init__(self, root: Path, budget: int | None, grace_s: float, above: DiskRoom | None = None) -> None:
        """``above``: that of the copies in memory, which go with what they are copies of."""
        self.root = root
        self.artifacts = root / "artifacts"
        self.uses = ArtifactUses(root / "locks")
        self.blobs = Blobs(root / "blobs")
        self._budget = budget
        self._grace_s = grace_s
        self._above = above

    def folders(self) -> list[Path]:
        """Of all artifacts, whole or not."""
        try:
            return sorted(self.artifacts.iterdir())
        except FileNotFoundError:
            return []

    def make(self, folder: Path, listing: Listing) -> None:
        """For what is still to come of ``listing`` into ``folder``, which says so. Raises SourceError (store-full)."""
        while (lacking := max(self._over_budget(), self._lacking_on_disk(folder, listing))) > 0:
            if self._evict(lacking):
                continue
            kept = held(entry for entry in self._entries() if not entry.spare and entry.key != folder.name)
            room = f"a budget of {size_text(self._budget)} (store_bytes)" if self._budget is not None else "no budget"
            room += f", {size_text(shutil.disk_usage(self.root).free)} free on its disk, and {size_text(kept)} in use"
            what = f"{listing.source} needs {size_text(listing.bytes)}; {self.root} has {room}"
            raise SourceError("store-full", what, REMEDY)

    def make_more(self, folder: Path, listing: Listing) -> None:
        """The disk is full in the middle of it: others have filled it. As `make`."""
        disk = shutil.disk_usage(self.root)
        if not self._evict(max(1, self._lacking_on_disk(folder, listing) - _spare(disk.total))):
            what = f"the disk of {self.root} is full, and {listing.source} needs {size_text(listing.bytes)}"
            raise SourceError("store-full", what, REMEDY)

    def remove(self, key: str, *, though_given: bool = False) -> bool:
        """Whether nobody fetches it or uses it, so that it is gone now. Not ``though_given``: nor was it given to
        anybody for ``grace_s``."""
        folder = self.artifacts / key
        if not folder.is_dir():
            return True
        with locks.at_once(self.uses.flight(key)) as free, locks.at_once(self.uses.use(key)) as unused:
            if not free or not unused or (self._above is not None and self._above.uses.is_busy(key)):
                return False
            whole = manifest.whole(folder)
            if whole is not None and not though_given and self._is_given(key, whole):
                return False  # who has chosen it has looked before
            manifest.withdraw(folder)  # first: a death in between leaves nothing that looks whole
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(folder)
            self.uses.forget(key)
        self.blobs.sweep()
        if self._above is not None:
            self._above.remove(key, though_given=True)
        return True

    def is_spare(self, key: str) -> bool:
        """Whether `remove` would take it now."""
        return self._entry(self.artifacts / key).spare

    def sweep(self) -> None:
        """Remove contents that no artifact has, and locks of artifacts that are not here."""
        self.blobs.sweep()
        for key in self.uses.known():
            with locks.at_once(self.uses.flight(key)) as free, locks.at_once(self.uses.use(key)) as unused:
                if free and unused and not (self.artifacts / key).exists():
                    self.uses.forget(key)

    def _over_budget(self) -> int:
        return held(self._entries()) - self._budget if self._budget is not None else 0

    def _lacking_on_disk(self, folder: Path, listing: Listing) -> int:
        """Bytes that must be freed for the rest of it, and for what others have begun to fetch."""
        disk = shutil.disk_usage(self.root)
        promised = max(0, listing.bytes - _blocks(folder))
        for other in self.folders():
            going = manifest.growing(other)
            if other != folder and going is not None and locks.is_held(self.uses.flight(other.name)):
                promised += max(0, going.listing.bytes - _blocks(other))
        return promised + _spare(disk.total) - disk.free

    def _evict(self, want: int) -> bool:
        """Remove what costs least to bring back; False: not even all of it is enough."""
        chosen = to_free(self._entries(), want, self.uses.level())
        if chosen is None:
            return False
        for key in chosen.keys:
            if self.remove(key):  # else somebody uses it since a moment ago
                log.info("removed artifact %s to make room", key)
        self.uses.set_level(chosen.level)
        return True

    def _entries(self) -> list[Entry]:
        """All that takes room."""
        return [self._entry(folder) for folder in self.folders()]

    def _entry(self, folder: Path) -> Entry:
        key = folder.name
        busy = self.uses.is_busy(key) or (self._above is not None and self._above.uses.is_busy(key))
        whole, going = manifest.published(folder), manifest.growing(folder)
        if whole is not None:
            used_at, level = self.uses.last(key)
            return Entry(
                key=key,
                files={file.digest: file.size for file in whole.files.values()},
                reload_s=whole.fetch_s + FIXED_S,
                level=level,
                used_at=max(used_at, whole.fetched_at),
                spare=not busy and not self._is_given(key, whole),
            )
        if going is None:
            return Entry(key=key, files={key: _blocks(folder)}, reload_s=0.0, spare=not busy)
        sizes = {file.name: file.size for file in going.listing.files}
        seeded = {digest: sizes[name] for name, digest in going.seeds.items() if name in sizes}
        rest = (going.listing.bytes if busy else min(going.listing.bytes, _blocks(folder))) - sum(seeded.values())
        return Entry(key=key, files={**seeded, key: max(0, rest)}, reload_s=0.0, spare=not busy)

    def _is_given(self, key: str, whole: manifest.Manifest) -> bool:
        """Whether somebody got it a moment ago, who may not hold it yet. A clock that is set back by less than the
        grace changes nothing."""
        used_at = max(self.uses.last(key)[0], whole.fetched_at)
        return abs(time.time() - used_at) < self._grace_s


def says_full(error: BaseException | None) -> bool:
    """Whether it, or what it comes from, is the want of disk."""
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
    """Bytes of the disk that the files of a folder take; those that are half there as much as is there."""
    found = 0
    for at, _, names in os.walk(folder):  # which does not mind that it goes meanwhile
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found += Path(at, name).lstat().st_blocks * 512
    return found
