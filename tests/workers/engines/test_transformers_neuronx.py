"""The adapter of transformers-neuronx: token for token what the CPU engine answers."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from placements.engines.options import FIELDS, UNSERVED
from placements.engines.transformers_neuronx.capabilities import FAMILIES as ALL_FAMILIES
from tests.checkpoints import VOCAB_SIZE, make_checkpoint, set_eos
from tests.closed import real_tnx  # noqa: F401 - the fixture
from tests.contracts import contract
from tests.doubles import Neuron, neuron  # noqa: F401 - the fixture
from tests.replica_configs import changed
from tests.workers import tnx_mutants
from tests.workers.tnx_runs import (
    BUCKETS,
    CONTINUOUS,
    MAX_LEN,
    SERIAL,
    SLOTS,
    STATIC,
    ScriptedRequest,
    answers,
    config,
    of_the_cpu_engine,
    requests_for,
    scores,
    split,
)
from workers.engines.cpu.engine import CpuEngine
from workers.engines.transformers_neuronx.engine import TransformersNeuronxEngine, open_transformers_neuronx
from workers.engines.transformers_neuronx.options import TABLES, Shapes, options_for
from workers.messages.engine_protocol import DeviceSampling, EngineLoadError
from workers.messages.json_form import encoded

Checkpoints = Callable[[str], Path]
VERSIONS = contract("transformers-neuronx").versions
FAMILIES = (*CONTINUOUS, *STATIC)
SAMPLING = [(family, "host") for family in FAMILIES] + [(f, "device") for f in FAMILIES if ALL_FAMILIES[f].samples]


@pytest.fixture(autouse=True, params=["neuron", pytest.param("real_tnx", marks=pytest.mark.real)])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Neuron:
    """The double of the package, and the package itself above the closed layer's stand-ins."""
    family = getattr(request.node, "callspec", None) and request.node.callspec.params.get("family")
    if request.param == "real_tnx" and family == "gpt_neox" and not metadata.version("transformers").startswith("4."):
        pytest.skip("transformers-neuronx misreads GPT-NeoX beside transformers 5")
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    machine: Neuron = request.getfixturevalue(request.param)
    return machine


lane = pytest.mark.parametrize("machine", [pytest.param("real_tnx", marks=pytest.mark.real)], indirect=True)


def opened(source: Path, **fields: Any) -> Any:
    """The engine, loaded."""
    engine = open_transformers_neuronx(config(source, **fields))
    engine.load()
    return engine


def buckets_for(family: str) -> dict[str, Any]:
    return {} if family in SERIAL else BUCKETS


# -- The same answers


@lane
@pytest.mark.parametrize(("family", "sampling"), SAMPLING)
def test_greedy_answers_are_those_of_the_cpu_engine(checkpoint: Checkpoints, family: str, sampling: str) -> None:
    """With arrivals, clients that leave, ragged prompts at the edges of buckets, and slots that are filled to the end.

    Llama, Mistral and Mixtral batch continuously, the others in lock-step; the host samples, or the device.
    """
    source, requests = checkpoint(family), requests_for(family)
    engine = opened(source, sampling=sampling, **buckets_for(family))
    assert engine.spec.continuous is (family in CONTINUOUS)
    assert answers(engine, source, requests) == of_the_cpu_engine(source, requests)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_prompts_have_the_logprobs_of_the_cpu_engine(checkpoint: Checkpoints, family: str) -> None:
    """Token by token, in steps of their own: the graphs return the logits of one position."""
    source, prompts = checkpoint(family), [request.prompt for request in requests_for(family)]
    of_cpu = CpuEngine(source, slots=SLOTS, max_len=MAX_LEN, threads=1)
    of_cpu.load()

    for ours, theirs in zip(
        scores(opened(source, **BUCKETS), source, prompts), scores(of_cpu, source, prompts), strict=True
    ):
        assert ours[0] is theirs[0] is None
        assert ours[1:] == pytest.approx(theirs[1:], abs=1e-3)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_a_model_of_one_slot_gives_the_same_answers(checkpoint: Checkpoints, family: str) -> None:
    """It is a static batch of one row, whatever its family."""
    source, requests = checkpoint(family), requests_for(family, count=5)
    engine = opened(source, slots=1, **BUCKETS)
    assert not engine.spec.continuous
    assert answers(engine, source, requests) == of_the_cpu_engine(source, requests)


