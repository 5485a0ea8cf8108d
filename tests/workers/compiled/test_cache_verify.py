"""What `cache verify` says of a start is what that start then does, played through the double of the compiler."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.doubles import Neuron, neuron  # noqa: F401 - the fixture
from tests.s3 import FaultProxy, S3Server
from tests.workers import nxdi_traffic
from tests.workers.nxdi_traffic import replica_config
from tests.workers.tnx_runs import BUCKETS, config
from workers.compiled import graph_sync, neuron_cache, storage
from workers.compiled.compile_session import CompileSession
from workers.compiled.manifest import LOCK_FILE, name_of, record_of, write_record
from workers.compiled.prediction import Prediction
from workers.compiled.preparation import verify
from workers.engines.nxd_inference import artifacts
from workers.engines.open_engine import open_engine
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.status import Failure
from workers.serving.prepare import predict as needed_here

Checkpoints = Callable[[str], Path]
VERSION = "NEURON_DOUBLE_CC_VERSION"
NEWER = "2.17.194.0+d312836f"


@dataclass
class World:
    """A model, its compiled artifacts, and its cache."""

    source: Path
    compiled: Path
    cache: Path
    neuron: Neuron
    setenv: Callable[[str, str], None]
    fields: dict[str, Any]
    engine: str = "transformers-neuronx"

    def config(self) -> Any:
        if self.engine == "nxd-inference":
            return replica_config(self.source, self.compiled, **self.fields)
        return config(self.source, **{"compiled": str(self.compiled), **self.fields})

    def predicted(self) -> Prediction:
        """By the same code as the command, in this process's environment."""
        (result,) = needed_here(self.config(), read=True).wanted
        return result.prediction

    def start(self) -> str:
        """As a process of its own would, whose cores are free by now: what it does."""
        importlib.import_module("neuron_double.runtime").reset_for_tests()
        compiles = importlib.import_module("neuron_double.compiler").compiles
        before = len(compiles())
        try:
            open_engine(self.config()).load()
        except Exception:  # noqa: BLE001 - a start that fails, however
            return "fail"
        return "hit" if len(compiles()) == before else "compile"

    @property
    def entry(self) -> Path:
        (result,) = (path for path in self.compiled.iterdir() if path.is_dir())
        return result

    @property
    def neff(self) -> Path:
        return sorted(self.entry.glob("*.neff"))[0]

    @property
    def graph(self) -> Path:
        return sorted(self.cache.glob(neuron_cache.GRAPHS))[0]


