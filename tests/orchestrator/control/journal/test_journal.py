"""The controller's journal: what is in it stays, whatever happens to the file, the disk or the writer."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from orchestrator.control.journal import journal_fold as module
from orchestrator.control.journal.journal import KEEP_EVENTS, Journal, JournalBusy, JournalUnwritable, read
from orchestrator.control.journal.journal_fold import KEEP_REVISIONS
from orchestrator.control.journal.journal_records import (
    Cordon,
    Damage,
    Decision,
    Event,
    JournalState,
    Quarantine,
    Record,
    Revision,
    RolloutState,
    Scale,
)

ROOT = Path(__file__).parents[4]


def revision(number: int) -> Revision:
    return Revision(
        number=number, cause="apply", by="ann", text="version: 1", file="a.yaml", base_dir="/", of=None, plan={"+": [1]}
    )


def scale(model: str, count: int | None, *, sleep: bool = False) -> Scale:
    return Scale(model=model, count=count, by="ann", sleep=sleep)


def event(message: str, model: str | None = None) -> Event:
    return Event(level="info", reason="Happened", message=message, model=model)


def start(replica: int, epoch: int) -> Decision:
    return Decision(
        action="start", model="m", replica=replica, epoch=epoch, host="h", cores=[0, 1], version="v1", reason="planned"
    )


def cordon(cores: list[int] | None, *, on: bool) -> Cordon:
    return Cordon(host="h", cores=cores, on=on, by="ann")


def quarantine(core: int, *, on: bool) -> Quarantine:
    return Quarantine(host="h", core=core, on=on, pid=7, command="python train.py")


def folded(*records: Record) -> JournalState:
    journal = Journal(None)
    for record in records:
        journal.append(record)
    return journal.state()


def test_a_record_gets_its_number_and_its_time(tmp_path: Path) -> None:
    """Records are numbered from 1 without gaps, with the given clock, and across restarts."""
    journal = Journal(tmp_path / "journal", clock=lambda: 12.5)
    first = journal.append(event("a"))
    journal.close()
    journal = Journal(tmp_path / "journal", clock=lambda: 13.5)
    second = journal.append(scale("m", 1))
    journal.close()

    assert (first.seq, first.at, second.seq, second.at) == (1, 12.5, 2, 13.5)
    assert first.message == "a"


def test_a_record_is_a_line_with_its_checksum(tmp_path: Path) -> None:
    """The file can be read with a pager, and verified with zlib alone."""
    journal = Journal(tmp_path / "journal")
    journal.append(revision(1))
    journal.append(event("two\nlines"))
    journal.close()

    lines = (tmp_path / "journal").read_bytes().splitlines()

    assert len(lines) == 2
    for line in lines:
        assert re.fullmatch(rb"[0-9a-f]{8} \{.*\}", line)
        assert int(line[:8], 16) == zlib.crc32(line[9:])
    assert msgspec.json.decode(lines[0][9:])["kind"] == "revision"


def test_only_the_owner_can_read_the_file(tmp_path: Path) -> None:
    """The journal has specs and command lines: mode 0600 for each of its files, also for one with a wider mode."""
    path = tmp_path / "journal"
    path.touch(mode=0o644)
    path.write_bytes(b"torn")
    journal = Journal(path, most_bytes=100)
    for _ in range(5):
        journal.append(revision(1))
    journal.close()

    files = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}

    assert files == {"journal": 0o600, "journal.lock": 0o600, "journal.torn": 0o600}


# The state


def test_the_latest_revision_is_current_and_the_newest_are_kept() -> None:
    """History is bounded, and always has the current revision."""
    state = folded(*(revision(number) for number in range(1, KEEP_REVISIONS + 11)))

    assert state.revision == KEEP_REVISIONS + 10
    assert list(state.revisions) == list(range(11, KEEP_REVISIONS + 11))


def test_a_manual_scale_holds_until_the_spec_decides_again() -> None:
    """Only manually scaled or unloaded models are in the state."""
    state = folded(scale("a", 2), scale("b", 3), scale("c", None, sleep=True), scale("a", None))

    assert {model: (by_hand.count, by_hand.sleep) for model, by_hand in state.scales.items()} == {
        "b": (3, False),
        "c": (None, True),
    }


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([cordon([1, 2], on=True), cordon([2, 3], on=True)], {"h": frozenset({1, 2, 3})}),
        ([cordon([1, 2], on=True), cordon([2], on=False)], {"h": frozenset({1})}),
        ([cordon([1], on=True), cordon([1], on=False)], {}),
        ([cordon([1], on=True), cordon(None, on=True)], {"h": "whole"}),
        ([cordon(None, on=True), cordon([1], on=False)], {"h": "whole"}),
        ([cordon([1], on=True), cordon(None, on=True), cordon(None, on=False)], {}),
        ([cordon(None, on=False)], {}),
    ],
)
def test_cordons_add_up(records: list[Cordon], expected: dict[str, object]) -> None:
    """Uncordoning a host frees all of it; a host cordoned as a whole stays cordoned whatever happens to its cores."""
    assert folded(*records).cordons == expected


def test_a_quarantine_ends_with_its_core_freed() -> None:
    """A core is quarantined from the record that starts it to the one that ends it."""
    both = folded(quarantine(3, on=True), quarantine(4, on=True), quarantine(3, on=False))
    none = folded(quarantine(3, on=True), quarantine(3, on=False))

    assert list(both.quarantines["h"]) == [4]
    assert both.quarantines["h"][4].command == "python train.py"
    assert none.quarantines == {}


def test_an_epoch_is_never_used_twice() -> None:
    """The last epoch of a replica outlives the replica; only starts count as starts."""
    forget = msgspec.structs.replace(start(0, 2), action="forget")
    adopted = msgspec.structs.replace(start(1, 7), action="stop")
    state = folded(start(0, 1), start(0, 2), forget, adopted)

    assert state.epochs == {"m/0": 2, "m/1": 7}
    assert state.starts == {"m/0": 0, "m/1": 0}  # what is forgotten begins anew


def test_the_stored_epochs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet whose models change their names for years keeps the epochs of its latest replicas."""
    monkeypatch.setattr(module, "KEEP_REPLICAS", 3)

    state = folded(start(0, 1), start(1, 1), start(2, 1), start(0, 2), start(3, 1))

    assert state.epochs == {"m/2": 1, "m/0": 2, "m/3": 1}
    assert state.starts.keys() == state.epochs.keys()


