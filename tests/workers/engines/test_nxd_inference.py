"""What the NxD Inference adapter refuses and reports, and what its artifacts depend on, over the package's double.

Answers are compared in ``test_nxd_traces.py`` and, over the package's own code, in ``tests/closed``."""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from placements.resources.environ import compiling
from tests.checkpoints import WINDOW, make_checkpoint
from tests.doubles import PACKAGES, Neuron
from tests.placements.fleets import model
from tests.workers import nxdi_traffic
from tests.workers.nxdi_traffic import (
    DECODE,
    FULL,
    MAX_LEN,
    PREFILL,
    Checkpoints,
    allow_fp8,
    arrivals,
    cpu,
    edit,
    opened,
    refused,
    replica_config,
    served,
)
from tests.workers.nxdi_traffic import sources as sources
from tests.workers.tnx_runs import scores
from workers.engines.nxd_inference import artifacts
from workers.engines.nxd_inference.config import NxdSettings, lengths, neuron_options
from workers.engines.nxd_inference.engine import NxdEngine
from workers.engines.nxd_inference.precompiled import with_sharding
from workers.engines.open_engine import open_engine
from workers.engines.package_contract import Drift
from workers.engines.weight_files import tensors_of
from workers.host.neuron_faults import fault_of
from workers.messages.engine_protocol import EngineLoadError
from workers.serving.prepare import predict


