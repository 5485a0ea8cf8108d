"""The controller's journal: an append-only file with one record per line, `<crc32, 8 hex digits> <json>`.

A record is valid if its line ends with a newline and its checksum matches. If the file is truncated at any byte, only
the record at that byte is lost, and it was not acknowledged: decisions are on disk before they are executed. Any other
damage may hide a decision: it stays in the file, and a ``Damage`` record after it holds the fleet's actions until an
operator applies a spec.

``JournalState`` is a pure fold of the records. A file that grows too long is replaced by that state and the newest
events; until then it also keeps records of kinds unknown to this version.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import cast

import msgspec

from orchestrator.control.journal.journal_fold import fold
from orchestrator.control.journal.journal_records import AnyRecord, Damage, Event, JournalState, R, Snapshot
from placements.facts.plural import counted
from workers.host import file_lock, private_file

log = logging.getLogger(__name__)

KEEP_EVENTS = 5000
REMOVED_KINDS = frozenset({"hostroll"})  # of records that earlier versions have written
MOST_BYTES = 16 << 20  # size of the file before compaction
LOCK_WAIT_S = 3.0  # for the previous holder; a killed process releases it within milliseconds
LOCK_POLL_S = 0.02


class _Head(msgspec.Struct):
    """The known fields of a record of an unknown kind."""

    seq: int
    kind: str = "?"


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord)
_head_decoder = msgspec.json.Decoder(_Head)


class JournalBusy(Exception):
    """Another process holds the journal's lock and did not release it in time."""


class JournalUnwritable(OSError):
    """The disk is full or broken. The record was not written, not even partially."""


class JournalLost(JournalUnwritable):
    """The file is gone, or another one is in its place: nothing that is written to it would be found again."""


@dataclass(frozen=True)
class Contents:
    """The parsed contents of a journal file."""

    state: JournalState
    events: deque[Event]  # the newest KEEP_EVENTS
    kept: int  # bytes that stay in the file: a torn end is cut off, a damaged one stays
    damage: list[str] = field(default_factory=list)  # since the last `Damage` record


def read(data: bytes) -> Contents:
    """Parse a journal's bytes. Never raises. Pure.

    1. A line with a matching checksum, known kind       -> folded
    2. A line with a matching checksum, unknown kind     -> skipped; reported, since a newer version wrote it, but for
                                                            ``REMOVED_KINDS``
    3. Other bytes, followed by a valid line             -> skipped and reported
    4. Other bytes at the end of the file                -> torn, and not reported, if they begin a line
    5. A gap in seq where nothing was skipped            -> reported
    6. A `Damage` record                                 -> clears the damage reported so far
    """
    state = JournalState()
    events: deque[Event] = deque(maxlen=KEEP_EVENTS)
    damage: list[str] = []
    valid_end = begin = 0
    while (newline := data.find(b"\n", begin)) != -1:
        line, place, begin = data[begin:newline], begin, newline + 1
        if not _is_valid(line):
            continue
        skipped = place > valid_end
        if skipped:  # 3
            lines = data.count(b"\n", valid_end, place)
            damage.append(f"bytes {valid_end} to {place - 1} are damaged: {counted(lines, 'record')} skipped")
        valid_end = begin
        record, seq, kind = _parse(line[9:])
        if seq > state.seq + 1 and not skipped and kind != "snapshot":  # 5
            damage.append(f"before byte {place} records {state.seq + 1} to {seq - 1} are missing")
        if record is None and kind not in REMOVED_KINDS:  # 2
            damage.append(f"byte {place}: a record of the kind {kind!r} that this version cannot read, skipped")
        if record is None:
            state = msgspec.structs.replace(state, seq=max(seq, state.seq))
            continue
        state = fold(state, record)  # 1
        if isinstance(record, Event):
            events.append(record)
        elif isinstance(record, Damage):  # 6
            damage.clear()
    lines = data.count(b"\n", valid_end)  # 4
    if lines or _is_valid(data[valid_end:-1]):  # a record with only its newline damaged was valid once
        fact = f"at least {counted(max(lines, 1), 'record')} lost"
        damage.append(f"bytes {valid_end} to {len(data) - 1}, the last ones, are damaged: {fact}")
        return Contents(state, events, len(data), damage)
    return Contents(state, events, valid_end, damage)


def as_stored(record: R) -> R:
    """Returns the record as it would be read back, sharing nothing with it. Raises TypeError or ValueError if it could
    not be: Structs do not validate on creation."""
    try:
        payload = _encoder.encode(record)
    except UnicodeEncodeError:  # the command line of a foreign process need not be UTF-8
        payload = _encoder.encode(_without_surrogates(record))
    return cast(R, _decoder.decode(payload))


