"""The NxD Inference adapter over the package's own code, against the CPU engine."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from placements.engines.nxd_inference.capabilities import NXD_E5M2, NXD_FAMILIES, NXD_WINDOW
from placements.engines.registry import serves
from placements.facts.checkpoints import Checkpoint
from placements.facts.versions import reaches
from placements.resources.memory import estimate
from tests.checkpoints import make_checkpoint
from tests.closed.experts import skewed
from tests.closed.nxd_lane import real_nxdi as real_nxdi
from tests.doubles import Neuron
from tests.placements.fleets import model
from tests.workers import nxdi_mutants, nxdi_traffic
from tests.workers.conftest import checkpoint as checkpoint
from tests.workers.engines import test_nxd_inference as double
from tests.workers.nxdi_traffic import (
    DECODE,
    FULL,
    MAX_LEN,
    PREFILL,
    Arrival,
    Checkpoints,
    allow_fp8,
    arrivals,
    cpu,
    edit,
    families,
    opened,
    replica_config,
    served,
)
from tests.workers.nxdi_traffic import expected as expected
from tests.workers.nxdi_traffic import sources as sources
from workers.batching.batcher import Batcher
from workers.engines.nxd_inference import artifacts
from workers.engines.nxd_inference.engine import NxdEngine
from workers.engines.nxd_inference.package import import_package
from workers.engines.package_contract import drift
from workers.messages.engine_protocol import DeviceSampling
from workers.serving.generate_once import End, GenerateJob, run
from workers.text.tokenizer import ByteTokenizer

pytestmark = [
    pytest.mark.real,
    pytest.mark.filterwarnings(*(f"ignore::{kind}" for kind in ("DeprecationWarning", "FutureWarning", "UserWarning"))),
]
Expected = Callable[[str], dict[str, list[int]]]

test_every_compile_works_in_a_folder_of_its_own = double.test_every_compile_works_in_a_folder_of_its_own
test_a_device_fault_passes_unchanged = double.test_a_device_fault_passes_unchanged
test_cores_of_another_process = double.test_cores_of_another_process_are_a_runtime_error
test_a_quantized_checkpoint_of_another_kind = double.test_a_quantized_checkpoint_of_another_kind_is_refused
test_a_killed_compiler = double.test_a_killed_compiler_is_not_cached_as_a_failure
test_options_reach_the_package = double.test_options_reach_the_package
test_an_eos_ends_an_answer = double.test_an_eos_ends_an_answer
test_flags_of_the_spec_reach_the_compiler = double.test_the_flags_of_the_spec_reach_the_compiler


@pytest.fixture
def nxd(real_nxdi: Neuron, monkeypatch: pytest.MonkeyPatch) -> Neuron:
    """The package, with compiles in this process."""
    monkeypatch.setattr(artifacts, "compile_in_subprocess", nxdi_traffic.compile_here)
    return real_nxdi


def test_the_package_is_as_recorded(nxd: Neuron) -> None:
    """Each signature and option of the contract, and the families of the version. Mistral may run as a llama."""
    assert drift("nxd-inference").lines() == []
    package = import_package()
    registered = {"mistral", *package.modules["constants"].MODEL_TYPES}
    planned = {family for family in NXD_FAMILIES if serves("nxd-inference", family, version=package.version)}
    assert planned == registered & NXD_FAMILIES.keys()


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen2", FULL, "mistral", "mistral-window", "mixtral"])
def test_tokens_equal_the_cpu_engines(
    family: str, degree: int, nxd: Neuron, sources: Checkpoints, expected: Expected, tmp_path: Path
) -> None:
    """Greedy, while requests arrive and others are cancelled."""
    if family not in families(import_package().version):
        pytest.skip("a family of a later version")
    buckets = PREFILL[1:] if family == "mistral-window" else PREFILL  # none is shorter than the window
    answers = served(opened(sources(family), tmp_path, tp_degree=degree, prefill_buckets=buckets), arrivals())
    assert nxdi_traffic.wrong(sources(family), arrivals(), expected(family), answers) == []


def test_a_bucket_of_4096_tokens_runs_the_flash_kernel(nxd: Neuron, sources: Checkpoints, tmp_path: Path) -> None:
    """The package switches to the kernel by itself. The answers are the same."""
    source = Path(shutil.copytree(sources("llama"), tmp_path / "model"))
    edit(source, max_position_embeddings=8192)
    engine = opened(source, tmp_path / "compiled", max_len=4224, prefill_buckets=[4096], decode_buckets=[4224])
    runs = importlib.import_module("neuronxcc.nki._private_kernels.attention").RUNS
    runs.clear()
    answers = served(engine, arrivals(3))
    assert nxdi_traffic.wrong(source, arrivals(3), served(cpu(source), arrivals(3)), answers) == []
    assert set(runs) == {4096}


def test_a_window_is_computed_without_its_kernel(nxd: Neuron, sources: Checkpoints, tmp_path: Path) -> None:
    """The package has one for 512 tokens or more, and only for multiples of 512."""
    if not reaches(import_package().version, NXD_WINDOW):
        pytest.skip("a window is refused in this version")
    source = Path(shutil.copytree(sources("mistral-window"), tmp_path / "model"))
    edit(source, max_position_embeddings=1024)
    engine = opened(source, tmp_path / "compiled", max_len=600, prefill_buckets=[600], decode_buckets=[600])
    answers = served(engine, arrivals(3))
    assert nxdi_traffic.wrong(source, arrivals(3), served(cpu(source), arrivals(3)), answers) == []


@pytest.mark.parametrize("window", [MAX_LEN, 4 * MAX_LEN])
def test_a_window_that_no_slot_reaches_changes_nothing(
    window: int, nxd: Neuron, sources: Checkpoints, expected: Expected, tmp_path: Path
) -> None:
    """In no token, and not in the size of the KV cache."""
    source = Path(shutil.copytree(sources("mistral"), tmp_path / "model"))
    edit(source, sliding_window=window)
    engine = opened(source, tmp_path / "compiled")
    answers = served(engine, arrivals())
    assert nxdi_traffic.wrong(source, arrivals(), expected("mistral"), answers) == []
    assert {tensor.shape[2] for tensor in states(engine).values()} == {MAX_LEN}


def states(engine: Any) -> dict[str, torch.Tensor]:
    """Returns the KV cache of the first rank, each ``[slots, heads, tokens, head_dim]``."""
    return dict(engine._model.traced_model.nxd_model.states[0])


@pytest.mark.parametrize("degree", [1, 2])
def test_no_token_is_dropped_when_all_choose_the_same_experts(
    degree: int, nxd: Neuron, sources: Checkpoints, tmp_path: Path
) -> None:
    """Without a ``capacity_factor``; with one of 1, each expert computes as many as if all experts had equal shares."""
    source = skewed(sources("mixtral"), tmp_path / "model")
    expected = served(cpu(source), arrivals())
    bad = []
    for name, options in (("none", {}), ("1", {"capacity_factor": 1.0})):
        engine = opened(source, tmp_path / name, tp_degree=degree, engine_options=options)
        bad.append(nxdi_traffic.wrong(source, arrivals(), expected, served(engine, arrivals())))
    assert (bad[0], bool(bad[1])) == ([], True)


def test_one_slot(nxd: Neuron, sources: Checkpoints, expected: Expected, tmp_path: Path) -> None:
    """Without the package's continuous batching."""
    answers = served(opened(sources("llama"), tmp_path, slots=1), arrivals())
    assert nxdi_traffic.wrong(sources("llama"), arrivals(), expected("llama"), answers) == []


