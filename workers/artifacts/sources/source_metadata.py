"""Caches the small files of remote sources on this machine: the config and the tokenizer.

    heads/<key>/            config.json, tokenizer.json, ...; the key of the complete listing
    heads/<key>/corewright-head.json
    heads/index/<digest>    the last key of a source
    heads/pins/<fleet>      {digest: key}: the commits that a fleet is pinned to

The planner, the commands and the gateway read them. A folder appears complete, under its final name; one that lost
files in a crash of the machine is fetched again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from uuid import uuid4

import msgspec

from workers.artifacts.fetch.progress import Progress
from workers.artifacts.fetch.retry_policy import RetryPolicy
from workers.artifacts.sources.layout import metadata_files
from workers.artifacts.sources.listing import Listing, Remote, SourceError
from workers.artifacts.sources.open_source import SourceQuery
from workers.host import file_lock, foreign_files

MARK = "corewright-head.json"
PATIENCE_S = 3.0  # short: a user waits for the command
KEPT_S = 30 * 86_400.0  # metadata unused for so long is removed
KEPT_PINS = 8  # fleets; a home has one at a time, and a fleet that runs for months reads its commits once
HALF_S = 86_400.0  # incomplete files of this age belong to a process that died
AWAY = ("hub-offline", "hub-unreachable", "hub-denied", "s3-unreachable", "s3-denied", "s3-no-credentials")
"""Errors that say nothing about the source: its cached metadata stays valid."""


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """The small files of a source at the time of its listing."""

    listing: Listing  # of all files, weights included
    folder: str  # of the small files

    @property
    def commit(self) -> str | None:
        """The commit of the hub's revision; None for S3."""
        return self.listing.revision or None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all files."""
        return tuple(file.name for file in self.listing.files)


class MetadataResult(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata, and why it may be outdated."""

    head: Metadata
    away: SourceError | None = None  # the source did not answer