@lane
def test_code_llama_is_a_llama(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the registry of the package; a transformers of today has no such model_type any more and is taught it."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, LlamaConfig, LlamaForCausalLM

    kind = type("CodeLlamaConfig", (LlamaConfig,), {"model_type": "code_llama"})
    model = type("CodeLlamaForCausalLM", (LlamaForCausalLM,), {"config_class": kind})
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "code_llama", kind)
    monkeypatch.setitem(MODEL_FOR_CAUSAL_LM_MAPPING._extra_content, kind, model)
    source = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    settings = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(settings | {"model_type": "code_llama"}))
    requests = requests_for("llama", count=4)
    texts = answers(opened(source, **BUCKETS), checkpoint("llama"), requests)
    assert texts == of_the_cpu_engine(checkpoint("llama"), requests)


def test_an_answer_ends_with_the_eos_of_the_generation_config(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """As in the CPU engine: generation_config.json before config.json."""
    source = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    requests = requests_for("llama", seed=3, count=8)
    endless = of_the_cpu_engine(source, requests)
    set_eos(source, max((ids for ids, _ in endless), key=len)[4])
    again = shutil.copytree(source, tmp_path / "again")
    texts = answers(opened(again, **BUCKETS), again, requests)
    assert texts == of_the_cpu_engine(again, requests)
    assert texts != endless


@lane
@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 63])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_prompt_at_the_edge_of_a_bucket(checkpoint: Checkpoints, family: str, length: int) -> None:
    """As long as a bucket, one token shorter, one longer, and the longest of all."""
    source = checkpoint(family)
    engine = opened(source, slots=2, **BUCKETS)
    requests = [ScriptedRequest(tuple(range(6, 6 + length)), 1)]
    assert answers(engine, source, requests) == of_the_cpu_engine(source, requests)


@lane
def test_a_prompt_of_one_token_leaves_the_other_slots_alone(checkpoint: Checkpoints) -> None:
    """Which it would not as a decode, and that is what the package takes a width of one for."""
    source = checkpoint("llama")
    engine = opened(source, **BUCKETS)
    prompt = [9, 90, 200, 31]
    engine.prefill([2], [prompt])
    engine.prefill([0], [[77]])
    logits = engine.decode([0, 2], [5, 6], [1, 4])
    alone = opened(source, slots=1, **BUCKETS).prefill([0], [[*prompt, 6]])
    assert torch.allclose(logits[1], alone[0], atol=1e-4)


def test_rows_come_back_in_the_order_of_the_slots(checkpoint: Checkpoints) -> None:
    """A prefill may list slots in any order; a decode of unsorted ones is refused."""
    engine = opened(checkpoint("llama"), **BUCKETS)
    prompt, other = [7, 8, 9], [300, 20]
    logits = engine.prefill([2, 0], [prompt, other])
    assert torch.allclose(logits[0], engine.prefill([1], [prompt])[0], atol=1e-5)
    with pytest.raises(ValueError, match="not sorted"):
        engine.decode([2, 0], [5, 5], [3, 2])


def test_a_static_batch_has_one_position(checkpoint: Checkpoints) -> None:
    """Rows that are not in lock-step are a mistake of the caller."""
    engine = opened(checkpoint("opt"), **BUCKETS)
    engine.prefill([0, 1], [[7, 8, 9], [5]])
    engine.decode([0, 1], [5, 5], [3, 1])
    with pytest.raises(ValueError, match="share one position"):
        engine.decode([0, 1], [5, 5], [4, 3])


