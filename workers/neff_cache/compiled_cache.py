"""Compiled artifacts kept for other hosts: whole entries in a model's ``neff_cache``, a folder or ``s3://``.

Below it, ``corewright/compiled/<name of the entry>/`` holds the files of the entry, each below a folder that is named
by its digest, then the record that names them, and last the manifest: without either it is what an upload that died has
left. What the record does not name is nobody's. So two hosts that send one entry at once overwrite no file of each
other's, and a record is always one host's. Where files lie without these folders, as the hub has them, they are taken
too.
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
from workers.neff_cache.compiled_artifacts import MANIFEST, Entry
from workers.neff_cache.entries import OWN
from workers.neff_cache.file_states import Part, parts
from workers.neff_cache.record import LOCK_FILE, Record, decoded, read_record
from workers.neff_cache.sync import DAMAGED, S3, CachePlace, place_at

log = logging.getLogger(__name__)

FOLDER = f"{OWN}/compiled"


def pull(found: Entry, location: str, stop: threading.Event | None = None) -> bool:
    """Bring the entry here, and finish it; ``found`` is held alone and empty. False: it is not there, or not whole.

    Raises SourceError where the place does not answer, and OSError where the folder cannot be written; the folder is
    empty then.
    """
    place = place_at(where(found, location))
    files = _files(place)
    if not _is_finished(files):
        return False
    if _manifest_at(place) != found.manifest:
        return _refused(place, "its manifest is not that of its name")
    told = decoded(place.read(LOCK_FILE))
    if told is None or missing(files, told):
        return _refused(place, "not all files of its record are there")
    kept = _places(files, told)
    try:
        place.fetch(list({file.name: file for file in kept.values()}.values()), found.path, stop or threading.Event())
        _settle(found.path, kept)
        came = parts(found.path)
    except BaseException:
        _empty(found.path)  # what arrived would count as compiled here
        raise
    if came != told.files:
        _empty(found.path)
        return _refused(place, "its files are not those of its record")
    found.finish(told.source, came)
    size = sum(part.size for part in came.values())
    log.info("%s (%.1f MB) came from %s: nothing is compiled", found.path.name, size / 1e6, place.url)
    return True


def push(found: Entry, location: str) -> int:
    """Bring a complete entry, which is held, to ``location``, unless all of one is there already. Bytes that were sent.

    What an upload that died has brought is not sent again. Raises SourceError.
    """
    place = place_at(where(found, location))
    files = _files(place)
    there = {file.name: file.size for file in files} if place.url not in DAMAGED else {}
    if there and _is_whole(place, files, found):
        return 0
    told = read_record(found.path / LOCK_FILE)
    if told is None:
        raise SourceError("compiled-unwritable", f"{found.path} cannot be sent to {place.url}: it is not complete")
    asked = {_key(name, part): (name, part.size) for name, part in sorted(told.files.items())}
    wanted = {key: name for key, (name, size) in asked.items() if there.get(key) != size}
    cache, base = place_at(location), f"{FOLDER}/{found.path.name}"  # files are staged beside all entries, in no one
    sent = 0
    for key, name in (*wanted.items(), (LOCK_FILE, LOCK_FILE), (MANIFEST, MANIFEST)):
        path = found.path / name
        try:
            cache.put(f"{base}/{key}", path)
            sent += path.stat().st_size
        except OSError as error:
            raise SourceError("compiled-unwritable", f"{path} cannot be sent to {place.url}: {error}") from error
    DAMAGED.discard(place.url)
    log.info("%s (%.1f MB) went to %s", found.path.name, sent / 1e6, place.url)
    return sent


def missing(files: Sequence[RemoteFile], told: Record) -> tuple[str, ...]:
    """Of the files of an entry elsewhere, which has ``files``, those of its record that are not there as they were, by
    name and size."""
    there = _places(files, told)
    return tuple(sorted(name for name in told.files if name not in there))


def where(found: Entry, location: str) -> str:
    """The folder, or the prefix, of that entry in the cache ``location``."""
    return f"{location.rstrip('/')}/{FOLDER}/{found.path.name}"


def _key(name: str, part: Part) -> str:
    return f"{part.digest}/{name}"


def _places(files: Sequence[RemoteFile], told: Record) -> dict[str, RemoteFile]:
    """Where the files of a record lie."""
    there = {file.name: file for file in files}
    found: dict[str, RemoteFile] = {}
    for name, part in told.files.items():
        for key in (_key(name, part), name):
            if key in there and there[key].size == part.size:
                found.setdefault(name, there[key])
    return found


def _settle(folder: Path, kept: Mapping[str, RemoteFile]) -> None:
    """Move what has arrived out of the folders that are named by digests."""
    for name, file in kept.items():
        if file.name != name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / file.name).rename(folder / name)
    for digest in {file.name.partition("/")[0] for name, file in kept.items() if file.name != name}:
        shutil.rmtree(folder / digest, ignore_errors=True)


def _is_whole(place: CachePlace, files: Sequence[RemoteFile], found: Entry) -> bool:
    if not _is_finished(files) or _manifest_at(place) != found.manifest:
        return False
    told = decoded(place.read(LOCK_FILE))
    return told is not None and not missing(files, told)


def _refused(place: CachePlace, why: str) -> bool:
    """False. The next push of this process, which then has one of its own, replaces it."""
    log.warning("%s is not used: %s", place.url, why)
    DAMAGED.add(place.url)
    return False


def _manifest_at(place: CachePlace) -> Any:
    """None: it is no JSON."""
    try:
        return json.loads(place.read(MANIFEST))
    except ValueError:
        return None


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)


def _files(place: CachePlace) -> Sequence[RemoteFile]:
    if not place.url.startswith(S3) and not Path(place.url).is_dir():
        return []
    return place.files()


def _is_finished(files: Sequence[RemoteFile]) -> bool:
    return {MANIFEST, LOCK_FILE} <= {file.name for file in files}