@pytest.fixture
def nxd(neuron: Neuron, monkeypatch: pytest.MonkeyPatch) -> Neuron:
    """The stand-ins, with compiles in this process. What a fixture of a narrower scope changes is put back."""
    monkeypatch.setattr(artifacts, "compile_in_subprocess", nxdi_traffic.compile_here)
    for name in ("BASE_COMPILE_WORK_DIR", "XLA_HANDLE_SPECIAL_SCALAR", "UNSAFE_FP8FNCAST"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return neuron


def play(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setenv("NEURON_DOUBLE_NXDI_VERSION", version)


# answers


def test_prompts_have_the_logprobs_of_the_cpu_engine(nxd: Neuron, sources: Checkpoints, tmp_path: Path) -> None:
    """Token by token, in steps of their own: the graphs return the logits of one position."""
    source, prompts = sources("llama"), [prompt for _, prompt, _, leaves in arrivals() if not leaves]

    ours = scores(opened(source, tmp_path / "compiled", sampling="host"), source, prompts)
    for of_nxd, of_cpu in zip(ours, scores(cpu(source), source, prompts), strict=True):
        assert of_nxd[0] is of_cpu[0] is None
        assert of_nxd[1:] == pytest.approx(of_cpu[1:], abs=1e-3)


def test_an_eos_ends_an_answer(nxd: Neuron, sources: Checkpoints, tmp_path: Path) -> None:
    """Read from generation_config.json, as the CPU engine does, while other requests arrive and are cancelled."""
    eos = served(cpu(sources("llama")), arrivals())["1"][3]
    source = nxdi_traffic.with_eos(sources("llama"), tmp_path / "model", [eos])
    engine = opened(source, tmp_path / "compiled")
    assert engine.spec.eos_token_ids == {eos}
    answers = served(engine, arrivals())
    assert nxdi_traffic.wrong(source, arrivals(), served(cpu(source), arrivals()), answers) == []
    assert answers["1"][-1] == eos
    assert len(answers["1"]) <= 4


# compiling and loading


@pytest.mark.compile
def test_a_killed_compile_reports_its_cause(
    neuron: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's OOM killer; the next start compiles again."""
    monkeypatch.setenv("PYTHONPATH", f"{PACKAGES}:{Path(__file__).parents[3]}")
    neuron.plan({"at": "compile", "exit": -9, "times": 1})
    error = refused(lambda: opened(sources("llama"), tmp_path / "compiled"))
    assert error.id == "compile-failed"
    fault = fault_of(error)
    assert fault is not None
    assert fault.id == "compiler-killed"
    assert Path(error.hint.split()[-1]).exists()
    opened(sources("llama"), tmp_path / "compiled")


@pytest.mark.parametrize(("dtype", "width"), [("fp32", 4), ("bf16", 2)])
def test_a_compile_without_room_for_its_shards_does_not_begin(
    dtype: str, width: int, nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are a copy of the weights, in the dtype of serving; the compiler may work for an hour before."""
    tensors = tensors_of(sources("llama") / "model.safetensors").values()
    disk = SimpleNamespace(free=sum(math.prod(tensor.shape) for tensor in tensors) * width - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: disk)
    error = refused(lambda: opened(sources("llama"), tmp_path / "compiled", dtype=dtype))
    assert (error.id, str(tmp_path / "compiled") in error.what) == ("disk-full", True)
    disk.free += 1
    opened(sources("llama"), tmp_path / "compiled", dtype=dtype)


def test_a_compiling_process_does_not_outlive_the_one_that_waits() -> None:
    """That one holds the lock of the folder: here it is gone already. And the module has one command."""
    command = [sys.executable, "-m", "workers.engines.nxd_inference.artifacts"]
    settings = msgspec.to_builtins(NxdSettings.of(replica_config(Path("/nowhere"), None)))
    job = json.dumps({"settings": settings, "folder": "/nowhere", "parent": 1})
    orphan = subprocess.run([*command, "compile"], input=job, text=True, capture_output=True, check=False)
    assert (orphan.returncode, orphan.stderr) == (1, "")
    assert subprocess.run([*command, "load"], capture_output=True, check=False).returncode == 2


def test_each_dependency_of_the_artifacts_makes_new_ones(
    nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths, flags, the package's version, and the weights themselves, which are stored sharded."""
    root = tmp_path / "compiled"
    source = Path(shutil.copytree(sources("llama"), tmp_path / "model"))

    def entries(**fields: Any) -> int:
        opened(source, root, **fields)
        return len(list(root.glob("*/corewright.json")))

    assert entries() == 1
    assert entries() == 1
    assert entries(decode_buckets=[MAX_LEN]) == 2
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O1")
    assert entries() == 3
    shutil.copy(make_checkpoint(tmp_path / "trained", "llama", seed=4, eos=None) / "model.safetensors", source)
    assert entries() == 4


def test_every_compile_works_in_a_folder_of_its_own(
    nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default the package has one for all compiles of a host, which two at once would overwrite."""
    from neuronx_distributed_inference.models.application_base import NeuronApplicationBase

    folders: list[Path] = []
    compiles = NeuronApplicationBase.compile

    def watched(self: Any, path: str, *more: Any) -> None:
        folders.append(Path(os.environ["BASE_COMPILE_WORK_DIR"]))
        compiles(self, path, *more)

    monkeypatch.setattr(NeuronApplicationBase, "compile", watched)
    opened(sources("llama"), tmp_path)
    opened(sources("llama"), tmp_path, decode_buckets=[MAX_LEN])
    assert len(set(folders)) == 2
    assert {work.parent for work in folders} == {mark.parent for mark in tmp_path.glob("*/corewright.json")}


def test_without_a_folder_no_artifacts_are_left(
    nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``compiled: None``. They are removed once the model is loaded: replicas are killed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = opened(sources("llama"), None)
    assert not list(tmp_path.glob("corewright-*"))
    engine.close()
    with pytest.raises(RuntimeError, match="not loaded"):
        _ = engine.spec


def test_a_device_fault_passes_unchanged(nxd: Neuron, sources: Checkpoints, tmp_path: Path) -> None:
    """Whoever reads faults finds the runtime's own words."""
    engine = opened(sources("llama"), tmp_path)
    nxd.plan({"at": "execute", "status": 1201})
    with pytest.raises(RuntimeError, match="status=1201"):
        engine.prefill([0], [[7, 8, 9]])


def test_cores_of_another_process_are_a_runtime_error(nxd: Neuron, sources: Checkpoints, tmp_path: Path) -> None:
    """While it loads; compiling went well without them."""
    nxd.plan({"at": "claim", "text": "NeuronCore(s) not available - Requested:nc0-nc1 Available:0"})
    with pytest.raises(RuntimeError, match="not available"):
        opened(sources("llama"), tmp_path)
    assert list(tmp_path.glob("*/corewright.json"))


def test_drift_of_the_installed_package_is_logged(
    nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At each load."""
    drift = Drift("nxd-inference", "neuronx_distributed_inference", "0.8.0", "0.8", removed=("NeuronConfig: seq_len",))
    monkeypatch.setattr("workers.engines.package_contract.drift", lambda engine: drift)
    opened(sources("llama"), tmp_path)
    assert "NeuronConfig: seq_len is gone" in caplog.text


# quantization


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantize": "fp8"}, "holds I8; f8e4m3 needs F8_E4M3"),
        (
            {"quantize": "int8", "quantization_type": "per_tensor_symmetric"},
            "are per_channel_symmetric, but the model's",
        ),
    ],
)
def test_a_quantized_checkpoint_of_another_kind_is_refused(
    fields: dict[str, Any],
    message: str,
    nxd: Neuron,
    sources: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The package would cast it, or multiply by the wrong scales. Before a core is claimed, and before a compile."""
    allow_fp8(monkeypatch, fields)
    opened(sources("llama"), tmp_path / "own", quantize="int8")
    (quantized,) = (tmp_path / "own").glob("*/quantized")
    options = {name: value for name, value in fields.items() if name == "quantization_type"}
    other_fields = {
        "quantize": fields["quantize"],
        "engine_options": {**options, "quantized_checkpoints_path": str(quantized)},
    }
    nxd.plan({"at": "claim", "text": "no core is claimed"})
    error = refused(lambda: opened(sources("llama"), tmp_path / "compiled", **other_fields))
    assert (error.id, message in error.what) == ("quantized-mismatch", True), error.what


def test_f8e5m2_is_refused_before_0_7(
    nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package would convert it to int8."""
    play(monkeypatch, "0.6")
    options = {"quantization_dtype": "f8e5m2"}
    error = refused(lambda: opened(sources("llama"), tmp_path, quantize="fp8", engine_options=options))
    assert (error.id, error.what) == (
        "option-not-in-version",
        "NxD Inference 0.6 would convert weights of f8e5m2 to int8",
    )


def test_version_0_3_is_refused(nxd: Neuron, sources: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own code has not been run."""
    from workers.engines.nxd_inference import package as nxd_package

    import_module = importlib.import_module
    package = SimpleNamespace(__version__="0.3.5591")
    monkeypatch.setattr(
        nxd_package.importlib,  # type: ignore[attr-defined]
        "import_module",
        lambda name, *anchor: package if name == nxd_package.NAME else import_module(name, *anchor),
    )
    error = refused(nxd_package.import_package)
    assert (error.id, "the first supported version is 0.4" in error.what) == ("engine-not-installed", True)


# the compiler's flags


def test_the_flags_of_the_spec_reach_the_compiler(
    nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every graph gets them, except for flags of the cache's wrapper. The package does not read NEURON_CC_FLAGS."""
    compiler = {"optlevel": 3, "flags": "--enable-saturate-infinity --log_level=INFO"}
    for name, value in compiling(model("m", compiler=compiler), "nxd-inference").items():
        monkeypatch.setenv(name, value)
    opened(sources("llama"), tmp_path)
    flags = [str(line["flags"]).split() for line in importlib.import_module("neuron_double.compiler").compiles()]
    assert len(flags) == len(PREFILL) + len(DECODE)
    for graph_flags in flags:
        assert {"-O3", "--enable-saturate-infinity", "--auto-cast=none"} <= set(graph_flags)
        assert not {"-O1", "-O2", "--log_level=INFO"} & set(graph_flags)


@pytest.mark.parametrize(
    ("own", "given", "wanted"),
    [
        ("--a -O1 ", "", "--a -O1 "),
        ("--a -O1 --b", "-O3", "--a  --b -O3"),
        ("--a -O1", "--optlevel=2 --c", "--a  -O2 --c"),
        ("--a -O2", "--optlevel 1", "--a  -O1"),
        ("--a", "--cache_dir=/x --c --no_cache", "--a --c"),
    ],
)
def test_an_optimization_level_replaces_the_packages(own: str, given: str, wanted: str) -> None:
    """Other flags are added."""
    assert artifacts.with_flags(own, given) == wanted


def test_a_killed_compiler_is_not_cached_as_a_failure(nxd: Neuron, sources: Checkpoints, tmp_path: Path) -> None:
    """The package compiles through Neuron's persistent cache, which does not try a graph again."""
    nxd.plan({"at": "compile", "exit": -9, "times": 1})
    with pytest.raises(RuntimeError, match="failed with -9"):
        opened(sources("llama"), tmp_path)
    assert served(opened(sources("llama"), tmp_path), [("1", [7, 8, 9], 3, False)])


@pytest.mark.compile
def test_a_graph_that_the_compiler_cannot_compile_fails_again(
    neuron: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the command that has it tried again; `cache verify` knows it."""
    monkeypatch.setenv("PYTHONPATH", f"{PACKAGES}:{Path(__file__).parents[3]}")
    neuron.plan({"at": "compile", "exit": 70, "times": 1})
    config = replica_config(sources("llama"), tmp_path)
    refused(lambda: opened(sources("llama"), tmp_path))
    (verdict,) = predict(config, read=True).wanted
    assert verdict.prediction.outcome == "fail", verdict
    fault = fault_of(refused(lambda: opened(sources("llama"), tmp_path)))
    assert fault is not None
    assert (fault.id, "corewright cache retry MODULE_" in fault.hint) == ("compile-cached-failure", True)


# what is refused


def test_the_error_of_a_missing_package_names_its_source(sources: Checkpoints) -> None:
    """Before anything is read."""
    error = refused(lambda: open_engine(replica_config(sources("llama"), None)))
    assert error.id == "engine-not-installed"
    assert "pip install" in error.hint


def test_open_engine_returns_the_adapter(nxd: Neuron, sources: Checkpoints, tmp_path: Path) -> None:
    """By its name in a spec."""
    assert isinstance(open_engine(replica_config(sources("llama"), tmp_path)), NxdEngine)


@pytest.mark.parametrize(
    ("fields", "id"),
    [
        ({"max_len": 1024, "decode_buckets": [1024]}, "max-len-too-long"),
        ({"prefill_buckets": [32, 16]}, "bad-buckets"),
        ({"prefill_buckets": [1, 64]}, "bad-buckets"),
        ({"decode_buckets": [32]}, "bad-buckets"),
        ({"draft_source": "SELF", "draft_k": 15}, "bad-buckets"),  # a prefill bucket of 16 would look like a step
        ({"draft_source": "SELF", "draft_k": 2, "quantize": "int8"}, "bad-engine-option"),
        ({"quantize_kv": "int8"}, "bad-engine-option"),
        ({"engine_options": {"glu_mlp": True}}, "bad-engine-option"),  # llama has no experts
        ({"engine_options": {"on_device_sampling_config": {"global_topk": 8}}}, "bad-engine-option"),
        ({"engine_options": {"fused_qvk": True}}, "option-not-in-version"),
        ({"quantize": "int8", "engine_options": {"quantized_checkpoints_path": "/nowhere"}}, "weights-missing"),
        ({"engine_options": {"enable_ve_data_parallel": True}}, "option-not-in-version"),
    ],
)
def test_unsupported_settings_are_load_errors(
    fields: dict[str, Any], id: str, nxd: Neuron, sources: Checkpoints, tmp_path: Path
) -> None:
    """Before a core is claimed."""
    source = sources("llama")
    fields = {name: str(source) if value == "SELF" else value for name, value in fields.items()}
    assert refused(lambda: opened(source, tmp_path, **fields)).id == id
    assert nxd.held() == {}


def test_an_option_names_the_version_that_has_it(nxd: Neuron, sources: Checkpoints, tmp_path: Path) -> None:
    """A later one."""
    newer = refused(lambda: opened(sources("llama"), tmp_path, engine_options={"enable_ve_data_parallel": True}))
    assert "versions from 0.9 on have it" in newer.what


def test_errors_of_the_package_are_quoted(
    nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its constructors raise whatever comes; before a compile, and before a core is claimed."""
    from neuronx_distributed_inference.models import config

    def refuse(self: Any, **_: Any) -> None:
        raise ValueError("no such kernel on this platform")

    monkeypatch.setattr(config.NeuronConfig, "__init__", refuse)
    error = refused(lambda: opened(sources("llama"), tmp_path))
    assert error.id == "bad-engine-option"
    assert "ValueError: no such kernel on this platform" in error.what
    assert nxd.held() == {}


def test_options_reach_the_package(nxd: Neuron, sources: Checkpoints, tmp_path: Path) -> None:
    """To NeuronConfig, by their names; those of experts to models of experts."""
    engine = opened(
        sources("llama"), tmp_path, engine_options={"sequence_parallel_enabled": True, "vocab_parallel": True}
    )
    config = engine._model.config.neuron_config
    assert (config.sequence_parallel_enabled, config.vocab_parallel) == (True, True)
    experts = opened(sources("mixtral"), tmp_path, engine_options={"capacity_factor": 2.0})
    assert experts._model.config.neuron_config.capacity_factor == 2.0
    assert experts._model.config.neuron_config.glu_mlp is True


def test_families_and_windows_that_the_package_lacks_are_refused(
    nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt2 in all versions; a short sliding window but in mistral from 0.7 on, and there with a draft."""
    assert refused(lambda: opened(sources("gpt2"), tmp_path)).id == "unknown-family"
    assert refused(lambda: opened(sources("qwen3"), tmp_path)).id == "window-not-kept"
    window = sources("mistral-window")
    draft = refused(lambda: opened(window, tmp_path, draft_source=str(window), draft_k=2))
    assert (draft.id, "for mistral with a draft" in draft.what) == ("window-not-kept", True)
    opened(window, tmp_path, prefill_buckets=[32, 64])
    play(monkeypatch, "0.6")
    assert refused(lambda: opened(window, tmp_path)).id == "window-not-kept"
    opened(window, tmp_path, max_len=WINDOW, prefill_buckets=[WINDOW], decode_buckets=[WINDOW])


def test_no_bucket_of_prompts_is_shorter_than_a_sliding_window(
    nxd: Neuron, sources: Checkpoints, tmp_path: Path
) -> None:
    """Its graph reads as many tokens as the window has. By default the shortest bucket is the window."""
    short = refused(lambda: opened(sources("mistral-window"), tmp_path / "compiled"))
    assert (short.id, short.hint) == ("bad-buckets", f"use buckets of {WINDOW} tokens or more")
    source = Path(shutil.copytree(sources("mistral-window"), tmp_path / "model"))
    edit(source, sliding_window=300)
    settings = NxdSettings.of(replica_config(source, None, max_len=1000, prefill_buckets=[], decode_buckets=[]))
    settings = with_sharding(settings)
    sizes = lengths(settings)
    assert (sizes.context_buckets, sizes.decode_buckets) == ((300, 600, 1000), (128, 256, 512, 1000))
    assert neuron_options(settings, sizes, (0, 8), "")["attn_kernel_enabled"] is False  # the window's own kernel


@pytest.mark.parametrize(
    ("version", "family", "fields", "accepted"),
    [
        ("0.8", "llama", {"fuse_qkv": True}, True),
        ("0.8", "mistral", {"fuse_qkv": True}, True),  # as a llama
        ("0.9", "mistral", {"fuse_qkv": True}, False),
        ("0.9", "mixtral", {"fuse_qkv": True}, False),
        ("0.8", FULL, {"fuse_qkv": True}, False),
        ("0.9", FULL, {"fuse_qkv": True}, True),
        ("0.9", "mixtral", {"quantize": "int8"}, False),
        ("0.9", "qwen2", {"quantize": "int8"}, False),
        ("0.9", FULL, {"quantize": "int8"}, True),
    ],
)
def test_a_class_that_cannot_be_compiled_so_is_refused(
    version: str,
    family: str,
    fields: dict[str, Any],
    accepted: bool,
    nxd: Neuron,
    sources: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The package accepts the options, and fails while it shards the weights, without their name."""
    play(monkeypatch, version)
    if accepted:
        opened(sources(family), tmp_path, **fields)
    else:
        error = refused(lambda: opened(sources(family), tmp_path, **fields))
        assert (error.id, error.hint) == ("bad-engine-option", f"remove `{next(iter(fields))}`")


def test_a_window_that_no_slot_reaches_is_not_the_packages(nxd: Neuron, sources: Checkpoints, tmp_path: Path) -> None:
    """It would make the KV cache of each slot as long as the window."""
    source = Path(shutil.copytree(sources("mistral"), tmp_path / "model"))
    edit(source, sliding_window=4 * MAX_LEN)
    assert opened(source, tmp_path / "compiled")._model.config.sliding_window is None


def test_the_size_of_a_head_is_always_a_number(nxd: Neuron, sources: Checkpoints, tmp_path: Path) -> None:
    """Some configurations of transformers leave it open."""
    source = Path(shutil.copytree(sources("mixtral"), tmp_path / "model"))
    edit(source, head_dim=None)
    config = opened(source, tmp_path / "compiled")._model.config
    assert config.head_dim == config.hidden_size // config.num_attention_heads


def test_a_family_of_a_later_version_is_refused_by_an_earlier_one(
    nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the ones that it has."""
    play(monkeypatch, "0.4")
    error = refused(lambda: opened(sources("qwen2"), tmp_path))
    assert error.id == "unknown-family"
    assert "llama, mixtral" in error.hint


def test_mismatched_drafts_are_refused(
    nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another vocabulary; another family before 0.7."""
    small = Path(shutil.copytree(sources("llama"), tmp_path / "small"))
    edit(small, vocab_size=256)
    source = sources("llama")
    with pytest.raises(EngineLoadError, match="the draft model's vocabulary"):
        opened(source, tmp_path / "c", draft_source=str(small), draft_k=2)
    play(monkeypatch, "0.4")
    forget_package()
    with pytest.raises(EngineLoadError, match="same family"):
        opened(source, tmp_path / "c", draft_source=str(sources("mixtral")), draft_k=2)


def forget_package() -> None:
    """The next import plays the version that is named then."""
    from tests.doubles import PLAYED, forget

    forget(*PLAYED)
