"""A NEFF cache comes to a host, and what was compiled there goes back: finished entries only, whatever dies."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.s3 import FaultProxy, S3Server
from tests.workers.neffs import COMPILER, FLAGS, content, finished, graph
from workers.artifacts.sources.listing import SourceError, Stopped
from workers.artifacts.sources.s3 import Bucket
from workers.compiled import graph_sync, neuron_cache, storage
from workers.compiled.file_states import part_of
from workers.compiled.graph_records import Proof, record_file
from workers.compiled.graph_sync import Localized, localized, pull, push
from workers.compiled.manifest import read_record, record_of, write_record
from workers.compiled.neuron_cache import OWN, EntryState, read_entries
from workers.compiled.storage import FolderStorage, Storage, storage_at
from workers.host import file_lock

NEWER = "2.17.194.0+d312836f"
DEADLINE_S = 60
MANIFEST = {"engine": "transformers-neuronx", "versions": {"neuronx-cc": COMPILER}}
# Says what it brings, and whether it got there.
PULL = """
import sys
from pathlib import Path
from workers.compiled.graph_sync import pull
from workers.compiled.storage import storage_at
print("begins", flush=True)
print(len(pull(storage_at(sys.argv[1]), Path(sys.argv[2])).entries), flush=True)
"""
# Stops before the last file of the first entry is put, and says so.
PUSH = """
import sys
from pathlib import Path
from workers.compiled import graph_sync
place = graph_sync.storage_at(sys.argv[1])
put = place.put
def held(name, path):
    if name.endswith("model.done"):
        print("holds", flush=True)
        sys.stdin.readline()
    put(name, path)
place.put = held
graph_sync.push(Path(sys.argv[2]), place)
"""


@pytest.fixture(autouse=True)
def nobody_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neuron_cache, "compilers", list)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as s3:
        yield s3


@pytest.fixture
def proxy(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Between this process and S3."""
    with FaultProxy(server.url) as faults:
        for name, value in faults.env.items():
            monkeypatch.setenv(name, value)
        yield faults


@pytest.fixture
def bucket(server: S3Server, proxy: FaultProxy, tmp_path: Path) -> str:
    """The URL of an empty cache in S3."""
    name = f"neffs-{abs(hash(tmp_path))}"
    return f"{server.bucket(name)}/cache"


@pytest.fixture
def afar(tmp_path: Path) -> Storage:
    """An empty cache in another folder."""
    (tmp_path / "afar").mkdir()
    return FolderStorage(tmp_path / "afar")


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.slow)])
def either(request: pytest.FixtureRequest) -> Storage:
    """An empty cache, in a folder or in S3."""
    if request.param == "s3":
        return storage_at(request.getfixturevalue("bucket"))
    place: Storage = request.getfixturevalue("afar")
    return place


def kept(cache: Path, *folders: Path, manifest: dict[str, Any] | None = None) -> str:
    """Writes the record of a model with these graphs."""
    graphs = {str(folder.relative_to(cache)): part_of(folder / "model.neff") for folder in folders}
    record = record_of(manifest or MANIFEST, graphs=graphs)
    write_record(record_file(cache, record.name), record)
    return record.name


def entries(cache: Path) -> dict[str, str]:
    """Returns the files of the compilers' entries, without corewright's own folder."""
    return {name: text for name, text in content(cache).items() if not name.startswith(OWN)}


def names(place: Storage) -> set[str]:
    return {file.name for file in place.files()}


def test_pushed_graphs_are_pulled_by_another_host(either: Storage, tmp_path: Path) -> None:
    """Byte for byte, with the record."""
    first, other = tmp_path / "one", tmp_path / "other"
    name = kept(first, finished(first), finished(first, "22222222222222222222", neff="another"))
    sent = push(first, either)
    assert (len(sent.entries), sent.records) == (2, (name,))
    assert len(pull(either, other).entries) == 2
    assert entries(other) == entries(first)
    record = read_record(record_file(other, name))
    assert record is not None
    assert Proof(other, [record]).missing(record) == ()
    assert push(first, either).entries == pull(either, other).entries == ()


