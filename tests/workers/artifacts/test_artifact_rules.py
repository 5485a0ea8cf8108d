"""Rules of artifacts and NEFF caches that nothing else would notice the breach of, or only a slow test."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.hub import HubServer, Repo
from tests.s3 import FaultProxy, S3Server, client
from tests.workers.fake_remote import FakeRemote
from tests.workers.neffs import COMPILER, finished, graph
from tests.workers.tnx_runs import config
from workers.artifacts.fetch.artifact_fetcher import ArtifactFetcher, FetchedArtifact, WantedArtifact
from workers.artifacts.fetch.progress import FetchStatus, Progress
from workers.artifacts.fetch.retry_policy import RetryPolicy
from workers.artifacts.fetch.single_flight import SingleFlight
from workers.artifacts.fetch.transfer import S3Remote
from workers.artifacts.sources import hub as hub_source
from workers.artifacts.sources.hub import HubRemote, is_offline
from workers.artifacts.sources.listing import Listing, SourceError, Stopped
from workers.artifacts.sources.s3 import WORK, Bucket
from workers.artifacts.store.store import Store
from workers.compiled import graph_sync, host_sets, neuron_cache, pruning, shared_sets, storage
from workers.compiled.compile_session import CompileSession
from workers.compiled.file_states import part_of
from workers.compiled.graph_records import GraphUses, Proof, record_file
from workers.compiled.graph_sync import localized, push
from workers.compiled.host_sets import Buildable, LockedEntry, entry
from workers.compiled.manifest import LOCK_FILE, name_of, record_of, write_record
from workers.compiled.neuron_cache import EntryState, read_entries, state_of
from workers.compiled.orders import Built, Order, Reply
from workers.compiled.places import CachedGraphs, HostSets, ShippedGraphs
from workers.compiled.prediction import ArtifactCandidate
from workers.compiled.preparation import build_key
from workers.compiled.storage import FolderStorage, storage_at
from workers.serving import prepare

SPAN = 2**16
SIZE = 8 * SPAN
BIG = os.urandom(SIZE)
DEADLINE_S = 30.0
QUICK = RetryPolicy(first_s=0.001, longest_s=0.01)


def s3_remote(url: str, retry_policy: RetryPolicy = QUICK, connections: int = 4) -> S3Remote:
    return S3Remote(url, connections=connections, span_bytes=SPAN, retry_policy=retry_policy)


def fetched(remote: S3Remote, listing: Listing, folder: Path) -> Progress:
    progress = Progress("test")
    remote.fetch(listing, folder, progress, threading.Event())
    return progress


# S3


def test_an_object_without_a_checksum_is_of_one_version(
    s3_server: S3Server, s3_proxy: FaultProxy, tmp_path: Path
) -> None:
    """The ETag of KMS-encrypted objects is not a digest; each range must have the listed version."""
    url = s3_server.bucket()
    name = url.removeprefix("s3://")
    put: dict[str, Any] = {"Bucket": name, "Key": "m", "ServerSideEncryption": "aws:kms"}
    s3 = client(s3_server.url)
    s3.meta.config.request_checksum_calculation = "when_required"
    s3.put_object(**put, Body=BIG)
    remote = s3_remote(url)
    listing = remote.listing()
    assert "ChecksumCRC64NVME" not in Bucket.of(url).head("m")
    held = [s3_proxy.hold("m", at * SPAN) for at in range(4)]  # all connections: none comes to the end
    results: list[BaseException | None] = []

    def fetch() -> None:
        with pytest.raises(SourceError) as refused:
            fetched(remote, listing, tmp_path)
        results.append(refused.value)

    thread = threading.Thread(target=fetch)
    thread.start()
    assert all(fault.reached.wait(DEADLINE_S) for fault in held)
    s3.put_object(**put, Body=BIG[::-1])
    s3_proxy.heal()
    thread.join(DEADLINE_S)
    assert [getattr(error, "id", None) for error in results] == ["s3-changed"]
    assert not (tmp_path / "m").exists()


class Ended(Progress):
    """Ends a fetch after more than four ranges."""

    def add(self, count: int) -> None:
        super().add(count)
        if self.status().done > 4 * SPAN:
            raise Stopped


@pytest.fixture
def stopped(s3_server: S3Server, s3_proxy: FaultProxy, tmp_path: Path) -> tuple[S3Remote, Listing, Path]:
    """A fetch that was stopped after four complete ranges."""
    remote = s3_remote(s3_server.bucket(files={"m": BIG}), connections=1)
    listing = remote.listing()
    with pytest.raises(Stopped):
        remote.fetch(listing, tmp_path, Ended("test"), threading.Event())
    s3_proxy.forget()
    return remote, listing, tmp_path


def test_only_unrecorded_ranges_are_fetched(stopped: tuple[S3Remote, Listing, Path], s3_proxy: FaultProxy) -> None:
    """All complete ranges count, the first one, too."""
    remote, listing, folder = stopped
    fetched(remote, listing, folder)
    assert (folder / "m").read_bytes() == BIG
    assert [seen.start for seen in s3_proxy.seen("m")] == [at * SPAN for at in range(4, 8)]


def test_a_recorded_range_is_verified(stopped: tuple[S3Remote, Listing, Path], s3_proxy: FaultProxy) -> None:
    """The disk may have lost it."""
    remote, listing, folder = stopped
    (ledger,) = (folder / WORK).glob("*.ranges")
    with ledger.with_suffix("").open("r+b") as data:
        data.seek(2 * SPAN)
        data.write(bytes(4096))
    fetched(remote, listing, folder)
    assert (folder / "m").read_bytes() == BIG
    assert [seen.start for seen in s3_proxy.seen("m")] == [at * SPAN for at in (2, 4, 5, 6, 7)]


def grows(pauses: list[float]) -> bool:
    """Returns whether pauses with jitter double: each is longer than the one before the last."""
    return len(pauses) >= 5 and all(after > before for before, after in pairwise(pauses[::2]))


@pytest.mark.parametrize("what", ["ranges", "small requests"])
def test_retry_pauses_of_a_request_grow(what: str, s3_server: S3Server, s3_proxy: FaultProxy, tmp_path: Path) -> None:
    """An S3 that responds SlowDown gets fewer requests."""
    url = s3_server.bucket(files={"m": b"0123456789"})
    pauses: list[float] = []

    def wait(stop: threading.Event, seconds: float) -> bool:
        pauses.append(seconds)
        return False

    retry_policy = RetryPolicy(first_s=0.01, longest_s=100.0, wait=wait)
    remote = s3_remote(url, retry_policy, connections=1)
    listing = remote.listing()
    s3_proxy.answer(503, "SlowDown", key="m", times=7, methods=("GET",) if what == "ranges" else ("HEAD",))
    fetched(remote, listing, tmp_path)
    assert grows(pauses)


def test_part_sizes_are_requested_before_anything_is_fetched(
    s3_server: S3Server, s3_proxy: FaultProxy, tmp_path: Path
) -> None:
    """If the last part shows that they differ; each byte is sent once."""
    url = s3_server.bucket()
    place = {"Bucket": url.removeprefix("s3://"), "Key": "m"}
    s3 = s3_server.client()
    upload = s3.create_multipart_upload(**place, ChecksumAlgorithm="SHA256")["UploadId"]
    done = []
    for number, (start, end) in enumerate([(0, 150_000), (150_000, 250_000), (250_000, 370_000)], 1):
        result = s3.upload_part(
            **place, UploadId=upload, PartNumber=number, Body=BIG[start:end], ChecksumAlgorithm="SHA256"
        )
        done.append({"ETag": result["ETag"], "PartNumber": number, "ChecksumSHA256": result["ChecksumSHA256"]})
    s3.complete_multipart_upload(**place, UploadId=upload, MultipartUpload={"Parts": done})
    remote = s3_remote(url)
    progress = fetched(remote, remote.listing(), tmp_path)
    assert ((tmp_path / "m").read_bytes() == BIG[:370_000], progress.moved) == (True, 370_000)


# The hub


def test_retry_pauses_of_the_hub_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unreachable hub gets fewer requests."""
    from huggingface_hub import constants

    now, pauses = [0.0], list[float]()

    def wait(stop: threading.Event, seconds: float) -> bool:
        pauses.append(seconds)
        now[0] += seconds
        return False

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with HubServer() as server:
        for name, value in {**server.env, "HF_HOME": str(tmp_path)}.items():
            monkeypatch.setenv(name, value)
        server.repos["org/m"] = Repo()
        server.away()
        retry_policy = RetryPolicy(seconds=1.0, first_s=0.01, longest_s=100.0, clock=lambda: now[0], wait=wait)
        with pytest.raises(SourceError, match="hub-unreachable"):
            HubRemote("org/m", retry_policy=retry_policy).listing()
    assert grows(pauses)


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_mode_follows_the_hubs_library(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By either of its variables."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    before = is_offline()
    monkeypatch.setenv(variable, "1")
    assert (before, is_offline()) == (False, True)


# What a host brings


class Asked:
    """Replaces the hub: records the requested revision and serves these files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **files: bytes) -> None:
        self.remote = FakeRemote({name.replace("__", "."): data for name, data in files.items()}, "org/m", "c1")
        self.revisions: list[str | None] = []
        monkeypatch.setattr(hub_source, "HubRemote", self)

    def __call__(self, source: str, revision: str | None, **_: Any) -> FakeRemote:
        self.revisions.append(revision)
        return self.remote


def bring(store: Store, **wanted: Any) -> FetchedArtifact:
    wanted_artifact = WantedArtifact(source="org/m", **wanted)
    return ArtifactFetcher(store)(wanted_artifact, Progress("org/m"), threading.Event())


def test_a_host_fetches_pickles_only_if_the_spec_allows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing of the model is fetched."""
    hub = Asked(monkeypatch, config__json=b"{}", pytorch_model__bin=b"pickled")
    with pytest.raises(SourceError, match="pickle-refused"):
        bring(Store(tmp_path))
    assert hub.remote.moved == []
    assert (Path(bring(Store(tmp_path), allow_pickle=True).folder) / "pytorch_model.bin").exists()


def test_a_host_fetches_code_only_if_the_spec_trusts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint has it beside its weights."""
    Asked(monkeypatch, config__json=b"{}", model__safetensors=b"weights", modeling_m__py=b"import os")
    plain, trusting = bring(Store(tmp_path / "a")), bring(Store(tmp_path / "b"), trust_remote_code=True)
    assert [(Path(item.folder) / "modeling_m.py").exists() for item in (plain, trusting)] == [False, True]


def test_a_host_fetches_the_wanted_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the branch main."""
    hub = Asked(monkeypatch, config__json=b"{}", model__safetensors=b"weights")
    bring(Store(tmp_path), revision="607a30d7")
    assert hub.revisions == ["607a30d7"]


def test_another_commit_does_not_replace_an_unavailable_revision(tmp_path: Path) -> None:
    """It is another model."""
    store = Store(tmp_path)
    remote = FakeRemote({"config.json": b"{}"}, "org/m", "c1")

    def brought(revision: str) -> FetchedArtifact:
        wanted = WantedArtifact(source="org/m", revision=revision)
        return ArtifactFetcher(store, lambda *_: remote)(wanted, Progress("org/m"), threading.Event())

    first = brought("c1")

    def listing() -> Listing:
        raise SourceError("hub-offline", "nobody is asked")

    remote.listing = listing  # type: ignore[method-assign]
    assert brought("c1").artifact == first.artifact
    with pytest.raises(SourceError, match="hub-offline"):
        brought("c2")


def test_a_polling_waiter_gets_the_outcome_of_its_job() -> None:
    """The second of two waiters does not start the job anew."""
    begun: list[int] = []
    ended = threading.Event()

    def work(progress: Progress, stop: threading.Event) -> str:
        assert ended.wait(DEADLINE_S)
        begun.append(1)
        return f"end {len(begun)}"

    flights = SingleFlight[str]()
    assert all(isinstance(flights.join(caller, "key", "one", work, 0.0), FetchStatus) for caller in ("a", "b"))
    ended.set()
    result = [flights.join(caller, "key", "one", work, DEADLINE_S) for caller in ("a", "b")]
    assert (result, begun) == (["end 1"] * 2, [1])


def test_a_symlink_is_not_a_file_of_an_artifact(tmp_path: Path) -> None:
    """Whatever its length: its target is not under the store's control."""
    elsewhere = tmp_path / "elsewhere"
    files = {"config.json": b"x" * len(str(elsewhere))}
    elsewhere.write_bytes(b"y" * 9)
    store, remote = Store(tmp_path / "store"), FakeRemote(files)
    artifact = Path(store.get(remote).folder) / "config.json"
    artifact.unlink()
    artifact.symlink_to(elsewhere)
    assert (Path(store.get(remote).folder) / "config.json").read_bytes() == files["config.json"]
    assert elsewhere.read_bytes() == b"y" * 9


# NEFFs


@pytest.fixture(autouse=True)
def nobody_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neuron_cache, "compilers", list)
    monkeypatch.setattr(neuron_cache, "SETTLE_S", 0.0)