# -- Mutants


def equals_the_cpu_engine(kind: type[TransformersNeuronxEngine], source: Path, **fields: Any) -> bool:
    """Returns whether it answers as the CPU engine; one that raises does not."""
    engine = kind(config(source, **fields), source)
    family = json.loads((source / "config.json").read_text())["model_type"]
    requests = requests_for(family)
    try:
        engine.load()
        return answers(engine, source, requests) == of_the_cpu_engine(source, requests)
    except (AssertionError, EngineLoadError, IndexError, RuntimeError, ValueError):
        return False


@lane
@pytest.mark.parametrize("kind", tnx_mutants.CONTINUOUS_ROWS, ids=lambda kind: kind.__name__)
def test_a_mutant_of_continuous_batching_is_detected(checkpoint: Checkpoints, kind: type[Any]) -> None:
    """The check that the adapter passes fails with this fault."""
    assert not equals_the_cpu_engine(tnx_mutants.with_rows(kind), checkpoint("llama"), **BUCKETS)


@lane
@pytest.mark.parametrize("kind", tnx_mutants.LOCK_STEP_ROWS, ids=lambda kind: kind.__name__)
def test_a_mutant_of_lock_step_batches_is_detected(checkpoint: Checkpoints, kind: type[Any]) -> None:
    """The check that the adapter passes fails with this fault."""
    assert not equals_the_cpu_engine(tnx_mutants.with_rows(kind), checkpoint("opt"), **BUCKETS)


@lane
def test_top_k_zero_on_the_device_is_detected(checkpoint: Checkpoints) -> None:
    """Told so, the device does not answer greedily."""
    source, requests = checkpoint("llama"), requests_for("llama")
    engine = tnx_mutants.TopKZero(config(source, sampling="device", **BUCKETS), source)
    engine.load()
    engine.sample_by(range(3), [DeviceSampling()] * 3)
    try:
        texts = answers(engine, source, requests)
    except (AssertionError, ValueError, RuntimeError):
        return
    assert texts != of_the_cpu_engine(source, requests)


@lane
@pytest.mark.parametrize("kind", [None, *tnx_mutants.VERIFYING_ROWS], ids=lambda kind: kind and kind.__name__)
def test_a_mutant_of_verify_is_detected(checkpoint: Checkpoints, kind: type[Any] | None) -> None:
    """Three tokens at once for two of three slots: the adapter gives the logits of a prompt, a mutant does not."""
    source = checkpoint("llama")
    engine_class = TransformersNeuronxEngine if kind is None else tnx_mutants.with_rows(kind)
    engine = engine_class(config(source, **BUCKETS), source, speculates=3)
    prompt = [9, 90, 200, 31]
    engine.load()
    wished = engine.prefill([2], [[*prompt, 5, 6, 7]])[0]
    engine.prefill([1, 2], [prompt] * 2)
    try:
        passes = torch.allclose(engine.verify([1, 2], [[5, 6, 7]] * 2, [4, 4])[0, -1], wished, atol=1e-4)
    except (AssertionError, RuntimeError):  # of the package, or of what it gave
        passes = False
    assert passes is (kind is None)


@lane
@pytest.mark.parametrize("mutant", [False, True])
def test_a_run_that_begins_at_position_0_is_decoded_token_by_token(checkpoint: Checkpoints, mutant: bool) -> None:
    """The package takes all rows for prompts that begin at 0 where the first one does."""
    source, run, prompt = checkpoint("llama"), [9, 90, 200], [31, 8, 17, 5]
    engine_class = tnx_mutants.VerifiesAtPosition0 if mutant else TransformersNeuronxEngine
    engine = engine_class(config(source, **BUCKETS), source, speculates=3)
    engine.load()
    expected = engine.prefill([1], [[*prompt, *run]])[0]
    engine.prefill([1, 2], [prompt] * 2)
    try:
        passes = torch.allclose(engine.verify([0, 1, 2], [run] * 3, [0, 4, 4])[1, -1], expected, atol=1e-4)
    except RuntimeError:
        passes = False
    assert passes is not mutant