def test_only_finished_entries_are_synced(either: Storage, tmp_path: Path) -> None:
    """No locks, failures or partial NEFFs, in both directions."""
    first, other = tmp_path / "one", tmp_path / "other"
    good = finished(first)
    (good / "model.log").write_text("warnings")
    graph(first, "22222222222222222222", **{"model.log": "neuronx-cc failed with 70"})
    graph(first, "33333333333333333333", **{"model.hlo_module.pb.lock": ""})
    graph(first, "44444444444444444444", **{"model.neff": "half"})
    assert len(push(first, either).entries) == 1
    base = f"neuronxcc-{COMPILER}/{good.name}"
    marker = f"corewright.{part_of(good / 'model.neff').digest}"
    assert names(either) == {
        f"{base}/{file}" for file in ("model.neff", "model.done", "model.hlo_module.pb", "compile_flags.json", marker)
    }
    for state, files in {"5" * 20: {"model.neff": b"half"}, "6" * 20: {"model.log": b"failed"}}.items():
        for file, data in files.items():
            either.put_bytes(f"neuronxcc-{COMPILER}/MODULE_{state}+{FLAGS}/{file}", data)
    assert pull(either, other).entries == (base,)
    assert list(entries(other)) == sorted(f"{base}/{file.name}" for file in good.iterdir() if file.name != "model.log")


def test_finished_entries_are_never_replaced(afar: Storage, tmp_path: Path) -> None:
    """Two hosts that compile one graph produce different bytes; each keeps its own."""
    first, other = tmp_path / "one", tmp_path / "other"
    finished(first, neff="of one")
    (neff,) = (folder / "model.neff" for folder in [finished(other, neff="of the other")])
    push(first, afar)
    assert push(other, afar).entries == pull(afar, other).entries == ()
    assert neff.read_text() == "of the other"
    third = tmp_path / "third"
    pull(afar, third)
    assert [path.read_text() for path in third.rglob("model.neff")] == ["of one"]


def test_a_pulled_record_has_the_digests_of_the_pulled_files(afar: Storage, tmp_path: Path) -> None:
    """Also if another host has pushed other bytes of the graph first."""
    first, other, third = tmp_path / "one", tmp_path / "other", tmp_path / "third"
    finished(first, neff="of one")
    push(first, afar)
    name = kept(other, finished(other, neff="of the other"))
    assert push(other, afar).records == (name,)
    assert pull(afar, third).records == (name,)
    record = read_record(record_file(third, name))
    assert record is not None
    assert Proof(third, [record]).missing(record) == ()


def test_a_record_that_names_a_path_is_not_pulled(afar: Storage, tmp_path: Path) -> None:
    """Whoever writes to a shared cache could replace files beside the local one."""
    first, other = tmp_path / "one", tmp_path / "other"
    name = kept(first, finished(first))
    push(first, afar)
    record = record_file(first, name).read_bytes()
    afar.put_bytes(f"{OWN}/evil.lock.json", record.replace(name.encode(), b"../../evil"))
    pull(afar, other)
    assert not list(tmp_path.glob("evil*"))


def test_a_pull_replaces_unfinished_entries_but_not_locked_ones(afar: Storage, tmp_path: Path) -> None:
    """Empty entries and failures are replaced."""
    first, other = tmp_path / "one", tmp_path / "other"
    keys = [str(digit) * 20 for digit in range(1, 5)]
    for key in keys:
        finished(first, key)
    push(first, afar)
    graph(other, keys[0], **{"model.hlo_module.pb": "graph"})
    graph(other, keys[1], **{"model.log": "neuronx-cc failed with 70"})
    graph(other, keys[2], **{"model.hlo_module.pb.lock": ""})
    pull(afar, other)
    finished_here = [entry.key for entry in read_entries(other) if entry.state is EntryState.SUCCESS]
    assert finished_here == [keys[0], keys[1], keys[3]]


