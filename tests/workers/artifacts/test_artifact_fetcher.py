"""What a replica loads comes from its host's store, or to it."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec.structs
import pytest

from tests.fleet import until
from tests.replica_configs import changed
from tests.replica_configs import replica_config as configured
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
from workers.messages import replica_config
from workers.messages.replica_config import DRAFT, Origin

SOURCE = "s3://models/one"
FILES = {"config.json": b"{}", "model.safetensors": b"weights" * 1000}
CONFIG = configured(
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


def test_a_wanted_key_in_the_store_needs_no_request(tmp_path: Path) -> None:
    """Whatever content the source has now; without a key the source is listed."""
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


def test_the_store_replaces_an_unavailable_source(tmp_path: Path) -> None:
    """With a warning, since the source may have changed; without a stored artifact the error is raised."""
    store = Store(tmp_path)
    with pytest.raises(SourceError, match="s3-unreachable"):
        bring(store, Away({}, SOURCE))
    held = bring(store, FakeRemote(FILES, SOURCE))

    result = bring(store, Away({}, SOURCE))
    assert (result.artifact, result.moved, result.warning) == (held.artifact, 0, "s3-unreachable: nobody answers")


def test_in_offline_mode_the_store_precedes_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That cache may hold a part of the model; S3 is listed all the same."""
    store, hub = Store(tmp_path), WantedArtifact(source="org/model")
    artifact = store.get(FakeRemote(FILES, hub.source, revision="c1"))
    part = FakeRemote({"config.json": b"{}"}, hub.source, revision="c1")

    def brought(wanted: WantedArtifact) -> tuple[bool, int]:
        part.listings = 0
        landed = ArtifactFetcher(store, lambda *_: part)(wanted, Progress(""), threading.Event())
        return landed.artifact == artifact.key, part.listings

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [brought(hub), brought(msgspec.structs.replace(hub, revision="c1"))] == [(True, 0), (True, 0)]
    assert brought(msgspec.structs.replace(hub, revision="c2")) == (False, 1)
    assert brought(msgspec.structs.replace(hub, trust_remote_code=True)) == (False, 1)
    assert brought(WantedArtifact(source=SOURCE)) == (False, 1)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert brought(hub) == (False, 1)


def test_a_trailing_slash_of_a_source_is_ignored(tmp_path: Path) -> None:
    """It is fetched once, and found when S3 is unavailable."""
    store, remotes = Store(tmp_path), (FakeRemote(FILES, SOURCE), Away({}, SOURCE))
    wanted = WantedArtifact(source=f"{SOURCE}/")
    first, again = (
        ArtifactFetcher(store, lambda *_, remote=remote: wanted.select(remote))(wanted, Progress(""), threading.Event())
        for remote in remotes
    )
    plain = bring(store, FakeRemote(FILES, SOURCE))
    assert (again.artifact, plain.artifact, plain.moved) == (first.artifact, first.artifact, 0)
    assert again.warning.startswith("s3-unreachable")


def test_a_wanted_key_missing_from_the_store_is_fetched(tmp_path: Path) -> None:
    """The store may have evicted it."""
    result = bring(Store(tmp_path), FakeRemote(FILES, SOURCE), artifact="0" * 32)
    assert result.moved == result.bytes


def test_a_fetch_reports_its_folder_while_files_arrive(tmp_path: Path) -> None:
    """The folder is named by the key; there is none before and after."""
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
        result = progress.status()
        assert (result.total, result.done, result.moved) == (7002, 2, 2)
        assert [Path(result.folder)] == list((tmp_path / "artifacts").iterdir())
        go_on.set()
        landed = fetch.result(DEADLINE_S)
    assert (landed.folder, landed.artifact, landed.bytes) == (result.folder, Path(result.folder).name, result.total)
    assert progress.status().folder == ""