@lane
@pytest.mark.parametrize(("family", "mutant"), [("bloom", False), ("gpt_neox", False), ("opt", False), ("opt", True)])
def test_the_kv_cache_is_reset_once_in_load(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, family: str, mutant: bool
) -> None:
    """A request resets nothing, since a reset writes the whole KV cache from the host."""
    source = checkpoint(family)
    engine_class = tnx_mutants.with_rows(tnx_mutants.ResetsForEachBatch) if mutant else TransformersNeuronxEngine
    engine = engine_class(config(source), source)
    model_class = importlib.import_module("transformers_neuronx").modeling_auto.NEURON_MODEL_FOR_CAUSAL_LM_MAPPING[
        family
    ]
    reset, resets = model_class.reset, []
    monkeypatch.setattr(model_class, "reset", lambda model: resets.append(model) or reset(model))
    engine.load()
    in_load = len(resets)
    engine.prefill([0], [[7, 8]])
    engine.prefill([0, 1], [[7, 8], [9]])
    assert (in_load == 1, len(resets) == in_load) == (not mutant, not mutant)


# -- Speculation


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A draft model that knows nothing of the others."""
    folders: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in folders:
            path = tmp_path_factory.mktemp("draft") / family
            folders[family] = make_checkpoint(path, family, seed=7, layers=1, eos=None)
        return folders[family]

    return get


@lane
@pytest.mark.parametrize(
    ("family", "slots", "k"),
    [("llama", 3, 2), ("llama", 5, 2), ("gpt2", 1, 2)],
)
def test_a_draft_changes_no_token(
    checkpoint: Checkpoints, stranger: Checkpoints, family: str, slots: int, k: int
) -> None:
    """The model's own draft and a stranger's, on the same cores: all accepted, or few."""
    source = checkpoint(family)
    requests = requests_for("llama" if slots > 1 else "gpt2", seed=k, count=10 if slots > 1 else 5)
    for draft in (source, stranger(family)):
        engine = opened(source, slots=slots, draft_source=str(draft), draft_k=k, **BUCKETS)
        assert engine.spec.draft_k == k
        assert answers(engine, source, requests) == of_the_cpu_engine(source, requests)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mistral", {}),
        ("llama", {"prefill_buckets": [2]}),
        ("opt", {"slots": 1}),
        ("gpt2", {"slots": 2}),
        ("llama", {"sampling": "device"}),
    ],
)
def test_unsupported_speculation_is_refused(checkpoint: Checkpoints, family: str, fields: dict[str, Any]) -> None:
    """A class without speculative_forward, a static batch of several rows, sampling on the device."""
    source = checkpoint(family)
    with pytest.raises(EngineLoadError, match="bad-draft"):
        opened(source, **{"draft_source": str(source), "draft_k": 2, **fields})


# -- Sampling on the device


@lane
def test_each_slot_samples_by_its_own_parameters(checkpoint: Checkpoints) -> None:
    """Greedy in one slot, hot in another; the largest top_k is the package's or the vocabulary."""
    engine = opened(checkpoint("llama"), sampling="device", **BUCKETS)
    assert (engine.spec.returns, engine.spec.device_top_k) == ("tokens", 256)
    prompt, greedy = [9, 90, 200, 31], opened(checkpoint("llama"), **BUCKETS).prefill([0], [[9, 90, 200, 31]])
    engine.sample_by([1, 2], [DeviceSampling(256, 1.0, 50.0), DeviceSampling(2, 1.0, 50.0)])
    drawn = [engine.prefill([0, 1, 2], [prompt] * 3) for _ in range(30)]
    best = greedy[0].topk(2).indices.tolist()
    assert {tokens[0] for tokens in drawn} == {best[0]}
    assert len({tokens[1] for tokens in drawn}) > 10
    assert {tokens[2] for tokens in drawn} == set(best)


