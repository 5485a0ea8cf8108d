"""Upkeep takes nothing that somebody uses or has just compiled, and starts leave no traces that mislead it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers.neffs import finished, graph
from workers.compiled import file_states, neuron_cache, pruning
from workers.compiled.file_states import part_of
from workers.compiled.graph_records import GraphUses, record_file
from workers.compiled.host_sets import LockedEntry, entry, peek
from workers.compiled.manifest import missing_files, record_of, write_record
from workers.compiled.neuron_cache import read_entries

DAY_S = 86400.0
MANIFEST = {"engine": "transformers-neuronx", "model": "m"}


@pytest.fixture(autouse=True)
def nobody_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neuron_cache, "compilers", list)


def old(folder: Path, at: float = 1e9) -> Path:
    """Makes files look as if changed and read long ago."""
    for path in folder.iterdir():
        os.utime(path, (at, at))
    return folder


def name(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def pruned(cache: Path) -> list[str]:
    return [item.path for item in pruning.prune_cache(cache, DAY_S)]


# Whole sets


def test_a_set_whose_compile_ends_during_a_prune_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sets are examined first, which takes minutes."""
    look = pruning.kept_in

    def compiled_meanwhile(root: Path) -> list[pruning.Kept]:
        with entry(root, MANIFEST) as held:
            seen = look(root)
            (held.path / "a.neff").write_bytes(b"hours of work")
            held.finish()
        return seen

    monkeypatch.setattr(pruning, "kept_in", compiled_meanwhile)
    assert list(pruning.prune_compiled(tmp_path, DAY_S)) == []
    assert peek(tmp_path, MANIFEST).complete


def test_a_damaged_set_compiled_again_during_a_prune_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is examined again under its lock."""

    def made() -> LockedEntry:
        with entry(tmp_path, MANIFEST) as held:
            if not held.complete:
                (held.path / "a.neff").write_bytes(b"NEFF")
                held.finish()
        return held

    (made().path / "a.neff").write_bytes(b"NEfF")
    seen = pruning.kept_in(tmp_path)
    assert [request.state for request in seen] == ["damaged"]
    made()
    monkeypatch.setattr(pruning, "kept_in", lambda root: seen)
    assert list(pruning.prune_compiled(tmp_path, DAY_S)) == []
    assert made().complete


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_set_that_is_being_compiled_is_not_pruned(tmp_path: Path, dry_run: bool) -> None:
    """A leftover of a killed compile is."""
    with entry(tmp_path, MANIFEST) as held:
        assert list(pruning.prune_compiled(tmp_path, DAY_S, dry_run)) == []
    assert [item.path for item in pruning.prune_compiled(tmp_path, DAY_S, dry_run)] == [str(held.path)]


@pytest.mark.parametrize("program", ["a.neff", "model.pt", "code/a.so"])
def test_all_kinds_of_programs_are_compared_by_content(tmp_path: Path, program: str) -> None:
    """The cpu engine's are shared objects."""
    with entry(tmp_path, MANIFEST) as held:
        (held.path / program).parent.mkdir(exist_ok=True)
        (held.path / program).write_bytes(b"program")
        held.finish()
    (held.path / program).write_bytes(b"prOgram")
    assert (held.complete, missing_files(held.path)) == (False, (program,))


# Graphs


def test_a_new_empty_folder_is_not_pruned(tmp_path: Path) -> None:
    """A compile begins with it; after an hour it is a leftover."""
    begun, left = graph(tmp_path, "1" * 20), graph(tmp_path, "2" * 20)
    os.utime(left, (1e9, 1e9))
    assert pruned(tmp_path) == [str(left)]
    assert begun.exists()


def test_a_start_restores_the_access_times_of_unread_graphs(tmp_path: Path) -> None:
    """It sets them back to see which graphs are read."""
    read, unread = old(finished(tmp_path, "1" * 20)), old(finished(tmp_path, "2" * 20))
    neff = read / "model.neff"
    os.utime(neff, ns=(neff.stat().st_ctime_ns, neff.stat().st_mtime_ns))
    GraphUses(tmp_path).record(MANIFEST, "another model")
    assert pruned(tmp_path) == [str(unread)]


