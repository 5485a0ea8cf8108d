"""Shares complete compiled artifacts between hosts through a model's ``neff_cache``, a folder or ``s3://``.

``corewright/compiled/<entry name>/`` holds each file of an entry below a folder named by its digest, then the record
that lists them, and last the manifest; without both, the entry is an unfinished upload. Files that the record does not
list are ignored. Two hosts that push one entry at once thus do not overwrite each other's files, and a record always
belongs to one host. Files without digest folders, as on the hub, are accepted as well.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workers.artifacts.sources.listing import RemoteFile, SourceError
from workers.neff_cache.compiled_artifacts import MANIFEST, LockedEntry
from workers.neff_cache.entries import OWN
from workers.neff_cache.file_states import Part, parts
from workers.neff_cache.record import LOCK_FILE, ManifestRecord, decoded, read_record
from workers.neff_cache.sync import DAMAGED, S3, CachePlace, place_at

log = logging.getLogger(__name__)

FOLDER = f"{OWN}/compiled"


def pull(held: LockedEntry, location: str, stop: threading.Event | None = None) -> bool:
    """Fetches the entry and finishes it; ``held`` is held exclusively and empty. False: missing or incomplete there.

    Raises SourceError if the place does not answer, and OSError if the folder cannot be written; the folder is then
    empty.
    """
    place = place_at(entry_location(held, location))
    files = listed_files(place)
    record = finished_record(place, files)
    if record is None:
        return False
    if _manifest_at(place) != held.manifest:
        return _refused(place, "its manifest does not match its name")
    if missing(files, record):
        return _refused(place, "files of its record are missing")
    places = _places(files, record)
    try:
        place.fetch(list({file.name: file for file in places.values()}.values()), held.path, stop or threading.Event())
        _move_out_of_digest_folders(held.path, places)
        pulled = parts(held.path)
    except BaseException:
        _empty(held.path)  # partial content must not count as compiled here
        raise
    if pulled != record.files:
        _empty(held.path)
        return _refused(place, "its files do not match its record")
    held.finish(record.source, pulled)
    size = sum(part.size for part in pulled.values())
    log.info("pulled %s (%.1f MB) from %s", held.path.name, size / 1e6, place.url)
    return True


def push(held: LockedEntry, location: str) -> int:
    """Pushes a complete, held entry to ``location`` unless it is there already; returns the bytes sent.

    Resumes an interrupted upload. Raises SourceError.
    """
    place = place_at(entry_location(held, location))
    files = listed_files(place)
    present = {file.name: file.size for file in files} if place.url not in DAMAGED else {}
    if present and _is_whole(place, files, held):
        return 0
    record = read_record(held.path / LOCK_FILE)
    if record is None:
        raise SourceError("compiled-unwritable", f"cannot push {held.path} to {place.url}: it is not complete")
    expected = {_key(name, part): (name, part.size) for name, part in sorted(record.files.items())}
    unsent = {key: name for key, (name, size) in expected.items() if present.get(key) != size}
    cache, base = place_at(location), f"{FOLDER}/{held.path.name}"  # staging is beside the entries, not inside one
    sent = 0
    for key, name in (*unsent.items(), (LOCK_FILE, LOCK_FILE), (MANIFEST, MANIFEST)):
        path = held.path / name
        try:
            cache.put(f"{base}/{key}", path)
            sent += path.stat().st_size
        except OSError as error:
            raise SourceError("compiled-unwritable", f"cannot push {path} to {place.url}: {error}") from error
    DAMAGED.discard(place.url)
    log.info("pushed %s (%.1f MB) to %s", held.path.name, sent / 1e6, place.url)
    return sent


def missing(files: Sequence[RemoteFile], record: ManifestRecord) -> tuple[str, ...]:
    """Returns the files of the record that are missing from a remote entry's ``files``, by name and size."""
    present = _places(files, record)
    return tuple(sorted(name for name in record.files if name not in present))


def entry_location(held: LockedEntry, location: str) -> str:
    """Returns the folder or prefix of the entry in the cache at ``location``."""
    return f"{location.rstrip('/')}/{FOLDER}/{held.path.name}"


def _key(name: str, part: Part) -> str:
    return f"{part.digest}/{name}"


def _places(files: Sequence[RemoteFile], record: ManifestRecord) -> dict[str, RemoteFile]:
    """Returns the remote files of a record by their names in the entry."""
    by_name = {file.name: file for file in files}
    places: dict[str, RemoteFile] = {}
    for name, part in record.files.items():
        for key in (_key(name, part), name):
            if key in by_name and by_name[key].size == part.size:
                places.setdefault(name, by_name[key])
    return places


def _move_out_of_digest_folders(folder: Path, places: Mapping[str, RemoteFile]) -> None:
    """Moves fetched files out of their digest folders."""
    for name, file in places.items():
        if file.name != name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / file.name).rename(folder / name)
    for digest in {file.name.partition("/")[0] for name, file in places.items() if file.name != name}:
        shutil.rmtree(folder / digest, ignore_errors=True)


def _is_whole(place: CachePlace, files: Sequence[RemoteFile], held: LockedEntry) -> bool:
    record = finished_record(place, files)
    return record is not None and _manifest_at(place) == held.manifest and not missing(files, record)


def _refused(place: CachePlace, why: str) -> bool:
    """Logs why the remote entry is unusable and returns False. The next push of this process replaces it."""
    log.warning("%s is not used: %s", place.url, why)
    DAMAGED.add(place.url)
    return False


def _manifest_at(place: CachePlace) -> Any:
    """Returns the remote manifest; None: it is not JSON."""
    try:
        return json.loads(place.read(MANIFEST))
    except ValueError:
        return None


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)


def listed_files(place: CachePlace) -> Sequence[RemoteFile]:
    """Returns the files of an entry; none if its folder does not exist. Raises SourceError."""
    if not place.url.startswith(S3) and not Path(place.url).is_dir():
        return []
    return place.files()


def finished_record(place: CachePlace, files: Sequence[RemoteFile]) -> ManifestRecord | None:
    """Returns the record of an entry with these files; None: its upload is unfinished, or it has no valid record."""
    is_finished = {MANIFEST, LOCK_FILE} <= {file.name for file in files}
    return decoded(place.read(LOCK_FILE)) if is_finished else None