LOCK = "model.hlo_module.pb.lock"


def test_a_neff_that_is_being_written_is_locked() -> None:
    """Only model.done shows that it is complete."""
    assert state_of({"model.neff", LOCK}) is EntryState.LOCKED
    assert state_of({"model.neff", LOCK}, at_work=False) is EntryState.STALE


@pytest.mark.parametrize(("kind", "state"), [("ext4", EntryState.STALE), ("nfs4", EntryState.LOCKED)])
def test_no_lock_is_stale_on_a_shared_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, state: EntryState
) -> None:
    """Compilers of other hosts are not visible."""
    graph(tmp_path, **{LOCK: ""})
    monkeypatch.setattr(neuron_cache, "file_system", lambda path: kind)
    assert [entry.state for entry in read_entries(tmp_path)] == [state]


def test_model_done_is_uploaded_last(s3_server: S3Server, s3_proxy: FaultProxy, tmp_path: Path) -> None:
    """Readers never see a partial entry as finished."""
    finished(tmp_path)
    assert len(push(tmp_path, storage_at(f"{s3_server.bucket()}/cache")).entries) == 1
    put = [seen.key.rpartition("/")[2] for seen in s3_proxy.seen(method="PUT")]
    (result,) = (f"corewright.{part_of(path).digest}" for path in tmp_path.rglob("model.neff"))
    assert (put[-1], sorted(put)) == (
        "model.done",
        ["compile_flags.json", result, "model.done", "model.hlo_module.pb", "model.neff"],
    )


