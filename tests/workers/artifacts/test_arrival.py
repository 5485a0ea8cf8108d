"""A model is loaded while the rest of it arrives, and no file is read before it is whole."""

from __future__ import annotations

import contextlib
import io
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from placements.engines.registry import ENGINES
from tests.workers.fake_remote import DEADLINE_S, FakeRemote, Fetcher
from workers import engines
from workers.artifacts.fetch import arrival
from workers.artifacts.fetch.arrival import pending_files, wait_for, wait_for_all, wait_for_small
from workers.artifacts.sources.listing import SourceError, Stopped
from workers.artifacts.store.manifest import Artifact
from workers.artifacts.store.store import Store
from workers.engines.cpu.engine import CpuEngine
from workers.messages.engine_protocol import EngineLoadError

FILES = {"config.json": b"{}", "model-1.safetensors": b"1" * 100_000, "model-2.safetensors": b"2" * 100_000}
LAST, LAST_SHARD = "model-2.safetensors", "model-4.safetensors"
Checkpoints = Callable[[str], Path]


class Gated:
    """A fetch into a store that stops before its last file is complete."""

    def __init__(self, root: Path, files: dict[str, bytes], gate: str) -> None:
        self.store = Store(root)
        self._reached, self._go, self._stop, self._gate = threading.Event(), threading.Event(), threading.Event(), gate
        self._pool = ThreadPoolExecutor(1)
        remote = FakeRemote(files, before=self._before)
        self.fetch: Future[Artifact] = self._pool.submit(self.store.get, remote, None, self._stop)
        assert self._reached.wait(DEADLINE_S)
        self.folder = root / "artifacts" / remote.listing().key

    def _before(self, name: str) -> None:
        if name == self._gate:
            self._reached.set()
            assert self._go.wait(DEADLINE_S)

    def go_on(self) -> None:
        self._go.set()

    def end(self) -> None:
        """It ends there, and the rest never comes."""
        self._stop.set()
        self._go.set()
        with contextlib.suppress(Stopped):
            self.fetch.result(DEADLINE_S)
        self._pool.shutdown()


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[Callable[..., Gated]]:
    with contextlib.ExitStack() as stack:

        def start(files: dict[str, bytes] = FILES, gate: str = LAST) -> Gated:
            made = Gated(tmp_path / "store", files, gate)
            stack.callback(made.end)
            return made

        yield start


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that is set whenever a waiter finds that a file is still pending."""
    event, real = threading.Event(), arrival.pending_files

    def pending(folder: Path) -> frozenset[str]:
        names = real(folder)
        if names:
            event.set()
        return names

    monkeypatch.setattr(arrival, "pending_files", pending)
    return event


def test_a_file_is_waited_for_until_it_is_complete(gated: Callable[..., Gated], looked: threading.Event) -> None:
    """Its first half is there under another name; earlier files are complete."""
    fetch = gated()
    assert pending_files(fetch.folder) == {LAST}
    assert wait_for(fetch.folder, "model-1.safetensors").read_bytes() == FILES["model-1.safetensors"]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for, fetch.folder, LAST)
        assert looked.wait(DEADLINE_S)
        assert not waiting.done()
        fetch.go_on()
        assert waiting.result(DEADLINE_S).read_bytes() == FILES[LAST]
    assert fetch.fetch.result(DEADLINE_S).folder == str(fetch.folder)
    assert pending_files(fetch.folder) == frozenset()


def test_without_a_fetch_there_is_no_wait(tmp_path: Path) -> None:
    """Folders outside a store, and complete artifacts; a missing file is an error of the loader."""
    artifact = Store(tmp_path / "store").get(FakeRemote(FILES))
    for folder in (tmp_path, Path(artifact.folder)):
        wait_for_small(folder)
        assert not wait_for(folder, "missing.safetensors").exists()


@pytest.mark.parametrize(
    ("wait", "state"), [(lambda folder: wait_for(folder, LAST), LAST), (wait_for_all, "all files")]
)
def test_the_end_of_an_incomplete_fetch_ends_the_wait(
    wait: Callable[[Path], object], state: str, gated: Callable[..., Gated], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the error `fetch-ended`."""
    monkeypatch.setattr(arrival, "HANDOVER_S", 0.1)
    fetch = gated()
    fetch.end()
    with pytest.raises(SourceError, match=f"fetch-ended: .* before {state}"):
        wait(fetch.folder)


