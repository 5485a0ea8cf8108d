"""What a host keeps of its models is whole, verified, there once, and fetched once."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from blake3 import blake3

from tests.workers.fake_remote import DEADLINE_S, ROOT, FakeRemote, Fetcher
from workers.artifacts.fetch.progress import Progress
from workers.artifacts.sources.listing import Listing, SourceError, Stopped
from workers.artifacts.sources.open_source import SourceQuery
from workers.artifacts.store import manifest
from workers.artifacts.store.artifact_uses import using
from workers.artifacts.store.contents import digest_of
from workers.artifacts.store.eviction import DiskRoom
from workers.artifacts.store.manifest import OURS, WHOLE, Artifact
from workers.artifacts.store.store import Store
from workers.host import file_lock, lifetime

BIG = "sub/model-2.safetensors"
FILES = {"config.json": b"{}", "model-1.safetensors": b"a" * 200_000, BIG: os.urandom(300_000)}
OTHER = {"config.json": b"{}", "weights.safetensors": os.urandom(250_000)}
Fetchers = Callable[..., Fetcher]


@pytest.fixture
def fetcher() -> Iterator[Fetchers]:
    """Starts processes that fetch; kills them after the test."""
    with contextlib.ExitStack() as stack:

        def start(*args: object, **kwargs: object) -> Fetcher:
            made = Fetcher(*args, **kwargs)  # type: ignore[arg-type]
            stack.callback(made.end)
            return made

        yield start


def content(artifact: Artifact) -> dict[str, bytes]:
    """Returns the contents of the files in the artifact's folder, by name."""
    folder = Path(artifact.folder)
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in OURS]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def assert_sound(store: Store, keys: set[str] | None = None) -> None:
    """Asserts that every artifact matches its manifest, without unused contents or unfinished fetches."""
    used = set()
    for artifact in store.artifacts():
        recorded = {name: (file.size, file.digest) for name, file in artifact.files.items()}
        assert {name: (path.stat().st_size, digest_of(path)) for name, path in files(artifact).items()} == recorded
        used |= set(digests(artifact).values())
    assert {path.name for path in (store.root / "blobs").iterdir()} == used
    result = {path.name for path in (store.root / "artifacts").iterdir()}
    assert result == {artifact.key for artifact in store.artifacts()}
    assert keys is None or result == keys


def digests(artifact: Artifact) -> dict[str, str]:
    return {name: file.digest for name, file in artifact.files.items()}


def files(artifact: Artifact) -> dict[str, Path]:
    return {name: Path(artifact.folder) / name for name in content(artifact)}


def failure(work: Callable[[], object]) -> str:
    """Returns the id of the SourceError that ``work`` raises."""
    with pytest.raises(SourceError) as error:
        work()
    return error.value.id


