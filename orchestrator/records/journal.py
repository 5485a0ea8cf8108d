"""What the controller must not forget: one append-only file, one record a line, `<crc32, 8 hex digits> <json>`.

A record is in the file whole or not at all: its line ends with a newline and its checksum fits. So the file may be cut
at any byte, and only the record that the cut goes through is lost. That record was not answered for: what is decided is
on the disk before it is done. Any other damage may hide a decision: it stays in the file, and a ``Damage`` record after
it holds the fleet's actions until somebody applies a spec.

What the records amount to is ``JournalState``, a pure fold; when the file grows too long it is replaced by that state
and the newest events. Until then it also keeps records of kinds that this version does not know.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import msgspec

from workers.messages.replica_config import Origin

log = logging.getLogger(__name__)

MOST_BYTES = 16 << 20  # of the file, before it is written anew from the state
KEEP_REVISIONS = 50
KEEP_EVENTS = 5000
KEEP_PINS = 256  # of versions: the latest
KEEP_REPLICAS = 4096  # whose epochs are known: those of the latest decisions
LOCK_WAIT_S = 3.0  # for the former holder; a process that was killed lets go within milliseconds
LOCK_POLL_S = 0.02


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """What every record has. ``Journal.append`` fills both in."""

    seq: int = 0  # 1, 2, ... without gaps
    at: float = 0.0  # seconds since the epoch, by the wall clock


class Revision(Record, frozen=True, kw_only=True):
    """The fleet's spec is another one. An apply is exactly one such record, so a crash leaves the old or the new."""

    number: int
    fleet: str = ""  # the `up` that it was applied to
    cause: Literal["up", "apply", "undo", "rollback", "watch"]
    by: str
    text: str  # of the spec
    file: str  # that it was read from
    base_dir: str  # that its relative paths begin at
    of: int | None  # the revision that it repeats
    plan: dict[str, Any]  # the summary that `rollout history` shows
    canary: float | None = None  # the share of the requests that goes to the new version, 0 to 1


class RolloutState(Record, frozen=True, kw_only=True, tag="rollout"):
    """How far the fleet is on its way to a revision."""

    revision: int
    state: Literal["progressing", "paused", "complete", "failed", "rolled_back"]
    reason: str
    promoted: bool = False  # someone ended its canary


class Scale(Record, frozen=True, kw_only=True):
    """Someone set how many replicas a model has."""

    model: str
    count: int | None  # None: as the spec says
    by: str
    sleep: bool = False  # unloaded by hand: no request wakes it


class Target(Record, frozen=True, kw_only=True):
    """The autoscaler has decided how many replicas a model shall have."""

    model: str
    count: int | None  # None: as the spec and the requests say


class Cordon(Record, frozen=True, kw_only=True):
    """Someone took cores out of planning, or gave them back. What runs there goes on."""

    host: str
    cores: list[int] | None  # None: the whole host
    on: bool
    by: str
    drain: bool = False  # what runs there moves elsewhere


class Replace(Record, frozen=True, kw_only=True):
    """Someone wants a new process for a replica: what runs with this epoch, or an earlier one, is replaced."""

    model: str
    replica: int
    epoch: int
    by: str


class Pin(Record, frozen=True, kw_only=True):
    """What all replicas of a version load: the content that the first of them found at the source."""

    model: str
    version: str
    origin: Origin | None  # both None: what the source has
    draft_origin: Origin | None = None

    @property
    def key(self) -> str:
        return f"{self.model}@{self.version}"


class Quarantine(Record, frozen=True, kw_only=True):
    """A core that is held by a process which is none of ours, or that has failed; or that is free again."""

    host: str
    core: int
    on: bool
    pid: int | None  # of its owner, where known
    command: str | None
    cause: str = ""  # of a core that has failed: it stays in quarantine until an operator takes it out


class Decision(Record, frozen=True, kw_only=True):
    """What the controller is about to do to one start of one replica."""

    action: Literal["start", "drain", "stop", "fail", "forget"]
    model: str
    replica: int
    epoch: int
    host: str
    cores: list[int]
    version: str
    reason: str


class Damage(Record, frozen=True, kw_only=True):
    """The file before this record is damaged: what is missing may be a newer revision than the last one that can be
    read, so nothing is done on that one until somebody applies a spec."""

    what: str