@lane
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_requests_that_are_sampled_leave_greedy_ones_alone(checkpoint: Checkpoints, family: str) -> None:
    """Through the batcher, which sets each slot's sampling on the device before its prompt."""
    source = checkpoint(family)
    requests = [
        replace(request, temperature=20.0) if number % 3 == 1 else request
        for number, request in enumerate(requests_for(family, seed=5))
    ]
    engine = opened(source, sampling="device", **BUCKETS)
    assert answers(engine, source, requests) == of_the_cpu_engine(source, requests)
    assert DeviceSampling(256, 1.0, 20.0) in engine._sampling


# -- Options


def test_fields_of_the_spec_reach_the_package(checkpoint: Checkpoints) -> None:
    """Fields and engine_options under the package's names, the latter where the class or NeuronConfig has them."""
    engine = opened(
        checkpoint("llama"),
        dtype="bf16",
        quantize="int8",
        quantize_kv="fp8",
        group_query_attention="replicated-heads",
        fuse_qkv=True,
        compile_workers=2,
        engine_options={
            "attention_layout": "BSH",
            "on_device_embedding": True,
            "context_unroll": 1,
            "sparse_attn": None,
            "sequence_parallel_norm": True,
        },
        **BUCKETS,
    )
    model = engine._model
    options = model.neuron_config
    assert (options.quant.quant_dtype, options.quant.dequant_dtype) == ("s8", "bf16")
    assert (options.kv_cache_quant.quant_dtype, options.kv_cache_quant.dequant_dtype) == ("f8e4m3fn", "bf16")
    assert options.group_query_attention.value == "replicated-heads"
    assert (options.fuse_qkv, options.compilation_worker_count, options.on_device_embedding) == (True, 2, True)
    assert (options.attention_layout.value, options.sequence_parallel_norm) == ("BSH", True)
    assert options.continuous_batching.batch_size_for_shared_caches == 3
    assert (model.token_buckets, model.context_buckets) == ([32, 64], [8, 16, 64])


def test_buckets_are_the_packages_own_unless_named(checkpoint: Checkpoints) -> None:
    """From 128 on they double up to max_len; with continuous batching there is one token graph."""
    llama, opt = (opened(checkpoint(family), max_len=300).spec for family in ("llama", "opt"))
    assert (llama.prefill_buckets, llama.decode_buckets) == ((128, 256, 300), (300,))
    assert (opt.prefill_buckets, opt.decode_buckets) == ((128, 256, 300), (128, 256, 300))


def test_no_two_models_share_a_neuron_config(checkpoint: Checkpoints) -> None:
    """GPT-2's, Mistral's and Mixtral's constructors have one object for all by default."""
    engine, other = (opened(checkpoint("gpt2"), **BUCKETS) for _ in range(2))
    assert engine._model.neuron_config is not other._model.neuron_config


