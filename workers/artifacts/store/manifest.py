"""Reads and writes the state of an artifact's folder: complete, or being fetched."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from workers.artifacts.sources.listing import Listing, RemoteFile, is_file
from workers.host import lifetime

WHOLE = "corewright-artifact.json"  # written last: a folder without it is an unfinished fetch
GROWING = "corewright-fetch.json"  # written first
OURS = frozenset({WHOLE, GROWING, f"{WHOLE}.new", f"{GROWING}.new"})

EARLIER = 64  # commits kept per artifact

Kind = TypeVar("Kind")


class KeptFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of an artifact."""

    size: int  # bytes
    digest: str  # content digest (contents.py) in hex
    tag: str = ""  # the source's
    checksum: str = ""  # the source's


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file WHOLE."""

    source: str
    revision: str = ""
    earlier: tuple[str, ...] = ()  # commits that had the same files, the latest first
    files: Mapping[str, KeptFile]  # by name
    fetched_at: float  # seconds since the epoch
    fetch_s: float  # seconds of a complete fetch, extrapolated if part of it was there before
    boot: str  # id of the boot in which all files were last verified

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def with_revision(self, revision: str) -> Manifest:
        """Returns the manifest with ``revision`` as the current commit of the same files."""
        before = [commit for commit in (self.revision, *self.earlier) if commit != revision]
        return msgspec.structs.replace(self, revision=revision, earlier=tuple(before[:EARLIER]))

    def listing(self) -> Listing:
        """Returns the listing that was fetched."""
        files = [
            RemoteFile(name=name, size=file.size, tag=file.tag, checksum=file.checksum)
            for name, file in sorted(self.files.items())
        ]
        return Listing(source=self.source, revision=self.revision, files=tuple(files))

    def artifact(self, folder: Path, used_at: float) -> Artifact:
        used_at = max(used_at, self.fetched_at)
        return Artifact(**msgspec.structs.asdict(self), key=folder.name, folder=str(folder), used_at=used_at)


class Artifact(Manifest, frozen=True, kw_only=True):
    """A complete artifact of this host."""

    key: str
    folder: str  # holds the files under the source's names
    used_at: float  # seconds since the epoch


class Fetch(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file GROWING: an unfinished fetch into the folder, running or interrupted."""

    listing: Listing
    boot: str
    seeds: Mapping[str, str] = {}  # name -> digest of files linked from other artifacts instead of fetched


def complete(folder: Path) -> Manifest | None:
    """Returns the manifest if all files are present with their sizes; else None."""
    manifest = _read(folder / WHOLE, Manifest)
    if manifest is None:
        return None
    is_complete = all(is_file(folder / name, file.size) for name, file in manifest.files.items())
    return manifest if is_complete else None


def published(folder: Path) -> Manifest | None:
    """Returns the manifest without a check of the files; None: not published."""
    return _read(folder / WHOLE, Manifest)


def unfinished(folder: Path) -> Fetch | None:
    """Returns the unfinished fetch into the folder, running or interrupted; None: there is none."""
    return None if (folder / WHOLE).exists() else _read(folder / GROWING, Fetch)


def begin(folder: Path, listing: Listing, seeds: Mapping[str, str]) -> None:
    """Records that ``listing`` is being fetched into the folder. Existing files stay."""
    _write(folder / GROWING, msgspec.json.encode(Fetch(listing=listing, boot=lifetime.boot(), seeds=seeds)))


def publish(folder: Path, manifest: Manifest) -> None:
    """Marks the folder as complete.

    Does not sync to disk: after a reboot the boot id differs, and files are verified before use. A sync would take a
    minute for 14 GB on a volume with 250 MB/s, while the load that follows reads from the page cache.
    """
    _write(folder / WHOLE, msgspec.json.encode(manifest))
    (folder / GROWING).unlink(missing_ok=True)


def reopen(folder: Path) -> None:
    """Turns a complete folder into an unfinished fetch; the remaining files must still match their digests."""
    manifest = published(folder)
    if manifest is not None:
        begin(folder, manifest.listing(), {name: file.digest for name, file in manifest.files.items()})
    unpublish(folder)


def unpublish(folder: Path) -> None:
    """Marks the folder as incomplete."""
    (folder / WHOLE).unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    written = path.with_name(f"{path.name}.new")
    written.write_bytes(content)
    os.replace(written, path)  # noqa: PTH105 - atomic for readers


def _read(path: Path, kind: type[Kind]) -> Kind | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None