class Event(Record, frozen=True, kw_only=True):
    """What happened, for people: `corewright events` tells it. Nothing is decided from it."""

    level: Literal["info", "warning", "error"]
    reason: str  # CamelCase, one word for each kind of happening
    message: str
    model: str | None = None
    replica: str | None = None  # `model/n`
    host: str | None = None


Cordoned = frozenset[int] | Literal["whole"]


class JournalState(msgspec.Struct, frozen=True, kw_only=True):
    """What all records up to ``seq`` amount to. A value: no later append changes it."""

    seq: int = 0
    index: int = 0  # the seq of the last record but events and rollout states: `--check-index` compares it
    revision: int | None = None  # the current one's number; None before the first
    rollout: RolloutState | None = None
    revisions: Mapping[int, Revision] = msgspec.field(default_factory=dict)  # by number, the newest KEEP_REVISIONS
    scales: Mapping[str, Scale] = msgspec.field(default_factory=dict)  # by model; none where the spec decides
    targets: Mapping[str, int] = msgspec.field(default_factory=dict)  # by model; none where the spec decides
    outcomes: Mapping[int, RolloutState] = msgspec.field(default_factory=dict)  # the latest by revision, as many
    completed: int | None = None  # the latest revision that was complete once
    promoted: int | None = None  # the latest revision whose canary was ended
    cordons: Mapping[str, Cordoned] = msgspec.field(default_factory=dict)  # by host; none where nothing is cordoned
    drains: frozenset[str] = frozenset()  # of the hosts that are cordoned as a whole, those that shall be empty
    replaces: Mapping[str, int] = msgspec.field(default_factory=dict)  # the epoch that shall go, by `model/n`
    quarantines: Mapping[str, Mapping[int, Quarantine]] = msgspec.field(default_factory=dict)  # by host and core
    epochs: Mapping[str, int] = msgspec.field(default_factory=dict)  # the highest of each replica, by `model/n`
    pins: Mapping[str, Pin] = msgspec.field(default_factory=dict)  # by `Pin.key`, since this `up`
    starts: Mapping[str, int] = msgspec.field(default_factory=dict)  # of each since this `up`, or it was forgotten
    held: str | None = None  # the damage for which actions are withheld; None: nobody need confirm anything

    @property
    def next_revision(self) -> int:
        """A number that no revision has had: of one that was lost an outcome may be left."""
        return max(self.revision or 0, self.completed or 0, self.promoted or 0, *self.outcomes) + 1


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="snapshot"):
    """Stands for all records up to ``seq``, its own number being that of the last one. Only compaction writes it."""

    seq: int
    at: float
    state: JournalState


AnyRecord = (
    Revision
    | RolloutState
    | Scale
    | Target
    | Cordon
    | Replace
    | Pin
    | Quarantine
    | Decision
    | Damage
    | Event
    | Snapshot
)
R = TypeVar("R", bound=Record)


class _Head(msgspec.Struct):
    """What is read of a record that this version does not know."""

    seq: int
    kind: str = "?"


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord)
_head_decoder = msgspec.json.Decoder(_Head)


class JournalBusy(Exception):
    """Another process holds the journal, and has not let go in time."""


class JournalUnwritable(OSError):
    """A full disk, or a broken one. The record is not in the journal, and nothing half-written is."""