class SourceMetadata:
    """The metadata cache in ``$COREWRIGHT_HOME/store/heads``. Processes may share it. All methods block."""

    def __init__(self, root: Path, opener: Callable[[SourceQuery, RetryPolicy], Remote] = SourceQuery.open) -> None:
        self._root = root
        self._opener = opener

    def refresh(self, query: SourceQuery) -> MetadataResult:
        """Lists the source and fetches its metadata if needed; returns cached metadata if the source is unavailable.

        Raises SourceError if nothing is cached, or if the source refuses.
        """
        try:
            remote = self._opener(query, RetryPolicy(seconds=PATIENCE_S))
            return MetadataResult(head=self._fetched(query, remote, remote.listing()))
        except SourceError as error:
            cached = self.cached(query) if error.id in AWAY else None
            if cached is None:
                raise
            return MetadataResult(head=cached, away=error)
        except OSError as error:
            message = f"{error.filename or self._root} cannot be written: {error.strerror or type(error).__name__}"
            raise SourceError("heads-unwritable", message, "COREWRIGHT_HOME names another folder") from None

    def get(self, query: SourceQuery) -> MetadataResult:
        """Returns the cached metadata; calls ``refresh`` only if there is none."""
        cached = self.cached(query)
        return self.refresh(query) if cached is None else MetadataResult(head=cached)

    def cached(self, query: SourceQuery) -> Metadata | None:
        """Returns the metadata that was fetched last, without a request; None: nothing is cached."""
        try:
            return self.kept((self._root / "index" / query.digest).read_text())
        except (OSError, UnicodeDecodeError):
            return None

    def kept(self, key: str) -> Metadata | None:
        """Returns the metadata with that key; None: it is not cached completely."""
        folder = self._folder(key)
        listing = None if folder is None else _complete_listing(folder)
        if folder is None or listing is None:
            return None
        _touch(folder / MARK)
        return Metadata(listing=listing, folder=str(folder))

    def pins(self, fleet: str) -> dict[str, Metadata]:
        """Returns the cached metadata that a fleet is pinned to, by `SourceQuery.digest`."""
        keys = self._pinned(fleet)
        _touch(self._root / "pins" / fleet)
        pins = {digest: self.kept(key) for digest, key in keys.items()}
        return {digest: head for digest, head in pins.items() if head is not None}

    def pin(self, fleet: str, more: Mapping[str, Metadata]) -> None:
        """Adds to `pins`. Only one process of a fleet may call it. Raises OSError."""
        keys = {digest: head.listing.key for digest, head in (self.pins(fleet) | dict(more)).items()}
        self._write("pins", fleet, msgspec.json.encode(keys).decode())

    def _folder(self, key: str) -> Path | None:
        """Returns the folder of a key; None: the text, read from a file, is not a key."""
        return self._root / key if len(key) == 32 and key.isalnum() else None

    def _pinned(self, fleet: str) -> dict[str, str]:
        try:
            return msgspec.json.decode((self._root / "pins" / fleet).read_bytes(), type=dict[str, str])
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return {}

    def _fetched(self, query: SourceQuery, remote: Remote, listing: Listing) -> Metadata:
        folder = self._root / listing.key
        if _complete_listing(folder) is None:
            self._root.mkdir(parents=True, exist_ok=True)
            self._prune()
            arriving = self._root / f".arriving-{uuid4().hex}"
            arriving.mkdir()
            try:
                remote.fetch(metadata_files(listing), arriving, Progress(listing.source), threading.Event())
                (arriving / MARK).write_bytes(msgspec.json.encode(listing))
                self._place(arriving, folder)
            finally:
                shutil.rmtree(arriving, ignore_errors=True)
        _touch(folder / MARK)
        with contextlib.suppress(OSError):  # only costs another request
            self._write("index", query.digest, listing.key)
        return Metadata(listing=listing, folder=str(folder))

    def _place(self, arriving: Path, folder: Path) -> None:
        lost = arriving.with_name(f"{arriving.name}-lost")
        with file_lock.exclusive(self._root / ".placing"):
            if _complete_listing(folder) is not None:
                return  # another process was first
            if folder.exists():  # incomplete, after a crash or a kill
                folder.rename(lost)
            arriving.rename(folder)
        shutil.rmtree(lost, ignore_errors=True)

    def _write(self, folder: str, name: str, text: str) -> None:
        (self._root / folder).mkdir(parents=True, exist_ok=True)
        half = self._root / folder / f".{uuid4().hex}"
        try:
            half.write_text(text)
            half.replace(self._root / folder / name)
        except OSError:
            half.unlink(missing_ok=True)
            raise

    def _prune(self) -> None:
        """Removes metadata that is neither pinned nor used for a month, and leftovers of killed processes."""
        pins = sorted(_entries(self._root / "pins"), key=_age)
        for old in pins[KEPT_PINS:]:
            if _age(old) > KEPT_S:
                _remove(old)
        pinned = {key for fleet in _entries(self._root / "pins") for key in self._pinned(fleet.name).values()}
        for folder in _entries(self._root):
            mark = folder / MARK
            if folder.name in ("index", "pins", *pinned):
                continue
            if not mark.exists() or _age(mark) > KEPT_S:  # without the mark, a removal has begun
                _remove(mark)  # first, so that a killed removal leaves nothing that looks complete
                shutil.rmtree(folder, ignore_errors=True)
        for name in _entries(self._root / "index"):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                if not (self._root / name.read_text()).exists():
                    name.unlink()
        for place in (self._root, self._root / "pins", self._root / "index"):
            for half in place.glob(".arriving-*" if place == self._root else ".*"):
                if _age(half) > HALF_S:
                    shutil.rmtree(half, ignore_errors=True)
                    _remove(half)


def _complete_listing(folder: Path) -> Listing | None:
    """Returns the listing of a complete folder; None: a small file is missing or has another size."""
    try:
        listing = msgspec.json.decode(foreign_files.read_bytes(folder / MARK), type=Listing)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    files = metadata_files(listing).files
    return listing if all(file.is_in(folder) for file in files) else None


def _touch(path: Path) -> None:
    """Marks a file as used now."""
    with contextlib.suppress(OSError):  # a read-only cache is not pruned either
        os.utime(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _entries(folder: Path) -> list[Path]:
    """Returns the entries of a folder without hidden, incomplete ones."""
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError:
        return []


def _age(path: Path) -> float:
    """Returns the seconds since the last write or use; 0 if it does not exist."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
