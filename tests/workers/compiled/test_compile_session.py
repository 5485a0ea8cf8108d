"""What a start takes from the NEFF cache, and that `cache verify` foretells just that."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.workers.neffs import COMPILER, content, finished, graph
from tests.workers.tnx_runs import config
from workers.compiled import graph_records, graph_sync, neuron_cache, places
from workers.compiled.compile_session import CompileSession
from workers.compiled.file_states import part_of
from workers.compiled.graph_records import record_file
from workers.compiled.graph_sync import push
from workers.compiled.host_sets import Buildable
from workers.compiled.manifest import read_record, record_of, write_record
from workers.compiled.neuron_cache import URL
from workers.compiled.places import find
from workers.compiled.prediction import Prediction
from workers.compiled.storage import FolderStorage

Manifest = dict[str, Any]


def manifest(model: str = "target", decode: tuple[int, ...] = (128, 256), **more: Any) -> Manifest:
    return {
        "engine": "transformers-neuronx",
        "model": model,
        "versions": {"neuronx-cc": COMPILER},
        "options": {"constructor": {"n_positions": list(decode), "context_length_estimate": [64]}},
        **more,
    }


@dataclass
class Host:
    """A host whose cache is local or a shared folder."""

    cache: Path
    home: Path
    env: dict[str, str] = field(default_factory=dict)

    def foretold(self, wanted: Manifest) -> Prediction:
        env = {URL: str(self.cache), **self.env}
        unit = Buildable(source=self.home / "model", manifest=wanted)
        return find(unit, config(self.home / "model", compiled=str(self.home / "compiled"), env=env))

    def start(self, wanted: Manifest) -> dict[str, str]:
        """The NEFFs that the package then finds, by the graph."""
        with CompileSession(wanted, self.home / "model", self.home / "compiled").compiling():
            return neffs(Path(os.environ[URL]))


def neffs(cache: Path) -> dict[str, str]:
    return {str(path.parent.relative_to(cache)): path.read_text() for path in cache.glob("*/*/model.neff")}


def name(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def write(cache: Path, of: Manifest, *folders: Path, failed: tuple[str, ...] = ()) -> None:
    """Writes the record of a model."""
    record = record_of(of, graphs={name(item): part_of(item / "model.neff") for item in folders}, failed=failed)
    write_record(record_file(cache, record.name), record)


@pytest.fixture(autouse=True)
def nobody_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neuron_cache, "compilers", list)
    monkeypatch.setattr(neuron_cache, "SETTLE_S", 0.0)
    monkeypatch.delenv("NEURON_CC_FLAGS", raising=False)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host with a local cache."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv(URL, str(tmp_path / "cache"))
    return Host(tmp_path / "cache", tmp_path / "home")


@pytest.fixture
def shared(host: Host, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host whose cache is a folder of many hosts."""
    result = neuron_cache.file_system
    monkeypatch.setattr(neuron_cache, "file_system", lambda path: "nfs4" if path == host.cache else result(path))
    return host


def test_the_second_model_of_a_process_uses_the_remote_cache(shared: Host) -> None:
    """A draft beside its target."""
    folders = {}
    for model, key in (("target", "1" * 20), ("draft", "2" * 20)):
        folders[model] = finished(shared.cache, key, neff=model)
        write(shared.cache, manifest(model), folders[model])
    assert name(folders["target"]) in shared.start(manifest("target"))
    assert shared.foretold(manifest("draft")).outcome == "hit"
    assert name(folders["draft"]) in shared.start(manifest("draft"))
    assert os.environ[URL] == str(shared.cache)


def test_a_failed_compile_restores_the_cache_url(shared: Host) -> None:
    """The next model of the process needs the original value."""
    with pytest.raises(RuntimeError), CompileSession(manifest(), shared.home, shared.home / "compiled").compiling():
        raise RuntimeError("the compiler has failed")
    assert os.environ[URL] == str(shared.cache)