@pytest.mark.parametrize(
    ("family", "fields", "id"),
    [
        ("qwen2", {}, "unknown-family"),
        ("gptj", {}, "unknown-family"),
        ("llama", {"dtype": "fp8"}, "bad-dtype"),
        ("llama", {"max_len": 513}, "max-len-too-long"),
        ("gpt_neox", {"max_len": 513}, "max-len-too-long"),
        ("llama", {"prefill_buckets": [16, 8]}, "bad-buckets"),
        ("llama", {"prefill_buckets": [1]}, "bad-buckets"),
        ("llama", {"decode_buckets": [32]}, "bad-buckets"),
        ("gpt_neox", {"prefill_buckets": [16]}, "bad-buckets"),
        ("llama", {"engine_options": {"no_such_option": 2}}, "bad-engine-option"),
        ("llama", {"engine_options": {"attention_layout": "XYZ"}}, "bad-engine-option"),
        ("gpt_neox", {"quantize": "int8"}, "bad-engine-option"),
        ("llama", {"quantize_kv": "int8"}, "bad-engine-option"),
        ("opt", {"quantize_kv": "fp8"}, "bad-engine-option"),
        ("llama", {"quantize": "int4"}, "bad-engine-option"),
        ("gpt_neox", {"sampling": "device"}, "bad-engine-option"),
        ("mixtral", {"sampling": "device"}, "bad-engine-option"),
        ("llama", {"engine_options": {"self": 1}}, "bad-engine-option"),
    ],
)
def test_unsupported_settings_are_refused_before_a_core_is_claimed(
    checkpoint: Checkpoints, machine: Neuron, family: str, fields: dict[str, Any], id: str
) -> None:
    """Each with its id."""
    with pytest.raises(EngineLoadError) as caught:
        opened(checkpoint(family), **fields)
    assert caught.value.id == id
    assert machine.held() == {}


@pytest.mark.parametrize("name", ALL_FAMILIES)
@pytest.mark.parametrize("sampling", ["host", "device"])
def test_the_option_tables_list_what_the_adapter_sets(name: str, sampling: str) -> None:
    """By the planner's table: else an option of the spec would stand beside the adapter's own, and one of them win."""
    family = ALL_FAMILIES[name]
    if sampling == "device" and not family.samples:
        return
    most = {"quantize": "int8"} if family.quantizes else {}
    most |= {"quantize_kv": "fp8"} if family.quantizes_kv else {}
    replica = config(Path("m"), sampling=sampling, fuse_qkv=True, compile_workers=2, group_query_attention="x", **most)
    shapes = Shapes.of(replica, family, family.continuous)
    kind = type("Class", (), {"__init__": lambda self: None})
    options = options_for(replica, family, shapes, family.continuous, kind, VOCAB_SIZE)
    own = {*options.constructor, *options.neuron} - {"prompt_batch_size"}  # which may be given as what it is
    assert own <= {name for table in TABLES for name in (*FIELDS[table], *UNSERVED[table])}


def test_an_engine_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """Before anything else; such a spec has errors."""
    with pytest.raises(EngineLoadError, match="source-missing"):
        open_transformers_neuronx(changed(config(tmp_path), source=""))


