"""The NxD Inference adapter against the CPU engine, on stand-ins of the package in each recorded version."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from placements.facts.checkpoints import Checkpoint
from placements.facts.engines import nxd_release
from placements.resources.environ import compiling
from placements.resources.memory import estimate
from tests.checkpoints import WINDOW, make_checkpoint
from tests.contracts import contract
from tests.doubles import PACKAGES, Neuron
from tests.placements.fleets import model
from tests.workers import nxdi_mutants, nxdi_traffic
from tests.workers.nxdi_traffic import DECODE, MAX_LEN, PREFILL, Arrival, arrivals, cpu, opened, replica_config, served
from workers.batching.batcher import Batcher
from workers.compiling.build import predict
from workers.compiling.start_forecast import verdicts
from workers.engines.nxd_inference import artifacts
from workers.engines.nxd_inference.config import Settings
from workers.engines.nxd_inference.engine import NxdEngine
from workers.engines.open_engine import open_engine
from workers.engines.package_contract import Drift
from workers.host.neuron_faults import fault_of
from workers.messages.engine_protocol import DeviceSampling, EngineLoadError
from workers.serving.generate_once import End, Job, run
from workers.text.tokenizer import ByteTokenizer

Checkpoints = Callable[[str], Path]
CONTRACT = contract("nxd-inference")
VERSIONS = sorted(CONTRACT.versions)
CONFIG = "neuronx_distributed_inference.models.config."
FULL = "qwen3-full"  # qwen3 without its window


@pytest.fixture
def nxd(neuron: Neuron, monkeypatch: pytest.MonkeyPatch) -> Neuron:
    """The stand-ins, with compiles in this process. What a fixture of a narrower scope changes is put back."""
    monkeypatch.setattr(artifacts, "compile_in_subprocess", nxdi_traffic.compile_here)
    for name in ("BASE_COMPILE_WORK_DIR", "XLA_HANDLE_SPECIAL_SCALAR", "UNSAFE_FP8FNCAST"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return neuron


@pytest.fixture(scope="session")
def sources(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """The shared checkpoints, and qwen3 without a window."""
    folders: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family != FULL:
            return checkpoint(family)
        if FULL not in folders:
            folders[FULL] = Path(shutil.copytree(checkpoint("qwen3"), tmp_path_factory.mktemp("nxd") / FULL))
            edit(folders[FULL], use_sliding_window=False, sliding_window=None, layer_types=["full_attention"] * 2)
        return folders[FULL]

    return get


@pytest.fixture(scope="session")
def expected(sources: Checkpoints) -> Callable[[str], dict[str, list[int]]]:
    """What the CPU engine answers to the usual traffic."""
    answers: dict[str, dict[str, list[int]]] = {}

    def get(family: str) -> dict[str, list[int]]:
        if family not in answers:
            answers[family] = served(cpu(sources(family)), arrivals())
        return answers[family]

    return get


def edit(folder: Path, **settings: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def families(version: str) -> list[str]:
    """The test families that a version computes."""
    names = ["llama", "mixtral", "mistral"]
    if nxd_release(version) >= (0, 5):
        names += ["qwen2", FULL]
    return names + (["mistral-window"] if nxd_release(version) >= (0, 9) else [])


def refused(work: Callable[[], object]) -> EngineLoadError:
    with pytest.raises(EngineLoadError) as caught:
        work()
    return caught.value


def play(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setenv("NEURON_DOUBLE_NXDI_VERSION", version)


# the tokens


@pytest.mark.parametrize(
    ("version", "family"), [(version, family) for version in VERSIONS for family in families(version)]
)
def test_tokens_equal_the_cpu_engines(
    version: str,
    family: str,
    nxd: Neuron,
    sources: Checkpoints,
    expected: Callable[[str], dict[str, list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy, while requests arrive and others are cancelled, in every version and for every family that it has."""
    play(monkeypatch, version)
    answers = served(opened(sources(family), tmp_path), arrivals())
    assert nxdi_traffic.wrong(sources(family), arrivals(), expected(family), answers) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_greedy_tokens_from_the_device_equal_the_hosts(
    version: str,
    nxd: Neuron,
    sources: Checkpoints,
    expected: Callable[[str], dict[str, list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``sampling: device``; the spec has the largest top_k."""
    play(monkeypatch, version)
    engine = opened(sources("llama"), tmp_path, sampling="device")
    assert (engine.spec.returns, engine.spec.device_top_k) == ("tokens", 256)
    answers = served(engine, arrivals())
    assert nxdi_traffic.wrong(sources("llama"), arrivals(), expected("llama"), answers) == []


def test_an_eos_ends_an_answer(
    nxd: Neuron, sources: Checkpoints, expected: Callable[[str], dict[str, list[int]]], tmp_path: Path
) -> None:
    """Read from generation_config.json, as the CPU engine does."""
    eos = expected("llama")["1"][3]
    source = nxdi_traffic.with_eos(sources("llama"), tmp_path / "model", [eos])
    engine = opened(source, tmp_path / "compiled")
    assert engine.spec.eos_token_ids == {eos}
    answers = served(engine, arrivals())
    assert nxdi_traffic.wrong(source, arrivals(), served(cpu(source), arrivals()), answers) == []
    assert answers["1"][-1] == eos
    assert len(answers["1"]) <= 4


def test_prompts_at_the_edges_of_buckets(nxd: Neuron, sources: Checkpoints, tmp_path: Path) -> None:
    """One below, at and above each prefill bucket; answers that cross every decode bucket up to the slot's end."""
    lengths_of_prompts = [1, 2, 15, 16, 17, 31, 32, 33, 62, 63, 64]
    requests: list[Arrival] = [
        (str(length), [6 + (length * 7 + index) % 500 for index in range(length)], MAX_LEN - length, False)
        for length in lengths_of_prompts
    ]
    source = sources("llama")
    answers = served(opened(source, tmp_path), requests)
    assert nxdi_traffic.wrong(source, requests, served(cpu(source), requests), answers) == []
    assert [len(answers[str(length)]) for length in lengths_of_prompts] == [MAX_LEN - n for n in lengths_of_prompts]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_packages_padding_never_hides_the_end_of_a_prompt(
    length: int, nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fills positions up to the bucket with 1, and takes the place of the first highest one."""
    engine = opened(sources("llama"), tmp_path)
    calls: list[dict[str, torch.Tensor]] = []
    forward = engine._model.forward
    monkeypatch.setattr(engine._model, "forward", lambda **call: calls.append(call) or forward(**call))
    engine.prefill([0, 1], [[7, 8, 9][:length], [7, 8, 9, 10]])
    for call in calls:
        positions = call["position_ids"]
        width = positions.shape[1]
        bucket = next((limit for limit in PREFILL if width < limit), PREFILL[-1])
        for row, real in zip(positions, call["attention_mask"].sum(dim=1), strict=True):
            filled = torch.cat([row, torch.ones(bucket - width)])
            assert int((filled == filled.max()).nonzero()[0]) == int(real) - 1


@pytest.mark.slow  # a test of the tests above
@pytest.mark.parametrize(
    ("mutant", "sampling"),
    [(mutant, "host") for mutant in nxdi_mutants.HOST] + [(mutant, "device") for mutant in nxdi_mutants.DEVICE],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_mistaken_adapter_does_not_pass(
    mutant: Any,
    sampling: str,
    nxd: Neuron,
    sources: Checkpoints,
    expected: Callable[[str], dict[str, list[int]]],
    tmp_path: Path,
) -> None:
    """Each of them answers otherwise, or fails."""
    assert not passes(mutant, sampling, sources("llama"), expected("llama"), tmp_path)


@pytest.mark.slow  # a test of the tests above
@pytest.mark.parametrize("sampling", ["host", "device"])
def test_the_adapter_itself_passes_what_its_mutants_do_not(
    sampling: str,
    nxd: Neuron,
    sources: Checkpoints,
    expected: Callable[[str], dict[str, list[int]]],
    tmp_path: Path,
) -> None:
    """Else the check above would show nothing."""
    assert passes(NxdEngine, sampling, sources("llama"), expected("llama"), tmp_path)


def passes(kind: Any, sampling: str, source: Path, expected: dict[str, list[int]], folder: Path) -> bool:
    try:
        answers = served(opened(source, folder, kind, sampling=sampling), arrivals())
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return False
    return nxdi_traffic.wrong(source, arrivals(), expected, answers) == []


# sampling on the device


def test_the_device_draws_each_slot_by_its_own_parameters(nxd: Neuron, sources: Checkpoints, tmp_path: Path) -> None:
    """A greedy slot beside a hot one of three ids; frequencies are those of the softmax over them."""
    source, prompt = sources("llama"), [20, 30, 40]
    engine = opened(source, tmp_path, sampling="device")
    logits = cpu(source).prefill([0], [prompt])[0]
    best = logits.topk(3).indices.tolist()
    weights = (logits[best] / 2.0).softmax(-1)
    torch.manual_seed(1)
    engine.sample_by([0, 2], [DeviceSampling(), DeviceSampling(3, 1.0, 2.0)])
    drawn = [engine.prefill([0, 2], [prompt, prompt]) for _ in range(300)]
    assert {row[0] for row in drawn} == {best[0]}
    assert {row[1] for row in drawn} <= set(best)
    counts = [sum(row[1] == id for row in drawn) / 300 for id in best]
    assert max(abs(count - float(weight)) for count, weight in zip(counts, weights, strict=True)) < 0.12


def test_a_top_k_of_0_is_the_largest_that_the_device_takes(nxd: Neuron, sources: Checkpoints, tmp_path: Path) -> None:
    """0 would draw uniformly from the whole vocabulary. Never more than global_topk."""
    options = {"on_device_sampling_config": {"global_topk": 8, "deterministic": False}}
    engine = opened(sources("llama"), tmp_path, sampling="device", engine_options=options)
    assert engine.spec.device_top_k == 8
    torch.manual_seed(1)
    request: list[Arrival] = [(str(number), [20, 30, 40], 1, False) for number in range(40)]
    drawn = {tokens[0] for tokens in served(engine, request, temperature=5.0, top_k=0).values()}
    assert drawn <= set(cpu(sources("llama")).prefill([0], [[20, 30, 40]])[0].topk(8).indices.tolist())
    assert len(drawn) > 3


# speculation


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("draft", ["itself", "another"])
def test_speculation_does_not_change_a_token(
    version: str,
    draft: str,
    nxd: Neuron,
    sources: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A draft that is always right and one that hardly ever is."""
    play(monkeypatch, version)
    source = sources("llama")
    other = source if draft == "itself" else make_checkpoint(tmp_path / "draft", "llama", seed=9, layers=1, eos=None)
    engine = opened(source, tmp_path / "compiled", draft_source=str(other), draft_k=3)
    assert (engine.spec.returns, engine.spec.run_k) == ("tokens", 3)
    answers = served(engine, arrivals())
    assert nxdi_traffic.wrong(source, arrivals(), served(cpu(source), arrivals()), answers) == []
    engine.prefill([0], [[7, 8, 9]])
    runs = engine.decode_runs([0], [10], [3])
    assert len(runs[0]) == 4 if draft == "itself" else 1 <= len(runs[0]) <= 4


def test_the_last_token_of_a_slot_is_decoded_with_a_draft_too(
    nxd: Neuron, sources: Checkpoints, tmp_path: Path
) -> None:
    """The slot is longer on the device than max_len by what a step guesses."""
    source = sources("llama")
    requests: list[Arrival] = [("full", [11, 12, 13], MAX_LEN - 3, False), ("other", [9] * 60, MAX_LEN - 60, False)]
    engine = opened(source, tmp_path, draft_source=str(source), draft_k=5)
    answers = served(engine, requests)
    assert nxdi_traffic.wrong(source, requests, served(cpu(source), requests), answers) == []
    assert len(answers["full"]) == MAX_LEN - 3


@pytest.mark.parametrize("version", VERSIONS)
def test_a_step_takes_the_smallest_graph_that_holds_it(
    version: str, nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the longest of its rows; the warm-up has run each of them."""
    play(monkeypatch, version)
    engine = opened(sources("llama"), tmp_path)
    assert {bucket for tag, bucket in engine._model.taken if tag.startswith("token")} == set(DECODE)
    engine._model.taken.clear()
    places = [1, DECODE[0] - 1, DECODE[0], DECODE[1] - 1, DECODE[1], MAX_LEN - 1]
    for place in places:
        engine.decode([0, 2], [7, 8], [1, place])
    assert [bucket for _, bucket in engine._model.taken] == [
        next(length for length in DECODE if place < length) for place in places
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_speculative_step_finds_a_graph_at_every_length(
    version: str, nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest that holds its guesses too; with a mask as wide as a slot it would find none at all."""
    play(monkeypatch, version)
    source = sources("llama")
    with pytest.raises(ValueError, match="exceeds largest bucket"):
        opened(source, tmp_path, nxdi_mutants.WideMask, slots=1, draft_source=str(source), draft_k=3)
    engine = opened(source, tmp_path, slots=1, draft_source=str(source), draft_k=3)
    engine._model.taken.clear()
    for position in range(1, MAX_LEN):
        engine.decode_runs([0], [10], [position])
    graphs = [*DECODE[:-1], MAX_LEN + 4]
    expected = [next((length for length in graphs if place + 4 < length), graphs[-1]) for place in range(1, MAX_LEN)]
    assert [bucket for _, bucket in engine._model.taken] == expected


# compiling and loading


@pytest.mark.compile
def test_a_model_is_compiled_once_in_a_process_of_its_own(
    neuron: Neuron,
    sources: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """That process holds no core and is logged; a second start loads the artifacts, with the sharded weights."""
    caplog.set_level("INFO", "workers.neff_cache.compiled_artifacts")
    from neuron_double.compiler import compiles

    monkeypatch.setenv("PYTHONPATH", f"{PACKAGES}:{Path(__file__).parents[3]}")
    source = sources("llama")
    engine = opened(source, tmp_path / "compiled")
    first = compiles()
    assert first
    assert {record["pid"] for record in first} != {os.getpid()}
    assert set(neuron.held().values()) == {os.getpid()}
    weights = list((tmp_path / "compiled").glob("*/model/weights/tp*_sharded_checkpoint.safetensors"))
    assert len(weights) == 2
    again = opened(source, tmp_path / "compiled")
    assert compiles() == first
    assert torch.equal(again.prefill([0], [[7, 8, 9]]), engine.prefill([0], [[7, 8, 9]]))
    assert not list((tmp_path / "compiled").glob("*/work"))
    assert [message.split()[0] for message in caplog.messages] == ["compiling", "compiled"]
    assert "compile.log" in caplog.messages[0]


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


def test_a_compiling_process_does_not_outlive_the_one_that_waits() -> None:
    """That one holds the lock of the folder: here it is gone already. And the module has one command."""
    command = [sys.executable, "-m", "workers.engines.nxd_inference.engine"]
    settings = msgspec.to_builtins(Settings.of(replica_config(Path("/nowhere"), None)))
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


def test_without_a_folder_close_removes_the_artifacts(
    nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``compiled: None``."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = opened(sources("llama"), None)
    assert list(tmp_path.glob("corewright-nxd-*/*/corewright.json"))
    engine.close()
    assert not list(tmp_path.glob("corewright-nxd-*"))
    with pytest.raises(RuntimeError, match="not loaded"):
        _ = engine.spec


def test_every_bucket_is_warmed_up(
    nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and steps whose length each bucket is the first to hold."""
    calls: list[tuple[str, int]] = []
    prefill, decode = NxdEngine.prefill, NxdEngine.decode

    def watched_prefill(self: Any, slots: Any, prompts: Any) -> Any:
        calls.append(("prefill", len(prompts[0])))
        return prefill(self, slots, prompts)

    def watched_decode(self: Any, slots: Any, tokens: Any, positions: Any) -> Any:
        calls.append(("decode", positions[0] + 1))
        assert list(slots) == [0, 1, 2, 3]
        return decode(self, slots, tokens, positions)

    monkeypatch.setattr(NxdEngine, "prefill", watched_prefill)
    monkeypatch.setattr(NxdEngine, "decode", watched_decode)
    opened(sources("llama"), tmp_path)
    assert calls == [*(("prefill", bucket - 1) for bucket in PREFILL), *(("decode", bucket) for bucket in DECODE)]


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


@pytest.mark.parametrize("version", ["0.2", "0.7", "0.8", "0.9"])
@pytest.mark.parametrize("fields", [{"quantize": "int8"}, {"quantize": "fp8"}, {"quantize_kv": "fp8"}])
def test_quantized_models_answer_nearly_the_same(
    version: str,
    fields: dict[str, Any],
    nxd: Neuron,
    sources: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But not exactly the same: in each version the switch of that version is on."""
    play(monkeypatch, version)
    allow_fp8(monkeypatch, fields)
    engine = opened(sources("llama"), tmp_path, **fields)
    assert 1e-3 < away(engine, sources("llama")) < 0.35
    assert bool(list(tmp_path.glob("*/quantized/*"))) is ("quantize" in fields)


def allow_fp8(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]) -> None:
    """What fp8 needs besides is in the placement's environment."""
    named = {name: value for name, value in fields.items() if name.startswith("quantize")}
    for name, value in compiling(model("m", **named), "nxd-inference").items():
        monkeypatch.setenv(name, value)


def away(engine: Any, source: Path) -> float:
    """How far its logits of a step are from those of the model, as a part of the largest."""
    exact = cpu(source)
    for runner in (exact, engine):
        runner.prefill([0], [[7, 8, 9]])
    logits, expected = engine.decode([0], [10], [3])[0], exact.decode([0], [10], [3])[0]
    return float((logits - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("version", VERSIONS)
def test_the_kv_cache_of_the_estimate_is_that_of_the_device(
    version: str, nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of fp32 with ``quantize_kv: fp8``, in every version."""
    play(monkeypatch, version)
    fields = {"quantize_kv": "fp8"}
    allow_fp8(monkeypatch, fields)
    settings = json.loads((sources("llama") / "config.json").read_text())
    spec = model("m", 2, max_batch=4, max_len=MAX_LEN, dtype="fp32", **fields)
    need = estimate(spec, Checkpoint.from_config(settings), "nxd-inference").kv * (1 << 30)
    engine = opened(sources("llama"), tmp_path, **fields)
    assert engine._model._kv_bytes(engine._model.config) / 2 == need


@pytest.mark.parametrize("fields", [{"quantize": "int8"}, {"quantize": "fp8"}, {"quantize": "fp8", "of": "f8e5m2"}])
def test_the_users_quantized_checkpoint_is_used(
    fields: dict[str, Any], nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is, whatever the source's own weights are; its digest is in the manifest, and its place is not."""
    allow_fp8(monkeypatch, fields)
    kind = fields.pop("of", None)
    options = {} if kind is None else {"quantization_dtype": kind}
    opened(sources("llama"), tmp_path / "own", engine_options=options, **fields)
    (quantized,) = (tmp_path / "own").glob("*/quantized")
    brought = Path(shutil.copytree(quantized, tmp_path / "brought"))
    stranger = make_checkpoint(tmp_path / "stranger", "llama", seed=9, eos=None)
    root = tmp_path / "compiled"
    brought_fields = {"engine_options": {**options, "quantized_checkpoints_path": str(brought)}, **fields}
    engine = opened(stranger, root, **brought_fields)
    assert 1e-3 < away(engine, sources("llama")) < 0.35
    (manifest,) = root.glob("*/corewright.json")
    assert str(brought) not in manifest.read_text()
    assert not list(root.glob("*/quantized"))
    (brought / "more.json").write_text("{}")
    opened(stranger, root, **brought_fields)
    assert len(list(root.glob("*/corewright.json"))) == 2


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


def test_version_0_1_is_refused(nxd: Neuron, sources: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """It requires an older transformers than corewright."""
    from workers.engines.nxd_inference import package as nxd_package

    import_module = importlib.import_module
    package = SimpleNamespace(__version__="0.1.1")
    monkeypatch.setattr(
        nxd_package.importlib,  # type: ignore[attr-defined]
        "import_module",
        lambda name: package if name == nxd_package.NAME else import_module(name),
    )
    error = refused(nxd_package.import_package)
    assert (error.id, "the first supported version is 0.2" in error.what) == ("engine-not-installed", True)


# the compiler's flags


@pytest.mark.parametrize("version", VERSIONS)
def test_the_flags_of_the_spec_reach_the_compiler(
    version: str, nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every graph gets them, except for flags of the cache's wrapper. The package does not read NEURON_CC_FLAGS."""
    play(monkeypatch, version)
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


@pytest.mark.parametrize("version", ["0.2", "0.3", "0.8"])
def test_a_killed_compiler_is_not_cached_as_a_failure(
    version: str, nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 0.3 on the package compiles through Neuron's persistent cache, which does not try a graph again."""
    play(monkeypatch, version)
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
    (verdict,) = verdicts(config, predict(config, read=True), os.environ)
    assert verdict.prediction.outcome == "fail", verdict
    fault = fault_of(refused(lambda: opened(sources("llama"), tmp_path)))
    assert fault is not None
    assert (fault.id, "corewright cache retry MODULE_" in fault.hint) == ("compile-cached-failure", True)


# one answer without a fleet


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("fields", [{}, {"sampling": "device"}, {"draft_source": "SELF", "draft_k": 3}])
def test_generate_once_gives_the_batchers_answer(
    version: str,
    fields: dict[str, Any],
    nxd: Neuron,
    sources: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`corewright generate` steps the engine itself: the package's loop fails in 0.7 and 0.8, and elsewhere samples
    by other parameters than it is given."""
    play(monkeypatch, version)
    source, replies = sources("llama"), list[Any]()
    tokens: list[int] = []
    fields = {name: str(source) if value == "SELF" else value for name, value in fields.items()}
    config = replica_config(source, tmp_path, claims=None, **fields)

    class Watched(Batcher):
        def __init__(self, engine: Any, tokenizer: Any, emit: Any) -> None:
            def watched(events: list[Any]) -> None:
                tokens.extend(id for event in events for id in event.token_ids)
                emit(events)

            super().__init__(engine, tokenizer, watched)

    monkeypatch.setattr("workers.serving.generate_once.Batcher", Watched)
    monkeypatch.setattr("workers.serving.generate_once.load_tokenizer", lambda *_: ByteTokenizer())
    run(Job(config=config, prompt="hello", raw=True, max_tokens=10), replies.append)
    assert replies[-1] == End(10, "length"), replies[-1]
    request: list[Arrival] = [("one", ByteTokenizer().encode("hello"), 10, False)]
    assert nxdi_traffic.wrong(source, request, served(cpu(source), request), {"one": tokens}) == []


# what is refused


def test_the_error_of_a_missing_package_names_its_source(sources: Checkpoints) -> None:
    """Before anything is read."""
    error = refused(lambda: open_engine(replica_config(sources("llama"), None)))
    assert error.id == "engine-not-installed"
    assert "pip install" in error.hint


def test_open_engine_returns_the_adapter(nxd: Neuron, sources: Checkpoints, tmp_path: Path) -> None:
    """By its name in a spec; a checkpoint is needed."""
    assert isinstance(open_engine(replica_config(sources("llama"), tmp_path)), NxdEngine)
    assert refused(lambda: open_engine(replace_source(sources("llama")))).id == "source-missing"


def replace_source(source: Path) -> Any:
    config = replica_config(source, None)
    return type(config)(**{**{name: getattr(config, name) for name in config.__struct_fields__}, "source": None})


@pytest.mark.parametrize(
    ("fields", "id"),
    [
        ({"max_len": 1024, "decode_buckets": [1024]}, "max-len-too-long"),
        ({"dtype": "int8"}, "bad-dtype"),
        ({"prefill_buckets": [32, 16]}, "bad-buckets"),
        ({"prefill_buckets": [1, 64]}, "bad-buckets"),
        ({"decode_buckets": [32]}, "bad-buckets"),
        ({"draft_source": "SELF", "draft_k": 15}, "bad-buckets"),  # a prefill bucket of 16 would look like a step
        ({"draft_source": "SELF", "draft_k": 2, "quantize": "int8"}, "bad-engine-option"),
        ({"quantize_kv": "int8"}, "bad-engine-option"),
        ({"engine_options": {"tp_degree": 8}}, "bad-engine-option"),
        ({"engine_options": {"is_prefix_caching": True}}, "bad-engine-option"),
        ({"engine_options": {"glu_mlp": True}}, "bad-engine-option"),  # llama has no experts
        ({"engine_options": {"on_device_sampling_config": {"global_topk": 8}}}, "bad-engine-option"),
        (
            {"sampling": "device", "engine_options": {"on_device_sampling_config": {"global_topk": 100_000}}},
            "bad-engine-option",
        ),
        ({"engine_options": {"enable_eagle_speculation": True}}, "bad-engine-option"),
        ({"engine_options": {"attention_dp_degree": 2}}, "bad-engine-option"),
        ({"engine_options": {"flash_decoding_enabled": True}}, "bad-engine-option"),
        ({"engine_options": {"fused_qvk": True}}, "option-not-in-version"),
        ({"engine_options": {"cp_max_num_seqs": 1}}, "option-not-in-version"),
        ({"engine_options": {"quantized_checkpoints_path": "/q"}}, "bad-engine-option"),
        ({"quantize": "int8", "engine_options": {"quantization_dtype": "f8e5m2"}}, "bad-engine-option"),
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
    """Newer ones and those that are gone."""
    newer = refused(lambda: opened(sources("llama"), tmp_path, engine_options={"enable_ve_data_parallel": True}))
    assert "versions from 0.9 on have it" in newer.what
    older = refused(lambda: opened(sources("llama"), tmp_path, engine_options={"cp_max_num_seqs": 1}))
    assert "versions up to 0.3 have it" in older.what


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
    """gpt2 in all versions, qwen2 before 0.5; a sliding window everywhere but in 0.9's mistral, if it is short."""
    assert refused(lambda: opened(sources("gpt2"), tmp_path)).id == "unknown-family"
    assert refused(lambda: opened(sources("mistral-window"), tmp_path)).id == "window-not-kept"
    assert refused(lambda: opened(sources("qwen3"), tmp_path)).id == "window-not-kept"
    opened(sources("mistral-window"), tmp_path, max_len=WINDOW, prefill_buckets=[WINDOW], decode_buckets=[WINDOW])


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
    from tests.doubles import _forget_packages

    _forget_packages()
