"""Serves an artifact of this host as a source, for its copy in memory."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from workers.artifacts.fetch.progress import Progress
from workers.artifacts.sources.listing import Listing, RemoteFile, SourceError, Stopped
from workers.artifacts.store import manifest
from workers.artifacts.store.blobs import DAMAGE, digest_of
from workers.artifacts.store.manifest import Artifact

AT_ONCE = 4  # files
DIGEST = "content:"  # checksum prefix; followed by the store's digest of the file (content_digest.py)
PIECE = 1 << 26  # bytes between two checks for a stop


class LocalSource:
    """Implements `Remote`: a fetch copies the files."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact

    def listing(self) -> Listing:
        """See `Remote`."""
        artifact = self._artifact
        files = [
            RemoteFile(name=name, size=file.size, tag=file.digest, checksum=f"{DIGEST}{file.digest}")
            for name, file in sorted(artifact.files.items())
        ]
        return Listing(source=artifact.source, revision=artifact.revision, files=tuple(files))

    def fetch(self, listing: Listing, folder: Path, progress: Progress, stop: threading.Event) -> None:
        """See `Remote`. Also raises OSError."""
        lacking = [file for file in listing.files if not manifest.is_file(folder / file.name, file.size)]
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="copying") as pool:
            for done in [pool.submit(self._copy, file, folder / file.name, progress, stop) for file in lacking]:
                done.result()

    def _copy(self, file: RemoteFile, path: Path, progress: Progress, stop: threading.Event) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        copy = path.with_name(f".{path.name}.copy")
        with (Path(self._artifact.folder) / file.name).open("rb") as source, copy.open("wb") as target:
            at = 0
            while count := self._send(source, target, at):
                at += count
                progress.add(count)
                if stop.is_set():
                    raise Stopped(f"the copy of {self._artifact.source} into memory was stopped")
        progress.digests[file.name] = digest_of(copy, stop.is_set)  # from the page cache
        copy.replace(path)

    def _send(self, source: IO[bytes], target: IO[bytes], at: int) -> int:
        try:
            return os.sendfile(target.fileno(), source.fileno(), at, PIECE)
        except OSError as error:
            if error.errno not in DAMAGE:
                raise
            message = f"{source.name} cannot be read from disk: {os.strerror(error.errno)}"
            raise SourceError("store-incomplete", message, "it will be fetched again") from error
