"""The journal is written beside the event loop: only what must not happen before its record waits for the disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.control.journal.journal import Journal, JournalUnwritable, read
from orchestrator.control.journal.journal_records import Decision, Record, Scale, Target
from orchestrator.control.record_writer import MAX_REFUSED, RecordWriter
from tests.orchestrator.fakes import FakeCluster, Played, virtual, virtually

DEADLINE_S = 20.0
SPEC = """\
version: 1
hosts: {emulate: inf2.48xlarge}
models:
  m: {engine: echo, tp_degree: 2, replicas: %d}
"""


class BlockedDisk:
    """A disk whose fsync takes until ``resume``, or far too long."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.late = False  # nobody resumed it: whoever should was blocked
        self._sync = os.fsync
        self._resumed = threading.Event()

    def fsync(self, file: int) -> None:
        self.entered.set()
        self.late |= not self._resumed.wait(DEADLINE_S)
        self._sync(file)

    def resume(self) -> None:
        self._resumed.set()


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], BlockedDisk]]:
    disks: list[BlockedDisk] = []

    def block() -> BlockedDisk:
        disks.append(BlockedDisk())
        monkeypatch.setattr(os, "fsync", disks[-1].fsync)
        return disks[-1]

    yield block
    for disk in disks:
        disk.resume()


async def entered(disk: BlockedDisk) -> None:
    assert await asyncio.to_thread(disk.entered.wait, DEADLINE_S), "the journal was not synced"


class GatedThread:
    """Runs a function once the gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        await self.gate.wait()
        return function(*args)


def test_the_loop_continues_while_a_sync_blocks(tmp_path: Path, blocked: Callable[[], BlockedDisk]) -> None:
    """A controller with a hanging disk serves routes and status, and receives demand."""

    async def main() -> None:
        journal = Journal(tmp_path / "journal")
        async with Played(tmp_path, FakeCluster(), SPEC % 1, journal=journal, in_thread=asyncio.to_thread) as played:
            await played.settled(DEADLINE_S)
            disk = blocked()
            scaled = asyncio.ensure_future(played.operator.scale("m", 1, "tester"))
            await entered(disk)
            assert [len(model.replicas) for model in played.controller.routes().models] == [1]
            assert played.controller.status().ready
            assert await played.controller.metrics()
            assert not scaled.done()
            disk.resume()
            await asyncio.wait_for(scaled, DEADLINE_S)
            assert not disk.late
        journal.close()

    asyncio.run(main())


async def test_records_are_written_while_all_shared_threads_are_busy(tmp_path: Path) -> None:
    """Slow reads of remote sources must not delay decisions."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    released = threading.Event()
    source = asyncio.create_task(asyncio.to_thread(released.wait, DEADLINE_S))
    journal = Journal(tmp_path / "journal")
    records = RecordWriter(journal)
    try:
        await asyncio.sleep(0)  # the thread is taken
        records.note(Target(model="m", count=1))
        await asyncio.wait_for(records.durable(), DEADLINE_S / 2)
        assert journal.state().targets == {"m": 1}
    finally:
        released.set()
        await source
        journal.close()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)], ids=["start", "drain"])
@virtual
async def test_an_effect_waits_for_its_record(tmp_path: Path, before: int, after: int) -> None:
    thread, cluster = GatedThread(), FakeCluster()
    async with Played(tmp_path, cluster, SPEC % 2, in_thread=thread) as played:
        await played.operator.scale("m", before, "tester")
        await played.settled()
        records = played.controller.state.records
        decision = records.decision

        def decide(*args: Any) -> None:
            thread.gate.clear()
            decision(*args)

        records.decision = decide  # type: ignore[assignment, method-assign]
        await played.operator.scale("m", after, "tester")
        await asyncio.sleep(5.0)
        assert not thread.gate.is_set()
        assert (len(cluster.started), cluster.drained, cluster.ended) == (before, [], [])
        records.decision = decision  # type: ignore[method-assign]
        thread.gate.set()
        await played.settled()
        assert len(cluster.living()) == after
    assert cluster.violations == []


@virtual
async def test_an_operation_completes_without_its_caller(tmp_path: Path) -> None:
    """Otherwise the journal would have a revision that the controller does not."""
    thread = GatedThread()
    async with Played(tmp_path, FakeCluster(), SPEC % 1, in_thread=thread) as played:
        await played.settled()
        state, installing = played.controller.state, asyncio.Event()
        record = state.records.record

        async def recording(revision: Any) -> Any:
            thread.gate.clear()
            installing.set()
            return await record(revision)

        state.records.record = recording  # type: ignore[assignment, method-assign]
        applied = asyncio.ensure_future(played.apply(SPEC % 2))
        await installing.wait()
        applied.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await applied
        thread.gate.set()
        await played.settled()
        assert state.current.number == played.journal.state().revision == 2


@virtual
async def test_a_request_is_visible_once_it_is_written_and_a_note_at_once(tmp_path: Path) -> None:
    thread = GatedThread()
    records = RecordWriter(Journal(None), thread)
    thread.gate.clear()
    request = asyncio.ensure_future(records.record(Scale(model="m", count=2, by="ann")))
    await asyncio.sleep(0)
    records.note(Target(model="m", count=3))
    assert (records.state.scales, records.state.targets) == ({}, {"m": 3})
    thread.gate.set()
    stored = await request
    assert (stored.seq, records.state.scales["m"].count) == (1, 2)
    await records.durable()
    assert records.state.seq == records.journal.state().seq == 2


