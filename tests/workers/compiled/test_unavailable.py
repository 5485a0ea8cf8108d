"""A cache that gives no answer costs no start: it is said, once, and what it may hold is compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doubles import Neuron, neuron  # noqa: F401 - the fixture
from tests.s3 import FaultProxy
from tests.workers.tnx_runs import BUCKETS, config
from workers.artifacts.sources.listing import RemoteFile, SourceError
from workers.compiled import neuron_cache, shared_sets, storage
from workers.compiled.orders import Built, Order, Reply
from workers.engines.transformers_neuronx.engine import open_transformers_neuronx
from workers.messages.replica_config import ReplicaConfig
from workers.serving import prepare

Checkpoints = Callable[[str], Path]
CACHE = "s3://neffs/chat"
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def machine(neuron: Neuron, monkeypatch: pytest.MonkeyPatch) -> Neuron:  # noqa: F811
    """A bucket without requests so far, and a short retry deadline."""
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    monkeypatch.setattr(neuron_cache, "SETTLE_S", 0.0)
    monkeypatch.setattr(storage, "_logged", set())
    monkeypatch.setattr(storage, "PATIENCE_S", 0.1)
    return neuron


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with FaultProxy(NOWHERE) as faults:
        for name, value in faults.env.items():
            monkeypatch.setenv(name, value)
        yield faults


def _away(proxy: FaultProxy) -> None:
    proxy.away()


def _denied(proxy: FaultProxy) -> None:
    proxy.answer(403, "AccessDenied", key="")


def _no_bucket(proxy: FaultProxy) -> None:
    proxy.answer(404, "NoSuchBucket", key="")


# (what is wrong with the cache; how loudly it is said; what stands there)
SILENT = [
    (_away, logging.WARNING, f"the cache at {CACHE} does not answer: s3-unreachable: s3:ListBucket on {CACHE}"),
    (_denied, logging.ERROR, f"the cache at {CACHE} cannot be used: s3-denied: s3:ListBucket on {CACHE}"),
    (_no_bucket, logging.ERROR, f"the cache at {CACHE} cannot be used: s3-no-bucket: the bucket neffs does not exist"),
]
silent = pytest.mark.parametrize(("fault", "level", "says"), SILENT)


def kept(source: Path, tmp_path: Path, **fields: Any) -> ReplicaConfig:
    return config(source, compiled=str(tmp_path / "compiled"), neff_cache=CACHE, **BUCKETS | fields)


def reply_to(replica_config: ReplicaConfig, **fields: Any) -> Reply:
    """How compiling it ends, without a process of its own."""
    results: list[Reply] = []
    prepare.run("compile", Order(config=replica_config, **fields), results.append)
    return results[-1]


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(item.levelno, item.getMessage()) for item in caplog.records if item.name == storage.__name__]


@silent
def test_an_unavailable_cache_does_not_fail_a_compile(
    checkpoint: Checkpoints,
    tmp_path: Path,
    proxy: FaultProxy,
    caplog: pytest.LogCaptureFixture,
    fault: Callable[[FaultProxy], None],
    level: int,
    says: str,
) -> None:
    """Also not that of the draft; it is logged once, as an error if it needs a fix."""
    fault(proxy)
    built = reply_to(kept(checkpoint("llama"), tmp_path, draft_source=str(checkpoint("llama")), draft_k=3))
    assert isinstance(built, Built)
    assert (len(built.compiled), built.pulled) == (2, [])
    assert [item.startswith(says) for item in built.warnings] == [True, True]
    ((how_loud, words),) = said(caplog)
    assert (how_loud, words.startswith(says), words.endswith("continuing without it")) == (level, True, True)


@silent
def test_a_start_compiles_graphs_of_an_unavailable_cache(
    checkpoint: Checkpoints,
    tmp_path: Path,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Callable[[FaultProxy], None],
    level: int,
    says: str,
) -> None:
    """Also without a compile ahead of time."""
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", CACHE)
    fault(proxy)
    engine: Any = open_transformers_neuronx(kept(checkpoint("llama"), tmp_path))
    engine.load()
    assert engine.compiled
    ((how_loud, words),) = said(caplog)
    assert (how_loud, words.startswith(says)) == (level, True)


@silent
def test_a_prediction_names_the_unavailable_cache(
    checkpoint: Checkpoints,
    tmp_path: Path,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[FaultProxy], None],
    level: int,
    says: str,
) -> None:
    """As the reason of the state `compiling`; sets and graphs are requested once."""
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", CACHE)
    fault(proxy)
    replica_config = kept(checkpoint("llama"), tmp_path)
    (result,) = prepare.predict(replica_config, ahead=True).missing
    assert result.startswith(f"model: this model has not been compiled; {says}")
    assert result.count("the cache at") == 1


def test_an_unavailable_cache_does_not_hide_local_artifacts(
    checkpoint: Checkpoints, tmp_path: Path, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start compiles nothing, and `verify` predicts that."""
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", CACHE)
    proxy.away()
    replica_config = kept(checkpoint("llama"), tmp_path)
    assert isinstance(reply_to(replica_config), Built)
    predicted = prepare.predict(replica_config, ahead=True)
    assert predicted.missing == []
    (wanted,) = predicted.wanted
    assert (wanted.prediction.outcome, wanted.prediction.where) == ("hit", "compiled")
    engine: Any = open_transformers_neuronx(replica_config)
    engine.load()
    assert not engine.compiled


