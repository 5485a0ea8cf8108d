"""Shares complete sets of compiled artifacts between hosts through a model's ``neff_cache``, a folder or ``s3://``.

``corewright/compiled/<set name>/`` holds each file of a set below a folder named by its digest, then the record that
lists them, and last the manifest; without both, the set is an unfinished upload. Files that the record does not list
are ignored. Two hosts that push one set at once thus do not overwrite each other's files, and a record always belongs
to one host. Files without digest folders, as on the hub, are accepted as well.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from workers.artifacts.sources.listing import RemoteFile, SourceError
from workers.compiled.file_states import Part, parts
from workers.compiled.host_sets import MANIFEST, LockedEntry, check_room
from workers.compiled.manifest import LOCK_FILE, ManifestRecord, decoded, read_record
from workers.compiled.neuron_cache import OWN
from workers.compiled.storage import DAMAGED, Storage, listed_files, log_unavailable, storage_at

log = logging.getLogger(__name__)

FOLDER = f"{OWN}/compiled"


@dataclass(frozen=True)
class SharedSet:
    """A set in shared storage, as it was listed."""

    storage: Storage  # its folder or prefix
    files: Sequence[RemoteFile]
    record: ManifestRecord | None  # None: its upload is unfinished, or it has no valid record

    @classmethod
    def of(cls, storage: Storage, files: Sequence[RemoteFile]) -> SharedSet:
        """Reads the record among the files. Raises SourceError."""
        is_finished = {MANIFEST, LOCK_FILE} <= {file.name for file in files}
        return cls(storage, files, decoded(storage.read(LOCK_FILE)) if is_finished else None)

    @classmethod
    def at(cls, location: str) -> SharedSet:
        """Reads the set at its own location. Raises SourceError."""
        storage = storage_at(location)
        return cls.of(storage, listed_files(storage))

    @property
    def name(self) -> str:
        return self.storage.url.rpartition("/")[2]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def places(self) -> Mapping[str, RemoteFile]:
        """The remote files of the record, by their names in the set."""
        by_name = {file.name: file for file in self.files}
        places: dict[str, RemoteFile] = {}
        for name, part in ({} if self.record is None else self.record.files).items():
            for key in (_key(name, part), name):
                if key in by_name and by_name[key].size == part.size:
                    places.setdefault(name, by_name[key])
        return places

    @property
    def missing(self) -> tuple[str, ...]:
        """The files of the record that are not there, by name and size."""
        return () if self.record is None else tuple(sorted(self.record.files.keys() - self.places.keys()))

    @property
    def state(self) -> str:
        return "unfinished" if self.record is None else "damaged" if self.missing else "whole"

    def problem(self, manifest: Mapping[str, Any]) -> str:
        """Returns why it is not the complete set of this manifest; empty: it is. Raises SourceError."""
        try:
            is_same = json.loads(self.storage.read(MANIFEST)) == manifest
        except ValueError:
            is_same = False
        if not is_same:
            return "its manifest does not match its name"
        return "files of its record are missing" if self.missing else ""


def sets_in(location: str) -> list[SharedSet]:
    """Returns the sets of a ``neff_cache``, by name, also unfinished ones. Raises SourceError."""
    files: dict[str, list[RemoteFile]] = {}
    for file in listed_files(storage_at(f"{location.rstrip('/')}/{FOLDER}")):
        name, slash, inner = file.name.partition("/")
        if slash:
            files.setdefault(name, []).append(msgspec.structs.replace(file, name=inner))
    return [SharedSet.of(storage_at(set_location(name, location)), held) for name, held in sorted(files.items())]


def set_location(name: str, location: str) -> str:
    """Returns the folder or prefix of a set in the ``neff_cache`` at ``location``."""
    return f"{location.rstrip('/')}/{FOLDER}/{name}"


def pull(held: LockedEntry, location: str, stop: threading.Event | None = None) -> bool:
    """Fetches the set and finishes it; ``held`` is held exclusively and empty. False: missing or incomplete there.

    Raises SourceError if the storage does not answer, EngineLoadError if the disk has no room for the set, and OSError
    if the folder cannot be written; the folder is then empty.
    """
    shared = SharedSet.at(set_location(held.path.name, location))
    if shared.record is None:
        return False
    if problem := shared.problem(held.manifest):
        return _refused(shared, problem)
    places = shared.places
    try:
        wanted = list({file.name: file for file in places.values()}.values())
        check_room(held.path, sum(file.size for file in wanted))
        shared.storage.fetch(wanted, held.path, stop or threading.Event())
        _move_out_of_digest_folders(held.path, places)
        pulled = parts(held.path)
    except BaseException:
        _empty(held.path)  # partial content must not count as compiled here
        raise
    if pulled != shared.record.files:
        _empty(held.path)
        return _refused(shared, "its files do not match its record")
    held.finish(shared.record.source, pulled)
    size = sum(part.size for part in pulled.values())
    log.info("pulled %s (%.1f MB) from %s", held.path.name, size / 1e6, shared.storage.url)
    return True


def pull_or_log(held: LockedEntry, location: str | None, warnings: list[str] | None = None) -> bool:
    """Fetches the set like `pull`, if there is a ``neff_cache``; one that does not answer is logged, and added to
    ``warnings``, since the set can be compiled here."""
    try:
        return location is not None and pull(held, location)
    except SourceError as error:
        warning = log_unavailable(location or "", error)
        if warnings is not None:
            warnings.append(warning)
        return False


def push(held: LockedEntry, location: str) -> int:
    """Pushes a complete, held set to ``location`` unless it is there already; returns the bytes sent.

    Resumes an interrupted upload. Raises SourceError.
    """
    shared = SharedSet.at(set_location(held.path.name, location))
    url, is_damaged = shared.storage.url, shared.storage.url in DAMAGED
    if shared.record is not None and not is_damaged and not shared.problem(held.manifest):
        return 0
    record = read_record(held.path / LOCK_FILE)
    if record is None:
        raise SourceError("compiled-unwritable", f"cannot push {held.path} to {url}: it is not complete")
    present = {file.name: file.size for file in shared.files} if not is_damaged else {}
    expected = {_key(name, part): (name, part.size) for name, part in sorted(record.files.items())}
    unsent = {key: name for key, (name, size) in expected.items() if present.get(key) != size}
    storage, base = storage_at(location), f"{FOLDER}/{held.path.name}"  # staging is beside the sets, not inside one
    sent = 0
    for key, name in (*unsent.items(), (LOCK_FILE, LOCK_FILE), (MANIFEST, MANIFEST)):
        path = held.path / name
        try:
            storage.put(f"{base}/{key}", path)
            sent += path.stat().st_size
        except OSError as error:
            raise SourceError("compiled-unwritable", f"cannot push {path} to {url}: {error}") from error
    DAMAGED.discard(url)
    log.info("pushed %s (%.1f MB) to %s", held.path.name, sent / 1e6, url)
    return sent


def _key(name: str, part: Part) -> str:
    return f"{part.digest}/{name}"


def _move_out_of_digest_folders(folder: Path, places: Mapping[str, RemoteFile]) -> None:
    """Moves fetched files out of their digest folders."""
    for name, file in places.items():
        if file.name != name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / file.name).rename(folder / name)
    for digest in {file.name.partition("/")[0] for name, file in places.items() if file.name != name}:
        shutil.rmtree(folder / digest, ignore_errors=True)


def _refused(shared: SharedSet, why: str) -> bool:
    """Logs why the remote set is unusable and returns False. The next push of this process replaces it."""
    log.warning("%s is not used: %s", shared.storage.url, why)
    DAMAGED.add(shared.storage.url)
    return False


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
