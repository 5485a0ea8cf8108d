"""Who uses the artifacts of a store, and when each was last used."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from workers.artifacts.sources.listing import SourceError
from workers.artifacts.store import locks


class ArtifactUses:
    """The locks of a store's artifacts: ``<key>.flight`` is held by who fetches it, ``<key>.use`` by all who read it.

    What the second says is when that was, and at which level of the store (see budget.py). ``room`` is held by who
    decides what must go, and says the level.
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
        """It is used inside. Where the store can only be read, nothing is held: nobody can remove anything either."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(exist_ok=True)
        try:
            held = locks.shared(self.use(key), stop)
            lock = held.__enter__()
        except OSError as error:
            if error.errno not in locks.READ_ONLY:
                raise
            yield
            return
        with contextlib.ExitStack() as stack:
            stack.push(held)
            self._touch(lock)
            stack.callback(self._touch, lock)
            yield

    def is_busy(self, key: str) -> bool:
        """Whether anybody fetches or uses it."""
        return locks.is_held(self.flight(key)) or locks.is_held(self.use(key))

    def known(self) -> set[str]:
        """The keys of all that there are locks of."""
        return {path.stem for path in self.folder.glob("*.*") if path.suffix in (".flight", ".use")}

    def forget(self, key: str) -> None:
        """By who holds both alone: it is not here any more."""
        for path in (self.flight(key), self.use(key)):
            path.unlink(missing_ok=True)

    def last(self, key: str) -> tuple[float, float]:
        """When it was last used, in seconds since the epoch, and at which level; 0 where that is not known."""
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
        """By who holds the room."""
        with self.room.open("r+") as file:
            file.write(f"{level:<20.6e}\n")  # always as long: read and written in one step

    def _touch(self, lock: int) -> None:
        with contextlib.suppress(OSError):  # it can only be read
            os.pwrite(lock, f"{time.time():<20.6f} {self.level():<20.6e}\n".encode(), 0)


def uses_of(folder: Path) -> ArtifactUses | None:
    """The locks of the store that ``folder`` is an artifact of; None: it is none of a store."""
    kept = folder.parent.parent / "locks"
    return ArtifactUses(kept) if folder.parent.name == "artifacts" and kept.is_dir() else None


@contextlib.contextmanager
def using(folder: str | Path) -> Iterator[None]:
    """What is in ``folder``, an artifact's, stays there for all processes, until the end of this one at the latest.

    A folder of no store is nobody's to remove, and nothing is done. Raises SourceError (store-gone) where the artifact
    was removed before; get it again.
    """
    folder = Path(folder)
    uses = uses_of(folder)
    if uses is None:
        yield
        return
    with uses.hold(folder.name):
        if not folder.is_dir():
            what = f"{folder} was removed to make room for another artifact"
            raise SourceError("store-gone", what, "the next start fetches it again")
        yield
