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
    """Of which a test says what it holds, and whether it answers."""

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


def test_the_small_files_are_fetched_once(heads: SourceMetadata, source: Source) -> None:
    """And no weights, though all files are known; asked again it is listed again, and nothing is sent."""
    seen = heads.refresh(ASKED)
    assert seen.away is None
    assert sorted(path.name for path in Path(seen.head.folder).iterdir()) == ["config.json", MARK]
    assert seen.head.names == ("config.json", "model.safetensors")
    assert seen.head.commit == "c1"
    assert heads.refresh(ASKED) == seen
    assert (source.listed, source.sent) == (2, ["config.json"])


def test_what_is_known_is_taken_without_a_question(heads: SourceMetadata, source: Source) -> None:
    """`get` asks only the first time."""
    assert heads.get(ASKED) == heads.get(ASKED) == heads.refresh(ASKED)
    assert source.listed == 2


def test_new_content_is_another_head(heads: SourceMetadata, source: Source) -> None:
    """The old one stays for who reads it."""
    old = heads.refresh(ASKED).head
    source.files["model.safetensors"] = b"new"
    new = heads.refresh(ASKED).head
    assert new.folder != old.folder
    assert heads.cached(ASKED) == new
    assert heads.kept(old.listing.key) == old


@pytest.mark.parametrize("id", ["s3-unreachable", "hub-unreachable", "hub-offline", "s3-denied", "s3-no-credentials"])
def test_a_source_that_is_away_is_as_it_was(heads: SourceMetadata, source: Source, id: str) -> None:
    """With the reason; without anything known, the error."""
    source.error = SourceError(id, "gone")
    with pytest.raises(SourceError):
        heads.refresh(ASKED)
    source.error = None
    known = heads.refresh(ASKED).head
    source.error = SourceError(id, "gone")
    seen = heads.refresh(ASKED)
    assert (seen.head, seen.away) == (known, source.error)


@pytest.mark.parametrize("id", ["s3-not-found", "hub-not-found", "pickle-refused"])
def test_what_the_source_says_of_itself_counts_more_than_what_was(
    heads: SourceMetadata, source: Source, id: str
) -> None:
    """A model that is gone is gone."""
    heads.refresh(ASKED)
    source.error = SourceError(id, "no")
    with pytest.raises(SourceError) as told:
        heads.refresh(ASKED)
    assert told.value.id == id


def test_what_may_be_fetched_is_part_of_the_question(heads: SourceMetadata, source: Source) -> None:
    """What was seen with pickles allowed is nothing for who does not allow them."""
    heads.refresh(SourceQuery(source="org/model", allow_pickle=True))
    assert heads.cached(ASKED) is None


def test_a_fetch_that_breaks_off_leaves_nothing(heads: SourceMetadata, source: Source, tmp_path: Path) -> None:
    """And nothing that looks whole."""
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


def test_many_who_ask_at_once_get_the_same(heads: SourceMetadata) -> None:
    """Also where each of them fetches."""
    found = []
    threads = [threading.Thread(target=lambda: found.append(heads.refresh(ASKED).head)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 8
    assert len({head.folder for head in found}) == 1
    assert (Path(found[0].folder) / "config.json").read_bytes() == CONFIG


def test_a_home_that_cannot_be_written_is_told(tmp_path: Path, source: Source) -> None:
    """With the path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceError, match="file") as told:
        SourceMetadata(tmp_path / "file" / "heads", source.open).refresh(ASKED)
    assert told.value.id == "heads-unwritable"


def test_a_fleet_stays_at_its_commits(heads: SourceMetadata, source: Source) -> None:
    """What is pinned is found again, and stays when others forget what they have not asked for in a month."""
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
def test_no_key_leads_out_of_the_folder(heads: SourceMetadata, key: str) -> None:
    """Keys are read from files."""
    assert heads.kept(key) is None


@pytest.mark.parametrize("lost", [{"config.json": b""}, {"config.json": None, MARK: None}, {"config.json": None}])
def test_a_head_that_has_lost_something_is_fetched_again(
    heads: SourceMetadata, source: Source, lost: dict[str, bytes | None]
) -> None:
    """To a crash of the machine, or to a removal that was killed: it is none until then."""
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
    """As if nobody had asked for them for more than a month."""
    for path in paths:
        os.utime(path, (0, time.time() - KEPT_S - 60))


def test_what_is_asked_for_daily_is_never_forgotten(heads: SourceMetadata, source: Source) -> None:
    """Though it was fetched long ago."""
    head = heads.refresh(ASKED).head
    aged(Path(head.folder) / MARK)
    heads.refresh(ASKED)
    source.files["model.safetensors"] = b"new"
    heads.refresh(ASKED)
    assert heads.kept(head.listing.key) == head


def test_a_fleet_that_runs_for_months_stays_at_its_commits(heads: SourceMetadata, source: Source) -> None:
    """It reads them when its controller is started again only; those of fleets long gone are forgotten."""
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


def test_a_home_that_can_only_be_read_tells_what_it_has(
    heads: SourceMetadata, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may have filled it."""
    head = heads.refresh(ASKED).head

    def refused(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refused)
    monkeypatch.setattr(SourceMetadata, "_write", refused)
    assert heads.cached(ASKED) == heads.refresh(ASKED).head == head


def test_a_head_is_there_for_every_user(tmp_path: Path, source: Source) -> None:
    """As far as the umask allows it."""
    before = os.umask(0o022)
    try:
        folder = Path(SourceMetadata(tmp_path / "heads", source.open).refresh(ASKED).head.folder)
    finally:
        os.umask(before)
    index = tmp_path / "heads" / "index" / ASKED.digest
    assert (folder.stat().st_mode & 0o777, index.stat().st_mode & 0o777) == (0o755, 0o644)


def test_nothing_that_is_of_no_use_is_left_for_ever(heads: SourceMetadata, source: Source) -> None:
    """What killed processes have left, and names of heads that are gone."""
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
    found = [path for path in (*left, root / "index" / ASKED.digest, Path(head.folder)) if path.exists()]
    assert (found, heads.cached(other) is not None) == ([], True)
