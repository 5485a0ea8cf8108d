"""What a replica loads comes from its host's store, or to it."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec.structs
import pytest

from tests.fleet import until
from tests.s3 import FaultProxy, S3Server
from tests.workers.fake_remote import DEADLINE_S, FakeRemote
from workers.artifacts.fetch import retry_policy
from workers.artifacts.fetch.artifact_fetcher import (
    ArtifactFetcher,
    FetchedArtifact,
    WantedArtifact,
    early_start_config,
    wanted_by,
    with_folders,
)
from workers.artifacts.fetch.progress import FetchStatus, Progress
from workers.artifacts.sources.listing import Listing, SourceError
from workers.artifacts.store.store import Store
from workers.messages.replica_config import Origin, ReplicaConfig

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


def bring(store: Store, remote: FakeRemote, artifact: str = "") -> FetchedArtifact:
    wanted = WantedArtifact(source=SOURCE, artifact=artifact)
    return ArtifactFetcher(store, lambda *_: remote)(wanted, Progress(SOURCE), threading.Event())


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


def test_offline_what_is_whole_here_counts_more_than_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may hold a part of the model; S3 is asked, and the hub where nobody may say offline."""
    store, hub = Store(tmp_path), WantedArtifact(source="org/model")
    whole = store.get(FakeRemote(FILES, hub.source, revision="c1"))
    part = FakeRemote({"config.json": b"{}"}, hub.source, revision="c1")

    def brought(wanted: WantedArtifact) -> tuple[bool, int]:
        part.listings = 0
        landed = ArtifactFetcher(store, lambda *_: part)(wanted, Progress(""), threading.Event())
        return landed.artifact == whole.key, part.listings

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [brought(hub), brought(msgspec.structs.replace(hub, revision="c1"))] == [(True, 0), (True, 0)]
    assert brought(msgspec.structs.replace(hub, revision="c2")) == (False, 1)
    assert brought(msgspec.structs.replace(hub, trust_remote_code=True)) == (False, 1)
    assert brought(WantedArtifact(source=SOURCE)) == (False, 1)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert brought(hub) == (False, 1)


def test_a_slash_at_the_end_of_a_source_means_nothing(tmp_path: Path) -> None:
    """It is fetched once, and found when S3 is away."""
    store, remotes = Store(tmp_path), (FakeRemote(FILES, SOURCE), Away({}, SOURCE))
    wanted = WantedArtifact(source=f"{SOURCE}/")
    first, again = (
        ArtifactFetcher(store, lambda *_, remote=remote: wanted.select(remote))(wanted, Progress(""), threading.Event())
        for remote in remotes
    )
    plain = bring(store, FakeRemote(FILES, SOURCE))
    assert (again.artifact, plain.artifact, plain.moved) == (first.artifact, first.artifact, 0)
    assert again.warning.startswith("s3-unreachable")


def test_what_is_meant_and_is_not_here_is_asked_for(tmp_path: Path) -> None:
    """The store may have removed it."""
    found = bring(Store(tmp_path), FakeRemote(FILES, SOURCE), artifact="0" * 32)
    assert found.moved == found.bytes


def test_what_arrives_is_told_while_it_comes_from_its_source(tmp_path: Path) -> None:
    """With the folder that it will have, named by its key; neither before nor after."""
    reached, go_on = threading.Event(), threading.Event()

    def before(name: str) -> None:
        if name == "model.safetensors":
            progress.enter("fetching")
            reached.set()
            assert go_on.wait(DEADLINE_S)

    store, wanted, progress = Store(tmp_path), WantedArtifact(source=SOURCE), Progress(SOURCE)
    bringing = ArtifactFetcher(store, lambda *_: FakeRemote(FILES, SOURCE, before=before))
    assert progress.status().folder == ""
    with ThreadPoolExecutor(1) as pool:
        fetch = pool.submit(bringing, wanted, progress, threading.Event())
        assert reached.wait(DEADLINE_S)
        told = progress.status()
        assert (told.total, told.done, told.moved) == (7002, 2, 2)
        assert [Path(told.folder)] == list((tmp_path / "artifacts").iterdir())
        go_on.set()
        landed = fetch.result(DEADLINE_S)
    assert (landed.folder, landed.artifact, landed.bytes) == (told.folder, Path(told.folder).name, told.total)
    assert progress.status().folder == ""


