"""A compiler that was killed leaves nothing in the persistent cache that would keep a model from ever loading."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.doubles import Neuron, neuron  # noqa: F401 - the fixture
from tests.workers.tnx_runs import BUCKETS, SERIAL, config
from workers.compiled import neuron_cache
from workers.engines.transformers_neuronx.engine import TransformersNeuronxEngine, open_transformers_neuronx
from workers.host.neuron_faults import fault_of
from workers.messages.json_form import encoded
from workers.messages.status import Reaction

Checkpoints = Callable[[str], Path]
DEADLINE_S = 30
GRAPH = "MODULE_cd73c69136bf675613f6+2c2d707e"
COMMAND = "compile --target=trn1 --framework=XLA /tmp/u/{0}/model.{0}.hlo_module.pb --output /tmp/u/{0}/model.{0}.neff"
LOAD = (
    "import sys, msgspec\n"
    "from workers.messages.json_form import decoded\nfrom workers.messages.replica_config import ReplicaConfig\n"
    "from workers.engines.transformers_neuronx.engine import open_transformers_neuronx\n"
    "open_transformers_neuronx(decoded(sys.argv[1], ReplicaConfig)).load()\n"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; nothing waits for it to settle."""
    monkeypatch.setattr(neuron_cache, "SETTLE_S", 0.0)
    return tmp_path / "neuron-compile-cache"


def graph(cache: Path, name: str = GRAPH, **files: str) -> Path:
    """Creates the folder of a graph with these files, whose names have "_" for "."."""
    folder = cache / "neuronxcc-2.16.372.0+4a9b2326" / name
    folder.mkdir(parents=True)
    for file, text in files.items():
        (folder / file.replace("_", ".")).write_text(text)
    return folder


