"""What is in Neuron's persistent cache is told as the next start meets it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.workers.neffs import COMPILER, FLAGS, GRAPH, graph
from workers.artifacts.sources.listing import RemoteFile
from workers.compiled import neuron_cache, pruning
from workers.compiled.neuron_cache import EntryState, listed_entries, read_entries, state_of

FINISHED = {"model.neff": "NEFF", "model.done": ""}
LOCK = "model.hlo_module.pb.lock"


@pytest.fixture(autouse=True)
def nobody_compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command lines of running compilers; nothing waits for the cache to settle."""
    commands: list[str] = []
    monkeypatch.setattr(neuron_cache, "compilers", lambda: commands)
    monkeypatch.setattr(neuron_cache, "SETTLE_S", 0.0)
    return commands


@pytest.mark.parametrize(
    ("files", "state"),
    [
        (FINISHED, EntryState.SUCCESS),
        ({**FINISHED, "model.log": "warnings"}, EntryState.SUCCESS),
        ({**FINISHED, LOCK: ""}, EntryState.SUCCESS),
        ({"model.log": "neuronx-cc failed with 70"}, EntryState.FAILED),
        ({"model.log": "neuronx-cc failed with 70", LOCK: ""}, EntryState.STALE),
        ({LOCK: "", "model.hlo_module.pb": "graph"}, EntryState.STALE),
        ({"model.hlo_module.pb": "graph"}, EntryState.EMPTY),
        ({"model.neff": "half of"}, EntryState.EMPTY),
        ({"model.neff": "", "model.done": ""}, EntryState.EMPTY),
        ({}, EntryState.EMPTY),
    ],
)
def test_entries_have_the_state_that_a_start_finds(tmp_path: Path, files: dict[str, str], state: EntryState) -> None:
    """By AWS's rules; an empty NEFF, left by a power failure, does not count."""
    graph(tmp_path, **files)
    (entry,) = read_entries(tmp_path)
    assert entry.state is state


def test_an_entry_has_its_compiler_key_flags_size_and_last_log_line(tmp_path: Path) -> None:
    """As `cache ls` shows them."""
    flags = ["--model-type=transformer", "-O1"]
    log = "compiling\n[NCC_EVRF029] Operation sort is not supported\n\n"
    folder = graph(tmp_path, **{"model.log": log, "compile_flags.json": json.dumps(flags)})
    os.utime(folder / "model.log", (1e9, 1e9))
    os.utime(folder / "compile_flags.json", (9e8, 9e8))
    (entry,) = read_entries(tmp_path)
    assert (entry.compiler, entry.key, entry.flags_key) == (COMPILER, GRAPH, FLAGS)
    assert entry.flags == tuple(flags)
    assert entry.bytes == len(log) + len(json.dumps(flags))
    assert entry.changed_at == 1e9
    assert entry.words == "[NCC_EVRF029] Operation sort is not supported"


def test_a_lock_of_a_running_compiler_is_not_stale(tmp_path: Path, nobody_compiles: list[str]) -> None:
    """Also if the compiler does not name its graph."""
    folder = graph(tmp_path, **{LOCK: ""})
    graph(tmp_path, key="7be3aa4c6f1c5a0f2f3d", **{LOCK: ""})
    nobody_compiles[:] = [f"neuronx-cc compile /tmp/{folder.name}/model.pb"]
    assert {entry.key: entry.state for entry in read_entries(tmp_path)} == {
        GRAPH: EntryState.LOCKED,
        "7be3aa4c6f1c5a0f2f3d": EntryState.STALE,
    }
    nobody_compiles[:] = ["neuronx-cc compile graph.hlo"]
    assert {entry.state for entry in read_entries(tmp_path)} == {EntryState.LOCKED}