def test_only_the_last_artifact_to_fetch_allows_an_early_start() -> None:
    """And only with the content that the version has."""
    both = changed(CONFIG, source=SOURCE, draft_source="s3://models/draft")
    going = FetchStatus(source="", phase="fetching", done=5, total=10, moved=5, folder="/store/k2")
    model = FetchedArtifact(folder="/store/k1", artifact="k1", bytes=10)
    assert early_start_config(both, {}, going) is None
    result = early_start_config(both, {replica_config.SOURCE: model}, going)
    assert result is not None
    assert (result.source, result.draft_source) == ("/store/k1", "/store/k2")
    assert result.origins["draft.source"] == Origin(source="s3://models/draft", artifact="k2", folder="/store/k2")

    for pinned, allowed in (("k1", False), ("k2", True)):
        config = changed(CONFIG, source=SOURCE, origins={"source": Origin(source=SOURCE, artifact=pinned)})
        assert (early_start_config(config, {}, going) is not None) == allowed


def test_a_config_names_its_artifacts_before_and_after_the_fetch() -> None:
    """A start after the first fetch wants the content that it got."""
    draft = Origin(source="org/draft", revision="abc")
    hub = changed(CONFIG, draft_source="org/draft", origins={"draft.source": draft}, allow_pickle=True)
    assert wanted_by(CONFIG) == {}
    assert wanted_by(hub) == {DRAFT: WantedArtifact(source="org/draft", revision="abc", allow_pickle=True)}
    result = with_folders(hub, {DRAFT: FetchedArtifact(folder="/store/d", artifact="key", bytes=1)})
    assert (result.source, result.draft_source) == ("/models/one", "/store/d")
    assert result.origins == {"draft.source": msgspec.structs.replace(draft, artifact="key", folder="/store/d")}
    assert wanted_by(result) == {
        DRAFT: WantedArtifact(source="org/draft", revision="abc", artifact="key", allow_pickle=True)
    }
    assert result.fetched_folders() == {DRAFT: "/store/d"}


def test_an_adapter_is_fetched_without_its_other_files(
    tmp_path: Path, s3_server: S3Server, s3_proxy: FaultProxy
) -> None:
    """Its configuration and its safetensors; one without them is refused."""
    weights = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}
    others = {"adapter_model.bin": b"pickle", "training_args.bin": b"x", "checkpoint-1/adapter_model.safetensors": b"x"}
    bucket = s3_server.bucket(files={f"lora/{name}": data for name, data in (weights | others).items()})
    config = changed(CONFIG, adapters={"local": "/lora", "support": f"{bucket}/lora"})
    (keys, wanted), *rest = wanted_by(config).items()
    assert (keys, rest) == (("adapters", "support"), [])
    fetch = ArtifactFetcher(Store(tmp_path))

    landed = fetch(wanted, Progress(wanted.source), threading.Event())

    assert {
        path.name: path.read_bytes() for path in Path(landed.folder).iterdir() if path.name in {**weights, **others}
    } == weights
    fetched = with_folders(config, {keys: landed})
    assert fetched.adapters == {"local": "/lora", "support": landed.folder}
    assert fetched.fetched_folders() == {keys: landed.folder}
    assert wanted_by(fetched) == {keys: msgspec.structs.replace(wanted, artifact=landed.artifact)}
    with pytest.raises(SourceError, match=r"adapter_config\.json"):
        fetch(msgspec.structs.replace(wanted, source=f"{bucket}/lora/checkpoint-1"), Progress(""), threading.Event())


@pytest.mark.parametrize("held", [False, True])
def test_the_status_shows_why_nothing_arrives(
    held: bool, tmp_path: Path, s3_server: S3Server, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If S3 is unavailable before the listing or within an object; and that it is back."""
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
        pattern = r"no answer for \d+ s \(\w+Error\)"  # and no more of it: other words may hold a secret
        until(lambda: re.fullmatch(pattern, progress.status().trouble), DEADLINE_S, "it is told")
        assert progress.status().phase == ("fetching" if held else "listing")
        s3_proxy.back()
        s3_proxy.heal()
        landing.result(DEADLINE_S)
    assert progress.status().trouble == ""


def test_one_waiting_attempt_is_not_a_silence_while_others_receive_bytes() -> None:
    """The time continues between attempts."""
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