@pytest.fixture
def world(
    neuron: Neuron,  # noqa: F811
    checkpoint: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> World:
    """A Llama that has been compiled here once; the double plays the installed compiler."""
    installed = metadata.version

    def version(name: str) -> str:
        return os.environ.get(VERSION, "2.16.372.0+4a9b2326") if name == "neuronx-cc" else installed(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(neuron_cache, "SETTLE_S", 0.0)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-3")
    monkeypatch.setenv("NEURON_DOUBLE_LOCK_WAIT_S", "1")
    monkeypatch.setattr(artifacts, "compile_in_subprocess", nxdi_traffic.compile_here)
    source = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    cache = tmp_path / "neuron-compile-cache"
    return World(source, tmp_path / "home/compiled", cache, neuron, monkeypatch.setenv, dict(BUCKETS))


# What is changed between the first start and the second. With ``alone`` the artifacts of the first are taken away, so
# that the cache alone is left.


def nothing(world: World) -> None:
    """The second of two starts."""


def alone(world: World) -> None:
    shutil.rmtree(world.entry)


def another_compiler(world: World) -> None:
    world.setenv(VERSION, NEWER)


def other_flags(world: World) -> None:
    world.setenv("NEURON_CC_FLAGS", "-O1 --enable-saturate-infinity")


def fields(**changed: Any) -> Callable[[World], None]:
    def change(world: World) -> None:
        world.fields |= changed

    return change


def other_config(world: World) -> None:
    result = json.loads((world.source / "config.json").read_text())
    (world.source / "config.json").write_text(json.dumps(result | {"rms_norm_eps": 1e-4}))


def other_weights(world: World) -> None:
    """Weights are not part of graphs."""
    weights = world.source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")


def a_neff_is_missing(world: World) -> None:
    """The cache still has it."""
    world.neff.unlink()


def all_is_missing(world: World) -> None:
    a_neff_is_missing(world)
    shutil.rmtree(world.cache)


def a_neff_is_short(world: World) -> None:
    os.truncate(world.neff, 3)
    shutil.rmtree(world.cache)


def a_neff_is_other(world: World) -> None:
    """A byte is flipped; the sizes are equal."""
    data = world.neff.read_bytes()
    world.neff.write_bytes(b"#" + data[1:])
    shutil.rmtree(world.cache)


def the_record_is_gone(world: World) -> None:
    (world.entry / LOCK_FILE).unlink()
    shutil.rmtree(world.cache)


def the_cache_is_gone(world: World) -> None:
    """The saved files are enough."""
    shutil.rmtree(world.cache)


def a_graph_is_gone(world: World) -> None:
    alone(world)
    shutil.rmtree(world.graph)


def a_graph_is_not_done(world: World) -> None:
    alone(world)
    (world.graph / "model.done").unlink()


def a_graph_is_empty(world: World) -> None:
    """What a power failure leaves of a file."""
    alone(world)
    os.truncate(world.graph / "model.neff", 0)


def a_graph_is_other(world: World) -> None:
    alone(world)
    data = (world.graph / "model.neff").read_bytes()
    (world.graph / "model.neff").write_bytes(b"#" + data[1:])


def a_stale_lock(world: World) -> None:
    a_graph_is_not_done(world)
    (world.graph / "model.hlo_module.pb.lock").touch()


def a_failure(world: World) -> None:
    """One that the compiler does not retry."""
    a_graph_is_not_done(world)
    (world.graph / "model.neff").unlink()
    (world.graph / "model.log").write_text("[NCC_EVRF029] Operation sort is not supported\n")


def a_failure_to_be_retried(world: World) -> None:
    """The flag is the wrapper's own, but it changes the flags."""
    a_failure(world)
    world.setenv("NEURON_CC_FLAGS", "--retry_failed_compilation")


def a_killed_compiler(world: World) -> None:
    a_failure(world)
    (world.graph / "model.log").write_text("neuronx-cc failed with -9\n")


def beside_unproven(world: World) -> None:
    """NEFFs as Optimum leaves them beside a checkpoint, without a record of their compiler."""
    shutil.move(world.entry, world.source / "compiled")
    (world.source / "compiled" / LOCK_FILE).unlink()


def beside_proven(world: World) -> None:
    """The entry was moved there with its record."""
    shutil.move(world.entry, world.source / "compiled")
    shutil.rmtree(world.cache)


def beside_of_another_compiler(world: World) -> None:
    beside_proven(world)
    another_compiler(world)


def beside_damaged(world: World) -> None:
    beside_proven(world)
    sorted((world.source / "compiled").glob("*.neff"))[0].unlink()


def beside_what_is_compiled_here(world: World) -> None:
    """Artifacts compiled here come first."""
    shutil.copytree(world.entry, world.source / "compiled")
    (world.source / "compiled" / LOCK_FILE).unlink()


def flat_in_the_cache(world: World) -> None:
    """A folder of bare NEFFs, configured as the cache."""
    shutil.move(world.entry, world.source.parent / "flat")
    (world.source.parent / "flat" / LOCK_FILE).unlink()
    world.setenv("NEURON_COMPILE_CACHE_URL", str(world.source.parent / "flat"))


QUICK = {alone: "hit", another_compiler: "compile", beside_unproven: "fail"}
SLOW = {
    nothing: "hit",
    a_failure: "fail",
    other_flags: "compile",
    other_config: "compile",
    other_weights: "hit",
    a_neff_is_missing: "hit",
    all_is_missing: "compile",
    a_neff_is_short: "compile",
    a_neff_is_other: "compile",
    the_record_is_gone: "compile",
    the_cache_is_gone: "hit",
    a_graph_is_gone: "compile",
    a_graph_is_not_done: "compile",
    a_graph_is_empty: "compile",
    a_graph_is_other: "compile",
    a_stale_lock: "compile",
    a_failure_to_be_retried: "compile",
    a_killed_compiler: "compile",
    beside_proven: "hit",
    beside_of_another_compiler: "fail",
    beside_damaged: "fail",
    beside_what_is_compiled_here: "hit",
    flat_in_the_cache: "fail",
}
SHAPES: dict[str, dict[str, Any]] = {
    "slots": {"slots": 2},
    "max_len": {"max_len": 32, "prefill_buckets": [8, 32], "decode_buckets": [32]},
    "buckets": {"prefill_buckets": [8, 32, 64]},
    "tp_degree": {"tp_degree": 4, "cores": [0, 1, 2, 3]},
    "dtype": {"dtype": "bf16"},
    "attention_layout": {"engine_options": {"attention_layout": "BSH"}},
    "group_query_attention": {"group_query_attention": "replicated-heads"},
    "quantize": {"quantize": "int8"},
    "sampling": {"sampling": "device"},
}
SAME: dict[str, dict[str, Any]] = {
    "fewer_buckets": {"prefill_buckets": [8, 64]},
    "workers": {"compile_workers": 1},
}


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        *(pytest.param(change, result, id=change.__name__) for change, result in QUICK.items()),
        *(
            pytest.param(change, result, id=change.__name__, marks=pytest.mark.compile)
            for change, result in SLOW.items()
        ),
        *(
            pytest.param(fields(**changed), "compile", id=name, marks=pytest.mark.compile)
            for name, changed in SHAPES.items()
        ),
        *(pytest.param(fields(**changed), "hit", id=name, marks=pytest.mark.compile) for name, changed in SAME.items()),
    ],
)
def test_a_start_does_what_was_predicted(world: World, change: Callable[[World], None], outcome: str) -> None:
    """For each compiler, set of flags, shape, degree, dtype and layout, and for missing and damaged files."""
    assert world.predicted().outcome == "compile"
    assert world.start() == "compile"
    change(world)
    result = world.predicted()
    assert (result.outcome, world.start()) == (outcome, outcome), result