def flip(path: Path) -> None:
    """Flips one bit of the file in place, also for its other hard links."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


# Whole, and once


def test_an_artifact_has_the_names_and_contents_of_its_source(tmp_path: Path) -> None:
    """Subfolders included."""
    store = Store(tmp_path)
    artifact = store.get(FakeRemote(FILES))
    assert content(artifact) == FILES
    assert artifact.bytes == sum(map(len, FILES.values()))
    assert_sound(store, {artifact.key})


def test_a_second_load_transfers_nothing(tmp_path: Path) -> None:
    """Complete artifacts are not fetched again, also by another store on the same folder."""
    first, second, progress = FakeRemote(FILES), FakeRemote(FILES), Progress("s3://models/one")
    artifact = Store(tmp_path).get(first)
    again = Store(tmp_path).get(second, progress)
    assert (again.key, again.folder, again.fetched_at) == (artifact.key, artifact.folder, artifact.fetched_at)
    assert second.moved == []
    assert progress.moved == 0
    assert (progress.status().phase, progress.status().done) == ("done", artifact.bytes)


def test_the_newest_artifact_is_found_without_a_request(tmp_path: Path) -> None:
    """`newest` returns the newest one of a source, or the one of a revision."""
    store = Store(tmp_path)
    first = store.get(FakeRemote(FILES, revision="1"))
    newer = store.get(FakeRemote({**FILES, "config.json": b"[]"}, revision="2"))
    result = [store.newest("s3://models/one"), store.newest("s3://models/one", "1"), store.newest("s3://models/other")]
    assert [item.key if item else None for item in result] == [newer.key, first.key, None]


def test_a_commit_that_changes_no_file_is_the_same_artifact(tmp_path: Path) -> None:
    """Both commits find it, and nothing is fetched."""
    store = Store(tmp_path)
    first, same = store.get(FakeRemote(FILES, revision="1")), FakeRemote(FILES, revision="2")
    assert (store.get(same).folder, store.get(same).revision, same.moved) == (first.folder, "2", [])
    assert [store.newest("s3://models/one", commit) for commit in "123"] == [
        *store.artifacts(),
        *store.artifacts(),
        None,
    ]
    store.get(FakeRemote(FILES, revision="1"))
    assert store.artifacts()[0].earlier == ("2",)


def test_equal_files_exist_once(tmp_path: Path) -> None:
    """Two sources with a common file share one copy of it."""
    store = Store(tmp_path)
    artifact = store.get(FakeRemote(FILES))
    other = store.get(FakeRemote({**FILES, "config.json": b"[]"}, "s3://models/other"))
    assert (Path(artifact.folder) / BIG).samefile(Path(other.folder) / BIG)
    assert_sound(store)


@pytest.mark.parametrize(("checksums", "source"), [(False, "s3://models/one"), (True, "org/other")])
def test_only_changed_files_of_a_new_version_are_fetched(tmp_path: Path, checksums: bool, source: str) -> None:
    """Files with the same tag at the same source, or the same sha256 at any source, are linked."""
    store = Store(tmp_path)
    store.get(FakeRemote(FILES, checksums=checksums))
    newer = FakeRemote({**FILES, "config.json": b"[1]"}, source, checksums=checksums)
    assert content(store.get(newer)) == newer.files
    assert newer.moved == ["config.json"]
    assert_sound(store)


def test_equal_tags_of_different_sources_are_not_equal_files(tmp_path: Path) -> None:
    """Tags are compared within a source only."""
    store = Store(tmp_path)
    store.get(FakeRemote(FILES))
    other = FakeRemote({**FILES, "config.json": b"[1]"}, "s3://models/other")
    store.get(other)
    assert sorted(other.moved) == sorted(FILES)


def test_a_copy_of_a_store_can_be_a_source(tmp_path: Path) -> None:
    """Its manifest is not fetched: the artifact is incomplete during the fetch."""
    store, seen = Store(tmp_path), list[int]()
    theirs = msgspec.json.encode(manifest.Manifest(source="s3://x", files={}, fetched_at=0, fetch_s=0, boot="b"))
    files = {"config.json": b"{}", "model.safetensors": b"w"}
    remote = FakeRemote({**files, WHOLE: theirs}, before=lambda name: seen.append(len(store.artifacts())))
    assert content(store.get(SourceQuery(source=remote.source).select(remote))) == files
    assert seen == [0, 0]


@pytest.mark.parametrize("name", ["../out", "/etc/passwd", "a/../../out", "a//b"])
def test_names_that_lead_out_of_the_folder_are_rejected(tmp_path: Path, name: str) -> None:
    """Nothing is written."""
    assert failure(lambda: Store(tmp_path / "store").get(FakeRemote({name: b""}))) == "name-unsafe"
    assert not (tmp_path / "store").exists()


# Together


def test_two_threads_fetch_an_artifact_once(tmp_path: Path) -> None:
    """The second one waits, shows the phase `waiting`, and transfers nothing."""
    store, requested, go = Store(tmp_path), threading.Event(), threading.Event()

    def before(name: str) -> None:
        requested.set()
        assert go.wait(DEADLINE_S)

    first, second, waiter = FakeRemote(FILES, before=before), FakeRemote(FILES), Waiting(go)
    with ThreadPoolExecutor(2) as pool:
        fetch = pool.submit(store.get, first)
        assert requested.wait(DEADLINE_S)
        other = pool.submit(store.get, second, waiter)
        assert fetch.result().key == other.result().key
    assert (sorted(first.moved), second.moved, waiter.moved) == (sorted(FILES), [], 0)
    assert_sound(store)


class Waiting(Progress):
    """Sets the event when the fetch waits for another."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__("s3://models/one")
        self.event = event

    def enter(self, phase: str) -> None:
        super().enter(phase)
        if phase == "waiting":
            self.event.set()


def test_two_processes_fetch_an_artifact_once(tmp_path: Path, fetcher: Fetchers) -> None:
    """As among threads."""
    first = fetcher(tmp_path, FILES, gate=BIG)
    assert first.line() == "gate"
    second = fetcher(tmp_path, FILES)
    assert second.line() == "waiting"
    first.go_on()
    result = json.loads(first.line()), json.loads(second.line())
    assert [sorted(item["moved"]) for item in result] == [sorted(FILES), []]
    assert_sound(Store(tmp_path))


def test_a_waiting_fetch_can_be_stopped(tmp_path: Path, fetcher: Fetchers) -> None:
    """Before the other fetch ends."""
    first = fetcher(tmp_path, FILES, gate=BIG)
    assert first.line() == "gate"
    stop = threading.Event()
    with pytest.raises(Stopped):
        Store(tmp_path).get(FakeRemote(FILES), Waiting(stop), stop)


