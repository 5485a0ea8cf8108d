"""transformers-neuronx's own code with each pair of options, against transformers in float32."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from placements.engines.transformers_neuronx.capabilities import FAMILIES, Family
from placements.facts.checkpoints import Checkpoint
from tests.checkpoints import make_checkpoint
from tests.closed.experts import skewed
from tests.closed.forced import deviation
from tests.closed.pairs import Row, all_pairs
from tests.doubles import Neuron
from tests.placements.test_engine_rules import checked
from tests.workers.conftest import checkpoint as checkpoint
from tests.workers.tnx_runs import answers, config, of_the_cpu_engine, requests_for, split
from workers.engines.transformers_neuronx import options
from workers.engines.transformers_neuronx.engine import open_transformers_neuronx
from workers.messages.engine_protocol import EngineLoadError

pytestmark = pytest.mark.real
Checkpoints = Callable[[str], Path]

OPTIONS: dict[str, tuple[Any, ...]] = {
    "tp_degree": (1, 2, 4),
    "group_query_attention": (None, "shard-over-heads", "replicated-heads", "all-gather-heads"),
    "dtype": ("fp32", "bf16"),
    "quantize": (None, "int8", "fp8"),
    "quantize_kv": (None, "fp8"),
    "fuse_qkv": (None, True),
    "sampling": ("host", "device"),
    "slots": (1, 4),
    "decode_buckets": ([64], [32, 64]),
    "compiled": (False, True),  # the engine starts from what another one has compiled
    "on_device_embedding": (False, True),
    "attention_layout": (None, "BSH"),
    "weights": ("safetensors", "split"),
}
DRAFTS: dict[str, tuple[Any, ...]] = {
    "family": ("llama", "gpt2"),
    "draft_k": (1, 2, 3, 4),
    "slots": (1, 2, 3, 4),
    "tp_degree": (1, 2, 4),
    "draft": ("itself", "another"),
    "weights": ("safetensors", "split"),
    "compiled": (False, True),
    "decode_buckets": ([64], [32, 64]),
}
RIGHT = (
    "sequence_parallel_norm",
    "on_device_embedding",
    "fused_rmsnorm_qkv",
    "fused_rmsnorm_mlp",
    "duplicate_q_weight_sos",
    "bf16_rms_norm",
)
TILED = ("qkv_tiling", "weight_tiling")  # the package checks their sizes itself
ENGINE_OPTIONS = ("on_device_embedding", "attention_layout")
# In standard deviations of the logits. Wrong logits deviate by 3 to 6; fp8 has three bits of mantissa.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.15, "int8": 0.3, "fp8": 1.0}
KV_HEADS = 2  # of the test's Llama, which has 4 heads


def is_allowed(row: Row) -> bool:
    """Returns whether ``validate`` accepts the options together."""
    if row["group_query_attention"] == "shard-over-heads" and KV_HEADS % row["tp_degree"]:
        return False
    return not (row["group_query_attention"] == "all-gather-heads" and row["fuse_qkv"] and row["tp_degree"] > KV_HEADS)


def opened(source: Path, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Any:
    """Returns the loaded engine."""
    cores = list(range(fields["tp_degree"]))
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", f"0-{cores[-1]}")
    importlib.import_module("neuron_double.runtime").reset_for_tests()
    engine = open_transformers_neuronx(config(source, cores=cores, **fields))
    engine.load()
    return engine


def name_of(row: Row) -> str:
    return " ".join(f"{name}={value}" for name, value in row.items() if value not in (None, False))


@pytest.mark.parametrize("row", all_pairs(OPTIONS, is_allowed), ids=name_of)
def test_llama_answers_as_transformers(
    real_tnx: Neuron, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, row: Row
) -> None:
    """After prompts and in steps, with slots that end, within the rounding of the types."""
    source = checkpoint("llama")
    fields = {name: value for name, value in row.items() if name not in (*ENGINE_OPTIONS, "compiled", "weights")}
    fields["engine_options"] = {name: row[name] for name in ENGINE_OPTIONS if row[name]}
    engine = started(row, source, monkeypatch, tmp_path, **fields)
    tolerance = max(TOLERANCE[row[name]] for name in ("dtype", "quantize", "quantize_kv") if row[name])
    assert deviation(engine, source) <= tolerance


def started(row: Row, source: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, **fields: Any) -> Any:
    """Returns the loaded engine with the row's form of weights, from another engine's artifacts where it has them."""
    fields["prefill_buckets"] = [8, 16, 64]
    if row["weights"] == "split":
        source, fields["allow_pickle"] = split(source, folder / "split"), True
    if row["compiled"]:
        fields["compiled"] = str(folder / "compiled")
        opened(source, monkeypatch, **fields)
    engine = opened(source, monkeypatch, **fields)
    assert not (row["compiled"] and getattr(engine, "compiled", False))  # an engine with a draft has no such field
    return engine


def may_draft(row: Row) -> bool:
    """Returns whether `validate` accepts the options together: GPT-2's rows share a position."""
    return row["family"] == "llama" or row["slots"] == 1


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Returns the folder of a draft with other weights."""
    return cache(lambda family: make_checkpoint(tmp_path_factory.mktemp("draft") / family, family, seed=7, layers=1))


@pytest.mark.parametrize("row", all_pairs(DRAFTS, may_draft), ids=name_of)
def test_a_draft_changes_no_token(
    real_tnx: Neuron,
    checkpoint: Checkpoints,
    another: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    row: Row,
) -> None:
    """Its guesses are all accepted, or few, while requests arrive and others are cancelled."""
    source, requests = checkpoint(row["family"]), requests_for(row["family"], seed=row["draft_k"], count=6)
    draft = source if row["draft"] == "itself" else another(row["family"])
    fields = {name: row[name] for name in ("draft_k", "slots", "tp_degree", "decode_buckets")}
    engine = started(row, source, monkeypatch, tmp_path, draft_source=str(draft), **fields)
    assert engine.spec.draft_k == row["draft_k"]
    assert answers(engine, source, requests) == of_the_cpu_engine(source, requests)


@pytest.mark.parametrize("k", range(5, 17))
@pytest.mark.parametrize(("family", "slots"), [("llama", 2), ("gpt2", 1)])
def test_a_draft_of_each_length_changes_no_token(
    real_tnx: Neuron, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, family: str, slots: int, k: int
) -> None:
    """Beyond those above, up to the longest of the spec."""
    source, requests = checkpoint(family), requests_for(family, seed=k, count=3)
    lengths = {"prefill_buckets": [64], "decode_buckets": [64]}
    draft = {"draft_source": str(source), "draft_k": k}
    engine = opened(source, monkeypatch, tp_degree=1, slots=slots, **lengths, **draft)
    assert answers(engine, source, requests) == of_the_cpu_engine(source, requests)


def test_each_program_runs_in_load(real_tnx: Neuron, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three lengths of prompts, and two of steps and of a draft's runs: any fault comes before the first request."""
    source = checkpoint("llama")
    fields = {"tp_degree": 1, "prefill_buckets": [8, 16, 64], "decode_buckets": [32, 64]}
    opened(source, monkeypatch, draft_source=str(source), draft_k=2, **fields)
    programs = importlib.import_module("torch_neuronx.runtime").PROGRAMS
    assert len(programs) == 14  # with those of the draft
    assert all(program.runs for program in programs)