def test_concurrent_starts_record_only_their_own_graphs(tmp_path: Path) -> None:
    """Restored times do not count as reads."""
    unread = old(finished(tmp_path, "1" * 20))
    first, second = GraphUses(tmp_path), GraphUses(tmp_path)
    first.record(MANIFEST, "m")
    made = finished(tmp_path, "2" * 20)
    result = second.record({**MANIFEST, "model": "another"}, "another")
    assert result is not None
    assert list(result.graphs) == [name(made)]
    assert name(unread) not in result.graphs


def test_a_graph_of_a_recent_record_is_not_pruned(tmp_path: Path) -> None:
    """On a file system without access times."""
    named, unread = old(finished(tmp_path, "1" * 20)), old(finished(tmp_path, "2" * 20))
    record = record_of(MANIFEST, graphs={name(named): part_of(named / "model.neff")})
    write_record(record_file(tmp_path, record.name), record)
    old(named)
    assert pruned(tmp_path) == [str(unread)]


def test_a_record_without_graphs_is_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with a remaining graph stays, and so does a new one."""
    left = finished(tmp_path)
    part = part_of(left / "model.neff")
    made = [
        record_of({"number": 1}, graphs={name(left): part_of(left / "model.neff"), "neuronxcc-1/MODULE_a": part}),
        record_of({"number": 2}, graphs={"neuronxcc-1/MODULE_a": part}),
        record_of({"number": 3}, failed=("neuronxcc-1/MODULE_b",)),
    ]
    for item in made:
        write_record(record_file(tmp_path, item.name), item)
    assert pruned(tmp_path) == []
    monkeypatch.setattr(pruning, "YOUNG_S", -1.0)
    assert sorted(pruned(tmp_path)) == sorted(str(record_file(tmp_path, item.name)) for item in made[1:])


# What goes while it is looked at


@pytest.fixture
def vanishes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """Removes a folder when one of its files is read for more than a number of times."""
    stat = Path.stat

    def later(folder: Path, times: int) -> None:
        left = iter(range(times))

        def gone_by_then(path: Path, *args: Any, **kwargs: Any) -> os.stat_result:
            if path.parent == folder and next(left, None) is None:
                shutil.rmtree(folder, ignore_errors=True)
            return stat(path, *args, **kwargs)

        monkeypatch.setattr(Path, "stat", gone_by_then)

    return later


def _uses(cache: Path) -> None:
    GraphUses(cache).record(MANIFEST, "m")


def _uses_that_fail(cache: Path) -> None:
    GraphUses(cache).record_failure(MANIFEST, "m", RuntimeError())


LOOKS = [read_entries, _uses, _uses_that_fail, lambda cache: list(pruning.prune_cache(cache, DAY_S))]


@pytest.mark.parametrize("times", range(16))
@pytest.mark.parametrize("look", LOOKS)
def test_a_graph_removed_meanwhile_is_skipped(
    look: Callable[[Path], object], times: int, tmp_path: Path, vanishes: Callable[[Path, int], None]
) -> None:
    """Other starts and prunes remove graphs at any time."""
    stays, gone = finished(tmp_path, "1" * 20), finished(tmp_path, "2" * 20)
    (gone / "model.log").write_text("failed")
    vanishes(gone, times)
    look(tmp_path)  # raises nothing
    assert (stays / "model.neff").exists()


def test_files_removed_meanwhile_are_not_part_of_a_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """inductor creates and removes folders all the time."""
    (tmp_path / "set" / "code").mkdir(parents=True)
    (tmp_path / "set" / "code" / "a.so").write_bytes(b"program")
    (tmp_path / "set" / "b.neff").write_bytes(b"NEFF")
    walk = os.walk

    def emptied(folder: Path) -> Iterator[Any]:
        result = list(walk(folder))
        shutil.rmtree(tmp_path / "set" / "code")
        return iter(result)

    monkeypatch.setattr(file_states.os, "walk", emptied)  # type: ignore[attr-defined]
    assert [item.bytes for item in pruning.kept_in(tmp_path)] == [len(b"NEFF")]
