"""A disk that is full, or read-only, costs what cannot be written and nothing else. On real file systems of 128 KiB."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.access.audit_log import Audit
from orchestrator.access.keys import KeyFile
from orchestrator.cli.output import libraries_to_log
from orchestrator.control.journal.journal import Journal, JournalUnwritable, read
from orchestrator.control.journal.journal_records import Scale
from orchestrator.gateway.telemetry.recorder import RequestRecorder
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from tests.orchestrator.fleet_records import fleet_record

RECORD = fleet_record(url="http://a", admin_url="http://b", ray_address="r")


class Disk:
    """A small file system, its home, and what fills it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = Home(folder / "home")

    def remount(self, option: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{option}", str(self.folder)], check=True)

    def fill(self) -> None:
        """Take every free block; the last block of each file has room left."""
        with contextlib.suppress(OSError), (self.folder / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    def free(self) -> None:
        (self.folder / "filler").unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    command = ["mount", "-t", "tmpfs", "-o", "size=128k,nr_inodes=40,mode=0700", "tmpfs", str(tmp_path)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("this user cannot mount a file system")
    try:
        yield Disk(tmp_path)
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def _log(home: Home) -> None:
    with libraries_to_log(home.logs / "daemon.log"):
        os.write(1, b"")


WRITES: dict[str, tuple[str, Callable[[Home], object]]] = {
    "record": ("fleet.json", lambda home: home.write_record(RECORD)),
    "keys": ("keys.json", lambda home: KeyFile(home.keys).create(os.urandom(4).hex() + "k")),
    "audit": ("audit.log", lambda home: Audit(home.audit).begin("command", "keys create")),
}
OPENS: dict[str, tuple[str, Callable[[Home], object]]] = {
    "lock": ("daemon.lock", Home.lock),
    "log": ("logs/daemon.log", _log),
}


@pytest.mark.parametrize("kind", WRITES)
def test_a_file_of_the_home_is_not_written_on_a_full_disk(kind: str, disk: Disk) -> None:
    """The error names it, what it held stays, nothing half-written is left, and with space again it is written."""
    name, write = WRITES[kind]
    path = disk.home.path / name
    disk.home.prepare()
    for _ in range(4096 if kind == "audit" else 1):
        write(disk.home)
        if kind == "audit" and path.stat().st_size % 4096 > 4000:  # the next line needs another block
            break
    before, there = path.read_bytes(), sorted(disk.home.path.iterdir())
    disk.fill()
    with pytest.raises(Failed, match=f"{name} cannot be written: No space left on device") as failed:
        write(disk.home)
    assert failed.value.problem.hint
    assert (path.read_bytes(), sorted(disk.home.path.iterdir())) == (before, there)
    disk.free()
    write(disk.home)


@pytest.mark.parametrize("kind", OPENS)
def test_a_file_of_the_home_is_not_opened_without_inodes(kind: str, disk: Disk) -> None:
    name, opens = OPENS[kind]
    disk.home.prepare()
    with contextlib.suppress(OSError):
        for number in range(100):
            (disk.folder / str(number)).touch()
    with pytest.raises(Failed, match=f"{name} cannot be written: No space left on device") as failed:
        opens(disk.home)
    assert "df -i" in failed.value.problem.hint
    (disk.folder / "0").unlink()
    opens(disk.home)


@pytest.mark.parametrize("kind", [*WRITES, *OPENS])
def test_a_read_only_home_is_reported(kind: str, disk: Disk) -> None:
    name, write = {**WRITES, **OPENS}[kind]
    disk.home.prepare()
    disk.remount("ro")
    with pytest.raises(Failed, match=f"{name} cannot be written: Read-only file system"):
        write(disk.home)


def test_a_home_that_cannot_be_created_is_reported_with_a_remedy(disk: Disk) -> None:
    disk.remount("ro")
    with pytest.raises(Failed, match="home cannot be created: Read-only file system") as failed:
        disk.home.prepare()
    assert "COREWRIGHT_HOME to another folder" in failed.value.problem.hint


def _scaled(journal: Journal, count: int) -> None:
    journal.append(Scale(model=f"m{count % 9}", count=count, by="ann"))


def _append_until_refused(journal: Journal) -> int:
    """Gives how many records the disk took."""
    for count in range(1, 10_000):
        try:
            _scaled(journal, count)
        except JournalUnwritable:
            return count - 1
    raise AssertionError("the disk has never been full")


def test_a_record_rejected_by_a_full_disk_is_dropped_and_the_next_one_is_kept(disk: Disk) -> None:
    """Neither in memory nor in the file; with space again the same journal continues."""
    disk.home.prepare()
    journal = Journal(disk.home.journal)
    disk.fill()
    taken = _append_until_refused(journal)
    assert journal.state().seq == taken
    assert read(disk.home.journal.read_bytes()).state == journal.state()
    disk.free()
    _scaled(journal, 77)
    journal.close()
    again = Journal(disk.home.journal)
    assert (again.damage, again.state().seq) == ([], taken + 1)
    again.close()


def test_a_journal_without_space_for_compaction_continues_and_compacts_later(disk: Disk) -> None:
    disk.home.prepare()
    journal = Journal(disk.home.journal, most_bytes=20_000)
    while disk.home.journal.stat().st_size < 19_900:
        _scaled(journal, 1)
    disk.fill()
    taken = journal.state().seq + _append_until_refused(journal)
    assert disk.home.journal.stat().st_size > 20_000
    assert not list(disk.home.path.glob("journal.new*"))
    disk.free()
    size = disk.home.journal.stat().st_size
    while disk.home.journal.stat().st_size >= size:
        taken += 1
        _scaled(journal, 1)
    journal.close()
    again = Journal(disk.home.journal)
    assert (again.damage, again.state().seq) == ([], taken)
    again.close()


def test_a_journal_opens_on_a_full_disk(disk: Disk) -> None:
    """Also one whose last record was cut off by a crash: a restarted controller finds its replicas."""
    disk.home.prepare()
    journal = Journal(disk.home.journal)
    _scaled(journal, 1)
    _scaled(journal, 2)
    journal.close()
    os.truncate(disk.home.journal, disk.home.journal.stat().st_size - 5)
    disk.fill()
    again = Journal(disk.home.journal)
    assert again.state().seq == 1
    again.close()


def test_requests_are_recorded_again_once_there_is_space(disk: Disk) -> None:
    disk.home.prepare()
    recorder = RequestRecorder(disk.home.traces, "0")
    disk.fill()
    for _ in range(500):
        recorder.note(1.0, "m", 1, 1)
    recorder.flush()
    assert recorder.dropped == 500
    disk.free()
    recorder.note(2.0, "m", 1, 1)
    recorder.close()
    assert [line for path in disk.home.traces.iterdir() for line in path.read_text().splitlines()] == [
        "2.000,m,1,1,,0.0,0.0"
    ]