def fold(state: JournalState, record: AnyRecord) -> JournalState:
    """The state after ``record``. Pure; a record whose seq is in ``state`` already changes nothing.

    Uncordoning a host frees all of its cores, also those that were cordoned one by one; uncordoning cores of a host
    that is cordoned as a whole changes nothing.
    """
    if isinstance(record, Snapshot):
        return record.state if record.seq > state.seq else state
    if record.seq <= state.seq:
        return state
    seq = index = record.seq
    replace = msgspec.structs.replace
    if isinstance(record, Event):
        return replace(state, seq=seq)
    if isinstance(record, RolloutState):
        outcomes = _latest(state.outcomes, record.revision, record, KEEP_REVISIONS)
        promoted = record.revision if record.promoted else state.promoted
        completed = record.revision if record.state == "complete" else state.completed
        return replace(state, seq=seq, rollout=record, outcomes=outcomes, promoted=promoted, completed=completed)
    if isinstance(record, Decision):
        id = f"{record.model}/{record.replica}"
        epoch = max(record.epoch, state.epochs.get(id, 0))  # it may be an adopted one that an older journal started
        starts = 0 if record.action == "forget" else state.starts.get(id, 0) + (record.action == "start")
        epochs = _latest(state.epochs, id, epoch, KEEP_REPLICAS)
        counts = _latest(state.starts, id, starts, KEEP_REPLICAS)
        over = record.epoch > state.replaces.get(id, record.epoch) or record.action == "forget"
        replaces = _set(state.replaces, id, 0, absent=True) if over else state.replaces
        return replace(state, seq=seq, index=index, epochs=epochs, starts=counts, replaces=replaces)
    if isinstance(record, Revision):
        revisions = _latest(state.revisions, record.number, record, KEEP_REVISIONS)
        begins = record.cause == "up"
        held = state.held if record.cause == "rollback" else None  # all others are somebody's word
        state = replace(state, seq=seq, index=index, revision=record.number, revisions=revisions, held=held)
        return replace(state, starts={}, pins={}) if begins else state
    if isinstance(record, Damage):
        return replace(state, seq=seq, index=index, held=record.what)
    if isinstance(record, Scale):
        as_the_spec_says = record.count is None and not record.sleep
        return replace(state, seq=seq, index=index, scales=_set(state.scales, record.model, record, as_the_spec_says))
    if isinstance(record, Target):
        targets = _set(state.targets, record.model, record.count or 0, record.count is None)
        return replace(state, seq=seq, targets=targets)  # not the index: what somebody has planned stands
    if isinstance(record, Cordon):
        cordoned = _cordoned(state.cordons.get(record.host, frozenset()), record)
        drained = state.drains - {record.host}
        if cordoned == "whole" and (record.drain or record.host in state.drains):
            drained |= {record.host}
        cordons = _set(state.cordons, record.host, cordoned, not cordoned)
        return replace(state, seq=seq, index=index, cordons=cordons, drains=drained)
    if isinstance(record, Pin):
        gone = record.origin is None and record.draft_origin is None
        pins = (
            _set(state.pins, record.key, record, gone) if gone else _latest(state.pins, record.key, record, KEEP_PINS)
        )
        return replace(state, seq=seq, pins=pins)  # not the index: what somebody has planned stands
    if isinstance(record, Replace):
        replaces = _set(state.replaces, f"{record.model}/{record.replica}", record.epoch, absent=False)
        return replace(state, seq=seq, index=index, replaces=replaces)
    cores = _set(state.quarantines.get(record.host, {}), record.core, record, not record.on)
    return replace(state, seq=seq, index=index, quarantines=_set(state.quarantines, record.host, cores, not cores))


def failed_cores(state: JournalState) -> list[Quarantine]:
    """Of the cores in quarantine those that have failed; whom the others are held by is looked at anew."""
    return [record for cores in state.quarantines.values() for record in cores.values() if record.cause]


K = TypeVar("K")
V = TypeVar("V")


def _set(mapping: Mapping[K, V], key: K, value: V, absent: bool) -> dict[K, V]:
    """A copy with ``key`` set, or without it when ``absent``."""
    copy = dict(mapping)
    if absent:
        copy.pop(key, None)
    else:
        copy[key] = value
    return copy


def _latest(mapping: Mapping[K, V], key: K, value: V, keep: int) -> dict[K, V]:
    """A copy with ``key`` at the end, and without those at the front that are more than ``keep``."""
    copy = dict(mapping)
    copy.pop(key, None)
    copy[key] = value
    while len(copy) > keep:
        del copy[next(iter(copy))]
    return copy


def _cordoned(before: Cordoned, record: Cordon) -> Cordoned:
    if record.cores is None:
        return "whole" if record.on else frozenset()
    if before == "whole":
        return before
    cores = frozenset(record.cores)
    return before | cores if record.on else before - cores


@dataclass(frozen=True)
class Contents:
    """What the bytes of a journal hold."""

    state: JournalState
    events: deque[Event]  # the newest KEEP_EVENTS
    whole: int  # the bytes up to the end of the last whole record; what follows is torn or damaged
    kept: int  # the bytes that stay in the file: a torn end is cut off, a damaged one stays
    damage: list[str] = field(default_factory=list)  # since the last `Damage` record


