"""Sources that NxD Inference has compiled or sharded elsewhere are loaded where they match the spec, else refused.

The error lists each field that differs, and `cache verify` reports the same."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest

from placements.engines.nxd_inference.capabilities import nxd_release
from tests.contracts import contract
from tests.doubles import Neuron, neuron  # noqa: F401 - the fixture
from tests.workers import nxdi_traffic
from tests.workers.nxdi_traffic import arrivals, cpu, replica_config, served
from workers.artifacts.sources.layout import metadata_files
from workers.artifacts.sources.listing import Listing, RemoteFile
from workers.artifacts.sources.source_metadata import MARK
from workers.compiled.manifest import LOCK_FILE, record_of, write_record
from workers.compiled.orders import Built
from workers.compiled.places import ensure
from workers.compiled.preparation import starts, verify
from workers.engines.nxd_inference import artifacts
from workers.engines.nxd_inference.config import NxdSettings
from workers.engines.nxd_inference.precompiled import start_error
from workers.engines.open_engine import buildables, open_engine
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure
from workers.serving.prepare import predict as needed_here

Checkpoints = Callable[[str], Path]
VERSIONS = sorted(contract("nxd-inference").versions)
NEURON_CONFIG = "neuron_config.json"
SHARD = "weights/tp{}_sharded_checkpoint.safetensors"


@pytest.fixture
def nxd(neuron: Neuron, monkeypatch: pytest.MonkeyPatch) -> Neuron:  # noqa: F811
    """The stand-ins, with compiles in this process."""
    monkeypatch.setattr(artifacts, "compile_in_subprocess", nxdi_traffic.compile_here)
    for name in ("BASE_COMPILE_WORK_DIR", "XLA_HANDLE_SPECIAL_SCALAR", "UNSAFE_FP8FNCAST"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return neuron


def compiled_ahead(replica_config: ReplicaConfig) -> Built:
    """As the process that compiles ahead does it."""
    return ensure(buildables(replica_config, read=True), replica_config, lambda _: None)


class Folder:
    """A source that was compiled on another host, whose original checkpoint is not here."""

    def __init__(self, root: Path, original: Path, **fields: Any) -> None:
        self.path, self.compiled, self.original = root / "given", root / "compiled", original
        shutil.copytree(compiled_elsewhere(original, **fields), self.path)
        for file in original.iterdir():
            if file.suffix != ".safetensors":
                shutil.copy(file, self.path)
        self.fields: dict[str, Any] = {"allow_pickle": True, **fields}
        self.before = compiles()

    def config(self, **fields: Any) -> Any:
        return replica_config(self.path, self.compiled, **{**self.fields, **fields})

    def opened(self, **fields: Any) -> Any:
        engine = open_engine(self.config(**fields))
        engine.load()
        return engine

    def predicted(self, **fields: Any) -> Any:
        """As the command does, in this process."""
        (wanted,) = starts(self.config(**fields), needed_here(self.config(**fields), read=True))
        return wanted.prediction

    def refused(self, **fields: Any) -> EngineLoadError:
        """What a start fails with, which is what is foretold, and what compiling ahead fails with."""
        errors = []
        for work in (self.predicted, self.opened, lambda **_: compiled_ahead(self.config(**fields))):
            with pytest.raises(EngineLoadError) as caught:
                work(**fields)
            errors.append(caught.value)
        assert len({(error.id, error.what, error.hint) for error in errors}) == 1
        assert compiles() == self.before
        assert not self.compiled.exists()
        return errors[0]

    def record(self, **options: Any) -> None:
        """Write ``options`` into its neuron_config.json."""
        settings = json.loads((self.path / NEURON_CONFIG).read_text())
        settings["neuron_config"] |= options
        (self.path / NEURON_CONFIG).write_text(json.dumps(settings))

    def without(self, *names: str) -> Folder:
        for name in names:
            (self.path / name).unlink()
        return self


COMPILED: dict[str, tempfile.TemporaryDirectory[str]] = {}  # by package, version and options


def compiled_elsewhere(original: Path, **fields: Any) -> Path:
    """Returns the folder that another host compiled, whose checkpoint is gone. It is compiled once in a run."""
    package = importlib.import_module("neuronx_distributed_inference")
    variables = [os.environ.get(name) for name in ("NEURON_DOUBLE_NXDI_VERSION", "NEURON_LOGICAL_NC_CONFIG")]
    key = repr([package.__file__, variables, original, sorted(fields.items())])
    if key not in COMPILED:
        COMPILED[key] = tempfile.TemporaryDirectory()
        moved = Path(shutil.copytree(original, Path(COMPILED[key].name) / "elsewhere" / "model"))
        artifacts.compile_here(NxdSettings.of(replica_config(moved, None, **fields)), Path(COMPILED[key].name))
        shutil.rmtree(moved)
    return Path(COMPILED[key].name) / artifacts.MODEL


def compiles() -> int:
    """How many graphs this process has compiled."""
    return len(importlib.import_module("neuron_double.compiler").compiles())


def answers(engine: Any, original: Path) -> list[str]:
    """The requests that are answered otherwise than by the cpu engine."""
    requests = arrivals(4)
    return nxdi_traffic.wrong(original, requests, served(cpu(original), requests), served(engine, requests))


@pytest.fixture
def llama(nxd: Neuron, checkpoint: Checkpoints, tmp_path: Path) -> Folder:
    return Folder(tmp_path, checkpoint("llama"))


# compiled


@pytest.mark.parametrize("version", VERSIONS)
def test_a_source_compiled_elsewhere_is_loaded(
    version: str, nxd: Neuron, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every version: nothing is compiled, nothing kept, and the original weights are not needed."""
    monkeypatch.setenv("NEURON_DOUBLE_NXDI_VERSION", version)
    folder = Folder(tmp_path, checkpoint("llama"))
    prediction = folder.predicted()
    assert (prediction.outcome, prediction.where, prediction.place) == ("hit", "source", str(folder.path))
    assert answers(folder.opened(), folder.original) == []
    assert compiles() == folder.before
    assert not folder.compiled.exists()