def test_a_graph_with_another_neff_is_missing(tmp_path: Path) -> None:
    """A byte is flipped; the sizes are equal."""
    folder = finished(tmp_path, neff="NEFF")
    record = record_of({"engine": "e"}, graphs={f"{folder.parent.name}/{folder.name}": part_of(folder / "model.neff")})
    before = Proof(tmp_path, [record]).missing(record)
    (folder / "model.neff").write_text("NEfF")
    assert (before, Proof(tmp_path, [record]).missing(record)) == ((), tuple(record.graphs))


@pytest.mark.parametrize("program", ["a.neff", "model.pt"])
def test_a_program_with_other_content_is_compiled_again(tmp_path: Path, program: str) -> None:
    """Of either engine; weights are compared by size."""
    for _ in range(2):
        with entry(tmp_path, {"engine": "e"}) as made:
            (made.path / program).write_bytes(b"program")
            (made.path / "weights.safetensors").write_bytes(b"weights")
            made.finish()
    (made.path / "weights.safetensors").write_bytes(b"Weights")
    weights = made.complete
    (made.path / program).write_bytes(b"Program")
    assert (weights, made.complete) == (True, False)


def test_a_recently_read_graph_is_not_pruned(tmp_path: Path) -> None:
    """However long ago it was compiled."""
    folder = finished(tmp_path)
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))
    read = (folder / "model.neff").stat()
    os.utime(folder / "model.neff", (read.st_ctime, 1e9))
    kept = list(pruning.prune_cache(tmp_path, 86400.0))
    os.utime(folder / "model.neff", (1e9, 1e9))
    gone = [item.path for item in pruning.prune_cache(tmp_path, 86400.0)]
    assert (kept, gone) == ([], [str(folder)])


