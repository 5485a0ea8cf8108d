"""Loading an artifact while the rest of it arrives.

A file appears under its name when it is whole, so whoever loads from a folder that is being fetched waits for each file
before it is read, and before it serves for the whole of it: only then was all of it compared with what is listed.
Of a folder of no store, and of an artifact that is whole, nothing is ever waited for. The folder has its last name from
the start; what makes it whole is a manifest (store.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from workers.artifacts.sources.listing import SourceError, Stopped
from workers.artifacts.store import locks, manifest
from workers.artifacts.store.artifact_uses import uses_of

LOOK_S = 0.05
HANDOVER_S = 15.0
"""Between a fetch that dies and another one that goes on with it: a host's actor that is killed is started again within
some seconds, and is asked again at once. Of a fetch that fails, replicas are told otherwise."""
SMALL_BYTES = 16 * 2**20  # files up to it are fetched first


def coming(folder: Path) -> frozenset[str]:
    """The names of the files that are being fetched into ``folder`` and that are not whole yet."""
    going = manifest.growing(folder)
    if going is None:
        return frozenset()
    return frozenset(file.name for file in going.listing.files if not _is_here(folder, file.name, going))


def wait_for(folder: Path, name: str, stop: threading.Event | None = None) -> Path:
    """The file, as soon as it is whole. One that is not being fetched is not waited for, be it there or not.

    Raises SourceError (fetch-ended) where the fetch ends without it, and Stopped.
    """
    _wait_while(lambda: name in coming(folder), folder, f"{name} was there", stop)
    return folder / name


def wait_for_all(folder: Path, stop: threading.Event | None = None) -> None:
    """Until it is whole: every file is there, and is what it should be. As `wait_for`."""
    _wait_while(lambda: manifest.growing(folder) is not None, folder, "all of it was there", stop)


def wait_for_small(folder: Path, stop: threading.Event | None = None) -> None:
    """Until all but the large files are there: the config, the tokenizer, the index of the shards. As `wait_for`."""
    going = manifest.growing(folder)
    for name in _small(going) if going is not None else ():
        wait_for(folder, name, stop)


def _wait_while(lacks: Callable[[], bool], folder: Path, what: str, stop: threading.Event | None) -> None:
    """Until ``what``, for as long as somebody fetches into the folder."""
    stop, since, uses = stop or threading.Event(), time.monotonic(), uses_of(folder)
    while uses is not None and lacks():
        now = time.monotonic()
        if locks.is_held(uses.flight(folder.name)):
            since = now
        elif now - since > HANDOVER_S and lacks():
            ended = f"the fetch of {folder} has ended before {what}"
            raise SourceError("fetch-ended", ended, "the next start goes on with it")
        if stop.wait(LOOK_S):
            raise Stopped(f"stopped before {what}")


def _small(going: manifest.Fetch) -> Iterable[str]:
    return (file.name for file in going.listing.files if file.size <= SMALL_BYTES)


def _is_here(folder: Path, name: str, going: manifest.Fetch) -> bool:
    """One that was linked from another artifact is read before the folder is whole, and may turn out to be damaged."""
    return name not in going.seeds and (folder / name).exists()
