"""A new head continues from the copy of the journal in the cluster, whose store neither delays nor loses a decision."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import msgspec
import pytest

from orchestrator.control.journal.journal import Journal
from orchestrator.control.journal.journal_records import Cordon, JournalState, Record, Revision, Scale, Target
from orchestrator.control.journal.state_copy import KEPT_REVISIONS, StateCopier, decode, encode, is_newer
from orchestrator.control.record_writer import RecordWriter
from tests.orchestrator.fakes import FakeCluster, Played, virtual

DEADLINE_S = 20.0
ONE = """\
version: 1
hosts: {emulate: inf2.48xlarge}
models:
  m: {engine: echo, tp_degree: 2}
"""
TWO = ONE.replace("tp_degree: 2", "tp_degree: 4")


def revision(number: int, fleet: str = "f") -> Revision:
    return Revision(
        number=number, fleet=fleet, cause="apply", by="ada", text=ONE, file="", base_dir="/", of=None, plan={}
    )


def journal_of(*records: Record) -> Journal:
    journal = Journal(None)
    for record in records:
        journal.append(record)
    return journal


class Store:
    """A store in the cluster, of which a test decides when it replies."""

    def __init__(self) -> None:
        self.values: list[JournalState] = []
        self.asked = threading.Semaphore(0)
        self.replies = threading.Semaphore(0)
        self.failures = 0  # that come first

    def put(self, copy: bytes) -> None:
        self.asked.release()
        assert self.replies.acquire(timeout=DEADLINE_S)
        if self.failures:
            self.failures -= 1
            raise OSError("the head does not reply")
        state = decode(copy)
        assert state is not None
        self.values.append(state)

    def reply(self) -> None:
        """Wait for the next call and let it return."""
        assert self.asked.acquire(timeout=DEADLINE_S)
        self.replies.release()


def test_a_copy_has_all_but_old_revisions() -> None:
    """An operator's cordon is in it; of many revisions it has the current ones."""
    state = journal_of(Cordon(host="a", cores=[3], on=True, by="ada"), *map(revision, range(1, 30))).state()
    copy = decode(encode(state))
    assert copy is not None
    assert msgspec.structs.replace(copy, revisions=state.revisions) == state
    assert list(copy.revisions) == list(range(30 - KEPT_REVISIONS, 30))


def test_an_unreadable_copy_is_none() -> None:
    """The journal's file then decides."""
    assert decode(b'{"seq": "many"}') is None


@pytest.mark.parametrize(
    ("copy", "journal", "expected"),
    [
        ([revision(1), Target(model="m", count=2)], [revision(1)], True),
        ([revision(1)], [revision(1), Target(model="m", count=2)], False),
        ([revision(1)], [revision(1)], False),
        ([revision(1)], [], True),
        ([revision(1)], [revision(1, "old"), revision(2, "old")], True),
        ([revision(1, "old"), revision(2, "old")], [revision(1)], False),
    ],
)
def test_the_higher_sequence_of_the_fleet_wins(copy: list[Record], journal: list[Record], expected: bool) -> None:
    """A longer journal of another fleet does not."""
    assert is_newer(journal_of(*copy).state(), journal_of(*journal).state(), "f") is expected


def test_a_restored_journal_is_read_as_the_copy(tmp_path: Path) -> None:
    """Its file had records of another fleet, and later records follow."""
    copy = journal_of(revision(7), Scale(model="m", count=3, by="ada")).state()
    journal = Journal(tmp_path / "journal")
    for number in range(1, 6):
        journal.append(revision(number, "old"))
    journal.restore(copy)
    stored = journal.append(Target(model="m", count=2))
    journal.close()
    again = Journal(tmp_path / "journal")
    assert (again.damage, again.state().revision, again.state().seq) == ([], 7, stored.seq)
    assert (again.state().scales["m"].count, again.state().targets) == (3, {"m": 2})
    again.close()


def test_the_newest_state_is_written_once_the_store_replies() -> None:
    """Those between are not, and no offer waits."""
    store = Store()
    copier = StateCopier(store.put)
    states = [JournalState(seq=seq) for seq in range(1, 5)]
    copier.offer(states[0])
    assert store.asked.acquire(timeout=DEADLINE_S)  # it is being written
    for state in states[1:]:
        copier.offer(state)
    store.replies.release()
    store.reply()
    copier.offer(JournalState(seq=5))
    store.reply()
    assert [state.seq for state in store.values] == [1, 4]


def test_a_state_that_the_store_refuses_is_written_later() -> None:
    """Nothing is lost while the head is away."""
    store = Store()
    store.failures = 2
    StateCopier(store.put, retry_s=0.01).offer(JournalState(seq=1))
    for _ in range(3):
        store.reply()
    assert store.asked.acquire(timeout=0.1) is False
    assert [state.seq for state in store.values] == [1]


def test_an_event_alone_is_not_copied() -> None:
    """A decision is, once it is on disk."""
    written: list[int] = []

    async def main() -> None:
        records = RecordWriter(Journal(None), written=lambda state: written.append(state.seq))
        records.event("info", "Adopted", "epoch 1", model="m")
        await records.durable()
        assert written == []
        await records.record(Target(model="m", count=1))

    asyncio.run(main())
    assert written == [2]


@virtual
async def test_a_controller_on_a_new_head_adopts_the_replicas_of_the_last_spec(tmp_path: Path) -> None:
    """It has only the copy: neither does it start the spec of `up`, nor does it reuse an epoch."""
    cluster, journal = FakeCluster(), Journal(None)
    async with Played(tmp_path, cluster, ONE, journal=journal) as played:
        await played.settled()
        await played.apply(TWO)
        await played.settled()
        before = played.ready("m")
    copy = decode(encode(journal.state()))
    assert copy is not None
    cluster.started.clear()
    journal = Journal(None)
    journal.restore(copy)
    async with Played(tmp_path, cluster, ONE, journal=journal, restarted=True) as played:
        await played.settled()
        id, epoch = before[0]["id"], before[0]["epoch"]
        assert (cluster.started, played.ready("m")[0]["epoch"]) == ([], epoch)
        await cluster.find(id).die("killed")
        await played.until(lambda: cluster.started, "it starts again", 3600.0)
        assert cluster.started[0].run.epoch > epoch