def _line(payload: bytes) -> bytes:
    return b"%08x %b\n" % (zlib.crc32(payload), payload)


def _is_valid(line: bytes) -> bool:
    return line[:9] == b"%08x " % zlib.crc32(line[9:])


def _parse(payload: bytes) -> tuple[AnyRecord | None, int, str]:
    """Returns the record, or None for an unknown kind or shape; its seq, 0 without one; its kind."""
    try:
        record = _decoder.decode(payload)
    except msgspec.MsgspecError:
        try:
            head = _head_decoder.decode(payload)
        except msgspec.MsgspecError:
            return None, 0, "?"
        return None, head.seq, head.kind
    return record, record.seq, str(record.__struct_config__.tag)


class Journal:
    """The journal of one controller, which is its only writer. Only one thread at a time may append.

    ``damage`` describes the unreadable parts of the file, one sentence each, until a `Damage` record is appended.
    Without a path the journal is in memory only, for controllers on a fake clock.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        clock: Callable[[], float] = time.time,
        most_bytes: int = MOST_BYTES,
        lock_wait_s: float = LOCK_WAIT_S,
        lost: bool = False,
    ) -> None:
        """Open or create the file, and read it. A torn tail is cut off and saved as `<path>.torn`. With ``lost`` the
        file is not opened, and each append fails.

        Raises JournalBusy if another process holds `<path>.lock` for ``lock_wait_s`` seconds; JournalUnwritable if the
        file cannot be opened.
        """
        self.damage: list[str] = []
        self._clock = clock
        self._path = path
        self._most_bytes = most_bytes
        self._compact_at = most_bytes
        self._state = JournalState()
        self._events: deque[Event] = deque(maxlen=KEEP_EVENTS)
        self._size = 0
        self._joint = b""  # prefix of the next line: a newline after a damaged end without one
        self._suspect = False  # the file may differ from what was written: rewrite it before the next record
        self._closed = False
        self._lock: int | None = None
        self._file: int | None = None
        if path is not None and not lost:
            try:
                self._lock = _lock(path, lock_wait_s)
                self._file = self._open(path)
            except OSError as error:
                self.close()
                raise _unwritable(path, error) from error
            except BaseException:
                self.close()
                raise

    def append(self, record: R) -> R:
        """Append ``record`` and return it with ``seq`` and ``at``, as it would be read back.

        On return it is on disk (fsync); an Event is only written to the page cache, and synced with the next record of
        another kind.

        Raises JournalUnwritable: the journal is then unchanged, and a later append may succeed; JournalLost if the file
        is gone. Raises TypeError or ValueError for a record that could not be read back; nothing is written then.
        """
        if self._closed:
            raise ValueError("the journal is closed")
        stored = as_stored(msgspec.structs.replace(record, seq=self._state.seq + 1, at=self._clock()))
        if self._path is not None:
            self._write(self._path, _line(_encoder.encode(stored)), sync=not isinstance(stored, Event))
        self._state = fold(self._state, cast(AnyRecord, stored))
        if isinstance(stored, Event):
            self._events.append(stored)
        elif isinstance(stored, Damage):
            self.damage = []
        if self._path is not None and self._size > self._compact_at:
            self._compact(self._path)
        return stored

    def restore(self, state: JournalState) -> None:
        """Continue from a state that another file had: it replaces that of all records so far. Raises as ``append``."""
        seq = max(state.seq, self._state.seq + 1)
        snapshot = Snapshot(seq=seq, at=self._clock(), state=msgspec.structs.replace(state, seq=seq))
        if self._path is not None:
            self._write(self._path, _line(_encoder.encode(snapshot)), sync=True)
        self._state = fold(self._state, snapshot)

    def is_own(self) -> bool:
        """Returns whether the path still leads to the open file. To be called in the thread that appends."""
        if self._path is None:
            return True
        try:
            there = self._path.lstat()
        except OSError:
            return False
        return self._file is not None and os.path.samestat(os.fstat(self._file), there)

    def state(self) -> JournalState:
        """Returns the fold of all records."""
        return self._state

    def events(self, after: int = 0, limit: int = 1000, model: str | None = None) -> list[Event]:
        """Returns at most ``limit`` of the newest KEEP_EVENTS with a seq above ``after``, oldest first: a reader passes
        the last seq that it received. ``model``: only events of that model. A thread may append meanwhile."""
        newer = takewhile(lambda event: event.seq > after, reversed(tuple(self._events)))
        return [event for event in newer if model is None or event.model == model][::-1][:limit]

    def close(self) -> None:
        """Sync the last events to disk and release the lock. May be called twice."""
        self._closed = True
        if self._file is not None:
            with contextlib.suppress(OSError):  # only events can be lost here
                os.fsync(self._file)
            os.close(self._file)
            self._file = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _open(self, path: Path) -> int:
        _draft(path).unlink(missing_ok=True)
        is_new = not path.exists()
        file = private_file.open_to_append(path)
        try:
            os.fchmod(file, 0o600)
            if is_new:
                private_file.sync_names(path.parent)
            data = path.read_bytes()
            contents = read(data)
            self._state, self._events, self._size = contents.state, contents.events, contents.kept
            self.damage = contents.damage
            self._joint = b"" if data[contents.kept - 1 : contents.kept] in (b"", b"\n") else b"\n"
            if torn := data[contents.kept :]:
                log.warning("%s: cut off %d bytes of an incomplete record at the end", path, len(torn))
                _save_torn(path.with_name(path.name + ".torn"), torn)
                os.ftruncate(file, contents.kept)  # not synced: if it reappears, it is cut off again
        except BaseException:
            os.close(file)
            raise
        for damage in self.damage:
            log.error("%s: %s", path, damage)
        return file

    def _write(self, path: Path, line: bytes, sync: bool) -> None:
        """Append one line, completely or not at all. Raises JournalUnwritable."""
        if not self.is_own():
            raise JournalLost(errno.ENOENT, "the file is gone, or another one is in its place", str(path))
        try:
            if self._suspect:
                self._rewrite(path)
            file, line = self._descriptor(), self._joint + line
            private_file.write_all(file, line)
        except OSError as error:
            self._cut_back()
            raise _unwritable(path, error) from error
        if sync:
            try:
                os.fsync(file)
            except OSError as error:
                self._cut_back()
                self._suspect = True  # the kernel forgets pages that it could not write, and the next fsync succeeds
                raise _unwritable(path, error) from error
        self._size += len(line)
        self._joint = b""

    def _cut_back(self) -> None:
        try:
            os.ftruncate(self._descriptor(), self._size)
        except OSError:
            self._suspect = True

    def _descriptor(self) -> int:
        if self._file is None:
            raise ValueError("the journal is closed")
        return self._file

    def _compact(self, path: Path) -> None:
        try:
            self._rewrite(path)
        except OSError as error:
            # The record itself is safe. Do not retry at the next one: on a full disk each append would be slow.
            self._compact_at = self._size + self._most_bytes // 4
            log.warning("%s could not be compacted: %s", path, error)

    def _rewrite(self, path: Path) -> None:
        """Replace the file by one with the state and the newest events. Raises OSError; the old file stays in use until
        the rename."""
        new = private_file.create(_draft(path))
        try:
            # The state comes first: a truncated file must not lose it.
            snapshot = Snapshot(seq=self._state.seq, at=self._clock(), state=self._state)
            lines = [_line(_encoder.encode(record)) for record in (snapshot, *self._events)]
            for line in lines:
                private_file.write_all(new, line)
            os.fsync(new)
            _draft(path).rename(path)
        except BaseException:
            os.close(new)
            with contextlib.suppress(OSError):
                _draft(path).unlink(missing_ok=True)
            raise
        os.close(self._descriptor())
        self._file = new
        self._size = sum(map(len, lines))
        self._joint = b""
        self._compact_at = max(self._most_bytes, 2 * self._size)
        self._suspect = True  # until the rename is synced, a power failure could restore the old file
        private_file.sync_names(path.parent)
        self._suspect = False


def _save_torn(path: Path, torn: bytes) -> None:
    """Save the bytes that are cut off, for inspection."""
    try:
        with os.fdopen(private_file.create(path), "wb") as file:
            file.write(torn)
    except OSError as error:  # the controller must also start on a full disk
        log.error("the %d bytes cut off at the end could not be saved: %s", len(torn), error.strerror)


def _draft(path: Path) -> Path:
    """Returns the path of the new file before the rename."""
    return path.with_name(path.name + ".new")


def _lock(path: Path, wait_s: float) -> int:
    """Returns a descriptor that holds the lock until it is closed. Raises JournalBusy, OSError."""
    lock = file_lock.opened(path.with_name(path.name + ".lock"))
    try:
        if not file_lock.lock_within(lock, wait_s, LOCK_POLL_S):
            holder = os.pread(lock, 32, 0).decode(errors="replace") or "unknown"
            raise JournalBusy(f"{path} is held by another process (pid {holder})")
        with contextlib.suppress(OSError):  # only for the message above; the disk may be full
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _unwritable(path: Path, error: OSError) -> JournalUnwritable:
    return JournalUnwritable(error.errno, error.strerror, str(path))


def _without_surrogates(record: R) -> R:
    texts = {name: value for name, value in msgspec.structs.asdict(record).items() if isinstance(value, str)}
    printable = {name: text.encode(errors="backslashreplace").decode() for name, text in texts.items()}
    return msgspec.structs.replace(record, **printable)