def test_a_pull_selects_graphs_by_record_or_compiler(afar: Storage, tmp_path: Path) -> None:
    """A cache has graphs of many models and compiler versions."""
    first = tmp_path / "one"
    own = finished(first)
    finished(first, "22222222222222222222")
    finished(first, "33333333333333333333", compiler=NEWER)
    name = kept(first, own)
    push(first, afar)
    assert pull(afar, tmp_path / "by record", record=name, compiler=COMPILER).entries == (
        f"{own.parent.name}/{own.name}",
    )
    by_compiler = pull(afar, tmp_path / "by compiler", record="0" * 20, compiler=COMPILER)
    assert len(by_compiler.entries) == 2
    assert len(pull(afar, tmp_path / "all").entries) == 3


def test_a_record_is_synced_only_with_all_its_graphs(afar: Storage, tmp_path: Path) -> None:
    """Records of failures are not pushed."""
    here, other = tmp_path / "one", tmp_path / "other"
    first, second = finished(here), finished(here, "22222222222222222222")
    kept(here, first, second)
    (second / "model.done").unlink()
    failed = record_of({"engine": "x"}, failed=("neuronxcc-1/MODULE_a+b",))
    write_record(record_file(here, failed.name), failed)
    assert push(here, afar).records == ()
    (second / "model.done").touch()
    assert len(push(here, afar).records) == 1
    assert len(pull(afar, other, compiler=NEWER).records) == 0  # none of its graphs came
    assert len(pull(afar, other).records) == 1


def test_concurrent_pulls_fetch_each_entry_once(afar: Storage, tmp_path: Path) -> None:
    """The later ones wait, and find all entries."""
    first = tmp_path / "one"
    for digit in range(1, 4):
        finished(first, str(digit) * 20)
    push(first, afar)
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda _: len(pull(afar, tmp_path / "other").entries), range(4)))
    assert sorted(got) == [0, 0, 0, 3]


# Deaths


def process(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )


def line(of: subprocess.Popen[str]) -> str:
    assert of.stdout is not None
    return of.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=DEADLINE_S)


@pytest.mark.slow
def test_a_killed_pull_leaves_no_partial_entry(bucket: str, proxy: FaultProxy, tmp_path: Path) -> None:
    """The next pull fetches the rest, without waiting for the dead process."""
    here, other = tmp_path / "one", tmp_path / "other"
    finished(here, "1" * 20, neff="x" * 200_000)
    push(here, storage_at(bucket))
    key = f"cache/neuronxcc-{COMPILER}/MODULE_{'1' * 20}+{FLAGS}/model.neff"
    held = proxy.hold(key, 100_000)
    first = process(PULL, bucket, str(other))
    assert line(first) == "begins"
    assert held.reached.wait(DEADLINE_S)
    assert entries(other) == {}
    kill(first)
    proxy.heal()
    second = process(PULL, bucket, str(other))
    assert line(second) == "begins"
    assert line(second) == "1"
    second.communicate(timeout=DEADLINE_S)
    assert entries(other) == entries(here)
    assert not (other / OWN / graph_sync.INCOMING).exists()


@pytest.mark.slow
def test_a_killed_push_leaves_no_finished_entry(bucket: str, tmp_path: Path) -> None:
    """Other hosts do not pull it, and the next push completes it."""
    here, other = tmp_path / "one", tmp_path / "other"
    finished(here)
    first = process(PUSH, bucket, str(here))
    assert line(first) == "holds"
    kill(first)
    assert any(name.endswith("model.neff") for name in names(storage_at(bucket)))
    assert pull(storage_at(bucket), other).entries == ()
    assert len(push(here, storage_at(bucket)).entries) == 1
    assert len(pull(storage_at(bucket), other).entries) == 1
    assert entries(other) == entries(here)


