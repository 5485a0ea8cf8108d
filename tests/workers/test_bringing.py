"""What a replica loads comes from its host's store, or to it."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec.structs
import pytest

from tests.workers.fake_remote import FakeRemote
from workers.artifacts.bringing import Bringing, Landed, Wanted, wanted_by, with_folders
from workers.artifacts.listing import Listing, SourceError
from workers.artifacts.progress import Progress
from workers.artifacts.store import Store
from workers.config import Origin, ReplicaConfig

SOURCE = "s3://models/one"
FILES = {"config.json": b"{}", "model.safetensors": b"weights" * 1000}
CONFIG = ReplicaConfig(
    model="m",
    replica=0,
    epoch=1,
    host="h",
    engine="cpu",
    source="/models/one",
    dtype="fp32",
    slots=1,
    max_len=64,
    cores=[],
    claims=None,
    env={},
    log="/dev/null",
    socket="",
    token="",
)


class Away(FakeRemote):
    """A source that does not answer."""

    def listing(self) -> Listing:
        self.listings += 1
        raise SourceError("s3-unreachable", "nobody answers")


def bring(store: Store, remote: FakeRemote, artifact: str = "") -> Landed:
    wanted = Wanted(source=SOURCE, artifact=artifact)
    return Bringing(store, lambda _: remote)(wanted, Progress(SOURCE), threading.Event())


def test_what_is_meant_is_taken_from_the_store_without_a_question(tmp_path: Path) -> None:
    """By the key of its content, whatever the source has now; without one the source is asked."""
    store = Store(tmp_path)
    first = bring(store, FakeRemote(FILES, SOURCE))
    assert first.moved == first.bytes == sum(map(len, FILES.values()))
    newer = FakeRemote({**FILES, "config.json": b"{1}"}, SOURCE)

    same = bring(store, newer, first.artifact)
    assert (same.folder, same.artifact, same.moved, newer.listings) == (first.folder, first.artifact, 0, 0)
    assert (Path(same.folder) / "config.json").read_bytes() == b"{}"
    other = bring(store, newer)
    assert other.artifact != first.artifact
    assert (Path(other.folder) / "config.json").read_bytes() == b"{1}"


def test_a_source_that_is_away_is_no_matter_where_it_is_held(tmp_path: Path) -> None:
    """With a warning, since it may have changed; where nothing is held the cause is told."""
    store = Store(tmp_path)
    with pytest.raises(SourceError, match="s3-unreachable"):
        bring(store, Away({}, SOURCE))
    held = bring(store, FakeRemote(FILES, SOURCE))

    found = bring(store, Away({}, SOURCE))
    assert (found.artifact, found.moved, found.warning) == (held.artifact, 0, "s3-unreachable: nobody answers")


def test_what_is_meant_and_is_not_here_is_asked_for(tmp_path: Path) -> None:
    """The store may have removed it."""
    found = bring(Store(tmp_path), FakeRemote(FILES, SOURCE), artifact="0" * 32)
    assert found.moved == found.bytes


def test_a_configuration_names_what_is_fetched_before_and_after() -> None:
    """A start after the first fetch asks for the very content that it got."""
    hub = msgspec.structs.replace(CONFIG, draft_source="org/draft", draft_revision="abc", allow_pickle=True)
    assert wanted_by(CONFIG) == (None, None)
    both = wanted_by(hub)
    assert both == (None, Wanted(source="org/draft", revision="abc", allow_pickle=True))
    told = with_folders(hub, both, (None, Landed(folder="/store/d", artifact="key", bytes=1)))
    assert (told.source, told.draft_source) == ("/models/one", "/store/d")
    assert told.draft_origin == Origin(source="org/draft", revision="abc", artifact="key")
    assert wanted_by(told)[1] == Wanted(source="org/draft", revision="abc", artifact="key", allow_pickle=True)