def read(data: bytes) -> Contents:
    """Read a journal's bytes, whatever is in them. Pure.

    1. A line whose checksum fits, of a kind known here -> folded
    2. A line whose checksum fits, of another kind      -> skipped and reported: a newer version wrote it
    3. Bytes that are no such line, a whole one follows -> skipped and reported
    4. The same at the end of the file                  -> torn, and not reported, when it is the beginning of a line
    5. A seq that leaves some out, nothing skipped there -> reported
    6. A `Damage` record                                -> what was reported so far is known
    """
    state = JournalState()
    events: deque[Event] = deque(maxlen=KEEP_EVENTS)
    damage: list[str] = []
    whole = begin = 0
    while (newline := data.find(b"\n", begin)) != -1:
        line, place, begin = data[begin:newline], begin, newline + 1
        if not _sound(line):
            continue
        skipped = place > whole
        if skipped:  # 3
            lines = data.count(b"\n", whole, place)
            damage.append(f"bytes {whole} to {place - 1} are damaged: {_records(lines)} skipped")
        whole = begin
        record, seq, kind = _parse(line[9:])
        if seq > state.seq + 1 and not skipped and kind != "snapshot":  # 5
            damage.append(f"before byte {place} records {state.seq + 1} to {seq - 1} are missing")
        if record is None:  # 2
            damage.append(f"byte {place}: a record of the kind {kind!r} that this version cannot read, skipped")
            state = msgspec.structs.replace(state, seq=max(seq, state.seq))
            continue
        state = fold(state, record)  # 1
        if isinstance(record, Event):
            events.append(record)
        elif isinstance(record, Damage):  # 6
            damage.clear()
    lines = data.count(b"\n", whole)  # 4
    if lines or _sound(data[whole:-1]):  # a whole record with another byte for its newline was on the disk once, too
        what = f"at least {_records(max(lines, 1))} lost"
        damage.append(f"bytes {whole} to {len(data) - 1}, the last ones, are damaged: {what}")
        return Contents(state, events, whole, len(data), damage)
    return Contents(state, events, whole, whole, damage)


def _line(payload: bytes) -> bytes:
    return b"%08x %b\n" % (zlib.crc32(payload), payload)


def _sound(line: bytes) -> bool:
    return line[:9] == b"%08x " % zlib.crc32(line[9:])


def _parse(payload: bytes) -> tuple[AnyRecord | None, int, str]:
    """The record, None when it is of no kind or shape known here; its seq, 0 when it has none; its kind."""
    try:
        record = _decoder.decode(payload)
    except msgspec.MsgspecError:
        try:
            head = _head_decoder.decode(payload)
        except msgspec.MsgspecError:
            return None, 0, "?"
        return None, head.seq, head.kind
    return record, record.seq, str(record.__struct_config__.tag)


def _records(count: int) -> str:
    return "1 record" if count == 1 else f"{count} records"


