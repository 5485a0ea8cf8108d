"""Compiled artifacts go to other hosts whole, and come back only as they went."""

from __future__ import annotations

import contextlib
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.s3 import S3Server
from workers.artifacts.sources.listing import SourceError, Stopped
from workers.compiled import file_states, shared_sets
from workers.compiled.host_sets import MANIFEST, LockedEntry, entry
from workers.compiled.manifest import LOCK_FILE
from workers.compiled.places import SharedSets
from workers.compiled.prediction import predict
from workers.compiled.shared_sets import set_location
from workers.compiled.storage import FolderStorage, storage_at
from workers.messages.engine_protocol import EngineLoadError

WANTED: dict[str, Any] = {"engine": "e", "shapes": [1, 2]}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.slow)])
def location(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty cache of each kind."""
    if request.param == "folder":
        return str(tmp_path / "shared")
    server = request.getfixturevalue("server")
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    return f"{server.bucket()}/neffs"


@contextlib.contextmanager
def held(root: Path) -> Iterator[LockedEntry]:
    with entry(root, WANTED) as opened:
        yield opened


def make(root: Path, program: bytes = b"program") -> LockedEntry:
    """Creates a complete entry with a file in a subfolder."""
    with held(root) as opened:
        (opened.path / "code").mkdir()
        (opened.path / "code" / "a.so").write_bytes(program)
        (opened.path / "b.neff").write_bytes(b"neff of " + program if program != b"program" else b"neff")
        opened.finish("a model")
    return opened


def there(folder: Path, file: str) -> Path:
    """Returns the path of that file in a cache that is a folder."""
    (result,) = folder.rglob(file)
    return result


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != LOCK_FILE  # its record says when it was made
    }


def test_a_pushed_entry_is_pulled_by_another_host(location: str, tmp_path: Path) -> None:
    """It is complete there, with the same files."""
    here = make(tmp_path / "a")
    assert shared_sets.push(here, location) > 0
    with held(tmp_path / "b") as other:
        assert not other.complete
        assert shared_sets.pull(other, location)
        assert other.complete
    assert content(other.path) == content(here.path)


def test_a_present_entry_is_not_pushed_again(location: str, tmp_path: Path) -> None:
    """Nor replaced by that of another host."""
    shared_sets.push(make(tmp_path / "a"), location)
    assert shared_sets.push(make(tmp_path / "b"), location) == 0


def test_an_entry_without_room_is_not_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling it here would need the same space."""
    shared = str(tmp_path / "shared")
    shared_sets.push(make(tmp_path / "a", b"x" * 1000), shared)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with held(tmp_path / "b") as other, pytest.raises(EngineLoadError, match="disk-full") as full:
        shared_sets.pull_or_log(other, shared)
    assert str(other.path) in full.value.what


def test_an_empty_cache_has_nothing_to_pull(location: str, tmp_path: Path) -> None:
    """The entry stays locked for the compile."""
    with held(tmp_path / "b") as other:
        assert not shared_sets.pull(other, location)
        assert list(other.path.iterdir()) == []


def _without_manifest(folder: Path) -> None:
    """An interrupted upload."""
    (folder / MANIFEST).unlink()


def _flipped(folder: Path) -> None:
    there(folder, "b.neff").write_bytes(b"neFf")


def _short(folder: Path) -> None:
    there(folder, "a.so").write_bytes(b"prog")


def _missing(folder: Path) -> None:
    there(folder, "b.neff").unlink()


def _without_record(folder: Path) -> None:
    (folder / LOCK_FILE).unlink()


def _record_that_is_none(folder: Path) -> None:
    (folder / LOCK_FILE).write_text("{")


def _other_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"engine": "another"}')


DAMAGES = [_without_manifest, _flipped, _short, _missing, _without_record, _record_that_is_none, _other_manifest]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_remote_entries_are_not_pulled(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Nothing of them stays, and what is compiled instead is complete."""
    shared = str(tmp_path / "shared")
    here = make(tmp_path / "a")
    shared_sets.push(here, shared)
    damage(Path(set_location(here.path.name, shared)))
    with held(tmp_path / "b") as other:
        assert not shared_sets.pull(other, shared)
        assert [path for path in other.path.rglob("*") if path.is_file()] == []
        assert not other.complete


def test_an_unfinished_upload_is_pushed_again(tmp_path: Path) -> None:
    """The manifest marks a finished one."""
    shared = str(tmp_path / "shared")
    here = make(tmp_path / "a")
    shared_sets.push(here, shared)
    place = Path(set_location(here.path.name, shared))
    (place / MANIFEST).unlink()
    there(place, "a.so").unlink()
    assert shared_sets.push(here, shared) > 0
    with held(tmp_path / "b") as other:
        assert shared_sets.pull(other, shared)


@pytest.mark.slow
@pytest.mark.parametrize("location", ["s3"], indirect=True)
def test_a_stopped_pull_leaves_no_complete_entry(location: str, tmp_path: Path) -> None:
    """Whatever has arrived."""
    shared_sets.push(make(tmp_path / "a"), location)
    stop = threading.Event()
    stop.set()
    with held(tmp_path / "b") as other:
        with pytest.raises(Stopped):
            shared_sets.pull(other, location, stop)
        assert not other.complete


@pytest.mark.slow
def test_a_missing_bucket_is_an_error(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for other sources."""
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SourceError, match="s3-no-bucket"):
        shared_sets.push(make(tmp_path / "a"), "s3://not-there-at-all/neffs")


