"""What the adapter of transformers-neuronx refuses before the package does, and what the package refuses itself."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from placements.engines.transformers_neuronx.capabilities import Reading
from tests.checkpoints import INIT_STD
from tests.closed.forced import deviation
from tests.doubles import Neuron, beside_transformers
from tests.workers.tnx_runs import config
from workers.compiled.places import ensure
from workers.engines.open_engine import buildables
from workers.engines.transformers_neuronx.engine import open_transformers_neuronx
from workers.messages.engine_protocol import EngineLoadError
from workers.serving.prepare import predict

Checkpoints = Callable[[str], Path]


@pytest.fixture(params=["neuron", pytest.param("real_tnx", marks=pytest.mark.real)])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Neuron:
    """The double of the package, and the package itself above the closed layer's stand-ins."""
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    machine: Neuron = request.getfixturevalue(request.param)
    return machine


def refused(source: Path) -> EngineLoadError:
    with pytest.raises(EngineLoadError) as caught:
        open_transformers_neuronx(config(source)).load()
    return caught.value


BLOCKS: list[tuple[str, dict[str, Any]]] = [
    ("opt", {"do_layer_norm_before": False}),
    ("opt", {"word_embed_proj_dim": 32}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("llama", {"head_dim": 32}),
    ("mistral", {"head_dim": 32}),
    ("llama", {"attention_bias": True}),
    ("gpt2", {"activation_function": "relu"}),
    ("bloom", {"apply_residual_connection_post_layernorm": True}),
]

APPROXIMATED: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"activation_function": "gelu"}),
    ("gpt_neox", {"hidden_act": "gelu"}),
]
COMPUTED: list[tuple[str, dict[str, Any]]] = [("opt", {"ffn_dim": 96}), ("gpt2", {"n_inner": 96})]


@pytest.mark.parametrize(("family", "fields"), BLOCKS)
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


@pytest.mark.real
@pytest.mark.parametrize(("family", "fields"), [*BLOCKS, *APPROXIMATED, *COMPUTED])
def test_the_package_miscomputes_just_the_blocks_that_are_reported(
    checkpoint: Checkpoints,
    tmp_path: Path,
    real_tnx: Neuron,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    fields: dict[str, Any],
) -> None:
    """It fails, or deviates from transformers' model of the same configuration, and nowhere else."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if family == "gpt_neox" and not metadata.version("transformers").startswith("4."):
        pytest.skip("transformers-neuronx misreads GPT-NeoX beside transformers 5")
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    settings = AutoConfig.from_pretrained(str(checkpoint(family)))
    settings.update(fields)
    model = AutoModelForCausalLM.from_config(settings)
    for bias in (weight for name, weight in model.named_parameters() if name.endswith("bias")):
        torch.nn.init.normal_(bias, std=INIT_STD)  # transformers' are 0, as if there were none
    model.save_pretrained(tmp_path)
    reading = Reading.of(json.loads((tmp_path / "config.json").read_text()))
    monkeypatch.setattr("workers.engines.transformers_neuronx.engine._check_reading", lambda *_: None)
    buckets = {} if family == "gpt_neox" else {"prefill_buckets": [64], "decode_buckets": [64]}
    engine: Any = open_transformers_neuronx(config(tmp_path, slots=1, **buckets))
    try:
        engine.load()
        is_wrong = deviation(engine, tmp_path) > 1e-4
    except (EngineLoadError, RuntimeError):
        is_wrong = True
        importlib.import_module("torch_neuronx.runtime").FAILURES.clear()
    assert is_wrong is bool(reading.lacks or reading.approximates)


@pytest.mark.real
@pytest.mark.parametrize("flagged", [True, False])
def test_weights_that_the_package_has_sharded_are_refused(
    checkpoint: Checkpoints, tmp_path: Path, real_tnx: Neuron, monkeypatch: pytest.MonkeyPatch, flagged: bool
) -> None:
    """By the flag in config.json or by the file; before a core is claimed, and by `cache verify` too."""
    import transformers_neuronx as tnx

    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    options = tnx.NeuronConfig(on_device_embedding=True)
    model = tnx.LlamaForSampling.from_pretrained(str(checkpoint("llama")), n_positions=64, neuron_config=options)
    model.to_neuron()
    with contextlib.suppress(TypeError):  # beside some versions of transformers, the configuration is no JSON
        model.save(str(tmp_path), sharded_weights=True)
    importlib.import_module("neuron_double.runtime").reset_for_tests()
    if flagged:
        (tmp_path / "DecoderLMHead.safetensors").unlink()
        settings = json.loads((checkpoint("llama") / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(settings | {"is_presharded_checkpoint": True}))
    else:
        shutil.copy(checkpoint("llama") / "config.json", tmp_path)
    assert model.config.is_presharded_checkpoint
    error = refused(tmp_path)
    with pytest.raises(EngineLoadError) as foretold:
        predict(config(tmp_path, compiled=str(tmp_path / "compiled")))
    assert (error.id, str(tmp_path) in error.what) == ("layout-unsupported", True)
    assert foretold.value.what == error.what
    assert real_tnx.held() == {}


@pytest.mark.parametrize("kind", [AssertionError, AttributeError, KeyError, TypeError, ValueError])
def test_errors_of_the_package_are_quoted(
    checkpoint: Checkpoints, neuron: Neuron, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """Its constructors raise whatever comes; before a core is claimed."""
    from transformers_neuronx import LlamaForSampling

    def refuse(*_: Any, **__: Any) -> None:
        raise kind("no such layout")

    monkeypatch.setattr(LlamaForSampling, "from_pretrained", refuse)
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
    """By the version of transformers beside the package; what it reads correctly is loaded."""
    beside_transformers(monkeypatch, beside)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    source = rewritten(checkpoint("llama"), tmp_path / "model", **changed)
    if not id:
        open_transformers_neuronx(config(source, prefill_buckets=[8], decode_buckets=[64])).load()
        return
    error = refused(source)
    assert (error.id, "500000" in error.what) == (id, True)


@pytest.mark.real
@pytest.mark.parametrize("changed", [{"rope_parameters": None, "rope_theta": 500_000.0}, {"rope_parameters": ROPE}, {}])
def test_the_package_misreads_just_the_rotary_bases_that_are_refused(
    checkpoint: Checkpoints,
    tmp_path: Path,
    real_tnx: Neuron,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
) -> None:
    """Its logits differ from those of transformers where the adapter refuses, and nowhere else."""
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    source = rewritten(checkpoint("llama"), tmp_path / "model", **changed)
    is_refused = bool(
        Reading.of(json.loads((source / "config.json").read_text())).misread(metadata.version("transformers"))
    )
    monkeypatch.setattr("workers.engines.transformers_neuronx.engine._check_reading", lambda *_: None)
    engine: Any = open_transformers_neuronx(config(source, slots=2, prefill_buckets=[16], decode_buckets=[64]))
    engine.load()
    assert (deviation(engine, source) > 0.1) is is_refused


def test_gpt_neox_needs_a_transformers_before_5(
    checkpoint: Checkpoints, neuron: Neuron, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package reads rotary_pct, which 5 does not have; before a core is claimed."""
    beside_transformers(monkeypatch, "5.0.0")
    error = refused(checkpoint("gpt_neox"))
    assert (error.id, "rotary_pct" in error.what, neuron.held()) == ("rotary-misread", True, {})