def test_leftovers_of_a_killed_push_are_not_entries(tmp_path: Path) -> None:
    """They are in a staging folder, and are removed after a day."""
    first, afar = tmp_path / "one", tmp_path / "afar"
    finished(first)
    stray = afar / OWN / f"{storage.STAGED}dead"
    stray.mkdir(parents=True)
    (stray / "model.neff").write_text("half")
    assert pull(FolderStorage(afar), tmp_path / "other").entries == ()
    os.utime(stray, (1e9, 1e9))
    push(first, FolderStorage(afar))
    assert not stray.exists()
    assert {file for file in entries(afar) if "corewright." not in file} == set(entries(first))


# Denials


@pytest.mark.slow
def test_a_missing_permission_names_the_action_and_the_key(bucket: str, proxy: FaultProxy, tmp_path: Path) -> None:
    """For listing, reading and writing."""
    finished(tmp_path / "one")
    push(tmp_path / "one", storage_at(bucket))
    proxy.answer(403, "AccessDenied", methods=("PUT",))
    finished(tmp_path / "one", "2" * 20)
    with pytest.raises(SourceError, match=r"s3:PutObject.*MODULE_2222") as write:
        push(tmp_path / "one", storage_at(bucket))
    proxy.heal()
    proxy.answer(403, "AccessDenied", key=f"cache/neuronxcc-{COMPILER}/MODULE_cd73c69136bf675613f6+{FLAGS}/model.neff")
    with pytest.raises(SourceError, match=r"s3:GetObject.*MODULE_cd73") as read:
        pull(storage_at(bucket), tmp_path / "other")
    proxy.heal()
    assert [write.value.id, read.value.id] == ["s3-denied"] * 2
    assert entries(tmp_path / "other") == {}


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    """It is not taken for an empty cache."""
    with pytest.raises(SourceError, match="neff-cache-unreadable"):
        pull(FolderStorage(tmp_path / "away"), tmp_path / "other")
    (tmp_path / "file").write_text("")
    finished(tmp_path / "one")
    afar = FolderStorage(tmp_path / "afar")
    (tmp_path / "afar").mkdir()
    (tmp_path / "afar" / OWN).write_text("a file is in the way")
    with pytest.raises(SourceError, match="neff-cache-unwritable"):
        push(tmp_path / "one", afar)


# Where a process is sent


def test_a_cache_in_s3_has_a_local_folder(tmp_path: Path) -> None:
    """The same for all models with that URL."""
    result = localized({"NEURON_COMPILE_CACHE_URL": "s3://neffs/chat"}, tmp_path)
    assert result is not None
    assert (result.location, result.why, result.path.parent) == ("s3://neffs/chat", "s3", tmp_path)
    again = localized({"NEURON_COMPILE_CACHE_URL": "s3://neffs/chat", "NEURON_CC_FLAGS": "-O1"}, tmp_path)
    other = localized({"NEURON_COMPILE_CACHE_URL": "s3://neffs/code"}, tmp_path)
    assert again == result
    assert other is not None
    assert other.path != result.path


@pytest.mark.parametrize("flags", ["--no_cache", "--cache_dir=s3://bucket/neffs -O1"])
def test_a_cache_in_the_compiler_flags_is_not_replaced(flags: str, tmp_path: Path) -> None:
    """The flags are part of the graphs' keys."""
    environment = {"NEURON_COMPILE_CACHE_URL": "s3://neffs/chat", "NEURON_CC_FLAGS": flags}
    assert localized(environment, tmp_path) is None


def test_a_local_folder_is_used_directly(tmp_path: Path) -> None:
    """Also if it does not exist yet; it is not created."""
    environment = {"NEURON_COMPILE_CACHE_URL": str(tmp_path / "a" / "neffs")}
    assert localized(environment, tmp_path / "keep") is None
    assert list(tmp_path.iterdir()) == []