@pytest.mark.parametrize("tp_degree", [1, 2])
def test_shards_over_the_batch_are_refused_for_a_reason(
    real_tnx: Neuron, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, tp_degree: int
) -> None:
    """On one core the package's answers are wrong; on several it uses another mode, since prompts run one at a time."""
    source = checkpoint("llama")
    fields = {"slots": 2, "prefill_buckets": [16, 64], "decode_buckets": [64]}
    mode = "shard-over-batch"
    engine = opened(source, monkeypatch, tp_degree=tp_degree, group_query_attention=mode, **fields)
    used = engine._model.neuron_config.group_query_attention.value
    assert (used == mode, deviation(engine, source) > 1) == (tp_degree == 1, tp_degree == 1)


def test_a_cache_layout_is_refused_for_a_reason(
    real_tnx: Neuron, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package orders a prompt's logits by slot then: here a prompt in slot 1 would get those of slot 0."""
    source, prompt = checkpoint("llama"), [9, 90, 200, 31]
    fields = {"tp_degree": 1, "slots": 2, "prefill_buckets": [64], "decode_buckets": [64]}
    expected = opened(source, monkeypatch, **fields).prefill([1], [prompt])[0]
    monkeypatch.delitem(options.UNSERVED, "cache_layout")
    logits = opened(source, monkeypatch, engine_options={"cache_layout": "BSH"}, **fields).prefill([1], [prompt])
    assert logits.shape[0] == 2
    assert torch.allclose(logits[1], expected, atol=1e-4)


# Option, family, degree, and what the package does: a part of its error, or its deviation is above 1 or not.
SINGLE: list[tuple[str, str, int, str | bool]] = [
    *((name, family, 2, False) for name in RIGHT for family in ("llama", "opt")),
    ("attn_output_transposed", "llama", 2, False),
    ("attn_output_transposed", "opt", 1, True),
    ("attn_output_transposed", "mistral", 2, "contracting_sizes"),
    ("mlp_out_weight_transpose", "llama", 2, False),
    ("mlp_out_weight_transpose", "mixtral", 2, "contracting_sizes"),
    ("shard_over_sequence", "llama", 1, "not divisble"),
    ("shard_over_sequence", "llama", 2, "broadcast"),
    ("shard_over_sequence", "llama", 4, False),
    ("shard_over_sequence", "mistral", 4, "broadcast"),
    ("fuse_mlp", "llama", 2, "add_mlp_output"),
    ("fuse_mlp", "mistral", 2, "contracting_sizes"),
    ("has_pre_attention_norm", "llama", 2, True),
    ("qkv_tiling", "llama", 2, "QKV fusion"),
    ("weight_tiling", "llama", 2, "divisible by 128"),
]


@pytest.mark.parametrize(("name", "family", "tp_degree", "outcome"), SINGLE)
def test_a_boolean_option_is_refused_or_right(
    real_tnx: Neuron,
    checkpoint: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    family: str,
    tp_degree: int,
    outcome: str | bool,
) -> None:
    """What `validate` refuses is wrong or does not build; the package itself refuses the sizes that cannot be tiled."""
    source = checkpoint(family)
    value = name != "has_pre_attention_norm"
    facts = Checkpoint.from_config(json.loads((source / "config.json").read_text()))
    settings = [
        "engine: transformers-neuronx",
        f"tp_degree: {tp_degree}",
        f"engine_options: {json.dumps({name: value})}",
    ]
    problems = [problem.id for problem in checked("\n    ".join(settings), facts)]
    refused = [id for id in problems if id in ("setting-unsupported", "unknown-engine-option")]
    assert bool(refused) is (outcome is not False and name not in TILED)
    fields: dict[str, Any] = {"tp_degree": tp_degree, "slots": 3, "engine_options": {name: value}}
    monkeypatch.delitem(options.UNSERVED, name, raising=False)
    if isinstance(outcome, str):
        with pytest.raises(EngineLoadError, match=outcome):
            opened(source, monkeypatch, **fields)
    else:
        assert (deviation(opened(source, monkeypatch, **fields), source) > 1) is outcome


@pytest.mark.parametrize("tp_degree", [2, 4])
def test_fused_weights_of_split_heads_are_refused_for_a_reason(
    real_tnx: Neuron, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, tp_degree: int
) -> None:
    """The package has no key weights of its own then, and fails while it builds its graphs."""
    fields = {"group_query_attention": "all-gather-heads", "fuse_qkv": True, "tp_degree": tp_degree}
    expected = pytest.raises(EngineLoadError, match="NoneType") if tp_degree > KV_HEADS else nullcontext()
    with expected:
        opened(checkpoint("llama"), monkeypatch, **fields)


def test_gpt_j_is_refused_for_a_reason(
    real_tnx: Neuron, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its class attends only to position 0: the first token of a prompt is right, all others are wrong."""
    family = Family(samples=False, serial=True, quantizes=False, resets=True)
    monkeypatch.setattr("workers.engines.transformers_neuronx.engine.family_of", lambda *_: family)
    source = checkpoint("gptj")
    engine = opened(source, monkeypatch, tp_degree=2, slots=1)
    assert deviation(engine, source, [[77]], steps=0) < TOLERANCE["fp32"]
    assert deviation(engine, source, [[77]], steps=1) > 1


@pytest.mark.parametrize("tp_degree", [1, 2])
def test_no_token_is_dropped_when_all_choose_the_same_experts(
    real_tnx: Neuron, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tp_degree: int
) -> None:
    """The package computes all experts for each token."""
    source = skewed(checkpoint("mixtral"), tmp_path / "model")
    lengths = {"prefill_buckets": [64], "decode_buckets": [64]}
    engine = opened(source, monkeypatch, tp_degree=tp_degree, slots=3, **lengths)
    assert deviation(engine, source) < TOLERANCE["fp32"]


def test_an_int8_kv_cache_is_refused_for_a_reason(
    real_tnx: Neuron, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package converts keys and values without a scale, which leaves nothing of them."""
    monkeypatch.setitem(options.QUANTIZED_KV, "int8", "s8")
    source = checkpoint("llama")
    lengths = {"prefill_buckets": [64], "decode_buckets": [64]}
    engine = opened(source, monkeypatch, tp_degree=2, slots=2, quantize_kv="int8", **lengths)
    assert deviation(engine, source) > 1


@pytest.mark.parametrize("tp_degree", [1, 2, 4])
def test_quantized_experts_are_refused_for_a_reason(
    real_tnx: Neuron, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, tp_degree: int
) -> None:
    """The package broadcasts the scales of all experts to the width of one."""
    family = replace(FAMILIES["mixtral"], quantizes=True)
    monkeypatch.setattr("workers.engines.transformers_neuronx.engine.family_of", lambda *_: family)
    with pytest.raises(RuntimeError, match="broadcast"):
        opened(checkpoint("mixtral"), monkeypatch, tp_degree=tp_degree, quantize="int8")
    importlib.import_module("torch_neuronx.runtime").FAILURES.clear()
