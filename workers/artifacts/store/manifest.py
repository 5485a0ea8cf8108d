"""What the folder of an artifact says of itself: that it is whole, or that its fetch goes on."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from workers.artifacts.sources.listing import Listing, RemoteFile
from workers.host import lifetime

WHOLE = "corewright-artifact.json"  # written last: a folder without it is a fetch that goes on, or that died
GROWING = "corewright-fetch.json"  # written first
OURS = frozenset({WHOLE, GROWING, f"{WHOLE}.new", f"{GROWING}.new"})

EARLIER = 64  # commits that are remembered

Kind = TypeVar("Kind")


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """One whole artifact of this host."""

    key: str
    source: str
    revision: str = ""
    earlier: tuple[str, ...] = ()  # commits that had the same files
    folder: str  # its files lie there under the source's names
    bytes: int
    files: Mapping[str, tuple[int, str]]  # name -> bytes and digest
    fetched_at: float  # seconds since the epoch
    used_at: float
    fetch_s: float  # seconds that its fetch took; what was there before is reckoned in at the rate of the rest


class KeptFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of an artifact."""

    size: int  # bytes
    digest: str  # of its content (content.py), in hex
    tag: str = ""  # the source's
    checksum: str = ""  # the source's


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in WHOLE."""

    source: str
    revision: str = ""
    earlier: tuple[str, ...] = ()  # commits that had the same files, the last one first
    files: Mapping[str, KeptFile]
    fetched_at: float
    fetch_s: float
    boot: str  # that of the machine in which all files were last compared with their digests

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def moved_on(self, revision: str) -> Manifest:
        """The same files stand at another commit now."""
        before = [one for one in (self.revision, *self.earlier) if one != revision]
        return msgspec.structs.replace(self, revision=revision, earlier=tuple(before[:EARLIER]))

    def listing(self) -> Listing:
        """What was fetched."""
        files = [
            RemoteFile(name=name, size=file.size, tag=file.tag, checksum=file.checksum)
            for name, file in sorted(self.files.items())
        ]
        return Listing(source=self.source, revision=self.revision, files=tuple(files))

    def artifact(self, folder: Path, used_at: float) -> Artifact:
        return Artifact(
            key=folder.name,
            source=self.source,
            revision=self.revision,
            earlier=self.earlier,
            folder=str(folder),
            bytes=self.bytes,
            files={name: (file.size, file.digest) for name, file in self.files.items()},
            fetched_at=self.fetched_at,
            used_at=max(used_at, self.fetched_at),
            fetch_s=self.fetch_s,
        )


class Fetch(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in GROWING: what is being fetched into the folder, or was, when the fetch ended too early."""

    listing: Listing
    boot: str
    seeds: Mapping[str, str] = {}  # name -> digest of files that were not fetched, but linked from what was here


def whole(folder: Path) -> Manifest | None:
    """Of a folder that was published, and whose files are all there at their sizes."""
    found = _read(folder / WHOLE, Manifest)
    if found is None:
        return None
    sound = all(is_file(folder / name, file.size) for name, file in found.files.items())
    return found if sound else None


def published(folder: Path) -> Manifest | None:
    """The same, whatever has become of its files."""
    return _read(folder / WHOLE, Manifest)


def growing(folder: Path) -> Fetch | None:
    """The fetch that goes on in the folder, or that did not end well."""
    return None if (folder / WHOLE).exists() else _read(folder / GROWING, Fetch)


def begin(folder: Path, listing: Listing, seeds: Mapping[str, str]) -> None:
    """``listing`` is fetched into the folder from now on. What is there stays."""
    _write(folder / GROWING, msgspec.json.encode(Fetch(listing=listing, boot=lifetime.boot(), seeds=seeds)))


def publish(folder: Path, manifest: Manifest) -> None:
    """The folder is whole.

    Nothing is synchronised with the disk: after a crash of the machine the boot is another one, and then files are
    compared with their digests before they are trusted. To wait for the disk instead would cost a minute for 14 GB on
    a volume of 250 MB/s, while the load that follows reads from memory.
    """
    _write(folder / WHOLE, msgspec.json.encode(manifest))
    (folder / GROWING).unlink(missing_ok=True)


def regrow(folder: Path) -> None:
    """A whole folder becomes one whose fetch has ended too early: what is left must have the digests that it had."""
    found = published(folder)
    if found is not None:
        begin(folder, found.listing(), {name: file.digest for name, file in found.files.items()})
    withdraw(folder)


def withdraw(folder: Path) -> None:
    """The folder is not whole any more."""
    (folder / WHOLE).unlink(missing_ok=True)


def is_file(path: Path, size: int) -> bool:
    """Whether it is a file of its own, no link to elsewhere, of so many bytes."""
    try:
        about = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(about.st_mode) and about.st_size == size


def without_ours(listing: Listing) -> Listing:
    """A source may be a copy of a store's folder; its word is not ours."""
    files = tuple(file for file in listing.files if file.name not in OURS)
    return listing if len(files) == len(listing.files) else msgspec.structs.replace(listing, files=files)


def kept(file: RemoteFile, digest: str) -> KeptFile:
    """``file``, whose content has that digest."""
    return KeptFile(size=file.size, digest=digest, tag=file.tag, checksum=file.checksum)


def _write(path: Path, content: bytes) -> None:
    written = path.with_name(f"{path.name}.new")
    written.write_bytes(content)
    os.replace(written, path)  # noqa: PTH105 - read as one step


def _read(path: Path, kind: type[Kind]) -> Kind | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None
