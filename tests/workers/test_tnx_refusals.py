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