class Journal:
    """The journal of one controller: the one who writes it. Not for several threads.

    ``damage`` tells what of the file could not be read, one sentence each, until a `Damage` record is appended. Without
    a path nothing is kept but in memory, for controllers on a fake clock.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        clock: Callable[[], float] = time.time,
        most_bytes: int = MOST_BYTES,
        lock_wait_s: float = LOCK_WAIT_S,
    ) -> None:
        """Open or make the file, and read it. A torn tail is cut off and kept beside it, as `<path>.torn`.

        Raises JournalBusy when another process holds `<path>.lock` for ``lock_wait_s`` seconds; JournalUnwritable when
        the file cannot be opened.
        """
        self.damage: list[str] = []
        self._clock = clock
        self._path = path
        self._most_bytes = most_bytes
        self._compact_at = most_bytes
        self._state = JournalState()
        self._events: deque[Event] = deque(maxlen=KEEP_EVENTS)
        self._size = 0
        self._joint = b""  # what the next line begins with: a newline after a damaged end that has none
        self._suspect = False  # the disk may hold other bytes than we wrote: write all anew before the next record
        self._closed = False
        self._lock: int | None = None
        self._file: int | None = None
        if path is not None:
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
        """Add ``record``; gives it back with ``seq`` and ``at``, as it will be read again.

        On return it is on the disk (fsync); an Event is only handed to the kernel, and goes to the disk with the next
        record of another kind.

        Raises JournalUnwritable: then the journal is as it was before, and a later append may succeed. Raises TypeError
        or ValueError for a record that could not be read back, with nothing written.
        """
        if self._closed:
            raise ValueError("the journal is closed")
        numbered = msgspec.structs.replace(record, seq=self._state.seq + 1, at=self._clock())
        try:
            payload = _encoder.encode(numbered)
        except UnicodeEncodeError:  # the command line of a foreign process need not be UTF-8
            numbered = _without_surrogates(numbered)
            payload = _encoder.encode(numbered)
        kept = _decoder.decode(
            payload
        )  # Structs do not check their types when made; and the caller keeps no part of it
        if self._path is not None:
            self._write(self._path, _line(payload), sync=not isinstance(kept, Event))
        self._state = fold(self._state, kept)
        if isinstance(kept, Event):
            self._events.append(kept)
        elif isinstance(kept, Damage):
            self.damage = []
        if self._path is not None and self._size > self._compact_at:
            self._compact(self._path)
        return cast(R, kept)

    def state(self) -> JournalState:
        """The fold of all records."""
        return self._state

    def events(self, after: int = 0, limit: int = 1000, model: str | None = None) -> list[Event]:
        """Of the newest KEEP_EVENTS those with a seq above ``after``, the oldest first, at most ``limit``: a reader
        goes on after the last seq that it got. ``model``: only those about it."""
        newer = takewhile(lambda event: event.seq > after, reversed(self._events))
        return [event for event in newer if model is None or event.model == model][::-1][:limit]

    def close(self) -> None:
        """Bring the last events to the disk and let another process have the journal. May be called twice."""
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
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.fchmod(file, 0o600)
            if is_new:
                _sync_folder(path)
            data = path.read_bytes()
            contents = read(data)
            self._state, self._events, self._size = contents.state, contents.events, contents.kept
            self.damage = contents.damage
            self._joint = b"" if data[contents.kept - 1 : contents.kept] in (b"", b"\n") else b"\n"
            if torn := data[contents.kept :]:
                log.warning("%s: %d bytes after the last whole record are cut off", path, len(torn))
                _keep(path.with_name(path.name + ".torn"), torn)
                os.ftruncate(file, contents.kept)  # not synced: should it come back, it is cut off again
        except BaseException:
            os.close(file)
            raise
        for damage in self.damage:
            log.error("%s: %s", path, damage)
        return file

    def _write(self, path: Path, line: bytes, sync: bool) -> None:
        """Add one line, whole or not at all. Raises JournalUnwritable."""
        try:
            if self._suspect:
                self._rewrite(path)
            file, line = self._descriptor(), self._joint + line
            _write_all(file, [line])
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
            # The record itself is safe. Not again at the next one: a full disk would make each of them slow.
            self._compact_at = self._size + self._most_bytes // 4
            log.warning("%s could not be made shorter: %s", path, error)

    def _rewrite(self, path: Path) -> None:
        """Replace the file by one that holds the state and the newest events. Raises OSError; until the new file has
        taken the old one's name, that one stays in use."""
        _draft(path).unlink(missing_ok=True)
        new = os.open(_draft(path), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            # The state comes first: a cut through the events must not cost it.
            snapshot = Snapshot(seq=self._state.seq, at=self._clock(), state=self._state)
            lines = [_line(_encoder.encode(record)) for record in (snapshot, *self._events)]
            _write_all(new, lines)
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
        self._suspect = True  # until its name is on the disk, a power failure could bring the old file back
        _sync_folder(path)
        self._suspect = False


def _keep(path: Path, torn: bytes) -> None:
    """Keep what is cut off, for people."""
    try:
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(torn)
    except OSError as error:  # on a full disk the controller must start nevertheless
        log.error("the %d bytes cut off at the end could not be kept: %s", len(torn), error.strerror)


def _draft(path: Path) -> Path:
    """Where the file's successor is written before it takes its name."""
    return path.with_name(path.name + ".new")


def _lock(path: Path, wait_s: float) -> int:
    """A descriptor that holds the lock until it is closed. Raises JournalBusy, OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(path.with_name(path.name + ".lock"), flags, 0o600)
    deadline = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(lock, 32, 0).decode(errors="replace") or "unknown"
                    raise JournalBusy(f"{path} is held by another process (pid {holder})") from None
                time.sleep(LOCK_POLL_S)
        with contextlib.suppress(OSError):  # only for the message above; the disk may be full
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _write_all(file: int, lines: Iterable[bytes]) -> None:
    """One write for each line. Where the kernel took only a part, the next write tells why."""
    for line in lines:
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(file, rest) :]


def _sync_folder(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _unwritable(path: Path, error: OSError) -> JournalUnwritable:
    return JournalUnwritable(error.errno, error.strerror, str(path))


def _without_surrogates(record: R) -> R:
    texts = {name: value for name, value in msgspec.structs.asdict(record).items() if isinstance(value, str)}
    printable = {name: text.encode(errors="backslashreplace").decode() for name, text in texts.items()}
    return msgspec.structs.replace(record, **printable)
