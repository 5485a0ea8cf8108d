"""Models of the hub, from a server that speaks its API over real sockets."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub import SIGNATURE, TOKEN, HubServer, Repo, tag_of
from workers.artifacts.fetch.progress import Progress
from workers.artifacts.fetch.retry_policy import RetryPolicy
from workers.artifacts.sources.hub import STAGING, HubRemote
from workers.artifacts.sources.listing import Listing, SourceError, Stopped
from workers.artifacts.sources.open_source import SourceQuery

ID = "org/tiny"
WEIGHTS = os.urandom(300_000)
FILES = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}" * 999, "model.safetensors": WEIGHTS}
HURRIED = RetryPolicy(seconds=5.0, first_s=0.001, longest_s=0.01)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A hub with one model; huggingface_hub's own pauses take no time."""
    from huggingface_hub import constants

    with HubServer() as server:
        for name, value in {**server.env, "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
        server.repos[ID] = Repo()
        server.repos[ID].commit(FILES)
        yield server


def remote(revision: str | None = None, retry_policy: RetryPolicy = HURRIED) -> HubRemote:
    return HubRemote(ID, revision, retry_policy=retry_policy)


def fetched(listing: Listing, folder: Path, retry_policy: RetryPolicy = HURRIED) -> Progress:
    progress = Progress(ID)
    remote(retry_policy=retry_policy).fetch(listing, folder, progress, threading.Event())
    return progress


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_listing_has_the_commit_and_the_hubs_digests(hub: HubServer) -> None:
    """Git's digests of small files, SHA-256 of large ones."""
    result = remote().listing()
    assert result.revision == hub.repos[ID].names["main"]
    assert {file.name: (file.size, file.tag) for file in result.files} == {
        name: (len(data), tag_of(name, data)) for name, data in FILES.items()
    }
    assert [file.checksum.partition(":")[0] for file in result.files] == ["git-sha1", "sha256", "git-sha1"]


def test_a_fetch_leaves_exactly_the_listed_files(hub: HubServer, tmp_path: Path) -> None:
    """Each byte is sent once; complete files are not requested."""
    listing = remote().listing()
    progress = fetched(listing, tmp_path / "a")
    assert contents(tmp_path / "a") == FILES
    assert (progress.status().done, progress.moved, hub.sent) == (listing.bytes, listing.bytes, listing.bytes)
    assert fetched(listing, tmp_path / "a").status().done == listing.bytes
    assert hub.sent == listing.bytes


def test_the_listed_commit_is_fetched(hub: HubServer, tmp_path: Path) -> None:
    """Also if the branch has moved since."""
    first = hub.repos[ID].commit(FILES, "main", "v1")
    listing = remote().listing()
    hub.repos[ID].commit({**FILES, "model.safetensors": b"other"})
    fetched(listing, tmp_path)
    assert contents(tmp_path) == FILES
    assert remote("v1").listing() == remote(first).listing() == listing
    assert remote().listing().revision != first


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("fault", ["flips", "cuts"])
def test_damaged_and_short_files_are_fetched_again(hub: HubServer, tmp_path: Path, name: str, fault: str) -> None:
    """Up to two times."""
    getattr(hub, fault)[name] = 2
    listing = remote().listing()
    progress = fetched(listing, tmp_path)
    assert contents(tmp_path) == FILES
    assert progress.status().done == listing.bytes
    assert progress.moved >= listing.bytes + (2 * len(FILES[name]) if fault == "flips" else 0)


@pytest.mark.slow
def test_a_busy_hub_is_retried(hub: HubServer, tmp_path: Path) -> None:
    """503 for the listing and for each kind of file request."""
    hub.busy = 3
    listing = remote().listing()
    hub.busy = 12
    fetched(listing, tmp_path)
    assert contents(tmp_path) == FILES
    assert hub.busy == 0


@pytest.mark.slow
def test_a_file_that_stays_damaged_never_gets_its_final_name(hub: HubServer, tmp_path: Path) -> None:
    """The others are kept for the next fetch."""
    hub.flips["model.safetensors"] = 99
    with pytest.raises(SourceError) as refused:
        fetched(remote().listing(), tmp_path)
    assert refused.value.id == "hub-damaged"
    assert "model.safetensors" in refused.value.what
    assert contents(tmp_path) == {name: FILES[name] for name in ("config.json", "tokenizer.json")}


@pytest.mark.slow
def test_an_unreachable_hub_is_retried(hub: HubServer, tmp_path: Path) -> None:
    """Until it is back."""
    listing = remote().listing()
    hub.away()
    waits: list[float] = []
    coming = threading.Lock()

    def wait(stop: threading.Event, seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) >= 5 and coming.acquire(blocking=False):
            hub.back()
        return False

    fetched(listing, tmp_path, RetryPolicy(seconds=60.0, wait=wait))
    assert contents(tmp_path) == FILES
    assert len(waits) >= 5


def test_an_unreachable_hub_is_reported_by_its_host(hub: HubServer) -> None:
    """With the variable that sets it."""
    hub.away()
    with pytest.raises(SourceError, match="HF_ENDPOINT") as refused:
        remote(retry_policy=RetryPolicy(seconds=0.0)).listing()
    assert refused.value.id == "hub-unreachable"
    assert "127.0.0.1" in refused.value.what


def test_a_stopped_fetch_is_resumed(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete files are kept, and there are no others."""
    stop = threading.Event()

    class StopsAtWeights(Progress):
        def transferred(self, count: int) -> None:
            super().transferred(count)
            if count > 10_000:
                stop.set()

    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 2**16)
    listing = remote().listing()
    with pytest.raises(Stopped):
        remote().fetch(listing, tmp_path, StopsAtWeights(ID), stop)
    assert "model.safetensors" not in contents(tmp_path)
    assert set(contents(tmp_path)) <= set(FILES)
    fetched(listing, tmp_path)
    assert set(contents(tmp_path)) == set(FILES)


KILLED = """
import sys, threading
from pathlib import Path
from workers.artifacts.sources.hub import HubRemote
from workers.artifacts.fetch.progress import Progress
remote = HubRemote(sys.argv[1])
listing = remote.listing()
remote.fetch(listing, Path(sys.argv[2]), Progress(""), threading.Event())
"""


@pytest.mark.slow
def test_after_a_kill_only_missing_files_are_fetched(hub: HubServer, tmp_path: Path) -> None:
    """SIGKILL during the weights: no partial file has its final name."""
    half = hub.held["model.safetensors"] = threading.Event()
    process = subprocess.Popen([sys.executable, "-c", KILLED, ID, str(tmp_path / "a")])
    try:
        assert half.wait(60)
        small = {"config.json", "tokenizer.json"}
        while not small <= set(contents(tmp_path / "a")):
            half.wait(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (tmp_path / "a" / STAGING).exists()
    assert not (tmp_path / "a" / "model.safetensors").exists()
    hub.held.clear()
    before = hub.sent
    fetched(remote().listing(), tmp_path / "a")
    assert contents(tmp_path / "a") == FILES
    assert hub.sent - before == len(WEIGHTS)


@pytest.mark.parametrize(
    ("repo", "revision", "id"),
    [
        ("org/none", None, "hub-not-found"),
        ("org/private", None, "hub-not-found"),
        (ID, "v9", "hub-not-found"),
        ("a/b/c", None, "hub-not-found"),
        ("org/..", None, "hub-not-found"),
    ],
)
def test_missing_models_and_revisions_fail_without_a_retry(
    hub: HubServer, repo: str, revision: str | None, id: str
) -> None:
    """The error has the name."""
    hub.repos["org/private"] = Repo(private=True)
    hub.repos["org/private"].commit(FILES)
    with pytest.raises(SourceError) as refused:
        HubRemote(repo, revision).listing()
    assert refused.value.id == id
    assert repo in refused.value.what
    assert len([item for item in hub.asked if item.path.startswith("/api/models")]) <= 1


def test_gated_models_are_reported(hub: HubServer, tmp_path: Path) -> None:
    """Their listing is public."""
    hub.repos[ID].gated = True
    with pytest.raises(SourceError, match="terms") as refused:
        fetched(remote().listing(), tmp_path)
    assert refused.value.id == "hub-denied"


def test_a_server_that_is_not_a_hub_is_reported(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as an endpoint with a wrong path."""
    monkeypatch.setenv("HF_ENDPOINT", f"{hub.url}/elsewhere")
    with pytest.raises(SourceError) as refused:
        remote().listing()
    assert refused.value.id in ("hub-refused", "hub-not-found")


def test_the_token_is_sent_to_the_hub_only(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes from the environment, and like signed URLs never appears in the log, at any level and with faults."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.repos[ID].private = True
    hub.cuts["model.safetensors"] = 1
    hub.flips["model.safetensors"] = 1
    fetched(remote().listing(), tmp_path)
    assert contents(tmp_path) == FILES
    hub.flips["model.safetensors"] = 99
    with pytest.raises(SourceError) as refused:
        fetched(remote().listing(), tmp_path / "b")
    assert {item.token for item in hub.asked if item.path.startswith("/api/models")} == {TOKEN}
    assert {item.token for item in hub.asked if "/cdn/" in item.path} == {""}
    for text in (caplog.text, str(refused.value), repr(refused.value.__context__)):
        assert TOKEN not in text
        assert SIGNATURE not in text


def test_in_offline_mode_the_hubs_cache_is_the_source(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Complete and verified, without a request; the artifact is the same."""
    from huggingface_hub import snapshot_download

    snapshot_download(ID, endpoint=hub.url, cache_dir=tmp_path / "hf" / "hub")
    listing = remote().listing()
    before = len(hub.asked)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = remote().listing()
    fetched(result, tmp_path / "a")
    assert (result.key, result.revision) == (listing.key, listing.revision)
    assert contents(tmp_path / "a") == FILES
    assert len(hub.asked) == before


@pytest.mark.slow
def test_in_offline_mode_missing_files_are_reported(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing model, revision or shard."""
    from huggingface_hub import snapshot_download

    index = b'{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    shards = {"model.safetensors.index.json": index, "model-00001-of-00002.safetensors": b"x"}
    hub.repos["org/part"] = Repo()
    hub.repos["org/part"].commit({**shards, "config.json": b"{}"})
    snapshot_download("org/part", endpoint=hub.url, cache_dir=tmp_path / "hf" / "hub")
    before = len(hub.asked)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for repo, revision in ((ID, None), ("org/part", "v2"), ("org/part", None)):
        with pytest.raises(SourceError, match="HF_HUB_OFFLINE") as refused:
            HubRemote(repo, revision).listing()
        assert refused.value.id == "hub-offline"
    assert len(hub.asked) == before


def test_in_offline_mode_a_tokenizer_alone_is_not_a_model(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program may have cached it."""
    from huggingface_hub import hf_hub_download

    for name in ("config.json", "tokenizer.json"):
        hf_hub_download(ID, name, endpoint=hub.url, cache_dir=tmp_path / "hf" / "hub")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SourceError, match="has no weights") as refused:
        remote().listing()
    assert refused.value.id == "hub-offline"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("CAS Client Error: Request error: error sending", SourceError),
        ("IO Error: No space left (os error 28)", OSError),
    ],
)
def test_errors_of_xet_are_told_apart(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, expected: type[Exception]
) -> None:
    """It raises RuntimeErrors for the network and for the disk."""

    def download(*_: object, **__: object) -> str:
        raise RuntimeError(f"Task error: File reconstruction error: {said}")

    listing = remote().listing()
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(expected) as error:
        fetched(listing, tmp_path, RetryPolicy(seconds=0.0))
    assert getattr(error.value, "id", None) == ("hub-unreachable" if expected is SourceError else None)
    assert getattr(error.value, "errno", None) == (errno.ENOSPC if expected is OSError else None)


def test_a_source_is_opened_by_the_form_of_its_name(hub: HubServer) -> None:
    """A path needs no fetch, and S3 has no revisions."""
    assert SourceQuery(source=ID).open().listing().source == ID
    with pytest.raises(ValueError, match="is a path"):
        SourceQuery(source="./models/tiny").open()
    with pytest.raises(SourceError) as refused:
        SourceQuery(source="s3://models/tiny", revision="v1").open()
    assert refused.value.id == "revision-without-hub"