@pytest.fixture
def compiler(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Starts a process that looks like neuronx-cc: a script of that name with the wrapper's arguments."""
    script = tmp_path / "neuronx-cc"
    script.write_text("#!/bin/sh\necho started\nread line\n")
    script.chmod(0o755)
    started: list[subprocess.Popen[bytes]] = []

    def start(words: str) -> None:
        process = subprocess.Popen([script, *words.split()], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"

    yield start
    for process in started:
        process.communicate(b"\n", DEADLINE_S)


# Where it is


@pytest.mark.parametrize(
    ("environment", "where"),
    [
        ({}, Path("/var/tmp/neuron-compile-cache")),
        ({"NEURON_COMPILE_CACHE_URL": "/neffs"}, Path("/neffs")),
        ({"NEURON_COMPILE_CACHE_URL": "file:///neffs"}, Path("/neffs")),
        ({"NEURON_COMPILE_CACHE_URL": "s3://bucket/neffs"}, None),
        (
            {"NEURON_COMPILE_CACHE_URL": "s3://bucket/neffs", "NEURON_CC_FLAGS": "-O1 --cache_dir=/other"},
            Path("/other"),
        ),
        ({"NEURON_COMPILE_CACHE_URL": "/neffs", "NEURON_CC_FLAGS": "--cache_dir=s3://bucket/neffs -O1"}, None),
        ({"NEURON_CC_FLAGS": "--no_cache"}, None),
    ],
)
def test_the_cache_location_is_that_of_the_wrapper(environment: dict[str, str], where: Path | None) -> None:
    """The flag precedes the variable, and that AWS's default; caches in S3 are not touched."""
    assert neuron_cache.location(environment) == where


# Failures


@pytest.mark.parametrize(
    "text",
    [
        "neuronx-cc failed with -9",
        "[F137] neuronx-cc was forcibly killed - This most commonly occurs due to insufficient system memory.",
        "INFO:Neuron:Compile command returned: -15",
        "x" * 200_000 + "\nneuronx-cc failed with -9\n",
    ],
)
def test_failures_of_killed_compilers_are_removed(cache: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    """Killed by the kernel or with the replica; the log names the graph."""
    folder = graph(cache, model_log=text)
    with caplog.at_level(logging.WARNING):
        neuron_cache.make_ready(cache)
    assert not folder.exists()
    assert str(folder) in caplog.text


@pytest.mark.parametrize(
    "files",
    [
        {"model_log": "[NCC_EVRF029] Operation sort is not supported"},
        {"model_log": "neuronx-cc failed with 70"},
        {"model_log": ""},
        {"model_log": "neuronx-cc failed with -9", "model_neff": "NEFF", "model_done": ""},
        {"model_neff": "NEFF", "model_done": ""},
        {"model_hlo": "a graph that nobody has compiled yet"},
    ],
)
def test_other_entries_of_the_cache_stay(cache: Path, files: dict[str, str]) -> None:
    """A graph that cannot be compiled, and one compiled after a failure."""
    folder = graph(cache, **files)
    before = sorted(folder.iterdir())
    neuron_cache.make_ready(cache)
    assert sorted(folder.iterdir()) == before


def test_a_failure_that_is_being_retried_stays(cache: Path, compiler: Callable[[str], None]) -> None:
    """Another process has the graph's lock."""
    folder = graph(cache, model_log="neuronx-cc failed with -9", model_pb_lock="")
    compiler(COMMAND.format(GRAPH))
    neuron_cache.make_ready(cache)
    assert len(list(folder.iterdir())) == 2


def test_a_folder_that_cannot_be_removed_is_logged(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It belongs to another user; the load continues."""

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    folder = graph(cache, model_log="neuronx-cc failed with -9")
    monkeypatch.setattr("workers.compiled.neuron_cache.shutil.rmtree", refuse)
    neuron_cache.make_ready(cache)
    assert folder.exists()
    assert f"cannot remove {folder}, left by a killed compile" in caplog.text


# Locks


def test_a_stale_lock_is_removed(
    cache: Path, compiler: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Locks of running compilers stay, and so do compiled graphs."""
    stale = graph(cache, model_pb_lock="", model_pb="graph")
    other = graph(cache, "MODULE_7be3aa4c6f1c5a0f2f3d+d41d8cd9", model_pb_lock="")
    compiler(COMMAND.format(other.name))
    with caplog.at_level(logging.WARNING):
        neuron_cache.make_ready(cache)
    assert [path.name for path in stale.iterdir()] == ["model.pb"]
    assert (other / "model.pb.lock").exists()
    assert f"removed {stale / 'model.pb.lock'}: no neuronx-cc is running for that graph" in caplog.text


def test_a_compiler_that_does_not_name_its_graph_keeps_all_locks(cache: Path, compiler: Callable[[str], None]) -> None:
    """It may be compiling any of them."""
    folder = graph(cache, model_pb_lock="")
    compiler("compile --target=trn1 graph.hlo")
    neuron_cache.make_ready(cache)
    assert (folder / "model.pb.lock").exists()


def test_a_lock_of_a_changing_folder_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler has ended, and the wrapper copies its NEFF."""
    folder = graph(cache, model_pb_lock="")
    monkeypatch.setattr(
        "workers.compiled.neuron_cache.time.sleep", lambda _: (folder / "model.neff").write_text("half")
    )
    neuron_cache.make_ready(cache)
    assert (folder / "model.pb.lock").exists()


def test_locks_on_a_shared_file_system_stay(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Compilers of other hosts are not visible; this is logged."""
    folder = graph(cache, model_pb_lock="")
    mounts = [SimpleNamespace(mountpoint=str(point), fstype=kind) for point, kind in [(cache, "nfs4"), ("/", "ext4")]]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    neuron_cache.make_ready(cache)
    assert (folder / "model.pb.lock").exists()
    assert f"keeping the locks in {cache}: on nfs4" in caplog.text


# A load of transformers-neuronx


@pytest.fixture
def machine(neuron: Neuron, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Neuron:  # noqa: F811
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    monkeypatch.setenv("NEURON_DOUBLE_LOCK_WAIT_S", "5")
    return neuron


def start(source: Path, **fields: Any) -> TransformersNeuronxEngine:
    """Starts the model as a process of its own would, with free cores."""
    importlib.import_module("neuron_double.runtime").reset_for_tests()
    engine = open_transformers_neuronx(config(source, **fields))
    assert isinstance(engine, TransformersNeuronxEngine)
    engine.load()
    return engine


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_killed_compile_is_retried_by_the_next_start(
    machine: Neuron, checkpoint: Checkpoints, tmp_path: Path, family: str
) -> None:
    """The package itself does not retry a failure in the cache. GPT-NeoX has no other artifacts."""
    fields = {"compiled": str(tmp_path / "compiled")} | ({} if family in SERIAL else BUCKETS)
    machine.plan({"at": "compile", "exit": -9, "times": 1})
    with pytest.raises(RuntimeError) as first:
        start(checkpoint(family), **fields)
    result = fault_of(first.value)
    assert result is not None
    assert (result.id, result.reaction) == ("compiler-killed", Reaction.RETRY)
    assert start(checkpoint(family), **fields).compiled


def test_a_graph_that_cannot_be_compiled_is_not_retried(machine: Neuron, checkpoint: Checkpoints) -> None:
    """The error repeats the compiler's message."""
    machine.plan({"at": "compile", "exit": 70, "times": 1})
    failures = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            start(checkpoint("llama"), **BUCKETS)
        failures.append(caught.value)
    result = [fault_of(failure) for failure in failures]
    assert [item and (item.id, item.reaction) for item in result] == [
        ("compiler-failed", Reaction.STOP),
        ("compile-cached-failure", Reaction.STOP),
    ]
    assert "neuronx-cc failed with 70" in str(failures[1])


@pytest.mark.slow
def test_a_killed_compile_does_not_block_the_next_start(
    machine: Neuron, checkpoint: Checkpoints, tmp_path: Path, cache: Path
) -> None:
    """It leaves the lock of its graph."""
    machine.plan({"at": "compile", "die": True, "times": 1})
    replica_config = config(checkpoint("llama"), compiled=str(tmp_path / "compiled"), **BUCKETS)
    env = os.environ | machine.env
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(Path(__file__).parents[3])])
    done = subprocess.run(
        [sys.executable, "-c", LOAD, encoded(replica_config).decode()],
        env=env,
        capture_output=True,
        timeout=200,
    )
    assert done.returncode == -9, done.stderr
    assert len(list(cache.glob("*/*/*.lock"))) == 1
    assert start(checkpoint("llama"), compiled=str(tmp_path / "compiled"), **BUCKETS).compiled
    assert not list(cache.glob("*/*/*.lock"))