def test_a_shared_folder_has_a_local_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers of other hosts are not visible, so stale locks cannot be detected."""
    mounts = [SimpleNamespace(mountpoint=str(tmp_path / "nfs"), fstype="nfs4")]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    environment = {"NEURON_COMPILE_CACHE_URL": str(tmp_path / "nfs")}
    result = localized(environment, tmp_path / "keep")
    assert isinstance(result, Localized)
    assert result.why == "shared"


def test_a_read_only_folder_has_a_local_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions do not show a read-only mount."""
    make = tempfile.mkstemp

    def refused(*args: Any, **kwargs: Any) -> Any:
        if Path(kwargs["dir"]) == tmp_path / "given":
            raise OSError(errno.EROFS, "Read-only file system")
        return make(*args, **kwargs)

    (tmp_path / "given").mkdir()
    monkeypatch.setattr(tempfile, "mkstemp", refused)
    result = localized({"NEURON_COMPILE_CACHE_URL": str(tmp_path / "given")}, tmp_path / "keep")
    assert isinstance(result, Localized)
    assert result.why == "read-only"


def test_a_stopped_pull_leaves_no_partial_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises Stopped."""
    finished(tmp_path / "one")
    push(tmp_path / "one", FolderStorage(tmp_path / "one"))

    def stopped(self: FolderStorage, files: Any, folder: Path, stop: threading.Event) -> None:
        (folder / files[0].name).parent.mkdir(parents=True)
        raise SourceError("neff-cache-unreadable", "the disk is gone")

    monkeypatch.setattr(FolderStorage, "fetch", stopped)
    with pytest.raises(SourceError):
        pull(FolderStorage(tmp_path / "one"), tmp_path / "other")
    assert entries(tmp_path / "other") == {}


# What is not as it was compiled


def test_damaged_graphs_are_not_pushed(afar: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their NEFF does not match the record; the others are pushed."""
    first = tmp_path / "one"
    bad, good = finished(first), finished(first, "2" * 20)
    kept(first, bad, good)
    (bad / "model.neff").write_text("NEfF")
    assert push(first, afar).entries == (f"{good.parent.name}/{good.name}",)
    assert f"/{bad.name} to " in caplog.text


@pytest.mark.parametrize("told_by", ["sender", "record"])
def test_damaged_remote_graphs_are_not_pulled(either: Storage, tmp_path: Path, told_by: str) -> None:
    """By the digest of the marker file or of the record; the next push replaces them."""
    first, other, third = tmp_path / "one", tmp_path / "other", tmp_path / "third"
    folder = finished(first)
    name = kept(first, folder)
    push(first, either)
    graph_name = f"{folder.parent.name}/{folder.name}"
    either.put_bytes(f"{graph_name}/model.neff", b"NEfF")
    if told_by == "record":
        (digest,) = (file for file in names(either) if graph_sync.DIGEST in file)
        _delete(either, digest)
    got = pull(either, other, record=name)
    assert (got.entries, got.records, entries(other)) == ((), (), {})
    kept(other, finished(other, neff="compiled anew"))
    assert push(other, either).entries == (graph_name,)
    assert pull(either, third, record=name).entries == (graph_name,)
    assert entries(third) == entries(other)


def _delete(place: Storage, file: str) -> None:
    if isinstance(place, FolderStorage):
        (Path(place.url) / file).unlink()
    else:
        Bucket.of(place.url).delete(file)


# Several hosts at once


