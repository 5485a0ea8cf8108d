"""The small files of a source elsewhere: its config and its tokenizer, kept on this machine.

    heads/<key>/            config.json, tokenizer.json, ...; key is that of the whole listing
    heads/<key>/corewright-head.json
    heads/index/<digest>    the key that a source was last seen at
    heads/pins/<fleet>      {digest: key}: the commits that a fleet stays at

The planner, the commands and the gateway read them. A folder appears whole, under its last name; one of which a crash
of the machine has lost something is fetched again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from hashlib import blake2s
from pathlib import Path
from uuid import uuid4

import msgspec

from workers.artifacts.fetch.progress import Progress
from workers.artifacts.fetch.retry_policy import RetryPolicy
from workers.artifacts.sources.layout import head
from workers.artifacts.sources.listing import Listing, Remote, SourceError
from workers.artifacts.sources.open_source import open_remote
from workers.artifacts.store import locks, manifest
from workers.host import foreign_files

MARK = "corewright-head.json"
PATIENCE_S = 3.0  # somebody waits for the command
KEPT_S = 30 * 86_400.0  # a head that nobody has asked for since then goes
KEPT_PINS = 8  # fleets; one home has one at a time, and the commits of one that runs for months are read once
HALF_S = 86_400.0  # what is half there for so long is of a process that died
AWAY = ("hub-offline", "hub-unreachable", "hub-denied", "s3-unreachable", "s3-denied", "s3-no-credentials")
"""Errors that say nothing about the source: what was seen of it before still counts."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A source, and what may be fetched of it."""

    source: str  # s3://bucket/prefix, or a hub id
    revision: str | None = None  # of the hub
    allow_pickle: bool = False
    trust_remote_code: bool = False

    @property
    def digest(self) -> str:
        return blake2s(msgspec.json.encode(self), digest_size=16).hexdigest()

    def open(self) -> Remote:
        """Raises SourceError."""
        return open_remote(
            self.source,
            self.revision,
            allow_pickle=self.allow_pickle,
            trust_remote_code=self.trust_remote_code,
            patience=RetryPolicy(seconds=PATIENCE_S),
        )


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """The small files of a source as it was when it was listed."""

    listing: Listing  # of all that would be fetched, the weights too
    folder: str  # where the small ones are

    @property
    def commit(self) -> str | None:
        """That a hub's revision stood at; None for S3."""
        return self.listing.revision or None

    @property
    def names(self) -> tuple[str, ...]:
        """Of all files."""
        return tuple(file.name for file in self.listing.files)


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A head, and why it may be an old one."""

    head: Metadata
    away: SourceError | None = None  # the source was asked, and did not answer


class SourceMetadata:
    """Those under one folder, ``$COREWRIGHT_HOME/store/heads``. Any number of processes may share it. All block."""

    def __init__(self, root: Path, opened: Callable[[Asked], Remote] = Asked.open) -> None:
        self._root = root
        self._opened = opened

    def look(self, asked: Asked) -> Seen:
        """Ask the source, and fetch what is not here yet. Where it is away, what was seen of it before.

        Raises SourceError where there is nothing, or where the source says that it cannot be had.
        """
        try:
            remote = self._opened(asked)
            return Seen(head=self._fetched(asked, remote, remote.listing()))
        except SourceError as error:
            known = self.known(asked) if error.id in AWAY else None
            if known is None:
                raise
            return Seen(head=known, away=error)
        except OSError as error:
            what = f"{error.filename or self._root} cannot be written: {error.strerror or type(error).__name__}"
            raise SourceError("heads-unwritable", what, "COREWRIGHT_HOME names another folder") from None

    def get(self, asked: Asked) -> Seen:
        """As ``look``, but the source is asked only where nothing is known of it."""
        known = self.known(asked)
        return self.look(asked) if known is None else Seen(head=known)

    def known(self, asked: Asked) -> Metadata | None:
        """What was seen last, without a question to anybody."""
        try:
            return self.kept((self._root / "index" / asked.digest).read_text())
        except (OSError, UnicodeDecodeError):
            return None

    def kept(self, key: str) -> Metadata | None:
        """The one with that key, if all of it is here."""
        folder = self._folder(key)
        listing = None if folder is None else _whole(folder)
        if folder is None or listing is None:
            return None
        _touch(folder / MARK)
        return Metadata(listing=listing, folder=str(folder))

    def pins(self, fleet: str) -> dict[str, Metadata]:
        """By `Asked.digest`, what a fleet stays at, as far as it is here."""
        told = self._pinned(fleet)
        _touch(self._root / "pins" / fleet)
        found = {digest: self.kept(key) for digest, key in told.items()}
        return {digest: head for digest, head in found.items() if head is not None}

    def pin(self, fleet: str, more: Mapping[str, Metadata]) -> None:
        """Add to `pins`. One process of a fleet does it. Raises OSError."""
        told = {digest: head.listing.key for digest, head in (self.pins(fleet) | dict(more)).items()}
        self._write("pins", fleet, msgspec.json.encode(told).decode())

    def _folder(self, key: str) -> Path | None:
        """None: no key, which are read from files."""
        return self._root / key if len(key) == 32 and key.isalnum() else None

    def _pinned(self, fleet: str) -> dict[str, str]:
        try:
            return msgspec.json.decode((self._root / "pins" / fleet).read_bytes(), type=dict[str, str])
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return {}

    def _fetched(self, asked: Asked, remote: Remote, listing: Listing) -> Metadata:
        folder = self._root / listing.key
        if _whole(folder) is None:
            self._root.mkdir(parents=True, exist_ok=True)
            self._prune()
            arriving = self._root / f".arriving-{uuid4().hex}"
            arriving.mkdir()
            try:
                remote.fetch(head(listing), arriving, Progress(listing.source), threading.Event())
                (arriving / MARK).write_bytes(msgspec.json.encode(listing))
                self._place(arriving, folder)
            finally:
                shutil.rmtree(arriving, ignore_errors=True)
        _touch(folder / MARK)
        with contextlib.suppress(OSError):  # it is asked for again
            self._write("index", asked.digest, listing.key)
        return Metadata(listing=listing, folder=str(folder))

    def _place(self, arriving: Path, folder: Path) -> None:
        lost = arriving.with_name(f"{arriving.name}-lost")
        with locks.alone(self._root / ".placing"):
            if _whole(folder) is not None:
                return  # another process was first
            if folder.exists():  # a crash of the machine, or a process that was killed, has left it so
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
        """What nobody has asked for in a month and no fleet is pinned to; and what was killed."""
        pins = sorted(_each(self._root / "pins"), key=_age)
        for old in pins[KEPT_PINS:]:
            if _age(old) > KEPT_S:
                _remove(old)
        pinned = {key for fleet in _each(self._root / "pins") for key in self._pinned(fleet.name).values()}
        for folder in _each(self._root):
            mark = folder / MARK
            if folder.name in ("index", "pins", *pinned):
                continue
            if not mark.exists() or _age(mark) > KEPT_S:  # the first: somebody has begun to remove it
                _remove(mark)  # at the beginning: what is left of a head by a process that was killed is none
                shutil.rmtree(folder, ignore_errors=True)
        for name in _each(self._root / "index"):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                if not (self._root / name.read_text()).exists():
                    name.unlink()
        for place in (self._root, self._root / "pins", self._root / "index"):
            for half in place.glob(".arriving-*" if place == self._root else ".*"):
                if _age(half) > HALF_S:
                    shutil.rmtree(half, ignore_errors=True)
                    _remove(half)


def _whole(folder: Path) -> Listing | None:
    """What was listed when it was fetched; None: not all of its small files are there, at their sizes."""
    try:
        listing = msgspec.json.decode(foreign_files.read_bytes(folder / MARK), type=Listing)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return listing if all(manifest.is_file(folder / file.name, file.size) for file in head(listing).files) else None


def _touch(path: Path) -> None:
    """It is in use today."""
    with contextlib.suppress(OSError):  # it can only be read, and then nobody removes it either; or it is not there
        os.utime(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _each(folder: Path) -> list[Path]:
    """Without what is half there."""
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError:
        return []


def _age(path: Path) -> float:
    """Seconds since it was written, or last in use; 0 where it is not there."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