def test_a_waiting_process_takes_over_from_a_killed_one(tmp_path: Path, fetcher: Fetchers) -> None:
    """Files that the killed process completed are kept."""
    first, waiting = fetcher(tmp_path, FILES, gate=BIG), threading.Event()
    assert first.line() == "gate"
    remote = FakeRemote(FILES)
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(Store(tmp_path).get, remote, Waiting(waiting))
        assert waiting.wait(DEADLINE_S)
        first.kill()
        assert content(got.result(DEADLINE_S)) == FILES
    assert remote.moved == [BIG]
    assert_sound(Store(tmp_path))


def test_a_stopped_fetch_is_resumed(tmp_path: Path) -> None:
    """Complete files are kept; meanwhile the artifact is incomplete."""
    store, stop = Store(tmp_path), threading.Event()
    with pytest.raises(Stopped):
        store.get(FakeRemote(FILES, before=lambda name: stop.set() if name == BIG else None), None, stop)
    assert store.artifacts() == ()
    remote = FakeRemote(FILES)
    store.get(remote)
    assert remote.moved == [BIG]
    assert_sound(store)


# Killed at any moment


TINY = {"config.json": b"{}", "sub/a.safetensors": b"a" * 1000, "b.safetensors": b"b" * 1000}
# Its children fetch, each in a store of its own; the n-th is killed before its store changes the disk the n-th time.
KILLED = f"""
import os, signal, sys
from pathlib import Path
from tests.workers.fake_remote import FakeRemote
from workers.artifacts.store.store import Store

CHANGES = {{"os.link", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod"}}

def fetch(root, left):
    def hook(event, args):
        nonlocal left
        wrote = event == "open" and isinstance(args[1], str) and "r" not in args[1]
        if (event in CHANGES or wrote) and root in " ".join(map(str, args)):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    store = Store(Path(root), budget=3000, grace_s=0)
    sys.addaudithook(hook)
    store.get(FakeRemote({{"config.json": b"{{}}", "b.safetensors": b"b" * 1000, "c": b"c" * 500}}, "s3://models/old"))
    store.get(FakeRemote({TINY!r}))
    store.get(FakeRemote({{"config.json": b"{{}}", "d": b"d" * 2500}}, "s3://models/new"))

step, status = 0, signal.SIGKILL
while status == signal.SIGKILL:
    step += 1
    if not (child := os.fork()):
        fetch(f"{{sys.argv[1]}}/{{step}}/store", step)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
print(step, status)
"""


@pytest.mark.slow
def test_a_kill_at_any_step_leaves_only_complete_artifacts(tmp_path: Path) -> None:
    """SIGKILL before each change of the disk while fetching, publishing and evicting; the store works afterwards."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    steps, status = map(int, ended.stdout.split())
    assert (steps > 90, status) == (True, 0), ended.stderr
    for step in range(1, steps + 1):
        store = Store(tmp_path / str(step) / "store", budget=3000, grace_s=0)
        for artifact in store.artifacts():
            assert store.verify(artifact.key) == []
        assert content(store.get(FakeRemote(TINY))) == TINY
        store.prune(keep=["s3://models/one"])
        assert_sound(store)


# Damaged


def test_verify_finds_a_flipped_bit_and_its_file_is_fetched_again(tmp_path: Path) -> None:
    """The artifact is incomplete until then."""
    store = Store(tmp_path)
    artifact = store.get(FakeRemote(FILES))
    flip(Path(artifact.folder) / BIG)
    assert store.verify(artifact.key) == [BIG]
    assert store.newest("s3://models/one") is None
    remote = FakeRemote(FILES)
    assert content(store.get(remote)) == FILES
    assert remote.moved == [BIG]
    assert_sound(store)


def test_damaged_content_is_removed_from_every_artifact(tmp_path: Path) -> None:
    """It is one file with several hard links."""
    store = Store(tmp_path)
    artifact = store.get(FakeRemote(FILES))
    other = FakeRemote({**FILES, "config.json": b"[]"}, "s3://models/other")
    store.get(other)
    flip(Path(artifact.folder) / BIG)
    store.verify(artifact.key)
    assert store.artifacts() == ()
    other.moved.clear()
    assert content(store.get(other)) == other.files
    assert other.moved == [BIG]


@pytest.mark.parametrize("damage", [flip, lambda path: os.truncate(path, 7), Path.unlink])
def test_linked_content_is_verified_before_it_is_used(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Damage is found when the next version of the source shares the file."""
    store = Store(tmp_path, grace_s=0)
    first = store.get(FakeRemote(FILES))
    damage(Path(first.folder) / BIG)
    newer = FakeRemote({**FILES, "config.json": b"[]"})
    assert content(store.get(newer)) == newer.files
    store.prune(keep=[artifact.key for artifact in store.artifacts()])
    assert_sound(store)


def test_fetched_content_replaces_a_damaged_copy(tmp_path: Path) -> None:
    """Fetched content has just been verified."""
    store = Store(tmp_path)
    first = store.get(FakeRemote(FILES))
    flip(Path(first.folder) / BIG)
    other = FakeRemote(FILES, "s3://models/other")
    assert content(store.get(other)) == FILES
    assert [artifact.source for artifact in store.artifacts()] == ["s3://models/other"]
    store.prune(keep=["s3://models/other"])
    assert_sound(store)


