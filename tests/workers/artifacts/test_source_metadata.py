"""The small files of sources elsewhere, kept on this machine."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from workers.artifacts.fetch.progress import Progress
from workers.artifacts.fetch.retry_policy import RetryPolicy
from workers.artifacts.sources.listing import Listing, RemoteFile, SourceError
from workers.artifacts.sources.open_source import SourceQuery
from workers.artifacts.sources.source_metadata import KEPT_PINS, KEPT_S, MARK, SourceMetadata

ASKED = SourceQuery(source="org/model")
CONFIG = b'{"model_type": "llama"}'


class Source:
    """A source whose files and availability the test sets."""

    def __init__(self, **files: bytes) -> None:
        self.files = {"config.json": CONFIG, "model.safetensors": b"w" * 1000, **files}
        self.commit = "c1"
        self.error: SourceError | None = None
        self.listed = 0
        self.sent: list[str] = []

    def open(self, query: SourceQuery, _: RetryPolicy) -> Source:
        return self

    def listing(self) -> Listing:
        self.listed += 1
        if self.error is not None:
            raise self.error
        files = [RemoteFile(name=name, size=len(data), tag=str(hash(data))) for name, data in self.files.items()]
        return Listing(source=ASKED.source, revision=self.commit, files=tuple(files))

    def fetch(self, listing: Listing, folder: Path, progress: Progress, stop: threading.Event) -> None:
        for file in listing.files:
            self.sent.append(file.name)
            (folder / file.name).write_bytes(self.files[file.name])


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def heads(tmp_path: Path, source: Source) -> SourceMetadata:
    return SourceMetadata(tmp_path / "heads", source.open)


def test_small_files_are_fetched_once(heads: SourceMetadata, source: Source) -> None:
    """Without weights, though all files are listed; a second refresh lists and fetches nothing."""
    seen = heads.refresh(ASKED)
    assert seen.away is None
    assert sorted(path.name for path in Path(seen.head.folder).iterdir()) == ["config.json", MARK]
    assert seen.head.names == ("config.json", "model.safetensors")
    assert seen.head.commit == "c1"
    assert heads.refresh(ASKED) == seen
    assert (source.listed, source.sent) == (2, ["config.json"])


def test_cached_metadata_needs_no_request(heads: SourceMetadata, source: Source) -> None:
    """`get` lists the source only the first time."""
    assert heads.get(ASKED) == heads.get(ASKED) == heads.refresh(ASKED)
    assert source.listed == 2


def test_new_content_has_its_own_folder(heads: SourceMetadata, source: Source) -> None:
    """The old one stays for its readers."""
    old = heads.refresh(ASKED).head
    source.files["model.safetensors"] = b"new"
    new = heads.refresh(ASKED).head
    assert new.folder != old.folder
    assert heads.cached(ASKED) == new
    assert heads.kept(old.listing.key) == old


@pytest.mark.parametrize("id", ["s3-unreachable", "hub-unreachable", "hub-offline", "s3-denied", "s3-no-credentials"])
def test_an_unavailable_source_has_its_cached_metadata(heads: SourceMetadata, source: Source, id: str) -> None:
    """With the reason; without a cache the error is raised."""
    source.error = SourceError(id, "gone")
    with pytest.raises(SourceError):
        heads.refresh(ASKED)
    source.error = None
    known = heads.refresh(ASKED).head
    source.error = SourceError(id, "gone")
    seen = heads.refresh(ASKED)
    assert (seen.head, seen.away) == (known, source.error)


@pytest.mark.parametrize("id", ["s3-not-found", "hub-not-found", "pickle-refused"])
def test_an_answer_of_the_source_overrides_the_cache(heads: SourceMetadata, source: Source, id: str) -> None:
    """A removed model is gone."""
    heads.refresh(ASKED)
    source.error = SourceError(id, "no")
    with pytest.raises(SourceError) as error:
        heads.refresh(ASKED)
    assert error.value.id == id


def test_the_allowed_kinds_of_files_are_part_of_the_query(heads: SourceMetadata, source: Source) -> None:
    """Metadata fetched with pickles allowed is not used without."""
    heads.refresh(SourceQuery(source="org/model", allow_pickle=True))
    assert heads.cached(ASKED) is None


def test_a_failed_fetch_leaves_nothing(heads: SourceMetadata, source: Source, tmp_path: Path) -> None:
    """Nothing that looks complete."""
    del source.files["config.json"]
    source.files["config.json"] = CONFIG
    broken = KeyError("broken")

    def fetch(listing: Listing, folder: Path, progress: Progress, stop: threading.Event) -> None:
        (folder / "config.json").write_bytes(b"{")
        raise broken

    source.fetch = fetch  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        heads.refresh(ASKED)
    assert list((tmp_path / "heads").rglob("config.json")) == []


def test_concurrent_queries_get_the_same_metadata(heads: SourceMetadata) -> None:
    """Also if each of them fetches."""
    result = []
    threads = [threading.Thread(target=lambda: result.append(heads.refresh(ASKED).head)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(result) == 8
    assert len({head.folder for head in result}) == 1
    assert (Path(result[0].folder) / "config.json").read_bytes() == CONFIG


def test_an_unwritable_home_is_reported(tmp_path: Path, source: Source) -> None:
    """With its path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceError, match="file") as error:
        SourceMetadata(tmp_path / "file" / "heads", source.open).refresh(ASKED)
    assert error.value.id == "heads-unwritable"


