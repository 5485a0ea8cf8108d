"""Compiled artifacts kept for other hosts: whole entries in a model's ``neff_cache``, a folder or ``s3://``.

Below it, ``corewright/compiled/<name of the entry>/`` holds the files of the entry, its record with the digest of each,
and last its manifest: without that it is what an upload that died has left. Nothing that is finished is overwritten.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from workers.artifacts.listing import RemoteFile, SourceError
from workers.compiled import MANIFEST, Entry
from workers.neff_cache.entries import OWN
from workers.neff_cache.files import parts
from workers.neff_cache.record import LOCK_FILE, read_record
from workers.neff_cache.sync import S3, Place, place_at

log = logging.getLogger(__name__)

FOLDER = f"{OWN}/compiled"


def pull(found: Entry, location: str, stop: threading.Event | None = None) -> bool:
    """Bring the entry here, and finish it; ``found`` is held alone and empty. False: it is not there, or not whole.

    Raises SourceError where the place does not answer, and OSError where the folder cannot be written.
    """
    place = place_at(where(found, location))
    files = _files(place)
    if not _is_finished(files):
        return False
    if json.loads(place.read(MANIFEST)) != found.manifest:
        log.warning("%s is not used: its manifest is not that of its name", place.url)
        return False
    kept = [file for file in files if file.name != MANIFEST]  # it is written by ``finish``, last
    place.fetch(kept, found.path, stop or threading.Event())
    told = read_record(found.path / LOCK_FILE)
    if told is None or parts(found.path, (LOCK_FILE,)) != told.files:
        log.warning("%s is not used: its files are not those of its record", place.url)
        shutil.rmtree(found.path)
        found.path.mkdir()
        return False
    found.finish(told.source)
    log.info("%s (%.1f MB) came from %s: nothing is compiled", found.path.name, _size(kept) / 1e6, place.url)
    return True


def push(found: Entry, location: str) -> int:
    """Bring a complete entry, which is held, to ``location``, unless it is there already. Bytes that were sent.

    Raises SourceError.
    """
    place = place_at(where(found, location))
    if _is_finished(_files(place)):
        return 0
    names = sorted(path.relative_to(found.path).as_posix() for path in found.path.rglob("*") if path.is_file())
    last = (LOCK_FILE, MANIFEST)
    put = _putting(place)
    for name in (*(name for name in names if name not in last), *last):
        path = found.path / name
        try:
            put(name, path)
        except OSError as error:
            raise SourceError("compiled-unwritable", f"{path} cannot be sent to {place.url}: {error}") from error
    sent = sum((found.path / name).stat().st_size for name in names)
    log.info("%s (%.1f MB) went to %s", found.path.name, sent / 1e6, place.url)
    return sent


def where(found: Entry, location: str) -> str:
    """The folder, or the prefix, of that entry in the cache ``location``."""
    return f"{location.rstrip('/')}/{FOLDER}/{found.path.name}"


def _files(place: Place) -> Sequence[RemoteFile]:
    if not place.url.startswith(S3) and not Path(place.url).is_dir():
        return []
    return place.files()


def _is_finished(files: Sequence[RemoteFile]) -> bool:
    return {MANIFEST, LOCK_FILE} <= {file.name for file in files}


def _putting(place: Place) -> Callable[[str, Path], None]:
    if place.url.startswith(S3):
        from workers.artifacts.s3 import Bucket

        return Bucket.of(place.url).put
    return lambda name, path: place.put_bytes(name, path.read_bytes())


def _size(files: Sequence[RemoteFile]) -> int:
    return sum(file.size for file in files)
