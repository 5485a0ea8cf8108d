"""The small files of a source elsewhere: its config and its tokenizer, kept on this machine.

    heads/<key>/            config.json, tokenizer.json, ...; key is that of the whole listing
    heads/<key>/corewright-head.json
    heads/index/<digest>    the key that a source was last seen at
    heads/pins/<fleet>      {digest: key}: the commits that a fleet stays at

The planner, the commands and the gateway read them. A folder appears whole, under its last name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2s
from pathlib import Path

import msgspec

from workers.artifacts.layout import head
from workers.artifacts.listing import Listing, Remote, SourceError
from workers.artifacts.patience import Patience
from workers.artifacts.progress import Progress
from workers.artifacts.sources import open_remote

MARK = "corewright-head.json"
PATIENCE_S = 3.0  # somebody waits for the command
KEPT_S = 30 * 86_400.0  # a head that nobody has asked for since then goes
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
            patience=Patience(seconds=PATIENCE_S),
        )


class Head(msgspec.Struct, frozen=True, kw_only=True):
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

    head: Head
    away: SourceError | None = None  # the source was asked, and did not answer


class Heads:
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

    def known(self, asked: Asked) -> Head | None:
        """What was seen last, without a question to anybody."""
        try:
            return self.kept((self._root / "index" / asked.digest).read_text())
        except (OSError, UnicodeDecodeError):
            return None

    def kept(self, key: str) -> Head | None:
        """The one with that key, if it is here."""
        if len(key) != 32 or not key.isalnum():
            return None
        folder = self._root / key
        try:
            listing = msgspec.json.decode((folder / MARK).read_bytes(), type=Listing)
            os.utime(folder / MARK)
        except (OSError, msgspec.DecodeError):
            return None
        return Head(listing=listing, folder=str(folder))

    def pins(self, fleet: str) -> dict[str, Head]:
        """By `Asked.digest`, what a fleet stays at, as far as it is here."""
        try:
            told = msgspec.json.decode((self._root / "pins" / fleet).read_bytes(), type=dict[str, str])
        except (OSError, msgspec.DecodeError):
            return {}
        found = {digest: self.kept(key) for digest, key in told.items()}
        return {digest: head for digest, head in found.items() if head is not None}

    def pin(self, fleet: str, more: Mapping[str, Head]) -> None:
        """Add to `pins`. One process of a fleet does it. Raises OSError."""
        told = {digest: head.listing.key for digest, head in (self.pins(fleet) | dict(more)).items()}
        self._write("pins", fleet, msgspec.json.encode(told).decode())

    def _fetched(self, asked: Asked, remote: Remote, listing: Listing) -> Head:
        folder = self._root / listing.key
        if not (folder / MARK).is_file():
            self._root.mkdir(parents=True, exist_ok=True)
            self._prune()
            arriving = Path(tempfile.mkdtemp(prefix=".arriving-", dir=self._root))
            try:
                remote.fetch(head(listing), arriving, Progress(listing.source), threading.Event())
                (arriving / MARK).write_bytes(msgspec.json.encode(listing))
                with contextlib.suppress(OSError):  # another process was first
                    arriving.rename(folder)
            finally:
                shutil.rmtree(arriving, ignore_errors=True)
        self._remember(asked, listing.key)
        return Head(listing=listing, folder=str(folder))

    def _remember(self, asked: Asked, key: str) -> None:
        self._write("index", asked.digest, key)

    def _write(self, folder: str, name: str, text: str) -> None:
        (self._root / folder).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self._root / folder, prefix=".", delete=False) as stream:
            stream.write(text)
        Path(stream.name).replace(self._root / folder / name)

    def _prune(self) -> None:
        """What nobody has asked for in a month and no fleet of that time is pinned to; and what was killed."""
        for pins in self._old(self._root / "pins"):
            pins.unlink(missing_ok=True)
        pinned = {
            head.listing.key for pins in self._each(self._root / "pins") for head in self.pins(pins.name).values()
        }
        for folder in self._old(self._root):
            if folder.name not in ("index", "pins", *pinned):
                shutil.rmtree(folder, ignore_errors=True)

    def _each(self, folder: Path) -> list[Path]:
        try:
            return list(folder.iterdir())
        except OSError:
            return []

    def _old(self, folder: Path) -> Iterator[Path]:
        now = time.time()
        for path in self._each(folder):
            mark = path / MARK if (path / MARK).is_file() else path
            with contextlib.suppress(OSError):
                if now - mark.stat().st_mtime > KEPT_S:
                    yield path