def test_a_fleet_keeps_its_pinned_commits(heads: SourceMetadata, source: Source) -> None:
    """Pins survive a month without use."""
    old = heads.refresh(ASKED).head
    heads.pin("fleet-1", {ASKED.digest: old})
    source.commit, source.files["model.safetensors"] = "c2", b"new"
    loose = heads.refresh(ASKED).head
    source.files["model.safetensors"] = b"newer"
    for head in (old, loose):
        os.utime(Path(head.folder) / MARK, (0, time.time() - KEPT_S - 60))
    heads.refresh(ASKED)
    assert heads.pins("fleet-1") == {ASKED.digest: old}
    assert heads.pins("fleet-2") == {}
    assert not Path(loose.folder).exists()


@pytest.mark.parametrize("key", ["../../etc", "", "x", "." * 32, "a/b" * 11])
def test_malformed_keys_find_nothing(heads: SourceMetadata, key: str) -> None:
    """Keys are read from files."""
    assert heads.kept(key) is None


@pytest.mark.parametrize("lost", [{"config.json": b""}, {"config.json": None, MARK: None}, {"config.json": None}])
def test_an_incomplete_folder_is_fetched_again(
    heads: SourceMetadata, source: Source, lost: dict[str, bytes | None]
) -> None:
    """After a crash of the machine, or a killed removal."""
    source.files["tokenizer.json"] = b"{}"
    folder = Path(heads.refresh(ASKED).head.folder)
    for name, left in lost.items():
        (folder / name).unlink()
        if left is not None:
            (folder / name).write_bytes(left)
    assert heads.cached(ASKED) is None
    assert Path(heads.refresh(ASKED).head.folder) == folder
    assert (folder / "config.json").read_bytes() == CONFIG
    assert heads.cached(ASKED) is not None
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".arriving")] == []


def aged(*paths: Path) -> None:
    """Makes the metadata look unused for more than a month."""
    for path in paths:
        os.utime(path, (0, time.time() - KEPT_S - 60))


def test_used_metadata_is_never_pruned(heads: SourceMetadata, source: Source) -> None:
    """However long ago it was fetched."""
    head = heads.refresh(ASKED).head
    aged(Path(head.folder) / MARK)
    heads.refresh(ASKED)
    source.files["model.safetensors"] = b"new"
    heads.refresh(ASKED)
    assert heads.kept(head.listing.key) == head


def test_pins_outlive_months_without_a_read(heads: SourceMetadata, source: Source) -> None:
    """The controller reads them only at its start; those of old fleets are removed."""
    head = heads.refresh(ASKED).head
    pins = Path(head.folder).parent / "pins"
    for number in range(KEPT_PINS + 1):
        heads.pin(f"fleet-{number}", {ASKED.digest: head})
        aged(pins / f"fleet-{number}")
        os.utime(pins / f"fleet-{number}", (0, (pins / f"fleet-{number}").stat().st_mtime + number))
    aged(Path(head.folder) / MARK)
    source.files["model.safetensors"] = b"new"
    heads.refresh(ASKED)
    assert heads.pins(f"fleet-{KEPT_PINS}") == {ASKED.digest: head}
    assert not (pins / "fleet-0").exists()


def test_a_read_only_home_serves_its_cache(
    heads: SourceMetadata, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may have filled it."""
    head = heads.refresh(ASKED).head

    def refused(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refused)
    monkeypatch.setattr(SourceMetadata, "_write", refused)
    assert heads.cached(ASKED) == heads.refresh(ASKED).head == head


def test_other_users_can_read_the_metadata(tmp_path: Path, source: Source) -> None:
    """As far as the umask allows."""
    before = os.umask(0o022)
    try:
        folder = Path(SourceMetadata(tmp_path / "heads", source.open).refresh(ASKED).head.folder)
    finally:
        os.umask(before)
    index = tmp_path / "heads" / "index" / ASKED.digest
    assert (folder.stat().st_mode & 0o777, index.stat().st_mode & 0o777) == (0o755, 0o644)


def test_leftovers_are_pruned(heads: SourceMetadata, source: Source) -> None:
    """Those of killed processes, and names of removed metadata."""
    head = heads.refresh(ASKED).head
    root = Path(head.folder).parent
    left = [root / ".arriving-1", root / "pins" / ".half", root / "index" / ".half"]
    (root / "pins").mkdir()
    left[0].mkdir()
    for path in left[1:]:
        path.write_text("")
    aged(*left, Path(head.folder) / MARK)
    other = SourceQuery(source="org/model", trust_remote_code=True)
    source.files["model.safetensors"] = b"new"
    heads.refresh(other)
    result = [path for path in (*left, root / "index" / ASKED.digest, Path(head.folder)) if path.exists()]
    assert (result, heads.cached(other) is not None) == ([], True)