@pytest.mark.parametrize("age_s", [0.0, 7200.0])
def test_an_entry_of_a_starting_compile_is_not_pruned(tmp_path: Path, age_s: float) -> None:
    """Its folder exists before its lock."""
    folder = graph(tmp_path, **{"model.hlo_module.pb": "graph"})
    made = (folder / "model.hlo_module.pb").stat().st_mtime - age_s
    os.utime(folder / "model.hlo_module.pb", (made, made))
    gone = [item.path for item in pruning.prune_cache(tmp_path, 86400.0)]
    assert gone == ([str(folder)] if age_s else [])


def test_recently_used_artifacts_are_not_pruned(tmp_path: Path) -> None:
    """However long ago they were compiled."""
    for kind in ("asked for", "old"):
        with entry(tmp_path, {"engine": kind}) as made:
            made.finish()
        for path in (made.path, made.path.with_name(f"{made.path.name}.lock")):
            os.utime(path, (1e9, 1e9))
    with entry(tmp_path, {"engine": "asked for"}) as wanted:
        assert wanted.complete
    assert [item.path for item in pruning.prune_compiled(tmp_path, 86400.0)] == [str(made.path)]


def test_retry_in_s3_removes_only_failures(s3_server: S3Server, s3_proxy: FaultProxy) -> None:
    """And none in a dry run."""
    cache = f"neuronxcc-{COMPILER}/MODULE"
    failed, other = [f"{cache}_a+b/model.log", f"{cache}_a+b/model.hlo_module.pb"], [f"{cache}_c+d/model.log"]
    good = [f"{cache}_e+f/model.neff", f"{cache}_e+f/model.done", f"{cache}_e+f/model.log"]
    busy = [f"{cache}_g+h/model.log", f"{cache}_g+h/{LOCK}"]
    url = s3_server.bucket(files=dict.fromkeys([*failed, *other, *good, *busy], b"x"))

    def left() -> list[str]:
        return [file.name for file in Bucket.of(url).files()]

    def forgotten(*names: str, dry_run: bool = False) -> list[str]:
        return [item.path for item in pruning.retry(url, names, dry_run)]

    assert forgotten(dry_run=True) == [f"{url}/{cache}_a+b", f"{url}/{cache}_c+d"]
    assert left() == sorted([*failed, *other, *good, *busy])
    assert forgotten("MODULE_c+d") == [f"{url}/{cache}_c+d"]
    assert left() == sorted([*failed, *good, *busy])
    assert forgotten() == [f"{url}/{cache}_a+b"]
    assert left() == sorted([*good, *busy])


