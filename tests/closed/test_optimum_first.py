"""The adapter of Optimum Neuron 0.0.28 over the package's own code and that of transformers-neuronx."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.closed import real_tnx as real_tnx
from tests.closed.lane_record import count_compared
from tests.closed.optimum_lane import real_optimum_before_0_4 as real_optimum_before_0_4
from tests.doubles import Neuron
from tests.workers.conftest import checkpoint as checkpoint
from tests.workers.nxdi_traffic import MAX_LEN, arrivals, refused, served
from tests.workers.optimum_traffic import config_of
from workers.engines.optimum_neuron.engine import buildables
from workers.engines.optimum_neuron.first_engine import FirstOptimumEngine
from workers.engines.optimum_neuron.settings import OptimumSettings
from workers.engines.package_contract import drift

pytestmark = [
    pytest.mark.real,
    pytest.mark.filterwarnings(*(f"ignore::{kind}" for kind in ("DeprecationWarning", "FutureWarning", "UserWarning"))),
]
Checkpoints = Callable[[str], Path]
TIE = 1e-4  # of the largest logit


def opened(source: Path, compiled: Path | None, **fields: Any) -> FirstOptimumEngine:
    engine = FirstOptimumEngine(OptimumSettings.of(config_of(source, compiled, **fields)), compiled)
    engine.load()
    return engine


def wrong(source: Path, answers: dict[str, list[int]]) -> list[str]:
    """The requests with a token that transformers does not give: the cpu engine needs a later version of it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(source)).eval()
    bad = []
    for id, prompt, wanted, leaves in arrivals():
        if leaves:
            continue
        tokens: Sequence[int] = answers[id]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        best = logits.max(dim=1).values
        count_compared(len(tokens))
        if len(tokens) != wanted or bool((best - chosen > TIE * logits.abs().amax(dim=1)).any()):
            bad.append(id)
    return bad


def test_the_package_is_as_recorded(real_optimum_before_0_4: Neuron) -> None:
    """Each signature of the contract."""
    assert drift("optimum-neuron").lines() == []


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gpt2", "opt", "bloom", "mixtral"])
def test_tokens_are_transformers_own(
    family: str, real_optimum_before_0_4: Neuron, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Greedy, while requests arrive and others are cancelled; four families in static batches."""
    engine = opened(checkpoint(family), tmp_path / "compiled")
    assert engine.spec.continuous is (family in ("llama", "mistral", "qwen2"))
    assert wrong(checkpoint(family), served(engine, arrivals())) == []


def test_an_export_is_kept_without_the_weights_and_reused(
    real_optimum_before_0_4: Neuron, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Nothing is compiled by the second start, and its tokens are the same."""
    compiler = importlib.import_module("neuron_double.compiler")
    device = importlib.import_module("neuron_double.runtime")
    first = served(opened(checkpoint("llama"), tmp_path), arrivals())
    count = len(compiler.compiles())
    assert count > 0
    assert not list(tmp_path.glob("*/model/checkpoint"))
    device.reset_for_tests()
    shutil.rmtree(tmp_path / "neuron-compile-cache", ignore_errors=True)
    assert served(opened(checkpoint("llama"), tmp_path), arrivals()) == first
    assert len(compiler.compiles()) == count


def test_a_folder_that_the_package_saved_is_loaded(
    real_optimum_before_0_4: Neuron, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """By its `neuron` section; another batch is refused before a core is claimed."""
    kind = importlib.import_module("optimum.neuron").NeuronModelForCausalLM
    sizes = {"batch_size": 4, "sequence_length": MAX_LEN, "num_cores": 2, "auto_cast_type": "fp32"}
    kind.from_pretrained(str(checkpoint("llama")), export=True, **sizes).save_pretrained(str(tmp_path / "saved"))
    importlib.import_module("neuron_double.runtime").reset_for_tests()
    error = refused(lambda: opened(tmp_path / "saved", tmp_path, slots=2))
    assert "max_batch (batch_size): needs 2, found 4" in error.what
    assert real_optimum_before_0_4.held() == {}
    assert buildables(config_of(tmp_path / "saved", tmp_path)) == []
    answers = served(opened(tmp_path / "saved", tmp_path), arrivals())
    assert wrong(checkpoint("llama"), answers) == []