def test_a_new_lock_is_not_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler starts a moment later."""
    monkeypatch.setattr(neuron_cache, "SETTLE_S", 2.0)
    folder = graph(tmp_path, **{LOCK: ""})
    at = (folder / LOCK).stat().st_mtime
    assert [entry.state for entry in read_entries(tmp_path, now=at + 1.9)] == [EntryState.LOCKED]
    assert [entry.state for entry in read_entries(tmp_path, now=at + 2.1)] == [EntryState.STALE]


def test_remote_entries_are_read_from_names_and_sizes(tmp_path: Path) -> None:
    """Remote compilers are not visible, so no lock is stale."""
    entry = f"neuronxcc-{COMPILER}/MODULE_{GRAPH}+{FLAGS}"
    other = f"neuronxcc-{COMPILER}/MODULE_{GRAPH}+d41d8cd9"
    files = {
        f"{entry}/model.neff": 7,
        f"{entry}/model.done": 0,
        f"{other}/{LOCK}": 0,
        f"neuronxcc-{COMPILER}/README": 3,
        "corewright/compiled/a/corewright.json": 9,
        f"{entry}/deeper/model.neff": 1,
    }
    result = listed_entries(RemoteFile(name=name, size=size, tag="") for name, size in files.items())
    assert [(item.name, item.state, item.bytes) for item in result] == [
        (entry, EntryState.SUCCESS, 7),
        (other, EntryState.LOCKED, 0),
    ]


def test_a_missing_cache_has_no_entries(tmp_path: Path) -> None:
    """It is not created."""
    assert read_entries(tmp_path / "nowhere") == ()
    assert not (tmp_path / "nowhere").exists()


def test_states_are_a_function_of_names() -> None:
    """With and without running compilers."""
    assert state_of({LOCK}) is EntryState.LOCKED
    assert state_of({LOCK}, at_work=False) is EntryState.STALE


# Upkeep


def test_retry_removes_failures(tmp_path: Path) -> None:
    """All, or the named ones; compiled graphs stay."""
    failed = graph(tmp_path, **{"model.log": "neuronx-cc failed with 70"})
    other = graph(tmp_path, key="7be3aa4c6f1c5a0f2f3d", **{"model.log": "neuronx-cc failed with 70"})
    good = graph(tmp_path, key="11111111111111111111", **FINISHED)
    assert [item.path for item in pruning.retry(str(tmp_path), [other.name], dry_run=True)] == [str(other)]
    assert other.exists()
    assert [(item.path, item.why) for item in pruning.retry(str(tmp_path), [other.name])] == [
        (str(other), "neuronx-cc failed with 70")
    ]
    assert [item.path for item in pruning.retry(str(tmp_path))] == [str(failed)]
    assert good.exists()


def test_prune_removes_unused_entries(tmp_path: Path) -> None:
    """Stale locks, empty entries and old graphs; failures and used graphs stay."""
    stale = graph(tmp_path, **{LOCK: "", "model.hlo_module.pb": "graph"})
    empty = graph(tmp_path, key="22222222222222222222", **{"model.hlo_module.pb": "graph"})
    old = graph(tmp_path, key="33333333333333333333", **FINISHED)
    good = graph(tmp_path, key="44444444444444444444", **FINISHED)
    failed = graph(tmp_path, key="55555555555555555555", **{"model.log": "neuronx-cc failed with 70"})
    for path in [*empty.iterdir(), *old.iterdir(), *failed.iterdir()]:
        os.utime(path, (1e9, 1e9))
    before = sorted(tmp_path.rglob("*"))
    foretold = {item.path for item in pruning.prune_cache(tmp_path, 86400.0, dry_run=True)}
    assert sorted(tmp_path.rglob("*")) == before
    gone = {item.path: item.why for item in pruning.prune_cache(tmp_path, 86400.0)}
    assert set(gone) == foretold == {str(stale), str(empty), str(old)}
    assert [path.exists() for path in (empty, old, good, failed)] == [False, False, True, True]
    assert not (stale / LOCK).exists()