# What a start finds, and what it leaves


MANIFEST = {"engine": "transformers-neuronx", "model": "digest", "versions": {"neuronx-cc": COMPILER}}


@dataclass
class Start:
    """The start of one model, whose graphs are in a cache from the environment."""

    home: Path
    cache: Path

    @property
    def root(self) -> Path:
        return self.home / "compiled"

    def visit(self) -> CompileSession:
        return CompileSession(MANIFEST, Path("/models/m"), self.root)

    def found(self, **environment: str) -> ArtifactCandidate:
        """The only one in the cache, told of another environment than the visits'."""
        variables = {"NEURON_COMPILE_CACHE_URL": str(self.cache), **environment}
        (copy,) = CachedGraphs(variables, self.root).candidates(MANIFEST)
        return copy

    def keep(self, *folders: Path, failed: tuple[str, ...] = ()) -> Path:
        """The record of what was compiled; its file."""
        graphs = {name_of_graph(folder): part_of(folder / "model.neff") for folder in folders}
        record = record_of(MANIFEST, graphs=graphs, failed=failed)
        write_record(record_file(self.cache, record.name), record)
        return record_file(self.cache, record.name)


def name_of_graph(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))
    monkeypatch.delenv("NEURON_CC_FLAGS", raising=False)
    (tmp_path / "cache").mkdir()
    return Start(tmp_path / "home", tmp_path / "cache")


def test_neffs_beside_a_model_are_compared_with_their_record(tmp_path: Path) -> None:
    """Changed ones are reported."""
    (tmp_path / "a.neff").write_text("NEFF")
    record = record_of(MANIFEST, files={"a.neff": part_of(tmp_path / "a.neff")})
    write_record(tmp_path / LOCK_FILE, record)
    (before,) = ShippedGraphs(tmp_path).candidates(MANIFEST)
    (tmp_path / "a.neff").write_text("NEfF")
    (after,) = ShippedGraphs(tmp_path).candidates(MANIFEST)
    assert (before.missing, after.missing) == ((), ("a.neff",))


def test_a_changed_program_is_a_predicted_compile(tmp_path: Path) -> None:
    """Before a start finds it."""
    with entry(tmp_path, MANIFEST) as made:
        (made.path / "a.neff").write_text("NEFF")
        made.finish()
    (before,) = HostSets(tmp_path).candidates(MANIFEST)
    (made.path / "a.neff").write_text("NEfF")
    (after,) = HostSets(tmp_path).candidates(MANIFEST)
    assert (before.missing, after.missing) == ((), ("a.neff",))


