"""What Optimum Neuron has exported goes to other hosts through S3, and is loaded there without a compile."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.doubles import Neuron
from tests.doubles import neuron as neuron
from tests.s3 import S3Server
from tests.workers.nxdi_traffic import Checkpoints, arrivals, cpu, served, wrong
from tests.workers.nxdi_traffic import sources as sources
from tests.workers.optimum_traffic import config_of, export_here, play
from workers.compiled.orders import NEEDS_DEVICE, Built, Order, Reply
from workers.engines.open_engine import open_engine
from workers.engines.optimum_neuron import artifacts
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Trouble
from workers.serving import prepare

ANSWERED = arrivals(2)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def cache(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty NEFF cache on S3."""
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    return f"{s3.bucket()}/neffs"


@pytest.fixture(autouse=True, params=["0.4.5", "0.0.28"])
def version(request: pytest.FixtureRequest, neuron: Neuron, monkeypatch: pytest.MonkeyPatch) -> str:
    """The package that is installed on both hosts."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    monkeypatch.setattr(artifacts, "compile_in_subprocess", export_here)
    play(monkeypatch, request.param)
    return str(request.param)


def compiled(config: ReplicaConfig, push: bool = False) -> Reply:
    """The result of ``corewright compile`` on the host of ``config``."""
    replies: list[Reply] = []
    prepare.run("compile", Order(config=config, push=push), replies.append)
    return replies[-1]


def answers(config: ReplicaConfig) -> dict[str, list[int]]:
    """Those of a start, which releases its cores again."""
    engine: Any = open_engine(config)
    engine.load()
    result = served(engine, ANSWERED)
    engine.close()
    importlib.import_module("neuron_double.runtime").reset_for_tests()
    return result


def exported(source: Path, folder: Path, cache: str, version: str) -> ReplicaConfig:
    """A host whose export is on S3. 0.0.28 exports on the cores of a start only."""
    config = config_of(source, folder, neff_cache=cache)
    if version == "0.0.28":
        answers(config)
    built = compiled(config, push=True)
    assert isinstance(built, Built)
    assert len(built.pushed) == 1
    return config


def another(source: Path, tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch) -> ReplicaConfig:
    """A host that has the model in another folder, and compiled nothing."""
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "another-cache"))
    return config_of(Path(shutil.copytree(source, tmp_path / "another")), tmp_path / "b", neff_cache=cache)


@pytest.mark.parametrize("version", ["0.4.5"], indirect=True)
def test_an_export_without_room_for_its_weights_does_not_begin(
    version: str, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a copy of them, other than that of transformers-neuronx below 0.0.28."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(EngineLoadError) as refused:
        answers(config_of(sources("llama"), tmp_path / "a"))
    assert refused.value.id == "disk-full"


def test_an_export_is_loaded_by_another_host_without_a_compile(
    version: str, cache: str, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are those of the cpu engine."""
    exported(sources("llama"), tmp_path / "a", cache, version)
    other = another(sources("llama"), tmp_path, cache, monkeypatch)
    compiles = importlib.import_module("neuron_double.compiler").compiles
    count = len(compiles())
    built = compiled(other)
    assert isinstance(built, Built)
    assert (len(built.pulled), built.compiled) == (1, [])
    expected = served(cpu(sources("llama")), ANSWERED)
    assert wrong(sources("llama"), ANSWERED, expected, answers(other)) == []
    assert len(compiles()) == count


def test_a_damaged_export_is_not_loaded(
    version: str,
    cache: str,
    s3: S3Server,
    sources: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One flipped byte: the host compiles itself, or reports that it needs cores for it."""
    exported(sources("llama"), tmp_path / "a", cache, version)
    bucket = cache.removeprefix("s3://").split("/")[0]
    keys = [item["Key"] for item in s3.client().list_objects_v2(Bucket=bucket)["Contents"]]
    graph = next(key for key in keys if key.endswith((".pt", ".neff")))
    data = s3.client().get_object(Bucket=bucket, Key=graph)["Body"].read()
    s3.client().put_object(Bucket=bucket, Key=graph, Body=data[:-1] + bytes([data[-1] ^ 1]))
    reply = compiled(another(sources("llama"), tmp_path, cache, monkeypatch))
    if version == "0.0.28":
        assert isinstance(reply, Trouble)
        assert reply.failure.id == NEEDS_DEVICE
    else:
        assert isinstance(reply, Built)
        assert (reply.pulled, len(reply.compiled)) == ([], 1)