def test_the_index_changes_only_with_changes_of_the_fleet() -> None:
    """`--check-index` does not reject an apply because of an event, or the progress of a rollout."""
    rollout = RolloutState(revision=1, state="complete", reason="all ready")
    state = folded(revision(1), event("a"), rollout)

    assert (state.index, state.seq) == (1, 3)
    assert state.outcomes[1].state == "complete"
    assert folded(revision(1), event("a"), scale("m", 1)).index == 3
    assert folded(revision(1), RolloutState(revision=1, state="paused", reason="by ada")).index == 2


def test_a_state_is_a_value() -> None:
    """The state of a reader does not change afterwards, nor do written records."""
    journal = Journal(None)
    plan = {"start": 1}
    journal.append(msgspec.structs.replace(revision(1), plan=plan))
    before = journal.state()
    copy = msgspec.json.encode(before)

    plan["start"] = 2
    for record in (revision(2), scale("m", 1), cordon([1], on=True), quarantine(1, on=True), start(0, 1)):
        journal.append(record)

    assert msgspec.json.encode(before) == copy


# Events


def test_events_are_read_from_the_last_read_one_on() -> None:
    """A reader requests the events after its last one, page by page, and misses none."""
    journal = Journal(None)
    for number in range(5):
        journal.append(event(f"e{number}", model="even" if number % 2 == 0 else "odd"))
        journal.append(scale("m", number))

    first = journal.events(limit=2)
    second = journal.events(after=first[-1].seq, limit=2)

    assert [e.message for e in first + second] == ["e0", "e1", "e2", "e3"]
    assert [e.message for e in journal.events(model="odd")] == ["e1", "e3"]
    assert journal.events(after=journal.state().seq) == []


# What cannot be written


@pytest.mark.parametrize(
    "record",
    [
        msgspec.structs.replace(scale("m", 1), count="2"),
        msgspec.structs.replace(revision(1), plan={"x": object()}),
        msgspec.structs.replace(revision(1), cause="whim"),
        msgspec.structs.replace(revision(1), plan={"x": "\udc80"}),
    ],
    ids=["type", "no JSON", "literal", "no Unicode"],
)
def test_an_unreadable_record_is_not_written(tmp_path: Path, record: Record) -> None:
    """A bug in the controller shows at the write, not when its successor reads."""
    journal = Journal(tmp_path / "journal")

    with pytest.raises((TypeError, ValueError)):
        journal.append(record)

    assert journal.append(event("after")).seq == 1
    journal.close()
    assert b'"kind":"event"' in (tmp_path / "journal").read_bytes()


