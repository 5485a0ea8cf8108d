"""Compiled artifacts go to other hosts whole, and come back only as they went."""

from __future__ import annotations

import contextlib
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.s3 import S3Server
from workers.artifacts.sources.listing import SourceError, Stopped
from workers.neff_cache import file_states, shared_artifacts
from workers.neff_cache.candidates import compiled_elsewhere
from workers.neff_cache.compiled_artifacts import MANIFEST, Entry, entry
from workers.neff_cache.predict import predict
from workers.neff_cache.record import LOCK_FILE
from workers.neff_cache.sync import FolderPlace, place_at

WANTED: dict[str, Any] = {"engine": "e", "shapes": [1, 2]}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.slow)])
def location(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty place, of each kind."""
    if request.param == "folder":
        return str(tmp_path / "shared")
    server = request.getfixturevalue("server")
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    return f"{server.bucket()}/neffs"


@contextlib.contextmanager
def held(root: Path) -> Iterator[Entry]:
    with entry(root, WANTED) as found:
        yield found


def make(root: Path, program: bytes = b"program") -> Entry:
    """A complete one, with a file in a folder."""
    with held(root) as found:
        (found.path / "code").mkdir()
        (found.path / "code" / "a.so").write_bytes(program)
        (found.path / "b.neff").write_bytes(b"neff of " + program if program != b"program" else b"neff")
        found.finish("a model")
    return found


def there(folder: Path, file: str) -> Path:
    """Where that file of the entry lies in a place that is a folder."""
    (found,) = folder.rglob(file)
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != LOCK_FILE  # its record says when it was made
    }


def test_what_was_pushed_is_what_is_pulled(location: str, tmp_path: Path) -> None:
    """On another host: an entry that is complete, with the same files."""
    here = make(tmp_path / "a")
    assert shared_artifacts.push(here, location) > 0
    with held(tmp_path / "b") as other:
        assert not other.complete
        assert shared_artifacts.pull(other, location)
        assert other.complete
    assert content(other.path) == content(here.path)


def test_an_entry_that_is_there_is_not_sent_again(location: str, tmp_path: Path) -> None:
    """Nor is it overwritten by one that another host has made."""
    shared_artifacts.push(make(tmp_path / "a"), location)
    assert shared_artifacts.push(make(tmp_path / "b"), location) == 0


def test_of_a_place_that_lacks_it_nothing_is_pulled(location: str, tmp_path: Path) -> None:
    """It is held as before, to be compiled into."""
    with held(tmp_path / "b") as other:
        assert not shared_artifacts.pull(other, location)
        assert list(other.path.iterdir()) == []


def _without_manifest(folder: Path) -> None:
    """As an upload leaves it that dies before its end."""
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
def test_what_is_not_as_it_was_made_is_not_taken(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Nothing of it stays, and what is compiled instead is complete."""
    shared = str(tmp_path / "shared")
    here = make(tmp_path / "a")
    shared_artifacts.push(here, shared)
    damage(Path(shared_artifacts.entry_location(here, shared)))
    with held(tmp_path / "b") as other:
        assert not shared_artifacts.pull(other, shared)
        assert [path for path in other.path.rglob("*") if path.is_file()] == []
        assert not other.complete


def test_an_upload_that_died_is_begun_anew(tmp_path: Path) -> None:
    """The manifest is what tells a finished one."""
    shared = str(tmp_path / "shared")
    here = make(tmp_path / "a")
    shared_artifacts.push(here, shared)
    place = Path(shared_artifacts.entry_location(here, shared))
    (place / MANIFEST).unlink()
    there(place, "a.so").unlink()
    assert shared_artifacts.push(here, shared) > 0
    with held(tmp_path / "b") as other:
        assert shared_artifacts.pull(other, shared)


@pytest.mark.slow
@pytest.mark.parametrize("location", ["s3"], indirect=True)
def test_a_pull_that_is_stopped_leaves_nothing_complete(location: str, tmp_path: Path) -> None:
    """Whatever has arrived by then."""
    shared_artifacts.push(make(tmp_path / "a"), location)
    stop = threading.Event()
    stop.set()
    with held(tmp_path / "b") as other:
        with pytest.raises(Stopped):
            shared_artifacts.pull(other, location, stop)
        assert not other.complete


@pytest.mark.slow
def test_a_bucket_that_is_not_there_is_told(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by every source."""
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SourceError, match="s3-no-bucket"):
        shared_artifacts.push(make(tmp_path / "a"), "s3://not-there-at-all/neffs")


def test_what_another_upload_has_left_does_not_matter(location: str, tmp_path: Path) -> None:
    """One that died, of files by other names: a compiler names them as it likes."""
    here = make(tmp_path / "a")
    cache = place_at(location)
    for name in ("code/stranger.so", "b.neff", "staged-abc"):
        cache.put_bytes(f"{shared_artifacts.FOLDER}/{here.path.name}/{name}", b"half")
    assert shared_artifacts.push(here, location) > 0
    with held(tmp_path / "b") as other:
        assert shared_artifacts.pull(other, location)
    assert content(other.path) == content(here.path)


def test_an_upload_that_died_is_gone_on_with(tmp_path: Path) -> None:
    """What has arrived whole is not sent again."""
    shared = str(tmp_path / "shared")
    here = make(tmp_path / "a")
    whole = shared_artifacts.push(here, shared)
    (Path(shared_artifacts.entry_location(here, shared)) / MANIFEST).unlink()
    assert shared_artifacts.push(here, shared) == whole - len(b"program") - len(b"neff")


def test_two_hosts_that_send_one_entry_at_once_mix_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers do not make the same bytes twice: what is pulled is one host's."""
    shared = str(tmp_path / "shared")
    one, other = make(tmp_path / "a"), make(tmp_path / "b", program=b"another")
    put = FolderPlace.put

    def while_the_other_sends(place: FolderPlace, name: str, path: Path) -> None:
        if path == one.path / "b.neff":
            monkeypatch.setattr(FolderPlace, "put", put)
            assert shared_artifacts.push(other, shared) > 0
        put(place, name, path)

    monkeypatch.setattr(FolderPlace, "put", while_the_other_sends)
    shared_artifacts.push(one, shared)
    with held(tmp_path / "c") as third:
        assert shared_artifacts.pull(third, shared)
    assert content(third.path) in (content(one.path), content(other.path))


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_was_refused_is_replaced_by_the_next_push(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Of whoever found it, for it has had to be compiled."""
    shared = str(tmp_path / "shared")
    shared_artifacts.push(make(tmp_path / "a"), shared)
    with held(tmp_path / "b") as other:
        damage(Path(shared_artifacts.entry_location(other, shared)))
        assert not shared_artifacts.pull(other, shared)
    mended = make(tmp_path / "b")
    assert shared_artifacts.push(mended, shared) > 0
    assert shared_artifacts.push(mended, shared) == 0
    with held(tmp_path / "c") as third:
        assert shared_artifacts.pull(third, shared)


def test_an_entry_as_the_hub_lays_it_out_is_taken(tmp_path: Path) -> None:
    """Its files lie beside the manifest, by their own names."""
    here = make(tmp_path / "a")
    shutil.copytree(here.path, shared_artifacts.entry_location(here, str(tmp_path / "shared")))
    with held(tmp_path / "b") as other:
        assert shared_artifacts.pull(other, str(tmp_path / "shared"))
    assert content(other.path) == content(here.path)


def test_what_is_sent_to_a_folder_other_users_can_read(tmp_path: Path) -> None:
    """As far as the umask lets them: each host may have its own user."""
    shared = tmp_path / "shared"
    shared_artifacts.push(make(tmp_path / "a"), str(shared))
    (tmp_path / "made").mkdir()
    (tmp_path / "written").touch()
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("made", "written")}
    assert {stat.S_IMODE(path.stat().st_mode) for path in shared.rglob("*")} == modes


def test_of_what_is_sent_only_a_part_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of weights have many gigabytes."""
    here = make(tmp_path / "a")

    read: Callable[[Path], bytes] = Path.read_bytes

    def small(path: Path) -> bytes:
        assert path.suffix == ".json", f"{path} is read at once"
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", small)
    assert shared_artifacts.push(here, str(tmp_path / "shared")) > 0


def test_what_is_pulled_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To be compared with its record; hundreds of gigabytes take a while."""
    shared = str(tmp_path / "shared")
    shared_artifacts.push(make(tmp_path / "a"), shared)
    seen: list[str] = []
    digest = file_states.digest

    def counted(path: Path) -> str:
        seen.append(path.name)
        return digest(path)

    monkeypatch.setattr(file_states, "digest", counted)
    with held(tmp_path / "b") as other:
        assert shared_artifacts.pull(other, shared)
        assert sorted(seen) == ["a.so", "b.neff"]


def test_a_pull_from_a_folder_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    """It ends between two blocks of a file."""
    shared_artifacts.push(make(tmp_path / "a"), str(tmp_path / "shared"))
    stop = threading.Event()
    stop.set()
    with held(tmp_path / "b") as other:
        with pytest.raises(Stopped):
            shared_artifacts.pull(other, str(tmp_path / "shared"), stop)
        assert list(other.path.iterdir()) == []


@pytest.mark.parametrize("damage", [_short, _missing])
def test_an_entry_elsewhere_that_lacks_a_file_is_no_hit(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Its start compiles; the listing tells it."""
    shared = str(tmp_path / "shared")
    here = make(tmp_path / "a")
    shared_artifacts.push(here, shared)
    whole = predict(WANTED, list(compiled_elsewhere(WANTED, tmp_path / "b", shared)))
    damage(Path(shared_artifacts.entry_location(here, shared)))
    less = predict(WANTED, list(compiled_elsewhere(WANTED, tmp_path / "b", shared)))
    assert (whole.outcome, less.outcome, len(less.missing)) == ("hit", "compile", 1)
