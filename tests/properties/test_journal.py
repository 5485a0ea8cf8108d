"""What holds for every journal: whatever is written, wherever it is cut or damaged, however often compacted."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.control.journal import journal as module
from orchestrator.control.journal.journal import Contents, Journal, read
from orchestrator.control.journal.journal_fold import fold
from orchestrator.control.journal.journal_records import (
    Cordon,
    Decision,
    Event,
    JournalState,
    Quarantine,
    ReadyStart,
    Record,
    Replace,
    Revision,
    RolloutState,
    Scale,
)
from tests.searches import search

texts = st.text(max_size=12)
names = st.sampled_from(["a", "b", "größer", 'q"\n'])
numbers = st.integers(0, 4)
cores = st.lists(st.integers(0, 5), max_size=3)
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**53) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=3,
)
RECORDS: list[st.SearchStrategy[Record]] = [
    st.builds(
        Revision,
        number=numbers,
        cause=st.sampled_from(["up", "apply", "undo", "rollback", "watch"]),
        by=texts,
        text=texts,
        file=texts,
        base_dir=texts,
        of=st.none() | numbers,
        plan=st.dictionaries(texts, values, max_size=2),
        canary=st.none() | st.floats(0, 1),
    ),
    st.builds(
        RolloutState,
        revision=numbers,
        state=st.sampled_from(["progressing", "paused", "complete", "failed", "rolled_back"]),
        reason=texts,
    ),
    st.builds(Scale, model=names, count=st.none() | numbers, by=texts, sleep=st.booleans()),
    st.builds(Cordon, host=names, cores=st.none() | cores, on=st.booleans(), by=texts, drain=st.booleans()),
    st.builds(Replace, model=names, replica=st.integers(0, 3), epoch=st.integers(1, 9), by=texts),
    st.builds(
        Quarantine, host=names, core=numbers, on=st.booleans(), pid=st.none() | numbers, command=st.none() | texts
    ),
    st.builds(
        Decision,
        action=st.sampled_from(["start", "drain", "stop", "fail", "forget"]),
        model=names,
        replica=numbers,
        epoch=numbers,
        host=names,
        cores=cores,
        version=texts,
        reason=texts,
    ),
    st.builds(
        ReadyStart,
        model=names,
        version=texts,
        engine=names,
        host=names,
        phases=st.dictionaries(names, st.floats(0, 99)),
    ),
    st.builds(
        Event,
        level=st.sampled_from(["info", "warning", "error"]),
        reason=texts,
        message=texts,
        model=st.none() | names,
        replica=st.none() | texts,
        host=st.none() | names,
    ),
]
records = st.one_of(RECORDS)


@contextmanager
def folder() -> Iterator[Path]:
    """A new folder, in memory where there is such a place: the cuts below sync thousands of times."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as path:
        yield Path(path)


def write(path: Path, wanted: list[Record], most_bytes: int = 1 << 20) -> tuple[list[Record], bytes]:
    """The records as the journal numbered them, and its bytes."""
    with closing(Journal(path, clock=lambda: 1.5, most_bytes=most_bytes)) as journal:
        written = [journal.append(record) for record in wanted]
    return written, path.read_bytes()


def states(written: list[Record]) -> list[JournalState]:
    """The state before the first record, and after each."""
    state = JournalState()
    return [state, *(state := fold(state, record) for record in written)]  # type: ignore[arg-type]


def events(written: list[Record]) -> list[Event]:
    return [record for record in written if isinstance(record, Event)]


def ends(data: bytes) -> list[int]:
    """Where the file's records end, beginning with 0."""
    return [0, *accumulate(len(line) for line in data.splitlines(keepends=True))]


def same(contents: Contents, state: JournalState, newest: list[Event]) -> bool:
    return contents.state == state and list(contents.events) == newest


@search(20)
@given(st.lists(records, max_size=8))
def test_a_journal_cut_at_any_byte_is_the_fold_of_its_whole_records(wanted: list[Record]) -> None:
    """At most the record that the cut goes through is lost, and no cut counts as damage."""
    with folder() as home:
        written, data = write(home / "journal", wanted)
    after, boundaries = states(written), ends(data)
    assert len(boundaries) == len(written) + 1

    for cut in range(len(data) + 1):
        whole = sum(end <= cut for end in boundaries) - 1
        contents = read(data[:cut])
        assert same(contents, after[whole], events(written[:whole])), cut
        assert contents.kept == boundaries[whole]
        assert contents.damage == []