def test_a_failed_push_is_reported(checkpoint: Checkpoints, tmp_path: Path, proxy: FaultProxy) -> None:
    """With the action that is not allowed; the compiled artifacts stay."""
    _denied(proxy)
    replica_config = kept(checkpoint("llama"), tmp_path)
    result = reply_to(replica_config, push=True)
    assert isinstance(result, Built)
    (why,) = result.unsent
    assert (why.id, "s3:ListBucket" in why.what, result.pushed) == ("s3-denied", True, [])
    assert all(wanted.complete for wanted in prepare.predict(replica_config).wanted)


def test_a_pull_that_fails_midway_leaves_nothing(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partial content must not count as compiled here."""
    first = config(
        checkpoint("llama"), compiled=str(tmp_path / "first"), neff_cache=str(tmp_path / "shared"), **BUCKETS
    )
    assert isinstance(reply_to(first, push=True), Built)

    def falls_silent(self: Any, files: list[RemoteFile], folder: Path, stop: Any) -> None:
        (folder / "arrived.neff").write_text("half")
        raise SourceError("neff-cache-unreadable", "the disk is gone")

    monkeypatch.setattr(storage.FolderStorage, "fetch", falls_silent)
    built = reply_to(
        config(checkpoint("llama"), compiled=str(tmp_path / "other"), neff_cache=str(tmp_path / "shared"), **BUCKETS)
    )
    assert isinstance(built, Built)
    assert (len(built.compiled), len(built.warnings)) == (1, 1)
    assert not list((tmp_path / "other").rglob("arrived.neff"))


def test_an_invalid_remote_manifest_is_rejected(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Whatever its content."""
    shared = tmp_path / "shared"
    replica_config = config(checkpoint("llama"), compiled=str(tmp_path / "a"), neff_cache=str(shared), **BUCKETS)
    assert isinstance(reply_to(replica_config, push=True), Built)
    (manifest,) = shared.rglob(shared_sets.MANIFEST)  # type: ignore[attr-defined]
    manifest.write_text("{")
    built = reply_to(config(checkpoint("llama"), compiled=str(tmp_path / "b"), neff_cache=str(shared), **BUCKETS))
    assert isinstance(built, Built)
    assert len(built.compiled) == 1


def test_credentials_in_a_wrong_url_are_not_shown() -> None:
    """Nor signatures."""
    error = SourceError("s3-url-wrong", "it is no s3://BUCKET/PREFIX")
    words = storage.describe("s3://KEY:SECRET@neffs/chat?X-Amz-Signature=abc", error)
    assert words == "the cache at s3://neffs/chat cannot be used: s3-url-wrong: it is no s3://BUCKET/PREFIX"
