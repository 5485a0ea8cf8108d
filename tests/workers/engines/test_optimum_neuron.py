"""The Optimum Neuron adapter over a stand-in of the package."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.doubles import PACKAGES, Neuron
from tests.doubles import neuron as neuron
from tests.doubles.machine import build_machine, make_interpreter
from tests.workers.nxdi_traffic import FULL, MAX_LEN, Checkpoints, Expected, arrivals, edit, refused, served, wrong
from tests.workers.nxdi_traffic import expected as expected
from tests.workers.nxdi_traffic import sources as sources
from tests.workers.optimum_traffic import config_of, export_here, opened, play
from workers.compiled.host_sets import peek
from workers.compiled.orders import Order
from workers.engines.open_engine import open_engine
from workers.engines.optimum_neuron import artifacts
from workers.engines.optimum_neuron.compiled_folder import start_error
from workers.engines.optimum_neuron.engine import buildables, drawn_token
from workers.messages.engine_protocol import DeviceSampling
from workers.messages.json_form import encoded


@pytest.fixture
def optimum(neuron: Neuron, monkeypatch: pytest.MonkeyPatch) -> Neuron:
    """The stand-in, with compiles in this process, and the variable that the package sets for them."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    monkeypatch.setattr(artifacts, "compile_in_subprocess", export_here)
    return neuron


@pytest.mark.parametrize(
    ("family", "sampling"), [("llama", "host"), ("llama", "device"), (FULL, "host"), ("mixtral", "host")]
)
def test_greedy_answers_are_those_of_the_cpu_engine(
    family: str, sampling: str, optimum: Neuron, sources: Checkpoints, expected: Expected, tmp_path: Path
) -> None:
    """While requests arrive and others are cancelled; a mixtral's batches are static."""
    engine = opened(sources(family), tmp_path, sampling=sampling)
    assert engine.spec.continuous is (family != "mixtral")
    assert wrong(sources(family), arrivals(), expected(family), served(engine, arrivals())) == []