def test_leftovers_of_another_upload_are_ignored(location: str, tmp_path: Path) -> None:
    """Compilers choose file names freely."""
    here = make(tmp_path / "a")
    cache = storage_at(location)
    for name in ("code/stranger.so", "b.neff", "staged-abc"):
        cache.put_bytes(f"{shared_sets.FOLDER}/{here.path.name}/{name}", b"half")
    assert shared_sets.push(here, location) > 0
    with held(tmp_path / "b") as other:
        assert shared_sets.pull(other, location)
    assert content(other.path) == content(here.path)


def test_an_interrupted_upload_is_resumed(tmp_path: Path) -> None:
    """Complete files are not sent again."""
    shared = str(tmp_path / "shared")
    here = make(tmp_path / "a")
    whole = shared_sets.push(here, shared)
    (Path(set_location(here.path.name, shared)) / MANIFEST).unlink()
    assert shared_sets.push(here, shared) == whole - len(b"program") - len(b"neff")


def test_concurrent_pushes_of_an_entry_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers do not reproduce bytes: a pull gets one host's files."""
    shared = str(tmp_path / "shared")
    first, other = make(tmp_path / "a"), make(tmp_path / "b", program=b"another")
    put = FolderStorage.put

    def while_the_other_sends(place: FolderStorage, name: str, path: Path) -> None:
        if path == first.path / "b.neff":
            monkeypatch.setattr(FolderStorage, "put", put)
            assert shared_sets.push(other, shared) > 0
        put(place, name, path)

    monkeypatch.setattr(FolderStorage, "put", while_the_other_sends)
    shared_sets.push(first, shared)
    with held(tmp_path / "c") as third:
        assert shared_sets.pull(third, shared)
    assert content(third.path) in (content(first.path), content(other.path))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_rejected_entry_is_replaced_by_the_next_push(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Of the process that rejected it, since it compiled the entry."""
    shared = str(tmp_path / "shared")
    shared_sets.push(make(tmp_path / "a"), shared)
    with held(tmp_path / "b") as other:
        damage(Path(set_location(other.path.name, shared)))
        assert not shared_sets.pull(other, shared)
    repaired = make(tmp_path / "b")
    assert shared_sets.push(repaired, shared) > 0
    assert shared_sets.push(repaired, shared) == 0
    with held(tmp_path / "c") as third:
        assert shared_sets.pull(third, shared)


def test_an_entry_in_the_hubs_layout_is_pulled(tmp_path: Path) -> None:
    """Its files are beside the manifest, without digest folders."""
    here = make(tmp_path / "a")
    shutil.copytree(here.path, set_location(here.path.name, str(tmp_path / "shared")))
    with held(tmp_path / "b") as other:
        assert shared_sets.pull(other, str(tmp_path / "shared"))
    assert content(other.path) == content(here.path)


def test_other_users_can_read_a_pushed_entry(tmp_path: Path) -> None:
    """As far as the umask allows: each host may have its own user."""
    shared = tmp_path / "shared"
    shared_sets.push(make(tmp_path / "a"), str(shared))
    (tmp_path / "made").mkdir()
    (tmp_path / "written").touch()
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("made", "written")}
    assert {stat.S_IMODE(path.stat().st_mode) for path in shared.rglob("*")} == modes


def test_a_push_needs_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of weights have many gigabytes."""
    here = make(tmp_path / "a")

    read: Callable[[Path], bytes] = Path.read_bytes

    def small(path: Path) -> bytes:
        assert path.suffix == ".json", f"{path} is read at once"
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", small)
    assert shared_sets.push(here, str(tmp_path / "shared")) > 0


def test_a_pulled_entry_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To compare it with its record."""
    shared = str(tmp_path / "shared")
    shared_sets.push(make(tmp_path / "a"), shared)
    calls: list[str] = []
    digest = file_states.digest

    def counted(path: Path) -> str:
        calls.append(path.name)
        return digest(path)

    monkeypatch.setattr(file_states, "digest", counted)
    with held(tmp_path / "b") as other:
        assert shared_sets.pull(other, shared)
        assert sorted(calls) == ["a.so", "b.neff"]


def test_a_stopped_pull_from_a_folder_leaves_nothing(tmp_path: Path) -> None:
    """It ends between two blocks of a file."""
    shared_sets.push(make(tmp_path / "a"), str(tmp_path / "shared"))
    stop = threading.Event()
    stop.set()
    with held(tmp_path / "b") as other:
        with pytest.raises(Stopped):
            shared_sets.pull(other, str(tmp_path / "shared"), stop)
        assert list(other.path.iterdir()) == []


@pytest.mark.parametrize("damage", [_short, _missing])
def test_a_remote_entry_with_a_missing_file_is_not_a_hit(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """The listing shows it, and the start compiles."""
    shared = str(tmp_path / "shared")
    here = make(tmp_path / "a")
    shared_sets.push(here, shared)
    prediction = predict(WANTED, list(SharedSets(shared, tmp_path / "b").candidates(WANTED)))
    damage(Path(set_location(here.path.name, shared)))
    less = predict(WANTED, list(SharedSets(shared, tmp_path / "b").candidates(WANTED)))
    assert (prediction.outcome, less.outcome, len(less.missing)) == ("hit", "compile", 1)