def test_neffs_without_a_matching_record_are_rejected_with_a_remedy(world: World) -> None:
    """The error has the folder and the fields that differ."""
    (world.source / "compiled").mkdir()
    (world.source / "compiled" / "0123456789abcdef0123.neff").write_bytes(b"NEFF")
    with pytest.raises(EngineLoadError) as unproven:
        open_engine(world.config()).load()
    record = record_of({**needed_here(world.config()).wanted[0].manifest, "lnc": 2})
    write_record(world.source / "compiled" / LOCK_FILE, record)
    with pytest.raises(EngineLoadError) as other:
        open_engine(world.config()).load()
    assert [error.value.id for error in (unproven, other)] == ["neff-unproven"] * 2
    assert str(world.source / "compiled") in unproven.value.what
    assert "have no record of their compiler" in unproven.value.what
    assert "lnc: needs none, found 2" in other.value.what
    assert "corewright compile SPEC" in other.value.hint
    assert world.neuron.held() == {}  # before a core is claimed


@pytest.mark.parametrize("python", ["/bin/false", "/nowhere/python"])
def test_an_interpreter_without_a_result_is_an_error(tmp_path: Path, python: str) -> None:
    """It is not a prediction."""
    result = verify(config(tmp_path, python=python))
    assert isinstance(result, Failure)
    assert result.id == "cache-not-verified"
    assert python in result.what


# NxD Inference, whose artifacts are a folder


def a_program_is_missing(world: World) -> None:
    (world.entry / "model/model.pt").unlink()


def a_program_is_other(world: World) -> None:
    data = (world.entry / "model/model.pt").read_bytes()
    (world.entry / "model/model.pt").write_bytes(b"#" + data[1:])


def weights_are_short(world: World) -> None:
    os.truncate(sorted((world.entry / "model/weights").rglob("*.safetensors"))[0], 8)


NXD = {
    "nothing": (nothing, "hit"),
    "compiler": (another_compiler, "compile"),
    "flags": (other_flags, "compile"),
    "weights": (other_weights, "compile"),  # the artifacts hold them
    "a_program_is_missing": (a_program_is_missing, "compile"),
    "a_program_is_other": (a_program_is_other, "compile"),
    "weights_are_short": (weights_are_short, "compile"),
    "slots": (fields(slots=2), "compile"),
    "tp_degree": (fields(tp_degree=4, cores=[0, 1, 2, 3]), "compile"),
    "dtype": (fields(dtype="bf16"), "compile"),
    "layout": (fields(fuse_qkv=True), "compile"),
    "buckets": (fields(prefill_buckets=[16, 96]), "compile"),
}