def test_a_truncated_file_is_fetched_again(tmp_path: Path) -> None:
    """Each load checks the sizes."""
    store = Store(tmp_path)
    artifact = store.get(FakeRemote(FILES))
    os.truncate(Path(artifact.folder) / BIG, 5)
    assert store.artifacts() == ()
    remote = FakeRemote(FILES)
    assert content(store.get(remote)) == FILES
    assert remote.moved == [BIG]


def test_a_source_that_sends_less_than_it_lists_fails_the_fetch(tmp_path: Path) -> None:
    """No artifact is complete afterwards."""
    remote, store = FakeRemote(FILES), Store(tmp_path)
    listing = remote.listing()
    remote.listing = lambda: listing  # type: ignore[method-assign]
    remote.files[BIG] = FILES[BIG][:-1]
    assert failure(lambda: store.get(remote)) == "store-incomplete"
    assert store.artifacts() == ()


def after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a reboot of the machine."""
    monkeypatch.setattr(lifetime, "boot", lambda: "another boot")


def test_after_a_reboot_contents_are_verified_before_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only lost files are fetched again; verified ones are trusted until the next reboot."""
    store, remote = Store(tmp_path), FakeRemote(FILES)
    artifact = store.get(remote)
    flip(Path(artifact.folder) / BIG)  # with its old size, as after a lost write
    after_a_crash(monkeypatch)
    remote.moved.clear()
    assert content(store.get(remote)) == FILES
    assert remote.moved == [BIG]
    monkeypatch.setattr(store, "_verified", None)
    store.get(remote)


def unreadable(path: Path, stopped: Callable[[], bool] = lambda: False) -> str:
    """Fails like a disk with a bad sector for files whose mtime is 0."""
    if path.stat().st_mtime == 0:
        raise OSError(errno.EIO, "Input/output error", str(path))
    return digest_of(path, stopped)


@pytest.mark.parametrize("when", ["whole", "linked from another"])
def test_unreadable_files_are_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """A bad sector counts as damage, not as missing permissions."""
    store, remote = Store(tmp_path), FakeRemote(FILES)
    artifact = store.get(remote)
    os.utime(Path(artifact.folder) / BIG, (0, 0))
    monkeypatch.setattr("workers.artifacts.store.contents.digest_of", unreadable)
    remote.moved.clear()
    if when == "whole":
        after_a_crash(monkeypatch)
    else:
        remote.files["config.json"] = b"[]"
    assert content(store.get(remote)) == remote.files
    assert remote.moved == ([BIG] if when == "whole" else ["config.json", BIG])


def test_verify_reports_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And verifies the others."""
    store = Store(tmp_path)
    artifact = store.get(FakeRemote(FILES))
    os.utime(Path(artifact.folder) / BIG, (0, 0))
    monkeypatch.setattr("workers.artifacts.store.contents.digest_of", unreadable)
    assert store.verify(artifact.key) == [BIG]


def test_after_a_reboot_an_unfinished_fetch_starts_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetcher: Fetchers
) -> None:
    """It is unknown what had reached the disk."""
    first = fetcher(tmp_path, FILES, gate=BIG)
    assert first.line() == "gate"
    first.kill()
    after_a_crash(monkeypatch)
    remote = FakeRemote(FILES)
    assert content(Store(tmp_path).get(remote)) == FILES
    assert sorted(remote.moved) == sorted(FILES)


# Room


def budget_for(*sources: dict[str, bytes]) -> int:
    return sum(len(data) for files in sources for data in files.values())


def test_the_artifact_that_is_cheapest_to_fetch_again_is_evicted(tmp_path: Path) -> None:
    """Of equal sizes, the slowly fetched one stays although it is older."""
    store = Store(tmp_path, budget=2100, grace_s=0)
    slow = FakeRemote({"a": b"a" * 1000}, "s3://models/slow")
    key = store.get(slow).key
    path = tmp_path / "artifacts" / key / WHOLE
    path.write_text(path.read_text().replace('"fetch_s":', '"fetch_s":99'))
    store.get(FakeRemote({"b": b"b" * 1000}, "s3://models/quick"))
    store.get(FakeRemote({"c": b"c" * 1000}, "s3://models/new"))
    assert sorted(artifact.source for artifact in store.artifacts()) == ["s3://models/new", "s3://models/slow"]
    assert_sound(store)


def test_of_equal_costs_the_least_recently_used_is_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load from the store is a use."""
    monkeypatch.setattr("workers.artifacts.store.store._whole_fetch_s", lambda size, moved, seconds: 1.0)
    store = Store(tmp_path, budget=2100, grace_s=0)
    remotes = [FakeRemote({"a": os.urandom(1000)}, f"s3://models/{name}") for name in ("first", "second", "third")]
    for remote in [*remotes[:2], remotes[0], remotes[2]]:
        store.get(remote)
    assert sorted(artifact.source for artifact in store.artifacts()) == ["s3://models/first", "s3://models/third"]


