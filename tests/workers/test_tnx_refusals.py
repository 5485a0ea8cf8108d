"""What the adapter of transformers-neuronx refuses before the package does, and what the package refuses itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.doubles import Neuron
from tests.workers.tnx_runs import config
from workers.build import predict
from workers.engine import EngineLoadError
from workers.engines.transformers_neuronx import open_transformers_neuronx

Checkpoints = Callable[[str], Path]


def refused(source: Path) -> EngineLoadError:
    with pytest.raises(EngineLoadError) as found:
        open_transformers_neuronx(config(source)).load()
    return found.value


@pytest.mark.parametrize(
    ("family", "told"),
    [
        ("opt", {"do_layer_norm_before": False}),
        ("opt", {"ffn_dim": 96}),
        ("gpt_neox", {"use_parallel_residual": False}),
    ],
)
def test_blocks_that_the_package_does_not_compute_are_refused(
    checkpoint: Checkpoints, tmp_path: Path, neuron: Neuron, family: str, told: dict[str, Any]
) -> None:
    """Before a core is claimed, by the key of config.json."""
    source = Path(shutil.copytree(checkpoint(family), tmp_path / "model"))
    settings = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(settings | told))
    error = refused(source)
    assert error.id == "unknown-family"
    assert next(iter(told)) in error.what
    assert neuron.held() == {}


@pytest.mark.parametrize("flagged", [True, False])
def test_weights_that_the_package_has_sharded_are_refused(
    checkpoint: Checkpoints, tmp_path: Path, neuron: Neuron, flagged: bool
) -> None:
    """By the flag in config.json or by the file; before a core is claimed, and by `cache verify` too."""
    import transformers_neuronx as tnx
    from neuron_double.runtime import reset_for_tests

    usual = {"n_positions": 64, "tp_degree": 2, "neuron_config": tnx.NeuronConfig(on_device_embedding=True)}
    model = tnx.LlamaForSampling.from_pretrained(str(checkpoint("llama")), **usual)
    model.to_neuron()
    model.save(str(tmp_path), sharded_weights=True)
    reset_for_tests()
    assert {"DecoderLMHead.safetensors", "decoder_layer_0.safetensors"} <= {file.name for file in tmp_path.iterdir()}
    if not flagged:
        shutil.copy(checkpoint("llama") / "config.json", tmp_path)
    error = refused(tmp_path)
    with pytest.raises(EngineLoadError) as foretold:
        predict(config(tmp_path, compiled=str(tmp_path / "compiled")))
    assert (error.id, str(tmp_path) in error.what) == ("layout-unsupported", True)
    assert foretold.value.what == error.what
    assert neuron.held() == {}


@pytest.mark.parametrize("kind", [AssertionError, AttributeError, KeyError, TypeError, ValueError])
def test_what_the_package_refuses_is_told_in_its_words(
    checkpoint: Checkpoints, neuron: Neuron, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """Its constructors raise whatever comes; before a core is claimed."""
    from transformers_neuronx.module import PretrainedModel

    def refuse(*_: Any, **__: Any) -> None:
        raise kind("no such layout")

    monkeypatch.setattr(PretrainedModel, "from_pretrained", refuse)
    error = refused(checkpoint("llama"))
    assert error.id == "bad-engine-option"
    assert kind.__name__ in error.what
    assert "no such layout" in error.what
    assert neuron.held() == {}