@pytest.mark.parametrize(
    ("log", "flags", "stuck"),
    [
        ("[NCC_EVRF029] Operation sort is not supported\n", "", True),
        ("neuronx-cc failed with -9\n", "", False),
        ("[NCC_EVRF029] Operation sort is not supported\n", "--retry_failed_compilation", False),
    ],
)
def test_only_failures_without_a_retry_are_predicted_to_fail(start: Start, log: str, flags: str, stuck: bool) -> None:
    """Those of killed compilers are removed by the start."""
    folder = graph(start.cache, **{"model.log": log})
    start.keep(failed=(name_of_graph(folder),))
    result = start.found(NEURON_CC_FLAGS=flags)
    assert (result.failed, result.missing) == ((name_of_graph(folder),) if stuck else (), (name_of_graph(folder),))


def test_a_start_removes_its_damaged_graphs(start: Start) -> None:
    """The compiler's wrapper would load them; graphs of other models stay."""
    changed, good, other = (finished(start.cache, str(digit) * 20) for digit in (1, 2, 3))
    start.keep(changed, good)
    for folder in (changed, other):
        (folder / "model.neff").write_text("NEfF")
    with start.visit().compiling():
        assert [folder.exists() for folder in (changed, good, other)] == [False, True, True]


def test_a_start_removes_the_lock_of_a_dead_compiler(start: Start) -> None:
    """The package would wait for it forever."""
    folder = graph(start.cache, **{LOCK: ""})
    with start.visit().compiling():
        assert not (folder / LOCK).exists()


def test_a_failed_compile_is_recorded(start: Start) -> None:
    """So that the next start is predicted to fail."""
    old = graph(start.cache, "1" * 20, **{"model.log": "[NCC_EVRF029] of another model\n"})
    failed: list[Path] = []

    def compiles() -> None:
        failed.append(graph(start.cache, **{"model.log": "[NCC_EVRF029] Operation sort is not supported\n"}))
        raise RuntimeError("the compiler has failed")

    with pytest.raises(RuntimeError), start.visit().compiling():
        compiles()
    assert start.found().failed == (name_of_graph(failed[0]),)
    assert old.exists()


