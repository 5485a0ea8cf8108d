"""Tracks the users of a store's artifacts with file locks, and when each artifact was last used."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from workers.artifacts.sources.listing import SourceError
from workers.host import file_lock


class ArtifactUses:
    """The locks of a store's artifacts: ``<key>.flight`` is held during a fetch, ``<key>.use`` by all readers.

    The use file records the time of the last use and the store's level then (see eviction.py). ``room`` is held during
    eviction and records the level.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.room = folder / "room"

    def flight(self, key: str) -> Path:
        return self.folder / f"{key}.flight"

    def use(self, key: str) -> Path:
        return self.folder / f"{key}.use"

    @contextlib.contextmanager
    def hold(self, key: str, stop: threading.Event | None = None) -> Iterator[None]:
        """Marks an artifact as used inside the context. A read-only store needs no lock: nothing can be removed."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(exist_ok=True)
        try:
            held = file_lock.shared(self.use(key), stop)
            lock = held.__enter__()
        except OSError as error:
            if error.errno not in file_lock.READ_ONLY:
                raise
            yield
            return
        with contextlib.ExitStack() as stack:
            stack.push(held)
            self._touch(lock)
            stack.callback(self._touch, lock)
            yield

    def is_busy(self, key: str) -> bool:
        """Returns whether the artifact is being fetched or used."""
        return file_lock.is_locked(self.flight(key)) or file_lock.is_locked(self.use(key))

    @contextlib.contextmanager
    def try_idle(self, key: str) -> Iterator[bool]:
        """Tries to hold both locks exclusively without waiting; yields whether they are held."""
        with file_lock.try_exclusive(self.flight(key)) as free, file_lock.try_exclusive(self.use(key)) as unused:
            yield free and unused

    def known(self) -> set[str]:
        """Returns the keys of all lock files."""
        return {path.stem for path in self.folder.glob("*.*") if path.suffix in (".flight", ".use")}

    def forget(self, key: str) -> None:
        """Removes the locks of a removed artifact. The caller holds both exclusively."""
        for path in (self.flight(key), self.use(key)):
            path.unlink(missing_ok=True)

    def last(self, key: str) -> tuple[float, float]:
        """Returns the time of the last use, in seconds since the epoch, and the level then; 0 if unknown."""
        try:
            at, level = self.use(key).read_text().split()
            return float(at), float(level)
        except (OSError, ValueError):
            return 0.0, 0.0

    def level(self) -> float:
        try:
            return float(self.room.read_text())
        except (OSError, ValueError):
            return 0.0

    def set_level(self, level: float) -> None:
        """Records the level. The caller holds ``room``."""
        with self.room.open("r+") as file:
            file.write(f"{level:<20.6e}\n")  # fixed length: read and written in one step

    def _touch(self, lock: int) -> None:
        with contextlib.suppress(OSError):  # read-only
            os.pwrite(lock, f"{time.time():<20.6f} {self.level():<20.6e}\n".encode(), 0)


def uses_of(folder: Path) -> ArtifactUses | None:
    """Returns the locks of the store that holds ``folder``; None: it is not an artifact of a store."""
    locks_folder = folder.parent.parent / "locks"
    return ArtifactUses(locks_folder) if folder.parent.name == "artifacts" and locks_folder.is_dir() else None


@contextlib.contextmanager
def using(folder: str | Path) -> Iterator[None]:
    """Protects an artifact's ``folder`` from removal by any process inside the context, or until this process ends.

    Does nothing for a folder outside a store. Raises SourceError (store-gone) if the artifact was removed before.
    """
    folder = Path(folder)
    uses = uses_of(folder)
    if uses is None:
        yield
        return
    with uses.hold(folder.name):
        if not folder.is_dir():
            message = f"{folder} was removed to make room for another artifact"
            raise SourceError("store-gone", message, "the next start will fetch it again")
        yield
