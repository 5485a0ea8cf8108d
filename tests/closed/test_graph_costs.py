"""The planner's memory, FLOPs and collectives of transformers-neuronx, against the graphs that the package writes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from placements.engines.capabilities import BYTES
from placements.engines.memory import GIB
from placements.facts.checkpoints import Checkpoint
from placements.resources.estimate import token_flops
from placements.resources.memory import estimate, gathers_heads
from placements.spec.schema import ModelSpec
from tests.closed.graph_costs import costs_of
from tests.closed.test_tnx import opened
from tests.doubles import Neuron
from tests.placements.fleets import model
from tests.workers.conftest import checkpoint as checkpoint

pytestmark = pytest.mark.real
Checkpoints = Callable[[str], Path]

INPUTS = 6  # parameters that the host writes: hidden states, positions, slots, last tokens and two of chunked prefill
LAYERS = 2  # of the test's checkpoints
CASES = [
    *((family, {}) for family in ("llama", "mistral", "mixtral", "opt", "bloom", "gpt2")),
    *((family, {"quantize": "int8"}) for family in ("llama", "opt", "bloom")),
    *((family, {"quantize_kv": "fp8"}) for family in ("llama", "mixtral")),
    *(("llama", {"group_query_attention": mode}) for mode in ("replicated-heads", "all-gather-heads")),
    ("llama", {"fuse_qkv": True}),
]


@pytest.mark.parametrize("tp_degree", [1, 2, 4])
@pytest.mark.parametrize(("family", "fields"), CASES, ids=str)
def test_the_bytes_of_a_step_are_those_of_the_plan(
    real_tnx: Neuron,
    checkpoint: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    tp_degree: int,
    family: str,
    fields: dict[str, Any],
) -> None:
    """Weights and FLOPs within 2 %; the KV cache and the collectives exactly."""
    source, lengths = checkpoint(family), {"prefill_buckets": [64], "decode_buckets": [64]}
    opened(source, monkeypatch, tp_degree=tp_degree, dtype="bf16", **lengths, **fields)
    step = next(program for program in _programs() if program.parameters[0][0][1:] == (1, 3))
    costs = costs_of(step.module, INPUTS)
    facts = Checkpoint.from_config(json.loads((source / "config.json").read_text()))
    spec = model("m", tp_degree, engine="transformers-neuronx", max_len=64, max_batch=3, dtype="bf16", **fields)
    plan = estimate(spec, facts)
    assert costs.weights == pytest.approx(plan.weights * GIB, rel=0.02)
    assert costs.cache == plan.kv * GIB
    assert costs.reduced + costs.gathered == step_collective_bytes(spec, facts, BYTES["bf16"])
    assert costs.flops * tp_degree == pytest.approx(step_flops(spec, facts, 64), rel=0.02)
    prompts = [program for program in _programs() if program.parameters[0][0][1] == 64]
    flops = [costs_of(program.module, INPUTS).flops for program in prompts]
    rows = prompts[0].parameters[0][0][2]
    counted = sum(flops) + (LAYERS - 1) * flops[0] * (len(flops) - 1)  # a graph of one layer, and of the head
    assert counted * tp_degree == pytest.approx(rows * prefill_flops(spec, facts, 64), rel=0.02)


def step_flops(model: ModelSpec, checkpoint: Checkpoint, context: int) -> float:
    """Returns the FLOPs of a decoding step of all slots, on all cores together, with ``context`` cached positions."""
    matrices, position = token_flops(model, checkpoint)
    return model.max_batch * (matrices + position * context + _head_flops(checkpoint))


def prefill_flops(model: ModelSpec, checkpoint: Checkpoint, tokens: int) -> float:
    """Returns the FLOPs of a prompt of ``tokens``, on all cores together; the head computes the last token only."""
    matrices, position = token_flops(model, checkpoint)
    return tokens * (matrices + position * tokens) + _head_flops(checkpoint)


def step_collective_bytes(model: ModelSpec, checkpoint: Checkpoint, width: int) -> int:
    """Returns the bytes of each core in the collectives of a decoding step, with ``width`` bytes for a number.

    In each layer the cores sum up the rows of all slots after the attention and after the feed-forward. Heads that
    all-gather-heads divides among cores are gathered: keys and values of one head on each.
    """
    tp = model.tp_degree
    divides_heads = tp > checkpoint.kv_heads and gathers_heads(checkpoint, tp, model.group_query_attention)
    numbers = 2 * (checkpoint.hidden + (checkpoint.head_dim if divides_heads else 0))
    return checkpoint.layers * model.max_batch * numbers * width if tp > 1 else 0


def _head_flops(checkpoint: Checkpoint) -> int:
    return 2 * checkpoint.vocab * (checkpoint.embedding_dim or checkpoint.hidden)


def _programs() -> list[Any]:
    programs: list[Any] = importlib.import_module("torch_neuronx.runtime").PROGRAMS
    return programs