def test_an_expensive_unused_artifact_is_evicted_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each eviction raises the level that new artifacts start from; the store records it."""
    costs = iter([5.0, *[1.0] * 9])
    monkeypatch.setattr("workers.artifacts.store.store._whole_fetch_s", lambda size, moved, seconds: next(costs))
    for number in range(6):
        Store(tmp_path, budget=2100, grace_s=0).get(FakeRemote({"a": os.urandom(1000)}, f"s3://models/{number}"))
    assert Store(tmp_path).newest("s3://models/0") is None


def test_artifacts_in_use_are_never_removed(tmp_path: Path, fetcher: Fetchers) -> None:
    """The kernel releases the lock with the process that uses it."""
    user = fetcher(tmp_path, FILES, use=True)
    user.line()
    assert user.line() == "using"
    store = Store(tmp_path, budget=budget_for(FILES), grace_s=0)
    (artifact,) = store.artifacts()
    assert failure(lambda: store.get(FakeRemote(OTHER, "s3://models/other"))) == "store-full"
    assert failure(lambda: store.remove(artifact.key)) == "store-in-use"
    assert store.prune() == []
    assert content(artifact) == FILES
    user.kill()
    store.get(FakeRemote(OTHER, "s3://models/other"))
    assert [artifact.source for artifact in store.artifacts()] == ["s3://models/other"]
    assert_sound(store)


def test_an_artifact_that_is_being_fetched_is_never_removed(tmp_path: Path, fetcher: Fetchers) -> None:
    """It counts against the budget with its full size."""
    fetch = fetcher(tmp_path, FILES, gate="config.json")
    assert fetch.line() == "gate"
    store = Store(tmp_path, budget=budget_for(FILES, OTHER) - 1, grace_s=0)
    assert failure(lambda: store.get(FakeRemote(OTHER, "s3://models/other"))) == "store-full"
    assert store.prune() == []
    fetch.go_on()
    assert json.loads(fetch.line())["moved"]
    assert_sound(store)


def test_a_just_returned_artifact_is_not_evicted(tmp_path: Path) -> None:
    """The process that will use it has not locked it yet."""
    store = Store(tmp_path, budget=budget_for(FILES))
    store.get(FakeRemote(FILES))
    assert failure(lambda: store.get(FakeRemote(OTHER, "s3://models/other"))) == "store-full"


def test_a_just_returned_artifact_is_not_pruned(tmp_path: Path) -> None:
    """Also if the clock is set back meanwhile."""
    store = Store(tmp_path, grace_s=1000)
    artifact = store.get(FakeRemote(FILES))
    assert store.prune() == []
    use = tmp_path / "locks" / f"{artifact.key}.use"
    use.write_text(f"{time.time() + 500:<20.6f} 0.0\n")
    assert store.prune() == []
    store.remove(artifact.key)
    assert store.artifacts() == ()


def test_an_artifact_that_comes_into_use_during_an_eviction_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was chosen a moment before."""
    budget = budget_for(FILES)
    old = Store(tmp_path, budget=budget, grace_s=0).get(FakeRemote(FILES))
    use = tmp_path / "locks" / f"{old.key}.use"
    path = Path(old.folder) / WHOLE
    path.write_text(path.read_text().replace(f'"fetched_at":{old.fetched_at}', '"fetched_at":1.0'))
    use.write_text(f"{1.0:<20.6f} 0.0\n")
    store, remove, got = Store(tmp_path, budget=budget), DiskRoom.remove, list[str]()

    def late(room: DiskRoom, key: str, **how: bool) -> bool:
        got.append(Store(tmp_path).get(FakeRemote(FILES)).folder)
        return remove(room, key, **how)

    monkeypatch.setattr(DiskRoom, "remove", late)
    assert failure(lambda: store.get(FakeRemote(OTHER, "s3://models/other"))) == "store-full"
    with using(got[0]):
        assert got == [old.folder]