@pytest.mark.parametrize("version", ["0.7", "0.8", "0.9"])
def test_a_compiled_source_with_an_fp8_cache_is_loaded(
    version: str, nxd: Neuron, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the package does not read back the kv_quant_config that it wrote; without fp8 it is refused."""
    monkeypatch.setenv("NEURON_DOUBLE_NXDI_VERSION", version)
    for name in ("XLA_HANDLE_SPECIAL_SCALAR", "UNSAFE_FP8FNCAST"):
        monkeypatch.setenv(name, "1")
    folder = Folder(tmp_path, checkpoint("llama"), quantize_kv="fp8")
    assert (start_error(folder.config()), folder.predicted().outcome) == (None, "hit")
    folder.opened()
    assert "quantize_kv (kv_cache_quant): needs False, found True" in folder.refused(quantize_kv=None).what


def test_compiling_ahead_finds_nothing_to_do(llama: Folder) -> None:
    """`corewright compile` of such a model."""
    built = compiled_ahead(llama.config())
    assert (built.wanted, built.compiled) == ([], [])
    assert compiles() == llama.before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"slots": 2}, "max_batch (batch_size): needs 2, found 4"),
        ({"max_len": 64, "decode_buckets": [64]}, "max_len (seq_len): needs 64, found 96"),
        ({"tp_degree": 1, "cores": [0]}, "tp_degree: needs 1, found 2"),
        ({"dtype": "bf16"}, "dtype (torch_dtype): needs bfloat16, found float32"),
        ({"prefill_buckets": [64]}, "buckets.prefill (context_encoding_buckets): needs 64, found 16 32 64"),
        ({"decode_buckets": [96]}, "buckets.decode (token_generation_buckets): needs 96, found 32 64 96"),
        ({"sampling": "device"}, "sampling (on_device_sampling_config): needs device, found host"),
        ({"quantize": "int8"}, "quantize (quantized): needs True, found False"),
        ({"quantize_kv": "fp8"}, "quantize_kv (kv_cache_quant): needs True, found False"),
        ({"fuse_qkv": True}, "fuse_qkv (fused_qkv): needs True, found False"),
        ({"engine_options": {"vocab_parallel": True}}, "engine_options.vocab_parallel: needs True, found False"),
        ({"draft_source": "ORIGINAL", "draft_k": 3}, "draft.k (speculation_length): needs 4, found 0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_each_field_that_differs_is_reported(
    llama: Folder, nxd: Neuron, fields: dict[str, Any], message: str, checkpoint: Checkpoints
) -> None:
    """With its value in the artifacts and in the spec, before a core is claimed, and nothing is compiled instead."""
    fields = {name: str(checkpoint("llama")) if value == "ORIGINAL" else value for name, value in fields.items()}
    error = llama.refused(**fields)
    assert error.id == "artifacts-mismatch"
    assert message in error.what
    assert str(llama.path) in error.what
    assert nxd.held() == {}


def test_all_fields_that_differ_are_reported_at_once(llama: Folder) -> None:
    """And what follows from them is not."""
    message = llama.refused(slots=2, dtype="bf16").what
    assert "max_batch (batch_size): needs 2, found 4" in message
    assert "dtype (torch_dtype): needs bfloat16, found float32" in message
    assert message.count("needs") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding_side": "left"}, "padding_side: needs right, found left"),
        ({"async_mode": True}, "async_mode: needs False, found True"),
        ({"qkv_kernel_enabled": True}, "engine_options.qkv_kernel_enabled: needs False, found True"),
        ({"of_another_version": 7}, "of_another_version: needs none, found 7"),
        ({"spec_batch_size": 3}, "max_batch (spec_batch_size): needs 4, found 3"),
        ({"logical_nc_config": 2}, "hosts.lnc (logical_nc_config): needs 1, found 2"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_options_that_the_spec_does_not_name_are_compared_too(
    llama: Folder, options: dict[str, Any], message: str
) -> None:
    """With what the package would take."""
    llama.record(**options)
    error = llama.refused()
    assert (error.id, message in error.what) == ("artifacts-mismatch", True), error.what


def test_fields_without_effect_on_graphs_may_differ(llama: Folder) -> None:
    """Places of another host, and what a load does."""
    llama.record(quantized_checkpoints_path="/elsewhere", skip_warmup=True, max_new_tokens=7)
    assert llama.predicted().hit
    assert answers(llama.opened(), llama.original) == []


def test_an_unnamed_size_of_a_head_is_the_usual_one(llama: Folder) -> None:
    """As configurations of transformers have it; another size is reported."""
    file = llama.path / NEURON_CONFIG
    recorded = json.loads(file.read_text())
    file.write_text(json.dumps(recorded | {"head_dim": None}))
    assert llama.predicted().hit
    file.write_text(json.dumps(recorded | {"head_dim": 2 * recorded["head_dim"]}))
    assert "head_dim of config.json" in llama.refused().what


def test_the_config_of_another_model_is_reported(llama: Folder) -> None:
    """Such a config.json is beside graphs that were compiled for other numbers."""
    file = llama.path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 1e-3}))
    error = llama.refused()
    assert error.id == "artifacts-mismatch"
    assert "rms_norm_eps of config.json: needs 0.001, found " in error.what


def test_a_draft_is_compared_with_the_one_that_was_compiled(
    nxd: Neuron, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Fused speculation compiles both models together; without a draft the spec needs none."""
    draft = {"draft_source": str(checkpoint("llama")), "draft_k": 3}
    folder = Folder(tmp_path, checkpoint("llama"), **draft)
    assert answers(folder.opened(), folder.original) == []
    assert "draft: needs none, found one" in folder.refused(draft_source=None, draft_k=0).what
    assert "draft.k (speculation_length): needs 3, found 4" in folder.refused(draft_k=2).what


def test_a_neuron_config_that_the_version_cannot_read_is_reported(llama: Folder, nxd: Neuron) -> None:
    """So is a missing one: without it the settings of the graphs are unknown."""
    llama.record(quantized=True)
    assert "cannot read neuron_config.json: AssertionError" in llama.refused().what
    assert "there is no neuron_config.json" in llama.without(NEURON_CONFIG).refused().what
    assert nxd.held() == {}


def test_a_compiled_program_is_loaded_only_where_pickles_are_allowed(llama: Folder, nxd: Neuron) -> None:
    """model.pt can run code."""
    error = llama.refused(allow_pickle=False)
    assert (error.id, nxd.held()) == ("pickle-refused", {})
    assert str(llama.path / "model.pt") in error.what
    assert "allow_pickle: true" in error.hint


# compiled, with the record of who has


@pytest.fixture
def recorded(llama: Folder, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """With the lock file of the entry that it was copied from."""
    installed, compiler = metadata.version, {"neuronx-cc": "2.16.372.0"}
    monkeypatch.setattr(metadata, "version", lambda name: compiler.get(name) or installed(name))
    entry = Path(shutil.copytree(llama.path, llama.path.parent / "entry" / "model"))
    from workers.compiled.file_states import parts
    from workers.engines.nxd_inference.package import import_package

    manifest = artifacts.unit(NxdSettings.of(llama.config()), import_package(), None).manifest
    write_record(llama.path / LOCK_FILE, record_of(manifest, files=parts(entry.parent)))
    return llama


def test_the_compiler_is_compared_where_it_is_recorded(recorded: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """neuron_config.json has neither the compiler's version nor its flags."""
    assert answers(recorded.opened(), recorded.original) == []
    compiler = metadata.version
    newer = {"neuronx-cc": "2.19.0"}
    monkeypatch.setattr(metadata, "version", lambda name: newer.get(name) or compiler(name))
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O1")
    message = recorded.refused().what
    assert "compiler version: needs 2.19.0, found 2.16.372.0" in message
    assert "compiler flags: needs -O1, found none" in message


def test_a_changed_program_is_reported(recorded: Folder) -> None:
    """Its digest differs from the record's."""
    data = (recorded.path / "model.pt").read_bytes()
    (recorded.path / "model.pt").write_bytes(data[:-1] + b" ")
    error = recorded.refused()
    assert (error.id, "are missing or have changed: model.pt" in error.what) == ("artifacts-mismatch", True)


def test_an_unrecorded_compiler_is_logged(llama: Folder, caplog: pytest.LogCaptureFixture) -> None:
    """In the log of the replica."""
    llama.opened()
    assert f"the compiler of {llama.path / 'model.pt'} is unknown" in caplog.text


# the weights of each core


def test_a_missing_or_truncated_shard_is_reported(llama: Folder, nxd: Neuron) -> None:
    """By its name, before a core is claimed."""
    os.truncate(llama.path / SHARD.format(0), 40)
    assert (error := llama.refused()).id == "weights-broken"
    assert SHARD.format(0) in error.what
    error = llama.without(SHARD.format(1)).refused()
    assert (error.id, nxd.held()) == ("weights-missing", {})
    assert f"is missing {SHARD.format(1)}" in error.what


def test_shards_of_more_cores_than_the_degree_are_reported(llama: Folder) -> None:
    """Two folders were mixed."""
    shutil.copy(llama.path / SHARD.format(1), llama.path / SHARD.format(3))
    error = llama.refused()
    assert (error.id, "weights of 4 cores, but tp_degree is 2" in error.what) == ("shards-mismatch", True)


def test_weights_that_were_not_saved_are_divided_again(nxd: Neuron, checkpoint: Checkpoints, tmp_path: Path) -> None:
    """From the original beside the graphs; without it the model is refused."""
    folder = Folder(tmp_path, checkpoint("llama"))
    folder.record(save_sharded_checkpoint=False)
    shutil.rmtree(folder.path / "weights")
    assert folder.refused().id == "weights-missing"
    shutil.copy(folder.original / "model.safetensors", folder.path)
    assert folder.predicted().hit
    assert answers(folder.opened(), folder.original) == []
    assert compiles() == folder.before


# the weights alone


@pytest.mark.parametrize("version", [version for version in VERSIONS if nxd_release(version) >= (0, 2)])
def test_shards_are_the_weights_of_an_own_compile(
    version: str, nxd: Neuron, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: the second start finds it compiled. They are neither divided again nor copied."""
    monkeypatch.setenv("NEURON_DOUBLE_NXDI_VERSION", version)
    folder = Folder(tmp_path, checkpoint("llama")).without("model.pt", NEURON_CONFIG)
    assert folder.predicted().outcome == "compile"
    engine = folder.opened(allow_pickle=False)
    assert answers(engine, folder.original) == []
    assert compiles() > folder.before
    engine.close()
    assert list(folder.compiled.rglob("*.safetensors")) == []
    now = compiles()
    importlib.import_module("neuron_double.runtime").reset_for_tests()
    assert folder.predicted().hit
    assert answers(folder.opened(), folder.original) == []
    assert compiles() == now


@pytest.mark.parametrize(
    ("fields", "id", "message"),
    [
        ({"tp_degree": 4, "cores": [0, 1, 2, 3]}, "shards-mismatch", "weights of 2 cores, but tp_degree is 4"),
        ({"dtype": "bf16"}, "shards-mismatch", "hold F32, mostly F32, but the spec needs BF16"),
        ({"quantize": "int8"}, "shards-mismatch", "needs one-byte numbers"),
        ({"draft_source": "ORIGINAL", "draft_k": 3}, "layout-unsupported", "do not include a draft model"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_shards_of_another_kind_are_reported(
    llama: Folder, fields: dict[str, Any], id: str, message: str, checkpoint: Checkpoints
) -> None:
    """The shards show their number and dtype."""
    fields = {name: str(checkpoint("llama")) if value == "ORIGINAL" else value for name, value in fields.items()}
    error = llama.without("model.pt", NEURON_CONFIG).refused(**fields)
    assert (error.id, message in error.what) == (id, True), error.what


def test_the_recorded_settings_of_shards_are_compared(llama: Folder) -> None:
    """Only the options that decide how weights are divided are compared, not the shapes of graphs."""
    llama.without("model.pt")
    assert "fuse_qkv (fused_qkv): needs True, found False" in llama.refused(fuse_qkv=True).what
    assert answers(llama.opened(slots=2), llama.original) == []


def test_a_gap_among_the_shards_is_reported(llama: Folder) -> None:
    """The file that is missing, and not another degree."""
    llama.without("model.pt", NEURON_CONFIG, SHARD.format(0))
    error = llama.refused()
    assert (error.id, f"is missing {SHARD.format(0)}" in error.what) == ("weights-missing", True)


# what is refused


@pytest.mark.parametrize(
    ("original", "hint"),
    [("", "set `source` to the original checkpoint"), ("model.safetensors", "holds the original weights"),
     ("checkpoint/model.safetensors", "checkpoint holds the original weights")],
)  # fmt: skip
def test_a_model_compiled_by_optimum_is_refused(llama: Folder, original: str, hint: str) -> None:
    """Its graphs are called differently. Where it has the original weights, the hint describes how to compile them."""
    (llama.path / NEURON_CONFIG).write_text(json.dumps({"_serialized_key": "NxDNeuronConfig", "tp_degree": 2}))
    if original:
        (llama.path / original).parent.mkdir(exist_ok=True)
        shutil.copy(llama.original / "model.safetensors", llama.path / original)
    error = llama.refused()
    assert (error.id, hint in error.hint) == ("layout-unsupported", True), error.hint
    assert "compiled by Optimum Neuron" in error.what


def test_a_compiled_draft_is_refused(llama: Folder, checkpoint: Checkpoints) -> None:
    """It is compiled into one set with its model."""
    config = replica_config(checkpoint("llama"), None, draft_source=str(llama.path), draft_k=2)
    with pytest.raises(EngineLoadError, match="a draft is always compiled") as refused:
        open_engine(config).load()
    assert refused.value.id == "layout-unsupported"


# before anything is fetched


def only_head(given: Folder) -> Path:
    """The small files of a source elsewhere, as commands keep them."""
    names = sorted(path.relative_to(given.path).as_posix() for path in given.path.rglob("*") if path.is_file())
    listing = Listing(
        source="s3://models/given",
        files=tuple(RemoteFile(name=name, size=(given.path / name).stat().st_size, tag="t") for name in names),
    )
    folder = given.path.parent / "head"
    folder.mkdir()
    for file in metadata_files(listing).files:
        shutil.copy(given.path / file.name, folder)
    (folder / MARK).write_bytes(msgspec.json.encode(listing))
    assert not (folder / "model.pt").exists()
    return folder


def test_a_source_that_is_not_fetched_yet_is_verified_by_its_head(llama: Folder) -> None:
    """By its small files and the names of all: what differs, what is missing, and what is as it should be."""
    llama.path = only_head(llama)
    assert llama.predicted().hit
    with pytest.raises(EngineLoadError, match=r"max_batch \(batch_size\): needs 2, found 4"):
        llama.predicted(slots=2)
    listing = json.loads((llama.path / MARK).read_text())
    listing["files"] = [file for file in listing["files"] if file["name"] != SHARD.format(1)]
    (llama.path / MARK).write_text(json.dumps(listing))
    with pytest.raises(EngineLoadError, match="tp1_sharded_checkpoint") as missing:
        llama.predicted()
    assert missing.value.id == "weights-missing"


@pytest.mark.parametrize("version", VERSIONS)
def test_fields_of_the_spec_are_compared_without_the_package(
    version: str, nxd: Neuron, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For `validate` and `plan`, wherever they run."""
    monkeypatch.setenv("NEURON_DOUBLE_NXDI_VERSION", version)
    folder = Folder(tmp_path, checkpoint("llama"), sampling="device")
    assert start_error(folder.config()) is None
    error = start_error(folder.config(slots=2, tp_degree=1, sampling="host"))
    assert error is not None
    assert error.id == "artifacts-mismatch"
    assert [part.split(":")[0] for part in error.what.split("spec's: ")[1].split("; ")] == [
        "max_batch (batch_size)",
        "sampling (on_device_sampling_config)",
        "tp_degree",
    ]
    errors = [start_error(folder.config(allow_pickle=False)), start_error(folder.without(SHARD.format(1)).config())]
    assert [None if start is None else start.id for start in errors] == ["pickle-refused", "weights-missing"]
    assert start_error(replica_config(checkpoint("llama"), None)) is None


def test_settings_of_the_hosts_environment_are_not_compared(
    nxd: Neuron, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine that validates may have another number of logical cores."""
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    folder = Folder(tmp_path, checkpoint("llama"))
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG")
    assert json.loads((folder.path / NEURON_CONFIG).read_text())["neuron_config"]["logical_nc_config"] == 2
    assert start_error(folder.config()) is None


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("context_encoding_buckets", ["many"], "neuron_config.json in .* cannot be compared: ValueError"),
        ("token_generation_buckets", [float("inf")], "cannot be compared: OverflowError"),
        ("max_length", "x", "max_len .*: needs 96, found x"),
        ("max_context_length", {}, "buckets.prefill .*: needs 64, found "),
    ],
)
def test_an_unreadable_record_is_a_mismatch(option: str, value: Any, expected: str, llama: Folder) -> None:
    """Whoever has written it."""
    file = llama.path / NEURON_CONFIG
    recorded = json.loads(file.read_text())
    recorded["neuron_config"][option] = value
    file.unlink()
    file.write_text(json.dumps(recorded))
    error = start_error(llama.config())
    assert error is not None
    assert error.id == "artifacts-mismatch"
    assert re.search(expected, error.what), error.what


@pytest.mark.slow
def test_the_command_reports_the_same_through_the_engines_interpreter(llama: Folder, nxd: Neuron) -> None:
    """`cache verify` gets a hit, or the error of the start."""
    env = {**nxd.env, "NEURON_RT_VISIBLE_CORES": "0-1"}
    reports = verify(llama.config(env=env), read=True)
    assert isinstance(reports, list)
    assert [(row.prediction.outcome, row.prediction.where) for row in reports] == [("hit", "source")]
    failure = verify(llama.config(env=env, slots=2), read=True)
    assert isinstance(failure, Failure)
    assert (failure.id, failure.what) == ("artifacts-mismatch", llama.refused(slots=2).what)