def test_a_small_vocabulary_bounds_top_k_on_the_device(
    checkpoint: Checkpoints, tmp_path: Path, machine: Neuron, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs with a top_k beyond the vocabulary do not build."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = tmp_path / "model"
    small = AutoConfig.from_pretrained(str(checkpoint("llama")))
    small.vocab_size = 96
    AutoModelForCausalLM.from_config(small).save_pretrained(source)
    engine: Any = open_transformers_neuronx(config(source, sampling="device", prefill_buckets=[8], decode_buckets=[64]))
    engine.load()
    assert engine.spec.device_top_k == 96


@pytest.mark.parametrize("kind", [AssertionError, StopIteration, NotImplementedError])
def test_failures_of_building_graphs_have_an_id(
    checkpoint: Checkpoints, machine: Neuron, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """The package raises bare exceptions there too, and in the first runs."""
    from transformers_neuronx import OPTForSampling

    def fail(*_: Any, **__: Any) -> None:
        raise kind("not here")

    for name in ("to_neuron", "forward"):
        with monkeypatch.context() as patched:
            patched.setattr(OPTForSampling, name, fail)
            error = refused(checkpoint("opt"))
        assert (error.id, kind.__name__ in error.what) == ("bad-engine-option", True)
        importlib.import_module("neuron_double.runtime").reset_for_tests()


@pytest.mark.parametrize(("family", "slots"), [("llama", 3), ("llama", 1), ("opt", 2)])
def test_a_position_beyond_the_slot_never_reaches_the_package(
    checkpoint: Checkpoints, machine: Neuron, monkeypatch: pytest.MonkeyPatch, family: str, slots: int
) -> None:
    """There it is a StopIteration; padding of a static batch counts."""
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


@pytest.mark.real
def test_compiling_gpt2_on_the_host_lists_its_cache_once(
    checkpoint: Checkpoints, tmp_path: Path, real_tnx: Neuron, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package alone lists it once more for each core with each of three context lengths."""
    import transformers_neuronx as tnx

    kind = tnx.GPT2ForSamplingWithContextBroadcasting
    compiled: list[Any] = []
    cpu_compile = kind.cpu_compile
    monkeypatch.setattr(kind, "cpu_compile", lambda model: compiled.append(model) or cpu_compile(model))
    lengths = {"n_positions": [64], "context_length_estimate": [8, 16, 64]}
    kind.from_pretrained(
        str(checkpoint("gpt2")),
        batch_size=3,
        prompt_batch_size=3,
        tp_degree=2,
        neuron_config=tnx.NeuronConfig(),
        **lengths,
    ).cpu_compile()
    buckets = {"prefill_buckets": [8, 16, 64], "decode_buckets": [64]}
    replica_config = config(checkpoint("gpt2"), compiled=str(tmp_path / "compiled"), **buckets)
    ensure(buildables(replica_config, read=True), replica_config, lambda _: None)
    alone, adapted = (
        sum(part.numel() for part in model.decoder_lm_head.layers[0].attn_k_cache[3]) for model in compiled
    )
    assert (adapted, alone > adapted) == (64 * 3 * 64, True)  # positions, slots, the width of the heads