@pytest.mark.compile
@pytest.mark.parametrize(("change", "outcome"), NXD.values(), ids=NXD)
def test_a_start_of_nxd_inference_does_what_was_predicted(
    world: World, change: Callable[[World], None], outcome: str
) -> None:
    """The engine keeps complete folders, and its graphs in Neuron's cache are not shared."""
    world.engine, world.fields = "nxd-inference", {}
    assert world.predicted().outcome == "compile"
    assert world.start() == "compile"
    change(world)
    shutil.rmtree(world.cache, ignore_errors=True)  # an entry that is made again takes its graphs from there
    result = world.predicted()
    assert (result.outcome, world.start()) == (outcome, outcome), result


def test_a_prediction_reports_unread_weights(world: World) -> None:
    """Artifacts of NxD Inference depend on weights."""
    world.engine, world.fields = "nxd-inference", {}
    (result,) = needed_here(world.config()).wanted
    assert result.prediction.outcome == "compile"
    assert "read them with --read" in result.prediction.reason


# Models that nothing but the cache keeps


@pytest.mark.compile
def test_graphs_of_a_model_without_saved_files_are_recorded(world: World, checkpoint: Checkpoints) -> None:
    """Graphs of other models in the cache do not matter."""
    assert world.start() == "compile"
    others = set(world.cache.glob(neuron_cache.GRAPHS))
    world.source, world.fields = checkpoint("gpt_neox"), {}
    assert world.predicted().outcome == "compile"
    assert world.start() == "compile"
    own = set(world.cache.glob(neuron_cache.GRAPHS)) - others
    for folder in others:
        shutil.rmtree(folder)
    (file,) = (world.cache / "corewright").glob(f"{name_of(needed_here(world.config()).wanted[0].manifest)}*")
    file.unlink()  # a start that takes all from the cache writes it down as well
    assert world.predicted().outcome == "compile"  # it is not known
    assert world.start() == "hit"
    assert (world.predicted().outcome, world.start()) == ("hit", "hit")
    shutil.rmtree(own.pop())
    assert (world.predicted().outcome, world.start()) == ("compile", "compile")


# Caches elsewhere


@pytest.mark.compile
def test_a_read_only_cache_is_copied(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start compiles missing graphs into the copy, and does not change the cache."""
    assert world.start() == "compile"
    given, is_writable = world.cache, storage.is_writable
    before = {path: path.stat().st_mtime_ns for path in given.rglob("*")}
    monkeypatch.setattr(graph_sync, "is_writable", lambda folder: folder != given and is_writable(folder))
    world.compiled = world.compiled.parent.parent / "another/compiled"
    assert (world.predicted().outcome, world.start()) == ("hit", "hit")
    world.setenv("NEURON_COMPILE_CACHE_URL", str(given))  # as the next process would find it
    world.fields |= {"prefill_buckets": [8, 32, 64]}
    assert (world.predicted().outcome, world.start()) == ("compile", "compile")
    assert {path: path.stat().st_mtime_ns for path in given.rglob("*")} == before


@pytest.mark.compile
def test_a_cache_in_s3_serves_all_hosts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is compiled once; a start without permission reports it and compiles."""
    with S3Server() as server, FaultProxy(server.url) as proxy:
        for name, value in proxy.env.items():
            monkeypatch.setenv(name, value)
        # What is pushed, is when it is up.
        monkeypatch.setattr(CompileSession.record_compiled, "__kwdefaults__", {"wait": True})
        url = server.bucket("neffs")

        def on_another_host(name: str) -> None:
            world.compiled = world.compiled.parent.parent / name / "compiled"
            world.setenv("NEURON_COMPILE_CACHE_URL", url)

        on_another_host("first")
        assert (world.predicted().outcome, world.start()) == ("compile", "compile")
        on_another_host("second")
        assert (world.predicted().outcome, world.start()) == ("hit", "hit")
        assert world.start() == "hit"
        on_another_host("third")
        proxy.answer(403, "AccessDenied")
        result = world.predicted()
        assert (result.outcome, "s3-denied: s3:GetObject on" in result.reason) == ("compile", True)
        assert world.start() == "compile"
        proxy.heal()
        on_another_host("fourth")
        assert (world.predicted().outcome, world.start()) == ("hit", "hit")