def test_the_newest_artifact_is_the_last_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the clock was set back in between."""
    store, now = Store(tmp_path), time.time()
    store.get(FakeRemote(FILES))
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    newer = store.get(FakeRemote({**FILES, "config.json": b"[]"}))
    result = store.newest("s3://models/one")
    assert result is not None
    assert result.key == newer.key


def test_an_artifact_larger_than_the_budget_is_rejected_at_once(tmp_path: Path) -> None:
    """The error names the sizes; nothing is fetched or removed."""
    store = Store(tmp_path, budget=budget_for(OTHER), grace_s=0)
    artifact = store.get(FakeRemote(OTHER))
    remote = FakeRemote(FILES, "s3://models/large")
    with pytest.raises(SourceError, match=r"s3://models/large needs 500.0 kB; .* of 250.0 kB .store_bytes."):
        store.get(remote)
    assert remote.moved == []
    assert_sound(store, {artifact.key})


def test_leftovers_of_dead_fetches_are_evicted_first(tmp_path: Path, fetcher: Fetchers) -> None:
    """Even if all other artifacts are cheap."""
    dead = fetcher(tmp_path, FILES, gate=BIG)
    assert dead.line() == "gate"
    dead.kill()
    store = Store(tmp_path, budget=budget_for(OTHER) + 100_000, grace_s=0)
    small = store.get(FakeRemote({"a": b"a" * 1000}, "s3://models/small"))
    other = store.get(FakeRemote(OTHER, "s3://models/other"))
    assert_sound(store, {small.key, other.key})


def test_leftovers_of_an_older_version_go_with_the_next_fetch(tmp_path: Path, fetcher: Fetchers) -> None:
    """They would not be resumed."""
    dead = fetcher(tmp_path, FILES, gate=BIG)
    assert dead.line() == "gate"
    dead.kill()
    store = Store(tmp_path)
    newer = store.get(FakeRemote({**FILES, BIG: b"new"}))
    assert_sound(store, {newer.key})


def test_prune_keeps_named_artifacts(tmp_path: Path, fetcher: Fetchers) -> None:
    """Named by key or by source; leftovers of dead fetches and unused contents are removed."""
    dead = fetcher(tmp_path, FILES, gate=BIG)
    assert dead.line() == "gate"
    dead.kill()
    store = Store(tmp_path, grace_s=0)
    artifact = {name: store.get(FakeRemote({"a": name.encode()}, f"s3://models/{name}")) for name in ("k", "s", "gone")}
    (tmp_path / "blobs" / "0").write_text("of an artifact that was removed by a process that died in between")
    assert [item.source for item in store.prune(keep=[artifact["k"].key, "s3://models/s"])] == ["s3://models/gone"]
    assert_sound(store, {artifact["k"].key, artifact["s"].key})


def test_removing_an_artifact_keeps_shared_contents(tmp_path: Path) -> None:
    """Removing a missing artifact is an error."""
    store = Store(tmp_path)
    first, other = store.get(FakeRemote(FILES)), store.get(FakeRemote(FILES, "s3://models/other"))
    store.remove(first.key)
    assert content(other) == FILES
    assert_sound(store, {other.key})
    assert failure(lambda: store.remove(first.key)) == "store-gone"
    assert failure(lambda: store.verify(first.key)) == "store-gone"


@pytest.mark.parametrize("key", ["", ".", "../victim", "../../victim"])
def test_malformed_keys_remove_nothing(tmp_path: Path, key: str) -> None:
    """They could name all artifacts, or another folder."""
    store = Store(tmp_path / "store")
    artifact = store.get(FakeRemote(FILES))
    for victim in (tmp_path / "victim", tmp_path / "store" / "victim"):
        victim.mkdir()
    assert failure(lambda: store.remove(key)) == "store-gone"
    assert failure(lambda: store.verify(key)) == "store-gone"
    assert store.artifacts()[0].key == artifact.key
    assert len(list(tmp_path.rglob("victim"))) == 2


def test_locks_of_removed_artifacts_are_removed(tmp_path: Path) -> None:
    """Else their number would grow without bound."""
    store = Store(tmp_path, grace_s=0)
    removed = store.get(FakeRemote(FILES, "s3://models/removed"))
    artifact = store.get(FakeRemote(FILES))
    store.remove(removed.key)
    with pytest.raises(SourceError), using(removed.folder):
        pass
    store.prune(keep=[artifact.key])
    assert {path.name for path in (tmp_path / "locks").iterdir()} == {
        "room",
        f"{artifact.key}.flight",
        f"{artifact.key}.use",
    }


def test_a_waiter_for_a_removed_lock_file_locks_the_next_one(tmp_path: Path) -> None:
    """Else two waiters could hold the lock exclusively."""
    path, waits, holds, done = tmp_path / "lock", threading.Event(), threading.Event(), threading.Event()

    def second() -> None:
        with file_lock.exclusive(path, None, waits.set):
            holds.set()
            done.wait(DEADLINE_S)

    thread = threading.Thread(target=second)
    with file_lock.exclusive(path):
        thread.start()
        assert waits.wait(DEADLINE_S)
        path.unlink()
    assert holds.wait(DEADLINE_S)
    with file_lock.try_exclusive(path) as free:
        assert not free
    done.set()
    thread.join(DEADLINE_S)


def test_a_lock_is_released_despite_a_forked_child(tmp_path: Path) -> None:
    """The child has the descriptor open, too."""
    with file_lock.exclusive(tmp_path / "lock") as lock:
        childs = os.dup(lock)
    try:
        assert not file_lock.is_locked(tmp_path / "lock")
    finally:
        os.close(childs)


def test_a_silent_source_does_not_delay_a_stop(tmp_path: Path) -> None:
    """It may be silent until its retry deadline."""
    requested, stop, answer = threading.Event(), threading.Event(), threading.Event()

    class Silent(FakeRemote):
        def listing(self) -> Listing:
            requested.set()
            assert answer.wait(DEADLINE_S)
            return super().listing()

    threading.Thread(target=lambda: requested.wait(DEADLINE_S) and stop.set()).start()
    with pytest.raises(Stopped):
        Store(tmp_path).get(Silent(FILES), None, stop)
    assert not answer.is_set()
    answer.set()


def test_a_removed_artifact_cannot_be_used(tmp_path: Path) -> None:
    """`using` raises instead of a load that reads half a model."""
    store = Store(tmp_path)
    artifact = store.get(FakeRemote(FILES))
    store.remove(artifact.key)
    with pytest.raises(SourceError, match="store-gone"), using(artifact.folder):
        pass


def test_folders_outside_a_store_can_be_used(tmp_path: Path) -> None:
    """No lock files are created there."""
    with using(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


# The disk


def test_a_full_disk_during_a_fetch_evicts_and_resumes(tmp_path: Path) -> None:
    """Other programs have used the free space."""
    store, failing = Store(tmp_path, grace_s=0), [True]
    store.get(FakeRemote(OTHER, "s3://models/other"))

    def full(name: str) -> None:
        if name == BIG and failing:
            failing.clear()
            with Path("/dev/full").open("wb", buffering=0) as file:
                file.write(b"x")

    remote = FakeRemote(FILES, before=full)
    artifact = store.get(remote)
    assert sorted(remote.moved) == sorted(FILES)
    assert_sound(store, {artifact.key})


def test_space_promised_to_other_fetches_is_not_free(
    tmp_path: Path, fetcher: Fetchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the disk still shows it as free."""
    fetch = fetcher(tmp_path, FILES, gate="config.json")
    assert fetch.line() == "gate"
    free = budget_for(FILES, OTHER) - 50_000
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=0, free=free))
    assert failure(lambda: Store(tmp_path).get(FakeRemote(OTHER, "s3://models/other"))) == "store-full"
    fetch.kill()
    Store(tmp_path).get(FakeRemote(OTHER, "s3://models/other"))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), SourceError("s3-disk-full", "no room")])
