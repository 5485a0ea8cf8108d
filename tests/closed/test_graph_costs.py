"""The planner's memory, FLOPs and collectives of transformers-neuronx, against the graphs that the package writes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from placements.facts.checkpoints import Checkpoint
from placements.facts.engines import BYTES
from placements.resources.estimate import prefill_flops, step_collective_bytes, step_flops
from placements.resources.memory import GIB, estimate
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


def _programs() -> list[Any]:
    programs: list[Any] = importlib.import_module("torch_neuronx.runtime").PROGRAMS
    return programs