@pytest.mark.parametrize("degree", [1, 2])
def test_greedy_tokens_from_the_device_equal_the_hosts(
    degree: int, nxd: Neuron, sources: Checkpoints, expected: Expected, tmp_path: Path
) -> None:
    """``sampling: device``."""
    answers = served(opened(sources("llama"), tmp_path, tp_degree=degree, sampling="device"), arrivals())
    assert nxdi_traffic.wrong(sources("llama"), arrivals(), expected("llama"), answers) == []


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
    """0 would draw uniformly from the likeliest global_topk ids, whatever the temperature; 0.4 and 0.5 raise for it."""
    options = {"on_device_sampling_config": {"global_topk": 8, "deterministic": False}}
    engine = opened(sources("llama"), tmp_path, sampling="device", engine_options=options)
    assert engine.spec.device_top_k == 8
    torch.manual_seed(1)
    request: list[Arrival] = [(str(number), [20, 30, 40], 1, False) for number in range(40)]
    hot, cold = (
        {tokens[0] for tokens in served(engine, request, temperature=temperature, top_k=0).values()}
        for temperature in (5.0, 0.01)
    )
    likeliest = cpu(sources("llama")).prefill([0], [[20, 30, 40]])[0].topk(8).indices.tolist()
    assert hot <= set(likeliest)
    assert len(hot) > 3
    assert cold == {likeliest[0]}