def test_a_disk_that_stays_full_fails_the_fetch(tmp_path: Path, error: Exception) -> None:
    """When nothing more can be evicted; complete files are kept."""
    store = Store(tmp_path, grace_s=0)
    store.get(FakeRemote(OTHER, "s3://models/other"))

    def full(name: str) -> None:
        if name == BIG:
            raise error

    assert failure(lambda: store.get(FakeRemote(FILES, before=full))) == "store-full"
    remote = FakeRemote(FILES)
    store.get(remote)
    assert remote.moved == [BIG]
    assert_sound(store)


# In a namespace of its own: a disk of 4 MB. Artifacts of 1.5 MB each; then somebody else takes what is left.
SMALL_DISK = """
import os, sys
from pathlib import Path
from tests.workers.fake_remote import FakeRemote
from workers.artifacts.sources.listing import SourceError
from workers.artifacts.store.store import Store

root = Path(sys.argv[1])
store = Store(root / "store", grace_s=0)

def of(name):
    return FakeRemote({"weights": name.encode() * 1_500_000}, name, before=lambda _: None)

def sources():
    return "".join(sorted(one.source for one in store.artifacts()))

for name in "abc":
    store.get(of(name))
told = [len(sources())]

def fill(name):
    remote.before = lambda _: None
    try:
        with (root / "filler").open("wb") as file:
            while True:
                file.write(b"x" * 65536)
                file.flush()
    except OSError:
        pass

remote = of("d")
remote.before = fill
store.get(remote)
told.append(sources())
try:
    store.get(FakeRemote({"weights": b"e" * 9_000_000}, "e"))
except SourceError as error:
    told.append(error.id)
told.append(sources())
print(*told)
"""


@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode != 0,
    reason="makes a file system of its own",
)
def test_without_a_budget_the_disk_is_the_limit(tmp_path: Path) -> None:
    """Room is made before a fetch, and when other programs fill the disk during one."""
    command = f'mount -t tmpfs -o size=4m none {tmp_path} && exec {sys.executable} -c "$SCRIPT" {tmp_path}'
    ended = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=os.environ | {"PYTHONPATH": str(ROOT), "SCRIPT": SMALL_DISK},
    )
    assert ended.stdout.split() == ["2", "d", "store-full", "d"], ended.stderr