def test_an_event_is_logged_with_its_object_if_it_has_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        records = RecordWriter(Journal(tmp_path / "journal"))
        records.event("warning", "RolloutComplete", "revision 1: every model matches the spec")
        records.event("warning", "Unloaded", "by ada", model="m")
        await records.durable()
        records.journal.close()

    asyncio.run(story())
    assert caplog.messages == ["revision 1: every model matches the spec", "m: by ada"]


def decision(replica: int, epoch: int) -> Decision:
    return Decision(
        action="start", model="m", replica=replica, epoch=epoch, host="h", cores=[0], version="v", reason="planned"
    )


def test_a_burst_on_a_healthy_disk_loses_no_record() -> None:
    """One round starts thousands of replicas, with a decision and an event for each."""

    async def main() -> None:
        records = RecordWriter(Journal(None))
        for replica in range(2400):
            records.note(decision(replica, 1))
            records.event("info", "Starting", "epoch 1")
        await records.durable()
        assert records.journal.state().seq == 4800
        assert len(records.journal.state().epochs) == 2400

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["events", "decisions"])
def test_a_full_disk_drops_events_first_and_then_replaced_decisions(kind: str) -> None:
    """What waits is bounded, but the last epoch of each replica and an earlier record of a model are kept."""

    async def main() -> None:
        journal = FillingDisk(None)
        records = RecordWriter(journal)
        journal.full = True
        records.note(Target(model="m", count=3))
        await records.durable()
        for number in range(MAX_REFUSED + 10):
            if kind == "events":
                records.event("info", "Test", str(number))
            else:
                records.note(decision(number % 5, number))
        journal.full = False
        await records.durable()
        await records.durable()
        state = journal.state()
        assert (state.targets, state.seq) == ({"m": 3}, MAX_REFUSED)
        last = [MAX_REFUSED + 5 + replica for replica in range(5)]
        if kind == "events":
            events = journal.events()
            assert [event.message for event in (events[0], events[-1])] == ["11", str(MAX_REFUSED + 9)]
        else:
            assert [state.epochs[f"m/{replica}"] for replica in range(5)] == last

    asyncio.run(main())


class FillingDisk(Journal):
    """A journal whose disk is full at times."""

    full = False

    def append(self, record: Any) -> Any:
        if self.full:
            raise JournalUnwritable(28, "No space left on device")
        return super().append(record)


STEPS = st.lists(st.sampled_from(["note", "request", "full", "free", "pass", "pass twice", "durable"]), max_size=40)


async def _take(steps: list[str], journal: FillingDisk, records: RecordWriter) -> tuple[list[int], set[int]]:
    """Returns the numbers of what was recorded in the order of the calls, and those that were refused."""
    order, requests = [], {}
    for number, step in enumerate(steps):
        if step == "note":
            records.note(Target(model="m", count=number))
        elif step == "request":
            requests[number] = asyncio.ensure_future(records.record(Scale(model="m", count=number, by="ann")))
            await asyncio.sleep(0)
        elif step in ("full", "free"):
            journal.full = step == "full"
        elif step == "durable":
            await records.durable()
        else:
            for _ in step.split():
                await asyncio.sleep(0)
        if step in ("note", "request"):
            order.append(number)
    journal.full = False
    results = dict(zip(requests, await asyncio.gather(*requests.values(), return_exceptions=True), strict=True))
    await records.durable()  # a batch that was refused may still be under way
    await records.durable()
    return order, {number for number, result in results.items() if isinstance(result, JournalUnwritable)}


@given(STEPS)
def test_records_are_written_in_the_order_of_the_calls_and_rejected_requests_never(steps: list[str]) -> None:
    """Whatever the disk does, all notes are there in the end, and the state in memory is that of the file."""

    async def later(function: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(0)
        result = function(*args)
        await asyncio.sleep(0)
        return result

    async def main() -> None:
        written: list[Record] = []
        journal = FillingDisk(None, clock=lambda: 1.0)
        append = journal.append

        def noted(record: Any) -> Any:
            stored = append(record)
            written.append(stored)
            return stored

        journal.append = noted  # type: ignore[method-assign]
        records = RecordWriter(journal, later, lambda: 1.0)
        order, refused = await _take(steps, journal, records)
        assert [record.count for record in written] == [n for n in order if n not in refused]  # type: ignore[attr-defined]
        assert [record.seq for record in written] == list(range(1, len(written) + 1))
        assert records.state == journal.state()
        assert records.writable

    virtually(main)


def test_a_kill_at_any_moment_leaves_a_prefix_of_the_records(tmp_path: Path) -> None:
    """Including all durable ones."""

    async def main(cut: int) -> None:
        steps = 0

        async def dying(function: Callable[..., Any], *args: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps > cut:
                await asyncio.Event().wait()
            return function(*args)

        path = tmp_path / f"journal-{cut}"
        journal = Journal(path)
        records, durable = RecordWriter(journal, dying), 0

        async def live() -> None:
            nonlocal durable
            for number in range(1, 7):
                records.note(Target(model=f"m{number}", count=number))
                if number % 2 == 0:
                    await records.durable()
                    durable = number

        work = asyncio.ensure_future(live())
        await asyncio.sleep(1.0)
        work.cancel()
        journal.close()
        targets = list(read(path.read_bytes()).state.targets)
        assert targets == [f"m{number}" for number in range(1, len(targets) + 1)]
        assert len(targets) >= durable == 2 * min(cut, 3)

    for cut in range(5):

        def run(cut: int = cut) -> Coroutine[Any, Any, None]:
            return main(cut)

        virtually(run)