def test_nothing_is_pushed_to_a_read_only_cache(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled graphs stay in the local folder."""
    is_writable = storage.is_writable
    monkeypatch.setattr(graph_sync, "is_writable", lambda folder: folder != start.cache and is_writable(folder))
    visit = start.visit()
    with visit.compiling():
        local = Path(os.environ["NEURON_COMPILE_CACHE_URL"])
        finished(local)
    visit.record_compiled(wait=True)
    assert local.is_relative_to(start.home)
    assert [*start.cache.rglob("*")] == []


def test_a_start_with_all_graphs_here_needs_no_remote_cache(
    start: Start, s3_server: S3Server, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 is used for missing graphs only."""
    url = f"{s3_server.bucket()}/cache"
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", url)
    place = localized(os.environ, start.home / "neff")
    assert place is not None
    start.cache = place.path
    start.keep(finished(place.path))
    with start.visit().compiling():
        assert s3_proxy.requests == []


def test_the_graphs_of_saved_neffs_are_recorded_all_or_none(start: Start, tmp_path: Path) -> None:
    """A partial record would predict a hit where a graph is compiled."""
    saved = tmp_path / "saved"
    saved.mkdir()
    for name in ("a", "b"):
        (saved / f"{name}.neff").write_text(f"NEFF of {name}")
    uses = GraphUses(start.cache)
    first = finished(start.cache, "1" * 20, neff="NEFF of a")
    finished(start.cache, "3" * 20, neff="NEFF of c")
    assert uses.record(MANIFEST, "m", saved) is None
    second = finished(start.cache, "2" * 20, neff="NEFF of b")
    result = uses.record(MANIFEST, "m", saved)
    assert result is not None
    assert set(result.graphs) == {name_of_graph(first), name_of_graph(second)}


def test_an_entry_that_another_process_finished_is_not_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes found it missing; the second gets the lock after the first has finished."""
    acquire, faster = host_sets._acquire, host_sets.peek(tmp_path, MANIFEST)

    def late(lock: int, path: Path, *, shared: bool) -> None:
        if not shared and not faster.complete:
            faster.path.mkdir()
            (faster.path / "a.neff").write_text("NEFF")
            faster.finish()
        acquire(lock, path, shared=shared)

    monkeypatch.setattr(host_sets, "_acquire", late)
    with entry(tmp_path, MANIFEST) as held:
        assert held.complete
        assert (held.path / "a.neff").read_text() == "NEFF"


@pytest.mark.parametrize("manifest", ["{}", '{"engine": "another"}', "[]"])
def test_an_entry_is_complete_only_with_its_own_manifest(tmp_path: Path, manifest: str) -> None:
    """The name of its folder is not enough."""
    with entry(tmp_path, MANIFEST) as made:
        made.finish()
    before = made.complete
    (made.path / host_sets.MANIFEST).write_text(manifest)
    assert (before, made.complete) == (True, False)


def test_the_manifest_of_an_entry_is_pushed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its record; without both it is an unfinished upload."""
    put: list[str] = []
    real = FolderStorage.put

    def spied(place: FolderStorage, name: str, path: Path) -> None:
        put.append(name.rpartition("/")[2])
        real(place, name, path)

    monkeypatch.setattr(FolderStorage, "put", spied)
    with entry(tmp_path / "here", MANIFEST) as made:
        for name in ("a.neff", "z.neff"):
            (made.path / name).write_text("NEFF")
        made.finish()
    shared_sets.push(made, str(tmp_path / "there"))
    assert put == ["a.neff", "z.neff", LOCK_FILE, host_sets.MANIFEST]


# Compiling ahead, with an engine that is played


@pytest.fixture
def makes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records what was compiled: one set with one file."""
    created: list[str] = []

    def make(held: LockedEntry, tell: Callable[[int, int], None]) -> None:
        created.append(held.path.name)
        (held.path / "a.neff").write_text("NEFF")
        held.finish("m")

    buildable = Buildable(source=Path("/models/m"), manifest=MANIFEST, make=make)
    monkeypatch.setattr(prepare, "buildables", lambda config, read: [buildable])
    return created


def built(home: Path, push: bool = False, **fields: Any) -> Built:
    messages: list[Reply] = []
    replica_config = config(Path("/models/m"), compiled=str(home), **fields)
    prepare.run("compile", Order(config=replica_config, push=push), messages.append)
    assert isinstance(messages[-1], Built), messages[-1]
    return messages[-1]


def test_artifacts_pushed_by_another_host_are_not_compiled(tmp_path: Path, makes: list[str]) -> None:
    """Only an order with ``push`` sends compiled artifacts."""
    there = str(tmp_path / "there")
    key = name_of(MANIFEST)
    kept = built(tmp_path / "a", neff_cache=there)
    assert (kept.compiled, kept.pushed, Path(there).exists()) == ([key], [], False)
    sent = built(tmp_path / "a", push=True, neff_cache=there)
    assert (sent.compiled, sent.pulled, sent.pushed) == ([], [], [key])
    result = built(tmp_path / "b", neff_cache=there)
    assert (result.compiled, result.pulled, result.pushed) == ([], [key], [])
    assert makes == [key]


def test_a_checkpoint_is_not_evicted_while_it_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store would make room for another model."""
    store = Store(tmp_path, grace_s=0.0)
    artifact = store.get(FakeRemote({"config.json": b"{}"}))
    errors: list[str] = []

    def ensure(*_: Any, **__: Any) -> Built:
        with pytest.raises(SourceError) as refusal:
            store.remove(artifact.key)
        errors.append(refusal.value.id)
        return Built(wanted=[], seconds=0.0)

    monkeypatch.setattr(prepare, "buildables", lambda config, read: [])
    monkeypatch.setattr(prepare, "ensure", ensure)
    assert prepare.run("compile", Order(config=config(Path(artifact.folder))), lambda reply: None)
    store.remove(artifact.key)
    assert errors == ["store-in-use"]


def test_replicas_of_one_model_wait_for_one_compile() -> None:
    """Fields of one replica do not matter; another setting, adapter or command is examined and compiled separately."""
    replica_config = config(Path("/models/m"))
    other = config(
        Path("/models/m"), replica=1, epoch=7, cores=[2, 3], env={"A": "1"}, token="t", log="/l", socket="/s"
    )
    assert build_key(replica_config) == build_key(other)
    different: list[dict[str, Any]] = [
        {"dtype": "bf16"},
        {"adapters": {"x": "/lora"}},
        {"server_launch": ["./start"]},
        {"compiled": "/c"},
    ]
    keys = {build_key(config(Path("/models/m"), **fields)) for fields in ({}, *different)}
    assert len(keys) == 1 + len(different)