@pytest.mark.parametrize("draft", ["itself", "another"])
def test_speculation_does_not_change_a_token(
    draft: str,
    nxd: Neuron,
    sources: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A draft that is always right and one that hardly ever is."""
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


def graphs_of(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the lengths of the graphs that run from now on, by the width of their masks."""
    taken: list[int] = []
    program = engine._model.traced_model.nxd_model
    forward = program.forward
    monkeypatch.setattr(program, "forward", lambda inputs: taken.append(inputs[1].shape[1]) or forward(inputs))
    return taken


def test_a_step_takes_the_smallest_graph_that_holds_it(
    nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the longest of its rows."""
    engine = opened(sources("llama"), tmp_path)
    taken = graphs_of(engine, monkeypatch)
    places = [1, DECODE[0] - 1, DECODE[0], DECODE[1] - 1, DECODE[1], MAX_LEN - 1]
    for place in places:
        engine.decode([0, 2], [7, 8], [1, place])
    assert taken == [next(length for length in DECODE if place < length) for place in places]


def test_a_speculative_step_finds_a_graph_at_every_length(
    nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest that holds its guesses too; with a mask as wide as a slot it would find none at all."""
    source = sources("llama")
    fields = {"slots": 1, "tp_degree": 1, "draft_source": str(source), "draft_k": 3}
    with pytest.raises(ValueError, match="exceeds largest bucket"):
        opened(source, tmp_path, nxdi_mutants.WideMask, **fields)
    engine = opened(source, tmp_path, **fields)
    taken = graphs_of(engine, monkeypatch)
    for position in range(1, MAX_LEN):
        engine.decode_runs([0], [10], [position])
    graphs = [*DECODE[:-1], MAX_LEN + 4]
    assert taken == [
        next((length for length in graphs if place + 4 < length), graphs[-1]) for place in range(1, MAX_LEN)
    ]


@pytest.mark.parametrize("fields", [{"quantize": "int8"}, {"quantize": "fp8"}, {"quantize_kv": "fp8"}])
def test_quantized_models_answer_nearly_the_same(
    fields: dict[str, Any],
    nxd: Neuron,
    sources: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But not exactly the same: in each version the switch of that version is on."""
    allow_fp8(monkeypatch, fields)
    engine = opened(sources("llama"), tmp_path, **fields)
    assert 1e-3 < away(engine, sources("llama")) < 0.35
    assert bool(list(tmp_path.glob("*/quantized/*"))) is ("quantize" in fields)


def test_f8e5m2_is_refused_before_0_7_for_a_reason(
    nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package casts such weights to int8 with the scales of f8e5m2, and nothing is left of the logits."""
    if reaches(import_package().version, NXD_E5M2):
        pytest.skip("it is computed in this version")
    monkeypatch.setattr("workers.engines.nxd_inference.config.NXD_E5M2", "0.4")
    fields: dict[str, Any] = {"quantize": "fp8"}
    allow_fp8(monkeypatch, fields)
    engine = opened(sources("llama"), tmp_path, engine_options={"quantization_dtype": "f8e5m2"}, **fields)
    assert away(engine, sources("llama")) > 0.9


def away(engine: Any, source: Path) -> float:
    """How far its logits of a step are from those of the model, as a part of the largest."""
    exact = cpu(source)
    for runner in (exact, engine):
        runner.prefill([0], [[7, 8, 9]])
    logits, expected = engine.decode([0], [10], [3])[0], exact.decode([0], [10], [3])[0]
    return float((logits - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("fields", [{"quantize": "int8"}, {"quantize": "fp8"}, {"quantize": "fp8", "of": "f8e5m2"}])
def test_the_users_quantized_checkpoint_is_used(
    fields: dict[str, Any], nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is, whatever the source's own weights are; its digest is in the manifest, and its place is not."""
    if "of" in fields and not reaches(import_package().version, NXD_E5M2):
        pytest.skip("a type of a later version")
    allow_fp8(monkeypatch, fields)
    fields = dict(fields)
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


@pytest.mark.parametrize("fields", [{}, {"sampling": "device"}, {"draft_source": "SELF", "draft_k": 3}])
def test_generate_once_gives_the_batchers_answer(
    fields: dict[str, Any],
    nxd: Neuron,
    sources: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`corewright generate` steps the engine itself: the package's loop fails in 0.7 and 0.8, and elsewhere samples
    by other parameters than it is given."""
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

    monkeypatch.setattr("workers.serving.backend.Batcher", Watched)
    for module in ("backend", "generate_once"):
        monkeypatch.setattr(f"workers.serving.{module}.load_tokenizer", lambda *_: ByteTokenizer())
    run(GenerateJob(config=config, prompt="hello", raw=True, max_tokens=10), replies.append)
    assert replies[-1] == End(10, "length"), replies[-1]
    request: list[Arrival] = [("one", ByteTokenizer().encode("hello"), 10, False)]
    assert nxdi_traffic.wrong(source, request, served(cpu(source), request), {"one": tokens}) == []


def test_the_kv_cache_of_the_estimate_is_that_of_the_device(
    nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of fp32 with ``quantize_kv: fp8``."""
    fields = {"quantize_kv": "fp8"}
    allow_fp8(monkeypatch, fields)
    settings = json.loads((sources("llama") / "config.json").read_text())
    spec = model("m", 2, max_batch=4, max_len=MAX_LEN, dtype="fp32", **fields)
    need = estimate(spec, Checkpoint.from_config(settings), "nxd-inference").kv * (1 << 30)
    engine = opened(sources("llama"), tmp_path, **fields)
    assert sum(tensor.nbytes for tensor in states(engine).values()) == need


def test_artifacts_of_one_process_are_loaded_by_another(
    real_nxdi: Neuron, sources: Checkpoints, expected: Expected, tmp_path: Path
) -> None:
    """The compile holds no core; a second start compiles nothing."""
    from neuron_double.compiler import compiles

    engine = opened(sources("llama"), tmp_path / "compiled")
    first = compiles()
    assert first
    assert {record["pid"] for record in first}.isdisjoint({os.getpid()})
    assert set(real_nxdi.held().values()) == {os.getpid()}
    assert len(list((tmp_path / "compiled").glob("*/model/weights/tp*_sharded_checkpoint.safetensors"))) == 2
    engine.close()
    answers = served(opened(sources("llama"), tmp_path / "compiled"), arrivals())
    assert compiles() == first
    assert nxdi_traffic.wrong(sources("llama"), arrivals(), expected("llama"), answers) == []