def test_a_damaged_graph_is_not_loaded_by_a_model_with_fewer_buckets(host: Host) -> None:
    """It has no record of its own; the record with more buckets shows the damage."""
    bad, good = finished(host.cache, "1" * 20), finished(host.cache, "2" * 20)
    write(host.cache, manifest(), bad, good)
    fewer = manifest(decode=(256,))
    assert host.foretold(fewer).outcome == "hit"
    (bad / "model.neff").write_text("NEfF")
    assert host.foretold(fewer).outcome == "compile"
    assert host.start(fewer) == {name(good): "NEFF"}


def test_a_graph_that_another_model_compiled_again_is_valid(host: Host) -> None:
    """Two models of one architecture share it."""
    folder = finished(host.cache, neff="first")
    write(host.cache, manifest("one"), folder)
    (folder / "model.neff").write_text("again")
    write(host.cache, manifest("other"), folder)
    assert host.foretold(manifest("one")).outcome == "hit"
    assert host.start(manifest("one")) == {name(folder): "again"}


@pytest.mark.parametrize("is_written_down", [False, True])
def test_a_graph_that_failed_here_is_pulled(shared: Host, is_written_down: bool) -> None:
    """Another host has compiled it since."""
    folder = finished(shared.cache)
    write(shared.cache, manifest(), folder)
    place = graph_sync.localized(os.environ, graph_sync.keep_of(shared.home / "compiled"))
    assert place is not None
    graph(place.path, **{"model.log": "[NCC_EVRF029] Operation sort is not supported\n"})
    if is_written_down:
        write(place.path, manifest(), failed=(name(folder),))
    assert shared.foretold(manifest()).outcome == "hit"
    assert shared.start(manifest()) == {name(folder): "NEFF"}
    assert shared.foretold(manifest()).outcome == "hit"


def test_a_graph_damaged_here_is_pulled_again(shared: Host, tmp_path: Path) -> None:
    """The remote copy is intact."""
    folder = finished(tmp_path / "other")
    write(tmp_path / "other", manifest(), folder)
    push(tmp_path / "other", FolderStorage(shared.cache))
    assert shared.start(manifest()) == {name(folder): "NEFF"}
    place = graph_sync.localized(os.environ, graph_sync.keep_of(shared.home / "compiled"))
    assert place is not None
    (place.path / name(folder) / "model.neff").write_text("NEfF")
    assert shared.foretold(manifest()).outcome == "hit"
    assert shared.start(manifest()) == {name(folder): "NEFF"}
    assert [file for file in content(place.path) if graph_sync.DIGEST in Path(file).name.removesuffix(".json")] == []


def test_a_start_reads_no_neffs_of_other_models(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many records the cache has."""
    folders = [finished(host.cache, f"{number:020}") for number in range(3)]
    for number in range(5):
        write(host.cache, manifest(flags=number), *folders)
    looks: list[Path] = []
    reads: list[Path] = []
    read_entries, digested = places.read_entries, graph_records.part_at  # type: ignore[attr-defined]

    def looked(cache: Path) -> Any:
        looks.append(cache)
        return read_entries(cache)

    def read(path: Path) -> Any:
        reads.append(path)
        return digested(path)

    monkeypatch.setattr(places, "read_entries", looked)
    monkeypatch.setattr(graph_records, "part_at", read)
    assert host.foretold(manifest(flags=0)).outcome == "hit"
    assert (len(looks), sorted(reads)) == (1, sorted(folder / "model.neff" for folder in folders))


def test_a_start_renews_its_record(host: Host) -> None:
    """A prune needs it on file systems without access times."""
    folder = finished(host.cache)
    write(host.cache, manifest(), folder)
    file = record_file(host.cache, record_of(manifest()).name)
    before = read_record(file)
    visit = CompileSession(manifest(), host.home / "model", host.home / "compiled")
    with visit.compiling():
        at = (folder / "model.neff").stat()
        os.utime(folder / "model.neff", ns=(at.st_ctime_ns, at.st_mtime_ns))  # as a read would
    visit.record_compiled(wait=True)
    after = read_record(file)
    assert before is not None
    assert after is not None
    assert after.made_at > before.made_at