def test_a_push_keeps_a_graph_that_another_host_finished_first(
    either: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After this push has listed the cache."""
    first, other, third = tmp_path / "one", tmp_path / "other", tmp_path / "third"
    finished(first, neff="of one")
    finished(other, neff="of the other")
    listed = type(either).files

    def late(place: Any) -> Any:
        result = listed(place)
        monkeypatch.setattr(type(either), "files", listed)
        assert len(push(first, either).entries) == 1
        return result

    monkeypatch.setattr(type(either), "files", late)
    assert push(other, either).entries == ()
    pull(either, third)
    assert entries(third) == entries(first)


@pytest.mark.slow
def test_a_graph_replaced_during_a_pull_is_pulled_again(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host has pushed it since the listing."""
    first, other = tmp_path / "one", tmp_path / "other"
    folder = finished(first, neff="of one")
    place = storage_at(bucket)
    push(first, place)
    (folder / "model.neff").write_text("another")
    name = f"{folder.parent.name}/{folder.name}"
    listed = storage.BucketStorage.files

    def replaced(place: Any) -> Any:
        result = listed(place)
        monkeypatch.setattr(storage.BucketStorage, "files", listed)
        place.put_bytes(f"{name}/{graph_sync.DIGEST}{part_of(folder / 'model.neff').digest}", b"")
        place.put(f"{name}/model.neff", folder / "model.neff")
        return result

    monkeypatch.setattr(storage.BucketStorage, "files", replaced)
    assert pull(place, other).entries == (name,)
    assert entries(other) == entries(first)


@pytest.mark.parametrize("age_s", [60.0, 2 * storage.STRAY_S])
def test_a_push_keeps_entries_that_are_being_compiled(tmp_path: Path, age_s: float) -> None:
    """A lock older than a day is stale."""
    first, afar = tmp_path / "one", tmp_path / "afar"
    finished(first)
    lock = graph(afar, **{"model.hlo_module.pb.lock": ""}) / "model.hlo_module.pb.lock"
    at = time.time() - age_s
    os.utime(lock, (at, at))
    assert len(push(first, FolderStorage(afar)).entries) == (0 if age_s == 60.0 else 1)
    assert lock.exists() == (age_s == 60.0)


def test_other_users_can_read_pushed_graphs_and_records(tmp_path: Path) -> None:
    """As far as the umask allows."""
    first, afar = tmp_path / "one", tmp_path / "afar"
    kept(first, finished(first))
    afar.mkdir()
    push(first, FolderStorage(afar))
    (tmp_path / "made").mkdir()
    (tmp_path / "written").touch()
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("made", "written")}
    assert {stat.S_IMODE(path.stat().st_mode) for path in afar.rglob("*")} == modes


def test_leftover_records_of_killed_pushes_are_removed(tmp_path: Path) -> None:
    """They are files, not folders."""
    first, afar = tmp_path / "one", tmp_path / "afar"
    finished(first)
    (afar / OWN).mkdir(parents=True)
    stray = afar / OWN / f"{storage.STAGED}dead"
    stray.write_text("half")
    os.utime(stray, (1e9, 1e9))
    push(first, FolderStorage(afar))
    assert not stray.exists()


def test_a_pull_does_not_wait_for_a_push(afar: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start is not delayed by an upload of gigabytes."""
    first = tmp_path / "one"
    finished(first)
    put = FolderStorage.put

    def while_it_is_sent(place: FolderStorage, *args: Any) -> None:
        monkeypatch.setattr(FolderStorage, "put", put)
        stop = threading.Event()
        timer = threading.Timer(DEADLINE_S, stop.set)
        timer.start()
        assert pull(afar, first, stop=stop).entries == ()
        timer.cancel()
        put(place, *args)

    monkeypatch.setattr(FolderStorage, "put", while_it_is_sent)
    assert len(push(first, afar).entries) == 1


def test_a_waiting_pull_is_logged_and_can_be_stopped(
    afar: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other one may take minutes."""
    stop = threading.Event()
    stop.set()
    (tmp_path / "other" / OWN).mkdir(parents=True)
    caplog.set_level("INFO")
    with file_lock.exclusive(tmp_path / "other" / OWN / graph_sync.PULLING), pytest.raises(Stopped):
        pull(afar, tmp_path / "other", stop=stop)
    assert f"waiting for another process that syncs {tmp_path / 'other'}" in caplog.text