def test_a_wait_continues_with_the_process_that_resumes_the_fetch(tmp_path: Path, looked: threading.Event) -> None:
    """The first fetching process is killed."""
    fetcher = Fetcher(tmp_path, FILES, gate=LAST)
    try:
        assert fetcher.line() == "gate"
        store = Store(tmp_path)
        (folder,) = (tmp_path / "artifacts").iterdir()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(wait_for, folder, LAST)
            assert looked.wait(DEADLINE_S)
            fetcher.kill()
            for _ in range(2):  # it sees that nobody fetches
                looked.clear()
                assert looked.wait(DEADLINE_S)
            store.get(FakeRemote(FILES))
            assert waiting.result(DEADLINE_S).read_bytes() == FILES[LAST]
    finally:
        fetcher.end()


def test_a_load_waits_for_small_files_only(gated: Callable[..., Gated], monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins with the config, which is fetched first."""
    monkeypatch.setattr(arrival, "SMALL_BYTES", 1000)
    folder = gated().folder
    wait_for_small(folder)
    assert pending_files(folder) == {LAST}


def test_a_wait_for_all_files_ends_after_their_verification(
    gated: Callable[..., Gated], looked: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files may be present already; the manifest completes the folder."""
    monkeypatch.setattr(arrival, "HANDOVER_S", 0.1)
    reached, compare = threading.Event(), threading.Event()
    real = Store._matching_files

    def matching_files(self: Store, *arguments: Any) -> Any:
        reached.set()
        assert compare.wait(DEADLINE_S)
        return real(self, *arguments)

    monkeypatch.setattr(Store, "_matching_files", matching_files)
    fetch = gated()
    fetch.go_on()
    assert reached.wait(DEADLINE_S)
    assert pending_files(fetch.folder) == frozenset()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_all, fetch.folder)
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        compare.set()
        waiting.result(DEADLINE_S)
    assert fetch.fetch.result(DEADLINE_S).folder == str(fetch.folder)


def test_a_file_linked_from_another_version_is_pending_until_it_is_verified(
    gated: Callable[..., Gated], tmp_path: Path
) -> None:
    """It may be damaged."""
    Store(tmp_path / "store").get(FakeRemote({**FILES, LAST: b"old"}))
    fetch = gated()
    assert (fetch.folder / "model-1.safetensors").exists()
    assert pending_files(fetch.folder) == set(FILES)


@pytest.fixture
def sharded(checkpoint: Checkpoints) -> dict[str, bytes]:
    """Splits the weights of a llama into five shards."""
    from safetensors.torch import load_file, save

    files = {path.name: path.read_bytes() for path in checkpoint("llama").iterdir()}
    tensors = load_file(checkpoint("llama") / "model.safetensors")
    del files["model.safetensors"]
    places = {name: f"model-{number % 5}.safetensors" for number, name in enumerate(sorted(tensors))}
    for shard in set(places.values()):
        held = {name: tensor for name, tensor in tensors.items() if places[name] == shard}
        files[shard] = save(held, {"format": "pt"})
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": places}).encode()
    return files


def first_logits(folder: Path) -> list[float]:
    engine = CpuEngine(folder, slots=1, max_len=32, threads=1)
    engine.load()
    logits: list[float] = engine.prefill([0], [[7, 8, 9]])[0].tolist()
    return logits