def test_prompts_run_in_chunks_from_0_4_6_on(
    optimum: Neuron, sources: Checkpoints, expected: Expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 tokens, with the same answers; the prompt's first token is drawn on the host."""
    play(monkeypatch, "0.4.6.dev4")
    engine = opened(sources("llama"), tmp_path, sampling="device", engine_options={"prefill_chunk_size": 16})
    assert wrong(sources("llama"), arrivals(), expected("llama"), served(engine, arrivals())) == []


def test_earlier_versions_refuse_chunks(optimum: Neuron, sources: Checkpoints, tmp_path: Path) -> None:
    """They have no such option."""
    error = refused(lambda: opened(sources("llama"), tmp_path, engine_options={"prefill_chunk_size": 16}))
    assert (error.id, error.what) == (
        "bad-engine-option",
        "Optimum Neuron 0.4.5 has no prefill_chunk_size; 0.4.6 and later have it",
    )


def test_the_first_token_of_a_chunked_prompt_is_drawn_as_on_the_device() -> None:
    """Among the likeliest top_k, of which top_p keeps the first always."""
    logits = torch.tensor([0.0, 3.0, 2.9, -1.0])
    drawn = {drawn_token(logits, DeviceSampling(top_k=3, top_p=0.98)) for _ in range(200)}
    assert drawn == {1, 2}
    assert {drawn_token(logits, DeviceSampling(top_k=4, top_p=0.01, temperature=9.0)) for _ in range(50)} == {1}


@pytest.mark.parametrize(("family", "degree"), [("mixtral", 1), ("qwen2", 2)])
def test_sampling_on_the_device_is_refused_where_the_package_has_none(
    family: str, degree: int, optimum: Neuron, sources: Checkpoints, tmp_path: Path
) -> None:
    """Before anything is compiled."""
    error = refused(lambda: opened(sources(family), tmp_path, tp_degree=degree, sampling="device"))
    assert (error.id, error.hint) == ("bad-engine-option", "set `sampling: host`")


def test_an_export_in_a_process_of_its_own_is_reused(
    neuron: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next start with the same settings; one with another batch exports again."""
    monkeypatch.setenv("PYTHONPATH", f"{PACKAGES}:{Path(__file__).parents[3]}")
    opened(sources("llama"), tmp_path).close()
    compiler = importlib.import_module("neuron_double.compiler")
    pids = {line["pid"] for line in compiler.compiles()}
    assert len(compiler.compiles()) == 2
    assert os.getpid() not in pids
    monkeypatch.setattr(artifacts, "compile_in_subprocess", export_here)
    importlib.import_module("neuron_double.runtime").reset_for_tests()
    opened(sources("llama"), tmp_path).close()
    assert len(compiler.compiles()) == 2
    importlib.import_module("neuron_double.runtime").reset_for_tests()
    opened(sources("llama"), tmp_path, slots=2).close()
    assert len(compiler.compiles()) == 4


@pytest.mark.compile
def test_a_compile_runs_in_the_interpreter_of_the_package(sources: Checkpoints, tmp_path: Path) -> None:
    """Its artifacts record the transformers that only this one has."""
    machine, python = build_machine(tmp_path / "machine"), make_interpreter(tmp_path / "optimum")
    site = next((tmp_path / "optimum").glob("lib/*/site-packages"))
    (site / "transformers-4.57.6.dist-info").mkdir()
    metadata_file = site / "transformers-4.57.6.dist-info" / "METADATA"
    metadata_file.write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.6\n")
    order = encoded(Order(config=config_of(sources("llama"), tmp_path / "compiled")))
    env = {**os.environ, **machine.env, "NEURON_COMPILE_CACHE_URL": str(tmp_path / "cache")}
    subprocess.run([python, "-m", "workers.serving.prepare", "compile"], input=order, env=env, check=True)
    (manifest,) = (tmp_path / "compiled").glob("*/corewright.json")
    assert json.loads(manifest.read_text())["versions"]["transformers"] == "4.57.6" != metadata.version("transformers")


def test_its_artifacts_are_predicted_without_reading_weights(
    optimum: Neuron, sources: Checkpoints, tmp_path: Path
) -> None:
    """Their manifest lacks the digests until a start or a compile has read them."""
    config = config_of(sources("llama"), tmp_path)
    (unit,) = buildables(config, read=False)
    assert "model.safetensors" in [Path(name).name for name in unit.unread]
    opened(sources("llama"), tmp_path).close()
    (unit,) = buildables(config, read=False)
    assert unit.unread == ()
    assert peek(tmp_path, unit.manifest).complete


def saved_by_the_package(source: Path, folder: Path) -> Path:
    """What Optimum Neuron itself saves: with sampling on the device, which is its default for a llama."""
    kind = importlib.import_module("optimum.neuron").NeuronModelForCausalLM
    sizes = {"batch_size": 4, "sequence_length": MAX_LEN, "tensor_parallel_size": 2}
    kind.export(str(source), kind.get_neuron_config(str(source), **sizes)).save_pretrained(str(folder))
    return folder


def test_a_folder_that_the_package_saved_is_loaded(
    optimum: Neuron, sources: Checkpoints, expected: Expected, tmp_path: Path
) -> None:
    """Without compiling anything, with the settings that it was saved with."""
    folder = saved_by_the_package(sources("llama"), tmp_path / "saved")
    compiler = importlib.import_module("neuron_double.compiler")
    count = len(compiler.compiles())
    engine = opened(folder, tmp_path / "compiled", sampling="device", allow_pickle=True)
    assert wrong(sources("llama"), arrivals(), expected("llama"), served(engine, arrivals())) == []
    assert len(compiler.compiles()) == count
    assert buildables(config_of(folder, tmp_path, sampling="device", allow_pickle=True)) == []


RECORDED = {
    "_serialized_key": "NxDNeuronConfig",
    "optimum_neuron_version": "0.4.5",
    "neuronxcc_version": "2.21",
    "batch_size": 4,
    "sequence_length": MAX_LEN,
    "tp_degree": 2,
    "torch_dtype": "float32",
    "on_device_sampling": True,
    "continuous_batching": True,
    "target": "trn1",
}
SHARDS = tuple(f"checkpoint/weights/tp{rank}_sharded_checkpoint.safetensors" for rank in (0, 1))


def compiled(source: Path, folder: Path, *files: str, **recorded: Any) -> Path:
    """A folder as Optimum Neuron 0.4 writes it, with these files besides."""
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    (folder / "neuron_config.json").write_text(json.dumps(RECORDED | recorded))
    for name in ("model.pt", *files):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("fields", "targets", "difference"),
    [
        ({"tp_degree": 4}, (), "tp_degree (tp_degree): needs 4, found 2"),
        ({"slots": 8}, (), "max_batch (batch_size): needs 8, found 4"),
        ({"max_len": 64}, (), "max_len (sequence_length): needs 64, found 96"),
        ({"dtype": "bf16"}, (), "dtype: needs bfloat16, found float32"),
        ({"sampling": "host"}, (), "sampling (on_device_sampling): needs host, found device"),
        ({}, ("trn2",), "target of the machines: needs trn2, found trn1"),
        ({"engine_options": {"prefill_chunk_size": 32}}, (), "engine_options.prefill_chunk_size: needs 32, found 0"),
    ],
)
def test_a_mismatch_with_the_spec_is_found_without_the_package(
    fields: dict[str, Any], targets: tuple[str, ...], difference: str, sources: Checkpoints, tmp_path: Path
) -> None:
    """By the small files alone: each field with what is needed and what was found."""
    folder = compiled(sources("llama"), tmp_path / "saved", *SHARDS)
    usual = {"sampling": "device", "allow_pickle": True}
    assert start_error(config_of(folder, None, **usual), ("trn1",)) is None
    error = start_error(config_of(folder, None, **(usual | fields)), targets)
    assert error is not None
    assert (error.id, error.what.rpartition("spec's: ")[2]) == ("artifacts-mismatch", difference)


@pytest.mark.parametrize(
    ("files", "recorded", "fields", "id", "what"),
    [
        (SHARDS, {}, {"allow_pickle": False}, "pickle-refused", "is a compiled program"),
        (SHARDS[:1], {}, {}, "weights-missing", "is missing checkpoint/weights/tp1_sharded_checkpoint.safetensors"),
        ((), {"checkpoint_id": "meta/llama", "checkpoint_revision": "abc"}, {}, "weights-missing", "meta/llama at abc"),
        (SHARDS, {"_serialized_key": None, "neuron_config": {}}, {}, "layout-unsupported", "by NxD Inference"),
        (
            SHARDS,
            {"batch_size": 4, "continuous_batching": False, "prefill_chunk_size": 32},
            {},
            "artifacts-mismatch",
            "",
        ),
    ],
)
def test_a_folder_that_cannot_be_loaded_is_refused(
    files: tuple[str, ...], recorded: Any, fields: Any, id: str, what: str, sources: Checkpoints, tmp_path: Path
) -> None:
    """As soon as its small files are known."""
    folder = compiled(sources("llama"), tmp_path / "saved", *files, **recorded)
    if recorded.get("_serialized_key", "") is None:
        (folder / "neuron_config.json").write_text(json.dumps({"neuron_config": {}}))
    error = start_error(config_of(folder, None, **({"sampling": "device", "allow_pickle": True} | fields)))
    assert error is not None
    assert error.id == id
    assert what in error.what


@pytest.mark.parametrize(
    ("recorded", "files", "id", "what"),
    [
        ({}, ("checkpoint/config.json",), "", ""),
        (
            {"num_cores": 24},
            ("checkpoint/config.json",),
            "artifacts-mismatch",
            "tp_degree (num_cores): needs 2, found 24",
        ),
        (
            {"auto_cast_type": "bf16"},
            ("checkpoint/config.json",),
            "artifacts-mismatch",
            "needs float32, found bfloat16",
        ),
        ({"checkpoint_id": "a/b", "checkpoint_revision": "c"}, (), "weights-missing", "those of a/b at c"),
    ],
)
def test_a_folder_of_0_0_28_is_compared_by_its_neuron_section(
    recorded: dict[str, Any], files: tuple[str, ...], id: str, what: str, sources: Checkpoints, tmp_path: Path
) -> None:
    """Of config.json, as 0.0.28 and earlier write it."""
    folder = compiled(sources("llama"), tmp_path / "saved", *files)
    (folder / "neuron_config.json").unlink()
    usual = {"batch_size": 4, "sequence_length": MAX_LEN, "num_cores": 2, "auto_cast_type": "fp32"}
    edit(folder, neuron=usual | recorded)
    error = start_error(config_of(folder, None))
    assert ("" if error is None else error.id) == id
    assert what in ("" if error is None else error.what)


def test_the_version_and_the_compiler_must_be_those_of_the_export(
    optimum: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package would find out after it has claimed the cores."""
    folder = compiled(sources("llama"), tmp_path / "saved", *SHARDS, optimum_neuron_version="0.4.4")
    error = refused(lambda: opened(folder, tmp_path, sampling="device", allow_pickle=True))
    assert "compiler: needs 2.16.372.0+4a9b2326, found 2.21; Optimum Neuron: needs 0.4.5, found 0.4.4" in error.what
    assert optimum.held() == {}


@pytest.mark.parametrize(
    ("family", "changes", "id"),
    [
        ("llama", {"attention_bias": True}, "unknown-family"),
        ("llama", {"head_dim": 32}, "unknown-family"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 32}, "window-not-kept"),
    ],
)
def test_what_the_package_would_ignore_is_refused(
    family: str, changes: dict[str, Any], id: str, sources: Checkpoints, tmp_path: Path
) -> None:
    """It would answer without it."""
    source = Path(shutil.copytree(sources(family), tmp_path / "model"))
    edit(source, **changes)
    error = start_error(config_of(source, None))
    assert error is not None
    assert error.id == id


@pytest.mark.parametrize(("version", "part"), [(None, "needs optimum-neuron"), ("0.3.0", "0.3.0 is not supported")])
def test_a_missing_or_other_version_is_reported(
    version: str | None, part: str, neuron: Neuron, sources: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a core is claimed."""
    if version is not None:
        play(monkeypatch, version)
    else:
        monkeypatch.setattr(metadata, "version", absent)
    error = refused(lambda: open_engine(config_of(sources("llama"), None)))
    assert error.id == "engine-not-installed"
    assert part in error.what


def absent(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_0_0_28_answers_as_the_cpu_engine_and_keeps_its_graphs(
    family: str,
    neuron: Neuron,
    sources: Checkpoints,
    expected: Expected,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gpt2 in static batches. The next start compiles nothing, and the weights are not kept, nor anything outside the
    folder of artifacts once the model is loaded."""
    play(monkeypatch, "0.0.28")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    compiler = importlib.import_module("neuron_double.compiler")
    counts = []
    for _ in range(2):
        engine = open_engine(config_of(sources(family), tmp_path / "compiled"))
        engine.load()
        assert not list(tmp_path.glob("corewright-*"))
        assert engine.spec.continuous is (family == "llama")
        assert wrong(sources(family), arrivals(), expected(family), served(engine, arrivals())) == []
        engine.close()
        counts.append(len(compiler.compiles()))
        importlib.import_module("neuron_double.runtime").reset_for_tests()
    assert counts[0] == counts[1] > 0
    assert not list(tmp_path.glob("compiled/*/model/checkpoint"))


@pytest.mark.parametrize(
    ("fields", "id"),
    [
        ({"sampling": "device"}, "bad-engine-option"),
        ({"engine_options": {"prefill_chunk_size": 8}}, "bad-engine-option"),
        ({"source": FULL}, "unknown-family"),
    ],
)
def test_0_0_28_refuses_what_it_does_not_have(
    fields: dict[str, Any], id: str, neuron: Neuron, sources: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a core is claimed."""
    play(monkeypatch, "0.0.28")
    config = config_of(sources(fields.pop("source", "llama")), None, **fields)
    assert refused(open_engine(config).load).id == id
    assert neuron.held() == {}
