"""The usage of API keys, counted in one file by all gateways of a fleet. Losing the file loses counts, not requests.

The file is a table of cells, found by the key's id. A cell holds the key's counts and, for each gateway, the key's
requests there. A gateway takes a number, by a lock that ends with its process, and a unique stamp: the stamp shows
which entries a dead gateway has left behind, and those are not counted. The file is read and written, not mapped into
memory: a truncated mapping would kill the process with a signal.
"""

from __future__ import annotations

import logging
import os
import secrets
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from orchestrator.access.rate_limits import DEBT, MINUTE_S, SKEW_S, Counts
from workers.host import file_lock

log = logging.getLogger(__name__)

CELLS = 2**16  # a key file holds some 50,000 keys; the file is sparse
PROBES = 8  # consecutive cells in which a key may be
POLL_S = 0.0002  # another gateway holds the lock for some 10 us
LOCK_S = 0.05  # longest wait for the lock: its holder may be descheduled, but after this time it is stopped
CHECK_S = 1.0  # between two checks that the file is still the one that the others use
ALIVE_S = 0.25  # how long the result of a liveness check holds
HEAD = struct.Struct("<8s3d")  # the key's id and its counts
PLACE = struct.Struct("<II")  # the gateway's stamp and its requests
Changed = TypeVar("Changed")