def test_the_cpu_engine_loads_while_shards_arrive(
    sharded: dict[str, bytes],
    checkpoint: Checkpoints,
    gated: Callable[..., Gated],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It begins before the last shard arrives, and computes the same as from the complete folder."""
    monkeypatch.setattr(arrival, "SMALL_BYTES", len(sharded[LAST_SHARD]) - 1)
    requested, real = threading.Event(), arrival.wait_for

    def wait(folder: Path, name: str) -> Path:
        if name == LAST_SHARD:
            requested.set()
        return real(folder, name)

    monkeypatch.setattr("workers.engines.cpu.checkpoint.wait_for", wait)
    fetch = gated(sharded, LAST_SHARD)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(first_logits, fetch.folder)
        assert requested.wait(DEADLINE_S)
        assert not loading.done()
        assert pending_files(fetch.folder) == {LAST_SHARD}
        fetch.go_on()
        assert loading.result(DEADLINE_S) == pytest.approx(first_logits(checkpoint("llama")), abs=1e-4)


def test_the_cpu_engine_waits_for_all_files(
    sharded: dict[str, bytes], gated: Callable[..., Gated], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for files that it does not read: a replica serves from verified artifacts only."""
    monkeypatch.setattr(arrival, "SMALL_BYTES", 100)
    requested, real = threading.Event(), arrival.wait_for_all

    def wait(folder: Path) -> None:
        requested.set()
        real(folder)

    monkeypatch.setattr("workers.engines.cpu.engine.wait_for_all", wait)
    fetch = gated({**sharded, "z.safetensors": b"of no model" * 100}, "z.safetensors")
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(first_logits, fetch.folder)
        assert requested.wait(DEADLINE_S)
        assert not loading.done()
        fetch.go_on()
        assert len(loading.result(DEADLINE_S)) > 0


def test_arriving_pickled_weights_are_waited_for(
    checkpoint: Checkpoints, gated: Callable[..., Gated], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are missing when the engine looks for weights; without `allow_pickle` they are still rejected."""
    import torch
    from safetensors.torch import load_file

    monkeypatch.setattr(arrival, "SMALL_BYTES", 2000)
    files = {name: (checkpoint("llama") / name).read_bytes() for name in ("config.json", "generation_config.json")}
    held = io.BytesIO()
    torch.save(load_file(checkpoint("llama") / "model.safetensors"), held)
    fetch = gated({**files, "pytorch_model.bin": held.getvalue()}, "pytorch_model.bin")
    with pytest.raises(EngineLoadError, match="pickle-refused"):
        CpuEngine(fetch.folder, slots=1, max_len=32).load()

    requested, real = threading.Event(), arrival.wait_for

    def wait(folder: Path, name: str) -> Path:
        requested.set()
        return real(folder, name)

    monkeypatch.setattr("workers.engines.cpu.checkpoint.wait_for", wait)
    engine = CpuEngine(fetch.folder, slots=1, max_len=32, allow_pickle=True)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(engine.load)
        assert requested.wait(DEADLINE_S)
        fetch.go_on()
        loading.result(DEADLINE_S)
    assert engine.spec.vocab_size > 0


def test_the_engines_that_may_load_early_are_those_that_wait_for_files() -> None:
    """By the imports of their modules: the controller reads the set, not the engine."""
    folder = Path(engines.__file__).parent
    modules = folder.glob("*/*.py")
    waits = {path.parent.name for path in modules if "workers.artifacts.fetch.arrival" in path.read_text()}
    assert waits == {engine.module for engine in ENGINES.values() if engine.loads_arriving}


def test_the_cpu_engine_reports_a_failed_fetch_of_a_shard(
    sharded: dict[str, bytes], gated: Callable[..., Gated], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the error of the fetch, not as a missing file."""
    monkeypatch.setattr(arrival, "HANDOVER_S", 0.1)
    fetch = gated(sharded, LAST_SHARD)
    fetch.end()
    with pytest.raises(EngineLoadError) as error:
        CpuEngine(fetch.folder, slots=1, max_len=32).load()
    assert error.value.id == "fetch-ended"