@search(3, cost=8)
@given(st.lists(records, min_size=1, max_size=4), records, st.sampled_from([1, 1 << 20]))
def test_a_cut_journal_opens_and_goes_on(wanted: list[Record], more: Record, most_bytes: int) -> None:
    """The file itself, cut at every byte: it opens, takes the next record with the next number, and opens again."""
    with folder() as home:
        path = home / "journal"
        written, data = write(path, wanted)
        after, boundaries = states(written), ends(data)
        for cut in range(len(data) + 1):
            path.write_bytes(data[:cut])
            whole = sum(end <= cut for end in boundaries) - 1
            with closing(Journal(path, most_bytes=most_bytes)) as journal:
                assert journal.state() == after[whole]
                added = journal.append(more)
                assert added.seq == whole + 1
            with closing(Journal(path)) as again:
                assert again.state() == fold(after[whole], added)  # type: ignore[arg-type]
                assert again.events() == events([*written[:whole], added])
                assert again.damage == []


@search(20)
@given(st.lists(st.lists(records, max_size=8), max_size=5), st.integers(1, 3000))
def test_compaction_and_reopening_change_nothing(sessions: list[list[Record]], most_bytes: int) -> None:
    """A journal that is written anew at any size, in any number of sessions, reads as one kept in memory."""
    memory = Journal(None, clock=lambda: 1.0)
    with folder() as home, patch.object(module, "KEEP_EVENTS", 5):
        for session in sessions:
            with closing(Journal(home / "journal", clock=lambda: 1.0, most_bytes=most_bytes)) as journal:
                for record in session:
                    assert journal.append(record) == memory.append(record)
        with closing(Journal(home / "journal")) as journal:
            assert journal.state() == memory.state()
            assert journal.events() == memory.events()[-5:]
            assert journal.damage == []


@search(20)
@given(st.lists(records, min_size=1, max_size=8), st.integers(1, 3000))
def test_a_compacted_journal_cut_after_its_state_keeps_the_state(wanted: list[Record], most_bytes: int) -> None:
    """A cut through the events that compaction kept, or through later records, costs no more than these."""
    with folder() as home:
        written, data = write(home / "journal", wanted, most_bytes)
    after, boundaries = states(written), ends(data)

    for cut in range(boundaries[1], len(data) + 1):
        contents = read(data[:cut])
        whole = sum(end <= cut for end in boundaries) - 1
        assert contents.damage == []
        assert contents.state == after[contents.state.seq]
        assert contents.state.seq == len(written) or whole < len(boundaries) - 1


@search(100)
@given(st.lists(records, min_size=3, max_size=8), st.data())
def test_damaged_bytes_cost_only_their_records_and_are_reported(wanted: list[Record], data: st.DataObject) -> None:
    """Some bytes inside one record replaced by any others: all other records are read, whatever the bytes are."""
    with folder() as home:
        written, whole = write(home / "journal", wanted)
    boundaries = ends(whole)
    victim = data.draw(st.integers(0, len(written) - 1), "victim")
    begin, end = boundaries[victim], boundaries[victim + 1] - 1  # its newline stays
    first = data.draw(st.integers(begin, end - 1), "first")
    last = data.draw(st.integers(first + 1, end), "last")
    # Noise that ends like what it replaces may only set a line apart, and leave the record as it was.
    noise = data.draw(st.binary(max_size=20).filter(lambda noise: not noise.endswith(whole[first:last])), "noise")

    contents = read(whole[:first] + noise + whole[last:])

    others = written[:victim] + written[victim + 1 :]
    assert same(contents, states(others)[-1], events(others))
    assert len(contents.damage) == 1


@search(100)
@given(st.binary(max_size=400))
def test_any_bytes_can_be_read(noise: bytes) -> None:
    """What is no journal is an empty one: nothing in a file keeps the controller from starting."""
    contents = read(noise)

    assert contents.state == JournalState()
    assert contents.kept == (len(noise) if contents.damage else 0)


@search(20)
@given(st.lists(records, max_size=20))
def test_the_fold_is_deterministic_and_changes_nothing_it_was_given(wanted: list[Record]) -> None:
    """The same records give the same states, each time; a record that is in the state already changes nothing."""
    memory = Journal(None)
    written = [memory.append(record) for record in wanted]

    once, twice = states(written), states(written)

    assert once == twice
    assert once[-1] == memory.state()
    for record in written:
        assert fold(once[-1], record) is once[-1]  # type: ignore[arg-type]
    assert [state.seq for state in once] == list(range(len(written) + 1))
    assert all(before.index <= after.index <= after.seq for before, after in pairwise(once))
