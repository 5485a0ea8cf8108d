"""What the adapter of transformers-neuronx refuses before the package does, and what the package refuses itself."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.doubles import Neuron, beside_transformers
from tests.workers.tnx_runs import config
from workers.compiling.build import compile_all, predict
from workers.engines.transformers_neuronx.engine import open_transformers_neuronx
from workers.messages.engine_protocol import EngineLoadError

Checkpoints = Callable[[str], Path]


def refused(source: Path) -> EngineLoadError:
    with pytest.raises(EngineLoadError) as caught:
        open_transformers_neuronx(config(source)).load()
    return caught.value


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("opt", {"do_layer_norm_before": False}),
        ("opt", {"ffn_dim": 96}),
        ("gpt_neox", {"use_parallel_residual": False}),
        ("llama", {"head_dim": 32}),
        ("mistral", {"head_dim": 32}),
        ("llama", {"attention_bias": True}),
        ("gpt2", {"activation_function": "relu"}),
        ("bloom", {"apply_residual_connection_post_layernorm": True}),
    ],
)
def test_blocks_that_the_package_does_not_compute_are_refused(
    checkpoint: Checkpoints, tmp_path: Path, neuron: Neuron, family: str, fields: dict[str, Any]
) -> None:
    """Before a core is claimed, by the key of config.json."""
    source = Path(shutil.copytree(checkpoint(family), tmp_path / "model"))
    settings = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(settings | fields))
    error = refused(source)
    assert error.id == "unknown-family"
    assert next(iter(fields)) in error.what
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
def test_errors_of_the_package_are_quoted(
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


def rewritten(source: Path, target: Path, **changed: Any) -> Path:
    """A copy of a checkpoint whose config.json has the ``changed`` keys; None removes a key."""
    shutil.copytree(source, target)
    settings = json.loads((target / "config.json").read_text()) | changed
    settings = {name: value for name, value in settings.items() if value is not None}
    (target / "config.json").write_text(json.dumps(settings))
    return target


ROPE = {"rope_type": "default", "rope_theta": 500_000.0}


@pytest.mark.parametrize(
    ("beside", "changed", "id"),
    [
        ("4.47.1", {"rope_parameters": None, "rope_theta": 500_000.0}, ""),
        ("4.47.1", {"rope_parameters": ROPE}, "rotary-misread"),
        ("5.23.0", {"rope_parameters": None, "rope_theta": 500_000.0}, "rotary-misread"),
        ("5.23.0", {"rope_parameters": ROPE}, "rotary-misread"),
        ("5.23.0", {}, ""),  # the usual one
    ],
)
def test_a_rotary_base_that_the_package_ignores_is_refused(
    checkpoint: Checkpoints,
    tmp_path: Path,
    neuron: Neuron,
    monkeypatch: pytest.MonkeyPatch,
    beside: str,
    changed: dict[str, Any],
    id: str,
) -> None:
    """Where it is not refused, the answers are the model's; where it is, the package's logits would be others."""
    import transformers_neuronx as tnx
    from transformers import AutoModelForCausalLM

    beside_transformers(monkeypatch, beside)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    source, prompt = rewritten(checkpoint("llama"), tmp_path / "model", **changed), [7, 30, 8, 200, 9]
    expected = AutoModelForCausalLM.from_pretrained(str(source)).eval()(torch.tensor([prompt])).logits[0, -1]
    model = tnx.LlamaForSampling.from_pretrained(str(source), n_positions=[64], tp_degree=2)
    model.to_neuron()
    matches = torch.allclose(model(torch.tensor([prompt]))[0], expected, atol=1e-3)
    assert matches is not bool(id)
    if id:
        error = refused(source)
        assert (error.id, "500000" in error.what) == (id, True)


def test_gpt_neox_needs_a_transformers_before_5(
    checkpoint: Checkpoints, neuron: Neuron, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package reads rotary_pct, which 5 does not have; before a core is claimed."""
    beside_transformers(monkeypatch, "5.0.0")
    error = refused(checkpoint("gpt_neox"))
    assert (error.id, "rotary_pct" in error.what, neuron.held()) == ("rotary-misread", True, {})


def test_a_small_vocabulary_bounds_top_k_on_the_device(
    checkpoint: Checkpoints, tmp_path: Path, neuron: Neuron, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs with a top_k beyond the vocabulary do not build."""
    from transformers import AutoConfig, AutoModelForCausalLM

    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    source = tmp_path / "model"
    small = AutoConfig.from_pretrained(str(checkpoint("llama")))
    small.vocab_size = 96
    AutoModelForCausalLM.from_config(small).save_pretrained(source)
    engine: Any = open_transformers_neuronx(config(source, sampling="device", prefill_buckets=[8], decode_buckets=[64]))
    engine.load()
    assert engine.spec.device_top_k == 96


@pytest.mark.parametrize("kind", [AssertionError, StopIteration, NotImplementedError])
def test_failures_of_building_graphs_have_an_id(
    checkpoint: Checkpoints, neuron: Neuron, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """The package raises bare exceptions there too."""
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    base = importlib.import_module("transformers_neuronx.base")

    def fail(*_: Any) -> None:
        raise kind("not here")

    for name in ("_check_graphs", "_execute_static"):
        with monkeypatch.context() as patched:
            patched.setattr(base.NeuronModelBase, name, fail)
            error = refused(checkpoint("opt"))
        assert (error.id, kind.__name__ in error.what) == ("bad-engine-option", True)
        importlib.import_module("neuron_double.runtime").reset_for_tests()


@pytest.mark.parametrize(("family", "slots"), [("llama", 3), ("llama", 1), ("opt", 2)])
def test_a_position_beyond_the_slot_never_reaches_the_package(
    checkpoint: Checkpoints, neuron: Neuron, monkeypatch: pytest.MonkeyPatch, family: str, slots: int
) -> None:
    """There it is a StopIteration; padding of a static batch counts."""
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    engine: Any = open_transformers_neuronx(config(checkpoint(family), slots=slots, decode_buckets=[64]))
    engine.load()
    engine.prefill([0], [[7, 8]])
    engine.decode([0], [5], [63])
    with pytest.raises(ValueError, match="position 64 is beyond the 64 tokens"):
        engine.decode([0], [5], [64])
    if family == "opt":
        engine.prefill([0, 1], [[7, 8, 9], [7]])
        with pytest.raises(ValueError, match="position 64"):
            engine.decode([1], [5], [62])


def test_compiling_gpt2_on_the_host_lists_its_cache_once(
    checkpoint: Checkpoints, tmp_path: Path, neuron: Neuron, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package alone lists it once more for each core with each of three context lengths."""
    import transformers_neuronx as tnx

    kind = tnx.GPT2ForSamplingWithContextBroadcasting
    compiled: list[Any] = []
    cpu_compile = kind.cpu_compile
    monkeypatch.setattr(kind, "cpu_compile", lambda model: compiled.append(model) or cpu_compile(model))
    lengths = {"n_positions": [64], "context_length_estimate": [8, 16, 64]}
    kind.from_pretrained(str(checkpoint("gpt2")), tp_degree=2, **lengths).cpu_compile()
    buckets = {"prefill_buckets": [8, 16, 64], "decode_buckets": [64]}
    compile_all(config(checkpoint("gpt2"), compiled=str(tmp_path / "compiled"), **buckets), lambda *_, **__: None)
    assert [getattr(model, "host_caches", 1) for model in compiled] == [2**3, 1]
