"""What API keys have used, counted in one file by all gateways of a fleet. Losing it costs no request, only its counts.

The file is a table of cells, found by the key's id: the counts, and for each gateway how many requests of the key it
has. A gateway takes a number, by a lock that ends with its process, and a stamp that no other one has had: what a
gateway that died has left in its places is told by that, and is not counted. The file is read and written, not mapped
into memory: one that somebody cuts short would end the process with a signal.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from orchestrator.access.rate_limits import DEBT, MINUTE_S, SKEW_S, Counts

log = logging.getLogger(__name__)

CELLS = 2**16  # some 50,000 keys fit into a file of keys; the file has holes where no cell was used
PROBES = 8  # cells, one after the other, in which a key may be
SPIN_S = 0.0002  # another gateway holds the file for some 10 us
LOCK_S = 0.05  # for one to let go of it that has lost its CPU in the midst; who takes longer was stopped
LOOK_S = 1.0  # between two looks at whether the file is still the one that others have
ALIVE_S = 0.25  # for which another gateway, once seen alive, is taken to be
HEAD = struct.Struct("<8s3d")  # the key's id, and its counts
PLACE = struct.Struct("<II")  # the stamp of the gateway, and its requests
Changed = TypeVar("Changed")


class UsageCounts:
    """The counts as one gateway sees and changes them. Where the folder cannot be used, it counts for itself."""

    def __init__(self, folder: Path, places: int) -> None:
        """``places`` is the most gateways that there can be at a time, the same for all; nothing is opened before the
        first use."""
        self._folder = folder
        self._path = folder / f"counts-{places}"
        self._places = places
        self._size = HEAD.size + places * PLACE.size
        self._empty = bytes(self._size)
        self._all_places = struct.Struct(f"<{2 * places}I")
        self._file: int | None = None
        self._looked_at = -LOOK_S
        self._patient_at = 0.0  # before it, nobody is waited for
        self._cells: dict[str, int] = {}
        self._live: dict[str, int] = {}  # requests of this gateway, by key
        self._alone: dict[str, Counts] = {}  # where the file cannot be used
        self._complained = False
        self._lock: int | None = None
        self._number: int | None = None
        self._stamp = 0
        self._alive: dict[int, tuple[int, float]] = {}  # stamps of other gateways, and when they were seen

    def take(
        self, id: str, now: float, change: Callable[[Counts, int], Counts | Changed], at_most: int | None
    ) -> Counts | Changed:
        """Have ``change`` say the counts of a key after one more request, or something else: then nothing changes. It
        is given those before, and how many requests of the key there are: no fewer than there are, and just so many
        where they reach ``at_most``. Without ``at_most``, those of this gateway alone."""
        live = self._live.get(id, 0)
        data = self._begin(id, now)
        try:
            if data is None:
                outcome = change(self._alone.get(id, Counts()), live)
            else:
                if at_most is not None:
                    live += self._elsewhere(data, at_most - live, now)
                outcome = change(_counts(data), live)
            if isinstance(outcome, Counts):
                self._live[id] = self._live.get(id, 0) + 1
                self._put(id, data, outcome)
            return outcome
        finally:
            self._end()

    def give(self, id: str, now: float, change: Callable[[Counts], Counts]) -> None:
        """Have ``change`` say the counts of a key when one of its requests has ended."""
        data = self._begin(id, now)
        try:
            left = self._live.pop(id, 1) - 1
            if left > 0:
                self._live[id] = left
            self._put(id, data, change(self._alone.get(id, Counts()) if data is None else _counts(data)))
        finally:
            self._end()

    def peek(self, id: str, now: float) -> Counts:
        """The counts of a key as they are, without waiting for anybody."""
        self._look(now)
        data = self._read(id, now)
        return self._alone.get(id, Counts()) if data is None else _counts(data)

    def close(self) -> None:
        """The gateway ends; its requests are over."""
        for descriptor in (self._file, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._file = self._lock = self._number = None
        self._looked_at = -LOOK_S
        self._live.clear()
        self._cells.clear()

    # The file

    def _begin(self, id: str, now: float) -> bytearray | None:
        """The cell of a key, with the file locked; None where there is no file."""
        self._look(now)
        if self._file is None:
            return None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._hold(self._file)
        return self._read(id, now)

    def _end(self) -> None:
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _hold(self, file: int) -> None:
        """Lock the file that another gateway has locked. One who does not let go, because it was stopped, is not waited
        for: a count may be lost then, and no request."""
        began = at = time.monotonic()
        deadline = began + LOCK_S if began >= self._patient_at else began
        while at < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if at > began + SPIN_S:
                    time.sleep(SPIN_S)
                at = time.monotonic()
            else:
                return
        self._patient_at = max(self._patient_at, at + LOOK_S)

    def _read(self, id: str, now: float) -> bytearray | None:
        """The cell of a key, an empty one if it has none yet; None where the file cannot be read."""
        if self._file is None:
            return None
        try:
            cell = self._cells.get(id)
            if cell is not None:
                data = bytearray(os.pread(self._file, self._size, cell * self._size))
                if len(data) == self._size and data.startswith(id.encode()):
                    return data
            return self._find(self._file, id, now)
        except OSError as error:
            self._lose(error)
            return None

    def _find(self, file: int, id: str, now: float) -> bytearray:
        """The key's cell; else one that nobody needs, in its place."""
        name, home = id.encode(), _home(id)
        found = bytearray(os.pread(file, self._size * PROBES, home * self._size)).ljust(self._size * PROBES, b"\0")
        cells = [found[at : at + self._size] for at in range(0, len(found), self._size)]
        same = next((i for i, cell in enumerate(cells) if cell[:8] == name), None)
        if same is not None:
            self._cells[id] = home + same
            return cells[same]
        self._cells[id] = home + next((i for i, cell in enumerate(cells) if self._forgotten(cell, now)), 0)
        data = bytearray(self._empty)
        data[:8] = name
        return data

    def _forgotten(self, cell: bytearray, now: float) -> bool:
        """Whether it is of nobody, or of a key of which there is nothing to remember."""
        at: float = HEAD.unpack_from(cell)[1]
        recent = now - DEBT * MINUTE_S <= at <= now + SKEW_S
        return cell[:8] == bytes(8) or not (recent or any(self._all_places.unpack_from(cell, HEAD.size)[1::2]))

    def _put(self, id: str, data: bytearray | None, counts: Counts) -> None:
        if data is None or self._file is None:
            self._alone[id] = counts
            return
        HEAD.pack_into(data, 0, id.encode(), *counts)
        if self._number is not None:
            PLACE.pack_into(data, HEAD.size + self._number * PLACE.size, self._stamp, self._live.get(id, 0))
        try:
            os.pwrite(self._file, data, self._cells[id] * self._size)
        except OSError as error:
            self._lose(error)
            self._alone[id] = counts
        else:
            self._complained = False

    def _look(self, now: float) -> None:
        """Have the file that the others have: once a second, since somebody may have removed it."""
        if now - self._looked_at < LOOK_S and now >= self._looked_at:
            return
        self._looked_at = now
        try:
            if self._file is None or not _same(self._file, self._path):
                self._open()
            if self._lock is None or not _same(self._lock, self._lock_path(self._number)):
                self._join()
        except OSError as error:
            self._lose(error)

    def _open(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        opened = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if self._file is not None:
            os.close(self._file)
        self._file = opened
        self._cells.clear()
        self._alone.clear()

    def _lose(self, error: OSError) -> None:
        """The file cannot be used: the next look tries again."""
        if not self._complained:
            log.error("%s cannot be used: %s; this gateway counts for itself what keys use", self._path, error.strerror)
        self._complained = True
        if self._file is not None:
            os.close(self._file)
        self._file = None

    # The gateways

    def _lock_path(self, number: int | None) -> Path:
        return self._folder / f"{number}.lock"

    def _join(self) -> None:
        """Take the lowest free number; without one, the requests of this gateway are counted by itself only."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = self._number = None
        for number in range(self._places):
            path = self._lock_path(number)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                continue
            self._stamp = secrets.randbits(31) + 1
            os.pwrite(descriptor, self._stamp.to_bytes(4, "little"), 0)
            self._lock, self._number = descriptor, number
            return

    def _elsewhere(self, data: bytearray, room: int, now: float) -> int:
        """How many requests the other gateways have. Only where they fill the ``room`` it is asked whether they live;
        what the dead have left is taken out of ``data``."""
        places: tuple[int, ...] = self._all_places.unpack_from(data, HEAD.size)
        own = self._number
        others = [(i, places[2 * i], places[2 * i + 1]) for i in range(self._places) if i != own and places[2 * i + 1]]
        total = sum(count for _, _, count in others)
        if total < room:
            return total
        for number, stamp, count in others:
            if not self._lives(number, stamp, now):
                total -= count
                PLACE.pack_into(data, HEAD.size + number * PLACE.size, 0, 0)
        return total

    def _lives(self, number: int, stamp: int, now: float) -> bool:
        """Whether that gateway is there, and the one that has counted."""
        seen, at = self._alive.get(number, (0, 0.0))
        if seen == stamp and abs(now - at) < ALIVE_S:
            return True
        try:
            descriptor = os.open(self._lock_path(number), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            if os.pread(descriptor, 4, 0) != stamp.to_bytes(4, "little"):
                return False
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # its process holds it
            self._alive[number] = (stamp, now)
            return True
        finally:
            os.close(descriptor)
        return False


def _counts(data: bytearray) -> Counts:
    _, at, requests, tokens = HEAD.unpack_from(data)
    return Counts(at, requests, tokens)


def _home(id: str) -> int:
    return int(id, 16) % (CELLS - PROBES)


def _same(descriptor: int, path: Path) -> bool:
    """Whether the path still leads to the open file."""
    try:
        found, own = path.stat(), os.fstat(descriptor)
    except OSError:
        return False
    return (found.st_ino, found.st_dev) == (own.st_ino, own.st_dev)
