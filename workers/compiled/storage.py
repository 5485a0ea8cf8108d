"""Folders and prefixes in S3 that several hosts share: models' ``neff_cache``s, and remote caches of graphs.

One that does not answer is reported, and its users continue without it: its content can be compiled or may be on this
host already, so that it costs time but no start.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from workers.artifacts.fetch.progress import Progress
from workers.artifacts.fetch.retry_policy import RetryPolicy
from workers.artifacts.sources.listing import Listing, RemoteFile, SourceError, Stopped
from workers.artifacts.sources.s3 import Bucket
from workers.compiled import neuron_cache
from workers.compiled.file_states import BLOCK, about, files_below, sync_to_disk
from workers.compiled.neuron_cache import OWN

log = logging.getLogger(__name__)

S3 = "s3://"
AWAY = frozenset({"s3-unreachable", "neff-cache-unreadable"})  # transient; other errors need a fix
PATIENCE_S = 60.0  # retry deadline; shorter than for a model, which has no substitute
STAGED = "staged-"  # prefix of files during a push to a folder
STRAY_S = 86400.0  # older ones were left by killed pushes

DAMAGED: set[str] = set()
"""Remote graphs and sets that this process found damaged, as URL/NAME: its next push replaces them."""

_logged: set[tuple[str, str]] = set()  # locations and error ids that this process has logged
_lock = threading.Lock()


def describe(location: str, error: SourceError) -> str:
    """Describes why the content of the storage at ``location`` is unknown."""
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


class Storage(Protocol):
    """A shared folder or prefix. Names are as in ``workers.artifacts.sources.listing``; every method blocks and raises
    SourceError."""

    @property
    def url(self) -> str: ...
    def files(self) -> Sequence[RemoteFile]: ...
    def read(self, name: str) -> bytes: ...
    def delete(self, name: str) -> None: ...

    def fetch(self, files: Sequence[RemoteFile], folder: Path, stop: threading.Event) -> None:
        """Fetches the files into ``folder``, complete and verified; resumes an earlier fetch."""
        ...

    def put(self, name: str, path: Path) -> None:
        """Uploads a file atomically. Also raises OSError if it cannot be read."""
        ...

    def put_bytes(self, name: str, data: bytes) -> None: ...


def storage_at(location: str) -> Storage:
    """Opens the storage at ``s3://bucket/prefix`` or in a folder. Raises SourceError."""
    if location.startswith(S3):
        return BucketStorage.of(location, RetryPolicy(seconds=PATIENCE_S))
    return FolderStorage(Path(location.removeprefix("file://")))


def listed_files(storage: Storage) -> Sequence[RemoteFile]:
    """Returns the files, also of a folder that does not exist. Raises SourceError."""
    return storage.files() if storage.url.startswith(S3) or Path(storage.url).is_dir() else []


class BucketStorage(Bucket):
    """A prefix in S3."""

    def fetch(self, files: Sequence[RemoteFile], folder: Path, stop: threading.Event) -> None:
        from workers.artifacts.fetch.transfer import S3Remote

        listing = Listing(source=self.url, files=tuple(sorted(files, key=lambda file: file.name)))
        S3Remote(self.url, retry_policy=self.retry_policy).fetch(listing, folder, Progress(self.url), stop)


class FolderStorage:
    """A folder, such as on a network file system."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def url(self) -> str:
        return str(self._root)

    def files(self) -> Sequence[RemoteFile]:
        """Returns the files; their tags are the times of their last change, in ns since the epoch."""
        with _source_errors("neff-cache-unreadable", self.url):
            if not self._root.is_dir():
                raise NotADirectoryError(f"{self._root} is not a folder")
            return [
                RemoteFile(
                    name=path.relative_to(self._root).as_posix(), size=status.st_size, tag=str(status.st_mtime_ns)
                )
                for path, status in files_below(self._root)
            ]

    def read(self, name: str) -> bytes:
        with _source_errors("neff-cache-unreadable", self.url):
            return (self._root / name).read_bytes()

    def delete(self, name: str) -> None:
        with _source_errors("neff-cache-unwritable", self.url):
            (self._root / name).unlink(missing_ok=True)

    def fetch(self, files: Sequence[RemoteFile], folder: Path, stop: threading.Event) -> None:
        with _source_errors("neff-cache-unreadable", self.url):
            shutil.rmtree(folder, ignore_errors=True)
            for file in files:
                (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
                _copy(self._root / file.name, folder / file.name, stop)

    def put(self, name: str, path: Path) -> None:
        with path.open("rb"):  # an unreadable file is not an error of the storage
            self._write(name, lambda staged: shutil.copyfile(path, staged))

    def put_bytes(self, name: str, data: bytes) -> None:
        self._write(name, lambda staged: staged.write_bytes(data))

    def _write(self, name: str, fill: Callable[[Path], object]) -> None:
        """Fills a new file, and moves it to its name once it is on disk, so that later files never are without it.

        Files in work get their permissions by the umask, since users of other hosts read them. Removes leftovers of
        killed pushes.
        """
        own, target = self._root / OWN, self._root / name
        with _source_errors("neff-cache-unwritable", self.url):
            own.mkdir(parents=True, exist_ok=True)
            for stray in own.glob(f"{STAGED}*"):
                if (status := about(stray)) is not None and time.time() - status.st_mtime > STRAY_S:
                    neuron_cache.remove(stray)
            staged = own / f"{STAGED}{secrets.token_hex(8)}"
            fill(staged)
            sync_to_disk(staged)
            target.parent.mkdir(parents=True, exist_ok=True)
            staged.replace(target)
            sync_to_disk(target.parent)


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


def _copy(source: Path, target: Path, stop: threading.Event) -> None:
    """Copies a file. Raises OSError, and Stopped soon after ``stop`` is set."""
    with source.open("rb", buffering=0) as reader, target.open("wb") as writer:
        while block := reader.read(BLOCK):
            if stop.is_set():
                raise Stopped
            writer.write(block)


@contextlib.contextmanager
def _source_errors(id: str, where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SourceError(id, f"the NEFF cache {where}: {error}", "check its mount and owner") from error