# Runs without the rights of root, who may write everywhere.
UNPRIVILEGED = """
import ctypes, json, sys
from pathlib import Path
from tests.workers.fake_remote import FakeRemote
from workers.artifacts.sources.listing import SourceError
from workers.host.file_lock import is_locked
from workers.artifacts.store.store import Store
from workers.artifacts.store.artifact_uses import using

header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capset(header, none) == 0
store, told = Store(Path(sys.argv[1])), []
for text in ("ab", "xy"):
    remote = FakeRemote({"config.json": text[0].encode(), "weights": text[1].encode() * 1000})
    try:
        artifact = store.get(remote)
        with using(artifact.folder):
            names = sorted(path.name for path in Path(artifact.folder).iterdir())
            told.append([names, remote.moved, is_locked(store.root / "locks" / f"{artifact.key}.use")])
    except SourceError as error:
        told.append([error.id, str(store.root) in error.what])
print(json.dumps(told))
"""


@pytest.mark.parametrize("locks", ["there", "not there", "not there, after a crash"])
def test_a_read_only_store_serves_its_artifacts(tmp_path: Path, locks: str) -> None:
    """Fetching a missing one fails with an error that names the folder."""
    root = tmp_path / "store"
    artifact = Store(root).get(FakeRemote({"config.json": b"a", "weights": b"b" * 1000}))
    if locks != "there":
        for path in (root / "locks").iterdir():
            path.unlink()
    if "crash" in locks:
        path = Path(artifact.folder) / WHOLE
        path.write_text(path.read_text().replace(lifetime.boot(), "another boot"))
    folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
    for path in [*root.rglob("*"), root]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", UNPRIVILEGED, str(root)],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert ended.stdout, ended.stderr
        loaded, refused = json.loads(ended.stdout)
        assert loaded == [["config.json", WHOLE, "weights"], [], locks == "there"]
        assert refused == ["store-unwritable", True]
    finally:
        for path in folders:
            path.chmod(0o755)


# All at once


# Gets, reads, stops, prunes and verifies, in two threads, in a store that has room for a few artifacts only.
BUSY = """
import os, random, sys, threading, traceback
from pathlib import Path
from tests.workers.fake_remote import FakeRemote
from workers.artifacts.sources.listing import SourceError, Stopped
from workers.artifacts.store.store import Store
from workers.artifacts.store.artifact_uses import using

CONTENTS = [bytes([number]) * 1000 * (number + 1) for number in range(6)]

def get(store, random):
    source, stop = random.choice("abc"), threading.Event()
    chosen = __import__("random").Random(f"{source}{random.randrange(6)}")
    files = {name: chosen.choice(CONTENTS) for name in ("config.json", "x", "sub/y")}
    before = lambda name: stop.set() if random.random() < 0.03 else None
    artifact = store.get(FakeRemote(files, source, checksums=random.random() < 0.5, before=before), None, stop)
    with using(artifact.folder):
        for _ in range(2):
            assert {name: (Path(artifact.folder) / name).read_bytes() for name in files} == files
    if random.random() < 0.05:
        store.prune(keep="a")
    if random.random() < 0.05:
        assert [store.verify(one.key) for one in store.artifacts()[:1]] in ([], [[]])

def work(seed):
    chance = random.Random(f"{sys.argv[2]} {seed}")
    store = Store(Path(sys.argv[1]), budget=14_000, grace_s=0)
    for round in range(30):
        if seed == 0 and round == 10:
            print("at work", flush=True)
        try:
            get(store, chance)
        except Stopped:
            pass
        except SourceError as error:
            if error.id not in ("store-full", "store-gone"):
                traceback.print_exc()
                os._exit(1)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.slow
def test_concurrent_killed_processes_leave_a_sound_store(tmp_path: Path) -> None:
    """No reader gets a wrong byte, waits forever, or fails for another reason than missing space."""

    def start(number: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", BUSY, str(tmp_path), str(number)]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)

    with contextlib.ExitStack() as stack:
        busy = [start(number) for number in range(6)]
        for process in busy:
            stack.callback(process.communicate)
            stack.callback(process.kill)
        for process in busy[:3]:  # in the middle of whatever they do
            assert process.stdout is not None
            assert process.stdout.readline() == "at work\n"
            process.kill()
        result = [process.communicate(timeout=DEADLINE_S)[1] for process in busy[3:]]
        assert [process.returncode for process in busy[3:]] == [0] * 3, result
    store = Store(tmp_path)
    store.prune(keep=[artifact.key for artifact in store.artifacts()])
    assert_sound(store)


# Digests


def test_digests_that_the_transfer_computed_are_used(tmp_path: Path) -> None:
    """Other files are read, even if an earlier fetch with the same progress computed a digest for their names."""
    progress, digest = Progress("s3://models/one"), "0" * 64
    progress.digests = {"config.json": "of another fetch"}
    remote = FakeRemote(FILES, before=lambda name: progress.digests.update({name: digest} if name == BIG else {}))
    artifact = digests(Store(tmp_path).get(remote, progress))
    assert (artifact[BIG], artifact["config.json"]) == (digest, blake3(b"{}").hexdigest())