def test_a_replica_can_be_told_of_the_last_that_arrives_and_of_what_is_meant_only() -> None:
    """While its draft is still to come, or other content than its version has, there is nothing to tell."""
    both = msgspec.structs.replace(CONFIG, source=SOURCE, draft_source="s3://models/draft")
    wanted = wanted_by(both)
    going = FetchStatus(source="", phase="fetching", done=5, total=10, moved=5, folder="/store/k2")
    model = FetchedArtifact(folder="/store/k1", artifact="k1", bytes=10)
    assert early_start_config(both, wanted, [], going) is None
    told = early_start_config(both, wanted, [model], going)
    assert told is not None
    assert (told.source, told.draft_source) == ("/store/k1", "/store/k2")
    assert told.draft_origin == Origin(source="s3://models/draft", artifact="k2")

    for pinned, allowed in (("k1", False), ("k2", True)):
        config = msgspec.structs.replace(CONFIG, origin=Origin(source=SOURCE, artifact=pinned))
        assert (early_start_config(config, wanted_by(config), [], going) is not None) == allowed


def test_a_configuration_names_what_is_fetched_before_and_after() -> None:
    """A start after the first fetch asks for the very content that it got."""
    hub = msgspec.structs.replace(CONFIG, draft_source="org/draft", draft_revision="abc", allow_pickle=True)
    assert wanted_by(CONFIG) == (None, None)
    both = wanted_by(hub)
    assert both == (None, WantedArtifact(source="org/draft", revision="abc", allow_pickle=True))
    told = with_folders(hub, both, (None, FetchedArtifact(folder="/store/d", artifact="key", bytes=1)))
    assert (told.source, told.draft_source) == ("/models/one", "/store/d")
    assert told.draft_origin == Origin(source="org/draft", revision="abc", artifact="key")
    assert wanted_by(told)[1] == WantedArtifact(source="org/draft", revision="abc", artifact="key", allow_pickle=True)


@pytest.mark.parametrize("held", [False, True])
def test_who_waits_sees_why_nothing_comes(
    held: bool, tmp_path: Path, s3_server: S3Server, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether S3 goes away before the listing or in the middle of an object; and that it is back."""
    monkeypatch.setattr(retry_policy, "SILENT_S", 0.0)
    url = f"{s3_server.bucket(files={f'm/{name}': data for name, data in FILES.items()})}/m"
    fault = s3_proxy.hold("m/model.safetensors", 100)
    progress, stop = Progress(url), threading.Event()
    if not held:
        s3_proxy.away()
    with ThreadPoolExecutor(1) as pool:
        landing = pool.submit(ArtifactFetcher(Store(tmp_path)), WantedArtifact(source=url), progress, stop)
        if held:
            assert fault.reached.wait(DEADLINE_S)
            assert progress.status().trouble == ""
            s3_proxy.away()
        told = r"no answer for \d+ s \(\w+Error\)"  # and no more of it: other words may hold a secret
        until(lambda: re.fullmatch(told, progress.status().trouble), DEADLINE_S, "it is told")
        assert progress.status().phase == ("fetching" if held else "listing")
        s3_proxy.back()
        s3_proxy.heal()
        landing.result(DEADLINE_S)
    assert progress.status().trouble == ""


def test_one_attempt_that_waits_is_no_silence_while_bytes_come_to_another() -> None:
    """Nor is it told by turns; the time goes on between attempts."""
    now = [0.0]
    progress = Progress("org/m", clock=lambda: now[0])
    now[0] = 40.0
    progress.transferred(10)
    progress.report_silence(40.0, "Timeout")
    assert progress.status().trouble == ""
    now[0] = 44.0
    progress.report_silence(4.0, "Timeout")
    now[0] = 50.0
    assert progress.status().trouble == "no answer for 10 s (Timeout)"
    progress.transferred(1)
    assert progress.status().trouble == ""