def test_a_command_line_that_is_not_unicode_is_written_with_escapes() -> None:
    """Any command line of a foreign process can be recorded."""
    record = msgspec.structs.replace(quarantine(1, on=True), command="train\udc80")

    assert Journal(None).append(record).command == "train\\udc80"


FILL = """
import pathlib, resource, signal, sys
from orchestrator.control.journal.journal import Journal, JournalUnwritable
from orchestrator.control.journal.journal_records import Event, Scale
path = pathlib.Path(sys.argv[1])
most_bytes, limit, kind = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = Journal(path, most_bytes=most_bytes)
def add(name):
    if kind == "event":
        return journal.append(Event(level="info", reason="R", message=name))
    return journal.append(Scale(model=name, count=1, by="ann"))
add("first")
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
refused = 0
while not refused:
    before = journal.state()
    try:
        add("filler")
    except JournalUnwritable as error:
        assert error.errno and error.filename == str(path), error
        assert journal.state() is before
        refused += 1
assert path.read_bytes().endswith(b"\\n")
assert path.stat().st_size <= limit
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
last = add("last")
assert last.seq == before.seq + 1
journal.close()
print(last.seq)
"""


@pytest.mark.parametrize(
    ("kind", "most_bytes", "limit"),
    [
        ("scale", 1 << 20, 5000),
        ("event", 1 << 20, 5000),
        ("event", 1500, 2000),  # a state of scales alone would fit into one line, and compaction always make room
    ],
    ids=["scale", "event", "event, full while compacting"],
)
def test_on_a_full_disk_a_record_is_rejected_completely(tmp_path: Path, kind: str, most_bytes: int, limit: int) -> None:
    """It leaves neither bytes nor state, and once there is space the next one is accepted."""
    path = tmp_path / "journal"

    result = subprocess.run(
        [sys.executable, "-c", FILL, str(path), str(most_bytes), str(limit), kind],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    journal = Journal(path)
    assert journal.damage == []
    assert journal.state().seq == int(result.stdout)
    assert not (tmp_path / "journal.torn").exists()
    journal.close()


def fails(number: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_after_a_failed_sync_the_whole_file_is_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel drops pages that it could not write, so the old file is not reliable."""
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.append(scale("a", 1))
    inode = path.stat().st_ino
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fails(5))
        for _ in range(2):
            with pytest.raises(JournalUnwritable, match="Input/output error"):
                journal.append(scale("b", 1))
    journal.append(scale("c", 1))
    journal.close()

    assert path.stat().st_ino != inode
    again = Journal(path)
    assert list(again.state().scales) == ["a", "c"]
    assert again.state().seq == 2
    again.close()


def test_a_record_that_could_not_be_removed_is_gone_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If even truncation fails, the next append rewrites the file without it."""
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.append(scale("a", 1))
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fails(5))
        broken.setattr(os, "ftruncate", fails(5))
        with pytest.raises(JournalUnwritable):
            journal.append(scale("b", 1))
    journal.append(event("after"))
    journal.close()

    again = Journal(path)
    assert list(again.state().scales) == ["a"]
    assert [e.message for e in again.events()] == ["after"]
    again.close()


def test_a_closed_journal_accepts_no_records(tmp_path: Path) -> None:
    """A decision of a controller without the journal is not lost silently."""
    for journal in (Journal(tmp_path / "journal"), Journal(None)):
        journal.close()
        journal.close()
        with pytest.raises(ValueError, match="closed"):
            journal.append(event("late"))


def test_a_journal_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    """It has the file and the cause, and the lock is free again."""
    path = tmp_path / "journal"
    path.mkdir()

    with pytest.raises(JournalUnwritable, match="Is a directory"):
        Journal(path)

    path.rmdir()
    Journal(path).close()


# Two controllers

HOLD = """
import pathlib, sys
from orchestrator.control.journal.journal import Journal
from orchestrator.control.journal.journal_records import Scale
journal = Journal(pathlib.Path(sys.argv[1]), most_bytes=300)
for number in range(20):
    journal.append(Scale(model="m", count=number, by="other"))
print("held", flush=True)
sys.stdin.read()
"""


def hold(path: Path) -> subprocess.Popen[str]:
    """Another process that writes this journal, compacts it, and keeps it open."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_two_controllers_cannot_write_one_journal(tmp_path: Path) -> None:
    """The second is rejected with the holder, also after compaction has replaced the file."""
    other = hold(tmp_path / "journal")
    try:
        with pytest.raises(JournalBusy, match=rf"held by another process \(pid {other.pid}\)"):
            Journal(tmp_path / "journal", lock_wait_s=0.1)
    finally:
        other.kill()
        other.communicate()


def test_a_killed_controllers_journal_is_free_at_once(tmp_path: Path) -> None:
    """A waiting successor gets the journal with the death of the former holder, and all of its records."""
    other = hold(tmp_path / "journal")
    os.kill(other.pid, signal.SIGKILL)
    journal = Journal(tmp_path / "journal")
    other.communicate()

    assert journal.state().seq == 20
    assert journal.state().scales["m"].count == 19
    journal.close()


def test_a_closed_journal_is_free(tmp_path: Path) -> None:
    """One process may open it again after it has closed it, and not before."""
    journal = Journal(tmp_path / "journal")
    with pytest.raises(JournalBusy):
        Journal(tmp_path / "journal", lock_wait_s=0.0)
    journal.close()

    Journal(tmp_path / "journal", lock_wait_s=0.0).close()


# Damage


def written(path: Path, *records: Record) -> list[bytes]:
    """A closed journal of these records; its lines."""
    journal = Journal(path)
    for record in records:
        journal.append(record)
    journal.close()
    return path.read_bytes().splitlines(keepends=True)


def folded_lines(*records: Record) -> list[bytes]:
    """The lines of a journal of these records."""
    with tempfile.TemporaryDirectory() as folder:
        return written(Path(folder) / "journal", *records)


def test_a_torn_record_is_cut_off_and_kept_beside_the_journal(tmp_path: Path) -> None:
    """The last record may be lost; its bytes are kept for inspection, only the newest ones."""
    path = tmp_path / "journal"
    lines = written(path, scale("a", 1), scale("b", 1))
    (tmp_path / "journal.torn").write_bytes(b"an older one, and longer than the newer one" * 9)
    path.write_bytes(lines[0] + lines[1][:20])

    journal = Journal(path)

    assert list(journal.state().scales) == ["a"]
    assert journal.damage == []
    assert path.read_bytes() == lines[0]
    assert (tmp_path / "journal.torn").read_bytes() == lines[1][:20]
    journal.close()


def test_a_flipped_bit_affects_only_its_own_record(tmp_path: Path) -> None:
    """Every bit of a record in the middle is flipped: at most its neighbour is lost with it, and the loss is
    reported.
    """
    lines = written(tmp_path / "journal", *(scale(name, 1) for name in "abcd"))
    begin, size = len(lines[0]), len(lines[1])

    for bit in range(8 * size):
        data = bytearray(b"".join(lines))
        data[begin + bit // 8] ^= 1 << bit % 8
        contents = read(bytes(data))
        newline = bit // 8 == size - 1  # then the two lines are one
        assert list(contents.state.scales) == (["a", "d"] if newline else ["a", "c", "d"])
        assert contents.state.seq == 4
        assert contents.kept == len(data)
        assert len(contents.damage) == 1
        assert f"bytes {begin} to" in contents.damage[0]


def test_damage_is_reported_and_does_not_stop_the_journal(tmp_path: Path) -> None:
    """The controller starts, reports the loss, and its next record has a new number."""
    path = tmp_path / "journal"
    lines = written(path, *(scale(name, 1) for name in "abcd"))
    path.write_bytes(lines[0] + b"x" + lines[1][1:] + b"y" + lines[2][1:] + lines[3])

    journal = Journal(path)
    added = journal.append(scale("e", 1))

    middle = len(lines[0]) + len(lines[1]) + len(lines[2])
    assert journal.damage == [f"bytes {len(lines[0])} to {middle - 1} are damaged: 2 records skipped"]
    assert added.seq == 5
    assert list(journal.state().scales) == ["a", "d", "e"]
    journal.close()


def test_a_damaged_complete_last_line_is_reported(tmp_path: Path) -> None:
    """A crash leaves an incomplete line; a complete line was on the disk, so its loss is reported."""
    path = tmp_path / "journal"
    lines = written(path, scale("a", 1), scale("b", 1))
    path.write_bytes(lines[0] + b"x" + lines[1][1:])

    journal = Journal(path)

    assert list(journal.state().scales) == ["a"]
    assert len(journal.damage) == 1
    assert "the last ones, are damaged: at least 1 record lost" in journal.damage[0]
    assert path.read_bytes() == lines[0] + b"x" + lines[1][1:]
    journal.close()


@pytest.mark.parametrize("followed", [False, True], ids=["last", "with its event"])
def test_every_flipped_byte_of_the_newest_revision_is_damage(followed: bool) -> None:
    """Also its newline, and bytes that become one: none looks like a torn write."""
    lines = folded_lines(revision(1), revision(2), *[event("applied")] * followed)
    begin = len(lines[0])

    for place in range(begin, begin + len(lines[1])):
        for mask in (0x01, 0x20, 0x80, b"".join(lines)[place] ^ 0x0A):
            data = bytearray(b"".join(lines))
            data[place] ^= mask
            contents = read(bytes(data))
            assert bool(contents.damage) is (mask != 0), (place, mask)
            assert contents.kept == len(data)
            assert contents.state.revision == (1 if mask else 2)


def test_damage_at_the_end_is_seen_until_it_is_recorded(tmp_path: Path) -> None:
    """A controller that dies in between leaves it for the next; after the record it is known, whatever its end was."""
    path = tmp_path / "journal"
    lines = written(path, revision(1), revision(2))
    path.write_bytes(lines[0] + lines[1][:-1] + b"x")  # another byte for the newline
    for _ in range(2):
        journal = Journal(path)
        damage = journal.damage
        assert len(damage) == 1
        journal.close()

    journal = Journal(path)
    journal.append(Damage(what=damage[0]))
    assert journal.damage == []
    journal.close()

    again = Journal(path)
    assert (again.damage, again.state().held, again.state().revision) == ([], damage[0], 1)
    again.close()


@pytest.mark.parametrize(
    ("cause", "held"), [("apply", False), ("undo", False), ("watch", False), ("up", False), ("rollback", True)]
)
def test_a_hold_ends_with_a_revision_of_an_operator(cause: str, held: bool) -> None:
    """The controller's own rollback does not end it."""
    state = folded(revision(1), Damage(what="bytes"), msgspec.structs.replace(revision(2), cause=cause))

    assert (state.held is not None) is held


def test_a_hold_and_its_end_survive_compaction(tmp_path: Path) -> None:
    """Which removes the damage itself from the file, too."""
    path = tmp_path / "journal"
    lines = written(path, *(scale(name, 1) for name in "abc"))
    path.write_bytes(lines[0] + b"x" + lines[1][1:] + lines[2])
    journal = Journal(path, most_bytes=100)
    journal.append(Damage(what="bytes"))
    journal.close()
    assert read(path.read_bytes()).state.held == "bytes"

    journal = Journal(path, most_bytes=100)
    journal.append(revision(1))
    journal.close()

    contents = read(path.read_bytes())
    assert (contents.damage, contents.state.held) == ([], None)


def test_the_number_of_a_lost_revision_is_not_reused() -> None:
    """Otherwise the new one would have its outcome."""
    complete = RolloutState(revision=3, state="complete", reason="all ready")

    assert folded(revision(2), complete).next_revision == 4
    assert JournalState().next_revision == 1


def test_missing_records_are_reported(tmp_path: Path) -> None:
    """Lines removed from the file leave a gap in the numbers."""
    lines = written(tmp_path / "journal", *(scale(name, 1) for name in "abcd"))

    contents = read(lines[0] + lines[3])

    assert contents.damage == [f"before byte {len(lines[0])} records 2 to 3 are missing"]
    assert list(contents.state.scales) == ["a", "d"]


@pytest.mark.parametrize(
    ("payload", "kind", "seq"),
    [
        (b'{"kind":"wish","seq":2,"at":1.0}', "wish", 2),
        (b'{"kind":"scale","seq":2,"at":1.0,"model":"m","count":"many","by":"ann"}', "scale", 2),
        (b'{"seq":2}', "?", 2),
        (b'"text"', "?", 1),
    ],
    ids=["kind", "shape", "no kind", "no record"],
)
def test_records_of_a_newer_version_are_skipped_and_reported(
    tmp_path: Path, payload: bytes, kind: str, seq: int
) -> None:
    """After a downgrade the controller starts, and the numbers of unknown records are not reused."""
    path = tmp_path / "journal"
    lines = written(path, scale("a", 1))
    strange = b"%08x %b\n" % (zlib.crc32(payload), payload)
    path.write_bytes(lines[0] + strange)

    journal = Journal(path)

    assert len(journal.damage) == 1
    assert f"of the kind {kind!r}" in journal.damage[0]
    assert journal.append(scale("b", 1)).seq == seq + 1
    assert path.read_bytes().startswith(lines[0] + strange)
    journal.close()


def test_a_later_versions_extra_fields_are_passed_over() -> None:
    """A field more does not make a record strange."""
    payload = b'{"kind":"scale","seq":1,"at":1.0,"model":"m","count":1,"by":"ann","why":"x"}'

    contents = read(b"%08x %b\n" % (zlib.crc32(payload), payload))

    assert contents.damage == []
    assert contents.state.scales["m"].count == 1


def test_another_file_is_not_read_as_a_journal(tmp_path: Path) -> None:
    """It has no records: the journal is empty and reports it, and the bytes are kept."""
    path = tmp_path / "journal"
    path.write_bytes(b"\x00SQLite format 3\n\n\xff" * 100)

    journal = Journal(path)

    assert journal.state() == JournalState()
    assert len(journal.damage) == 1
    assert path.stat().st_size == 1900
    journal.close()


# Compaction


def test_compaction_keeps_state_events_and_numbers(tmp_path: Path) -> None:
    """A reader sees no difference, however often the file is rewritten."""
    path = tmp_path / "journal"
    journal, memory = Journal(path, clock=lambda: 1.0, most_bytes=3000), Journal(None, clock=lambda: 1.0)
    compactions, inode = 0, path.stat().st_ino
    for number in range(200):
        for record in (scale(f"m{number % 3}", number), start(number % 4, number), event(f"e{number}")):
            assert journal.append(record) == memory.append(record)
        if path.stat().st_ino != inode:
            compactions, inode = compactions + 1, path.stat().st_ino
    journal.close()

    again = Journal(path)

    assert compactions > 3
    assert again.damage == []
    assert again.state() == memory.state()
    assert again.events() == memory.events()
    assert again.append(event("next")).seq == 601
    again.close()


def test_a_failed_compaction_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is in the old file, which stays in use; the compaction is retried later."""
    path = tmp_path / "journal"
    journal = Journal(path, most_bytes=1000)
    inode = path.stat().st_ino
    with monkeypatch.context() as full:
        full.setattr(Path, "rename", fails(28))
        for number in range(30):
            journal.append(scale("m", number))
    assert path.stat().st_ino == inode
    assert not (tmp_path / "journal.new").exists()

    for number in range(30, 40):
        journal.append(scale("m", number))
    journal.close()

    assert path.stat().st_size < 1200
    assert read(path.read_bytes()).state.scales["m"].count == 39


def test_a_crash_during_compaction_leaves_the_old_file(tmp_path: Path) -> None:
    """The incomplete new file is ignored and removed."""
    path = tmp_path / "journal"
    written(path, scale("a", 1))
    (tmp_path / "journal.new").write_bytes(b"half")

    journal = Journal(path)

    assert list(journal.state().scales) == ["a"]
    assert not (tmp_path / "journal.new").exists()
    journal.close()


def test_ten_thousand_records_stay_bounded(tmp_path: Path) -> None:
    """The file is never much longer than what it was allowed, or than twice what it must hold."""
    path = tmp_path / "journal"
    journal = Journal(path, most_bytes=50_000)
    longest = 0
    for number in range(10_000):
        journal.append(event(f"e{number}") if number % 100 else start(number % 7, number))
        longest = max(longest, path.stat().st_size)
    journal.close()
    kept = sum(len(msgspec.json.encode(e)) + 10 for e in journal.events(limit=KEEP_EVENTS))

    assert len(journal.events(limit=KEEP_EVENTS + 1)) == KEEP_EVENTS
    assert longest < 2 * kept + 5000
    again = Journal(path)
    assert again.state() == journal.state()
    assert again.events(limit=KEEP_EVENTS) == journal.events(limit=KEEP_EVENTS)
    again.close()


# In memory


def test_a_simulated_year_is_fast_and_does_not_grow() -> None:
    """Without a path: well under 20 us for a record (the best of five runs), and bounded memory."""
    journal = Journal(None)
    records = [start(number % 12, number) for number in range(100)] + [event("e"), scale("m", 1)] * 450

    def run() -> float:
        begin = time.process_time()
        for record in records:
            journal.append(record)
        return (time.process_time() - begin) / len(records)

    fastest = min(run() for _ in range(5))
    tracemalloc.start()
    for _ in range(12):  # 5400 events: none is left that was made before the tracing
        run()
    first, _ = tracemalloc.get_traced_memory()
    for _ in range(12):
        run()
    second, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert fastest < 20e-6
    assert second - first < 100_000
    assert len(journal.events(limit=10**6)) == KEEP_EVENTS