class UsageCounts:
    """The counts as one gateway reads and changes them. Without a usable folder it counts its own requests only."""

    def __init__(self, folder: Path, places: int) -> None:
        """``places`` is the most gateways at a time, the same for all of them. The file is opened at the first use."""
        self._folder = folder
        self._path = folder / f"counts-{places}"
        self._places = places
        self._size = HEAD.size + places * PLACE.size
        self._empty = bytes(self._size)
        self._all_places = struct.Struct(f"<{2 * places}I")
        self._file: int | None = None
        self._checked_at = -CHECK_S
        self._no_wait_before = 0.0  # until then, a locked file is not waited for
        self._cells: dict[str, int] = {}
        self._live: dict[str, int] = {}  # requests of this gateway, by key
        self._local: dict[str, Counts] = {}  # while the file cannot be used
        self._warned = False
        self._lock: int | None = None
        self._number: int | None = None
        self._stamp = 0
        self._alive: dict[int, tuple[int, float]] = {}  # stamps of other gateways, and when they were seen

    def take(
        self, id: str, now: float, change: Callable[[Counts, int], Counts | Changed], at_most: int | None
    ) -> Counts | Changed:
        """Adds one request of a key. ``change`` gets the counts and the key's live requests, and returns the new counts
        or anything else: then nothing changes. Returns what ``change`` returns.

        The live requests may include those of dead gateways, but are exact where they reach ``at_most``. Without
        ``at_most`` they are those of this gateway alone."""
        live = self._live.get(id, 0)
        data = self._begin(id, now)
        try:
            if data is None:
                outcome = change(self._local.get(id, Counts()), live)
            else:
                if at_most is not None:
                    live += self._requests_elsewhere(data, at_most - live, now)
                outcome = change(_counts(data), live)
            if isinstance(outcome, Counts):
                self._live[id] = self._live.get(id, 0) + 1
                self._write(id, data, outcome)
            return outcome
        finally:
            self._end()

    def release(self, id: str, now: float, change: Callable[[Counts], Counts]) -> None:
        """Removes one request of a key; ``change`` returns the new counts."""
        data = self._begin(id, now)
        try:
            live = self._live.pop(id, 1) - 1
            if live > 0:
                self._live[id] = live
            self._write(id, data, change(self._local.get(id, Counts()) if data is None else _counts(data)))
        finally:
            self._end()

    def charge(self, id: str, now: float, change: Callable[[Counts], Counts]) -> None:
        """Changes the counts of a key by what it has used at other gateways, whose requests are not counted here."""
        data = self._begin(id, now)
        try:
            self._write(id, data, change(self._local.get(id, Counts()) if data is None else _counts(data)))
        finally:
            self._end()

    def live(self) -> dict[str, int]:
        """Returns the requests of this gateway, by key."""
        return dict(self._live)

    def peek(self, id: str, now: float) -> Counts:
        """Returns the counts of a key without waiting for the lock."""
        self._check_file(now)
        data = self._read(id, now)
        return self._local.get(id, Counts()) if data is None else _counts(data)

    def close(self) -> None:
        """Closes the files; to be called when the gateway's requests are over."""
        for descriptor in (self._file, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._file = self._lock = self._number = None
        self._checked_at = -CHECK_S
        self._live.clear()
        self._cells.clear()

    # The file

    def _begin(self, id: str, now: float) -> bytearray | None:
        """Locks the file and returns the key's cell; None without a file."""
        self._check_file(now)
        if self._file is None:
            return None
        try:
            if not file_lock.try_lock(self._file):
                self._wait_for_lock(self._file)
        except OSError as error:
            self._drop_file(error)
        return self._read(id, now)

    def _end(self) -> None:
        if self._file is not None:
            file_lock.unlock(self._file)

    def _wait_for_lock(self, file: int) -> None:
        """Waits for the lock that another gateway holds, but not for a stopped gateway: then a count may be lost, but
        no request."""
        wait_s = LOCK_S if time.monotonic() >= self._no_wait_before else 0.0
        if not file_lock.lock_within(file, wait_s, POLL_S):
            self._no_wait_before = max(self._no_wait_before, time.monotonic() + CHECK_S)

    def _read(self, id: str, now: float) -> bytearray | None:
        """Returns the key's cell, an empty one for a new key; None when the file cannot be read."""
        if self._file is None:
            return None
        try:
            cell = self._cells.get(id)
            if cell is not None:
                data = bytearray(os.pread(self._file, self._size, cell * self._size))
                if len(data) == self._size and data.startswith(id.encode()):
                    return data
            return self._find_cell(self._file, id, now)
        except OSError as error:
            self._drop_file(error)
            return None

    def _find_cell(self, file: int, id: str, now: float) -> bytearray:
        """Returns the key's cell, or an empty one in place of a free cell."""
        name, home = id.encode(), _home_cell(id)
        table = bytearray(os.pread(file, self._size * PROBES, home * self._size)).ljust(self._size * PROBES, b"\0")
        cells = [table[at : at + self._size] for at in range(0, len(table), self._size)]
        same = next((i for i, cell in enumerate(cells) if cell[:8] == name), None)
        if same is not None:
            self._cells[id] = home + same
            return cells[same]
        self._cells[id] = home + next((i for i, cell in enumerate(cells) if self._is_free(cell, now)), 0)
        data = bytearray(self._empty)
        data[:8] = name
        return data

    def _is_free(self, cell: bytearray, now: float) -> bool:
        """Returns whether the cell is empty, or its key has nothing left to count."""
        at: float = HEAD.unpack_from(cell)[1]
        recent = now - DEBT * MINUTE_S <= at <= now + SKEW_S
        return cell[:8] == bytes(8) or not (recent or any(self._all_places.unpack_from(cell, HEAD.size)[1::2]))

    def _write(self, id: str, data: bytearray | None, counts: Counts) -> None:
        if data is None or self._file is None:
            self._local[id] = counts
            return
        HEAD.pack_into(data, 0, id.encode(), *counts)
        if self._number is not None:
            PLACE.pack_into(data, HEAD.size + self._number * PLACE.size, self._stamp, self._live.get(id, 0))
        try:
            os.pwrite(self._file, data, self._cells[id] * self._size)
        except OSError as error:
            self._drop_file(error)
            self._local[id] = counts
        else:
            self._warned = False

    def _check_file(self, now: float) -> None:
        """Reopens the file or the lock once a second, if it was removed or replaced."""
        if now - self._checked_at < CHECK_S and now >= self._checked_at:
            return
        self._checked_at = now
        try:
            if self._file is None or not file_lock.is_at(self._file, self._path):
                self._open()
            if self._lock is None or not file_lock.is_at(self._lock, self._lock_path(self._number)):
                self._join()
        except OSError as error:
            self._drop_file(error)

    def _open(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        opened = file_lock.opened(self._path)
        if self._file is not None:
            os.close(self._file)
        self._file = opened
        self._cells.clear()
        self._local.clear()

    def _drop_file(self, error: OSError) -> None:
        """Closes a file that cannot be used; the next check tries again."""
        if not self._warned:
            log.error("cannot use %s: %s; key usage is counted by this gateway alone", self._path, error.strerror)
        self._warned = True
        if self._file is not None:
            os.close(self._file)
        self._file = None

    # The gateways

    def _lock_path(self, number: int | None) -> Path:
        return self._folder / f"{number}.lock"

    def _join(self) -> None:
        """Takes the lowest free number; without one, the other gateways do not see this one's requests."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = self._number = None
        for number in range(self._places):
            descriptor = file_lock.take(self._lock_path(number))
            if descriptor is not None:
                self._lock, self._stamp = descriptor, secrets.randbits(31) + 1
                os.pwrite(descriptor, self._stamp.to_bytes(4, "little"), 0)  # on a full disk: the next check retries
                self._number = number
                return

    def _requests_elsewhere(self, data: bytearray, room: int, now: float) -> int:
        """Returns the requests of the other gateways. Liveness is checked only when they fill the ``room``; the entries
        of dead gateways are then cleared in ``data``."""
        places: tuple[int, ...] = self._all_places.unpack_from(data, HEAD.size)
        own = self._number
        entries = [(i, places[2 * i], places[2 * i + 1]) for i in range(self._places) if i != own and places[2 * i + 1]]
        total = sum(count for _, _, count in entries)
        if total < room:
            return total
        for number, stamp, count in entries:
            if not self._is_alive(number, stamp, now):
                total -= count
                PLACE.pack_into(data, HEAD.size + number * PLACE.size, 0, 0)
        return total

    def _is_alive(self, number: int, stamp: int, now: float) -> bool:
        """Returns whether the gateway with that number runs and has that stamp."""
        last_stamp, at = self._alive.get(number, (0, 0.0))
        if last_stamp == stamp and abs(now - at) < ALIVE_S:
            return True
        try:
            path = self._lock_path(number)
            alive = path.read_bytes()[:4] == stamp.to_bytes(4, "little") and file_lock.is_locked(path, shared=True)
        except OSError:
            return False
        if alive:
            self._alive[number] = (stamp, now)
        return alive


def _counts(data: bytearray) -> Counts:
    _, at, requests, tokens = HEAD.unpack_from(data)
    return Counts(at, requests, tokens)


def _home_cell(id: str) -> int:
    return int(id, 16) % (CELLS - PROBES)
