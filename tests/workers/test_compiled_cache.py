"""Compiled artifacts go to other hosts whole, and come back only as they went."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.s3 import S3Server
from workers import compiled_cache
from workers.artifacts.listing import SourceError, Stopped
from workers.compiled import MANIFEST, Entry, entry
from workers.neff_cache.record import LOCK_FILE

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


def make(root: Path) -> Entry:
    """A complete one, with a file in a folder."""
    with held(root) as found:
        (found.path / "code").mkdir()
        (found.path / "code" / "a.so").write_bytes(b"program")
        (found.path / "b.neff").write_bytes(b"neff")
        found.finish("a model")
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
    assert compiled_cache.push(here, location) > 0
    with held(tmp_path / "b") as other:
        assert not other.complete
        assert compiled_cache.pull(other, location)
        assert other.complete
    assert content(other.path) == content(here.path)


def test_an_entry_that_is_there_is_not_sent_again(location: str, tmp_path: Path) -> None:
    """Nor is it overwritten by one that another host has made."""
    compiled_cache.push(make(tmp_path / "a"), location)
    assert compiled_cache.push(make(tmp_path / "b"), location) == 0


def test_of_a_place_that_lacks_it_nothing_is_pulled(location: str, tmp_path: Path) -> None:
    """It is held as before, to be compiled into."""
    with held(tmp_path / "b") as other:
        assert not compiled_cache.pull(other, location)
        assert list(other.path.iterdir()) == []


def _without_manifest(folder: Path) -> None:
    """As an upload leaves it that dies before its end."""
    (folder / MANIFEST).unlink()


def _flipped(folder: Path) -> None:
    (folder / "b.neff").write_bytes(b"neFf")


def _short(folder: Path) -> None:
    (folder / "code" / "a.so").write_bytes(b"prog")


def _missing(folder: Path) -> None:
    (folder / "b.neff").unlink()


def _stranger(folder: Path) -> None:
    (folder / "code" / "c.so").write_bytes(b"somebody else's")


def _other_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"engine": "another"}')


@pytest.mark.parametrize("damage", [_without_manifest, _flipped, _short, _missing, _stranger, _other_manifest])
def test_what_is_not_as_it_was_made_is_not_taken(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Nothing of it stays, and what is compiled instead is complete."""
    shared = str(tmp_path / "shared")
    here = make(tmp_path / "a")
    compiled_cache.push(here, shared)
    damage(Path(compiled_cache.where(here, shared)))
    with held(tmp_path / "b") as other:
        assert not compiled_cache.pull(other, shared)
        assert [path for path in other.path.rglob("*") if path.is_file()] == []
        assert not other.complete


def test_an_upload_that_died_is_begun_anew(tmp_path: Path) -> None:
    """The manifest is what tells a finished one."""
    shared = str(tmp_path / "shared")
    here = make(tmp_path / "a")
    compiled_cache.push(here, shared)
    there = Path(compiled_cache.where(here, shared))
    (there / MANIFEST).unlink()
    shutil.rmtree(there / "code")
    assert compiled_cache.push(here, shared) > 0
    with held(tmp_path / "b") as other:
        assert compiled_cache.pull(other, shared)


@pytest.mark.slow
@pytest.mark.parametrize("location", ["s3"], indirect=True)
def test_a_pull_that_is_stopped_leaves_nothing_complete(location: str, tmp_path: Path) -> None:
    """Whatever has arrived by then."""
    compiled_cache.push(make(tmp_path / "a"), location)
    stop = threading.Event()
    stop.set()
    with held(tmp_path / "b") as other:
        with pytest.raises(Stopped):
            compiled_cache.pull(other, location, stop)
        assert not other.complete


@pytest.mark.slow
def test_a_bucket_that_is_not_there_is_told(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by every source."""
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SourceError, match="s3-no-bucket"):
        compiled_cache.push(make(tmp_path / "a"), "s3://not-there-at-all/neffs")