def test_the_error_of_a_missing_package_names_its_source(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An AWS image, or a command."""
    monkeypatch.setitem(sys.modules, "transformers_neuronx", None)
    with pytest.raises(EngineLoadError, match=r"engine-not-installed.*pip\.repos\.neuron"):
        opened(checkpoint("llama"))


@pytest.mark.parametrize("machine", ["neuron"], indirect=True)  # the package's own warm-up runs graphs, too
@pytest.mark.parametrize(("count", "strikes"), [(6, True), (7, False)])
def test_every_graph_runs_once_in_load(checkpoint: Checkpoints, machine: Neuron, count: int, strikes: bool) -> None:
    """Three context graphs, two token graphs and that of speculation: a fault of the sixth run comes in load."""
    machine.plan({"at": "execute", "count": count, "status": 5})
    source = checkpoint("llama")
    engine = TransformersNeuronxEngine(config(source, **BUCKETS), source, speculates=3)
    failed = False
    try:
        engine.load()
    except RuntimeError as error:
        failed = "status=5" in str(error)
    assert failed is strikes


@pytest.mark.parametrize("version", VERSIONS)
def test_a_drift_of_the_package_is_logged(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    """Not that of a recorded version, but where a method is gone."""
    monkeypatch.setenv("NEURON_DOUBLE_TNX_VERSION", version)
    opened(checkpoint("llama"), **BUCKETS)
    before = caplog.text
    base = importlib.import_module("transformers_neuronx.base")
    monkeypatch.delattr(base.NeuronModelBase, "update_generation_config")
    opened(checkpoint("llama"), **BUCKETS)
    assert ("update_generation_config" in before, "update_generation_config is gone" in caplog.text) == (False, True)


def test_a_runtime_fault_passes_unchanged(checkpoint: Checkpoints, machine: Neuron) -> None:
    """Its text is what the fault is known by."""
    engine = opened(checkpoint("llama"), **BUCKETS)
    machine.plan({"at": "execute", "count": 1, "status": 1201})
    with pytest.raises(RuntimeError, match="status=1201"):
        engine.prefill([0], [[5, 6, 7]])


# -- Weights


@lane
def test_a_split_checkpoint_is_read_where_pickles_are_allowed(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """And gives the same answers; without allow_pickle it is refused, with a file missing or garbled too."""
    source = split(checkpoint("llama"), tmp_path / "split")
    requests = requests_for("llama", count=4)
    texts = answers(opened(source, allow_pickle=True, **BUCKETS), checkpoint("llama"), requests)
    assert texts == of_the_cpu_engine(checkpoint("llama"), requests)
    ids, folder = [], source / "pytorch_model.bin"
    for change in ("none", "garbled", "missing"):
        if change == "garbled":
            (folder / "p1.bin").write_bytes(b"x")
        if change == "missing":
            (folder / "p0.bin").unlink()
        with pytest.raises(EngineLoadError) as caught:
            opened(source, allow_pickle=change != "none", **BUCKETS)
        ids.append(caught.value.id)
    assert ids == ["pickle-refused", "weights-broken", "weights-missing"]


@lane
def test_a_source_compiled_by_optimum_is_loaded_with_its_weights(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Its config above, the split weights in ``checkpoint/``: the same answers. NEFFs beside them that nothing proves
    are refused."""
    root = tmp_path / "optimum"
    root.mkdir()
    split(checkpoint("llama"), root / "checkpoint")
    for file in checkpoint("llama").glob("*.json"):
        shutil.copy(file, root)
    requests = requests_for("llama", count=4)
    options = {"allow_pickle": True, "compiled": str(tmp_path / "compiled"), **BUCKETS}
    assert answers(opened(root, **options), checkpoint("llama"), requests) == of_the_cpu_engine(
        checkpoint("llama"), requests
    )
    (root / "compiled").mkdir()
    (root / "compiled" / "0123456789abcdef0123.neff").write_bytes(b"x")
    with pytest.raises(EngineLoadError) as caught:
        opened(root, **{**options, "compiled": str(tmp_path / "others")})
    assert caught.value.id == "neff-unproven"


def test_a_checkpoint_without_weights_is_refused(checkpoint: Checkpoints, tmp_path: Path, machine: Neuron) -> None:
    """Before a core is claimed, as is one whose safetensors are cut off."""
    source = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    weights = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(weights[:100])
    with pytest.raises(EngineLoadError, match="weights-broken"):
        opened(source)
    (source / "model.safetensors").unlink()
    with pytest.raises(EngineLoadError, match="weights-missing"):
        opened(source)
    assert machine.held() == {}


# -- Compiled artifacts


@pytest.mark.slow
@pytest.mark.parametrize(("family", "version"), list(zip(["llama", "opt"], VERSIONS, strict=True)))
def test_a_second_process_compiles_nothing(
    checkpoint: Checkpoints,
    machine: Neuron,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    family: str,
    version: str,
) -> None:
    """It finds the NEFFs of the first, by a manifest of all that they depend on, and answers alike."""
    program = (
        "import sys, json, msgspec\n"
        "from workers.messages.json_form import decoded\nfrom workers.messages.replica_config import ReplicaConfig\n"
        "from workers.engines.transformers_neuronx.engine import open_transformers_neuronx\n"
        "engine = open_transformers_neuronx(decoded(sys.argv[1], ReplicaConfig))\n"
        "engine.load()\n"
        "print(json.dumps([engine.compiled, engine.prefill([0], [[7, 8, 9]])[0].argmax().item()]))\n"
    )
    monkeypatch.setenv("NEURON_DOUBLE_TNX_VERSION", version)
    job = encoded(config(checkpoint(family), compiled=str(tmp_path / "compiled"), **BUCKETS)).decode()
    env = os.environ | machine.env
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(Path(__file__).parents[3])])
    runs = []
    for run in range(2):
        env["NEURON_COMPILE_CACHE_URL"] = str(tmp_path / f"cache-{run}")  # the NEFFs do not come from there
        done = subprocess.run(
            [sys.executable, "-c", program, job], env=env, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    assert [outcome[0] for outcome in runs] == [True, False]
    assert runs[0][1] == runs[1][1]


def test_incomplete_artifacts_are_compiled_again(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """A NEFF is missing, or cut off: it would be noticed only with cores claimed. Another shape is another folder."""
    fields = {"compiled": str(tmp_path / "compiled"), **BUCKETS}
    compiled = []
    for change in ("", "", "missing", "cut off", ""):
        neffs = sorted((tmp_path / "compiled").glob("*/*.neff"))
        if change == "missing":
            neffs[0].unlink()
        if change == "cut off":
            neffs[1].write_bytes(b"")
        importlib.import_module("neuron_double.runtime").reset_for_tests()
        compiled.append(opened(checkpoint("llama"), **fields).compiled)
    assert compiled == [True, False, True, True, False]
    assert opened(checkpoint("llama"), **fields | {"slots": 2}).compiled


def test_replicas_of_one_shape_load_at_the_same_time(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """What is complete is held with others: here one of them has it, and does not let go."""
    fields = {"compiled": str(tmp_path / "compiled"), **BUCKETS}
    assert opened(checkpoint("llama"), **fields).compiled
    lock = os.open(next((tmp_path / "compiled").glob("*.lock")), os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    importlib.import_module("neuron_double.runtime").reset_for_tests()
    compiled: list[bool] = []
    thread = threading.Thread(
        target=lambda: compiled.append(opened(checkpoint("llama"), **fields).compiled), daemon=True
    )
    thread.start()
    thread.join(60)
    os.close(lock)
    assert compiled == [False]


def test_a_compile_is_logged(checkpoint: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`corewright logs` shows its begin and end, and so why a start takes an hour; a load of NEFFs is not logged."""
    caplog.set_level("INFO", "workers.compiled.host_sets")
    fields = {"compiled": str(tmp_path / "compiled"), **BUCKETS}
    opened(checkpoint("llama"), **fields)
    assert [message.split()[0] for message in caplog.messages] == ["compiling", "compiled"]
    caplog.clear()
    importlib.import_module("neuron_double.runtime").reset_for_tests()
    opened(checkpoint("llama"), **fields)
    assert caplog.messages == []


@pytest.mark.parametrize("change", ["flags", "compiler", "model"])
def test_the_manifest_covers_what_neff_names_do_not(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Other flags, another compiler or another config.json: the old NEFFs are not taken."""
    source = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    fields = {"compiled": str(tmp_path / "compiled"), **BUCKETS}
    opened(source, **fields)
    if change == "flags":
        monkeypatch.setenv("NEURON_CC_FLAGS", "-O1")
    elif change == "compiler":
        monkeypatch.setattr("workers.engines.transformers_neuronx.artifacts.COMPILER", "pytest")
    else:
        settings = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 1e-4}))
    assert opened(source, **fields).compiled


@pytest.mark.parametrize("family", SERIAL)
def test_gpt_neox_has_only_the_persistent_cache(checkpoint: Checkpoints, tmp_path: Path, family: str) -> None:
    """Its class neither saves nor loads NEFFs, so nothing is kept in the folder."""
    engine = opened(checkpoint(family), compiled=str(tmp_path / "compiled"))
    assert engine.compiled
    assert not (tmp_path / "compiled").exists()
