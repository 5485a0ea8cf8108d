"""Compares the files of a store's artifacts with their digests, and removes damaged ones."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from workers.artifacts.sources.listing import Listing
from workers.artifacts.store import manifest
from workers.artifacts.store.blobs import is_of, readable_digest_of
from workers.artifacts.store.eviction import DiskRoom
from workers.artifacts.store.manifest import KeptFile, Manifest

log = logging.getLogger(__name__)

READERS = 4  # files that are read at once


class FileChecks:
    """The checks of one store. A damaged file is removed from every artifact that shares it."""

    def __init__(self, room: DiskRoom) -> None:
        self._room = room

    def fetched(
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
                self._remove_damaged(seeds.get(name, ""))
                continue
            if not self._room.blobs.keep(folder / name, digest):
                self._remove_damaged(digest)
            files[name] = KeptFile(size=file.size, digest=digest, tag=file.tag, checksum=file.checksum)
        return files

    def damaged(self, folder: Path, published: Manifest, stop: threading.Event) -> list[str]:
        """Removes files that do not match the manifest, here and in other artifacts; returns their names."""
        damaged = []
        for name, file in published.files.items():
            if manifest.is_file(folder / name, file.size) and is_of(folder / name, file.digest, stop.is_set):
                continue
            damaged.append(name)
            _reopen(folder, name)
            self._remove_damaged(file.digest)
        if damaged:
            log.warning(
                "damaged files of %s: %s; they will be fetched again on the next use", published.source, damaged
            )
        return damaged

    def _remove_damaged(self, digest: str) -> None:
        """Removes all damaged copies of a content; artifacts that lose a file become incomplete. An empty digest is
        ignored."""
        if not digest:
            return
        blob = self._room.blobs.path(digest)
        if _differs(blob, digest):
            blob.unlink(missing_ok=True)
        for folder in self._room.folders():
            published = manifest.published(folder)
            for name, file in published.files.items() if published is not None else ():
                if file.digest == digest and _differs(folder / name, digest):
                    _reopen(folder, name)


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
