"""What the stand-in of NxD Inference refuses, and how it fails, beyond what its golden traces show."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.contracts import contract
from tests.doubles import Neuron, neuron  # noqa: F401 - the fixture

PACKAGE = "neuronx_distributed_inference"
VERSIONS = contract("nxd-inference").versions
PROMPT = [7, 300, 21, 8, 90]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("nxdi") / "llama", "llama", eos=None)


def nxdi(module: str) -> Any:
    return importlib.import_module(f"{PACKAGE}.{module}")


def model(source: Path, **options: Any) -> Any:
    """A tiny model in float32: 3 slots of 64 tokens, batched continuously."""
    usual = {"batch_size": 3, "tkg_batch_size": 3, "ctx_batch_size": 1, "is_continuous_batching": True}
    neuron_config = nxdi("models.config").NeuronConfig(
        **{"tp_degree": 2, "seq_len": 64, "torch_dtype": torch.float32, **usual, **options}
    )
    load_config = nxdi("utils.hf_adapter").load_pretrained_config(str(source))
    llama = nxdi("models.llama.modeling_llama")
    return llama.NeuronLlamaForCausalLM(str(source), llama.LlamaInferenceConfig(neuron_config, load_config=load_config))


def loaded(source: Path, out: Path, **options: Any) -> Any:
    """Compiled and loaded."""
    loaded_model = model(source, **options)
    loaded_model.compile(str(out))
    loaded_model.load(str(out))
    return loaded_model


def call(loaded_model: Any, slots: list[int], ids: list[list[int]], positions: list[list[int]], mask: Any) -> Any:
    return loaded_model.forward(
        input_ids=torch.tensor(ids),
        position_ids=torch.tensor(positions),
        seq_ids=torch.tensor(slots),
        attention_mask=torch.tensor(mask),
    )


def prefill(loaded_model: Any, slot: int) -> Any:
    return call(loaded_model, [slot], [PROMPT], [[0, 1, 2, 3, 4]], [[1] * 5])


@pytest.fixture
def machine(neuron: Neuron, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Neuron:  # noqa: F811
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / "work"))
    return neuron


@pytest.mark.parametrize("version", VERSIONS)
def test_the_registry_and_the_options_are_those_of_the_version(
    machine: Neuron, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """Architectures, option names and the metadata are what was recorded."""
    monkeypatch.setenv("NEURON_DOUBLE_NXDI_VERSION", version)
    data = contract("nxd-inference").data
    snapshot = data["snapshots"].get(version) or data["other_revisions"][version]
    types = nxdi("utils.constants").MODEL_TYPES
    assert {
        arch: {task: model_class.__name__ for task, model_class in tasks.items()} for arch, tasks in types.items()
    } == snapshot["registries"][f"{PACKAGE}.utils.constants.MODEL_TYPES"]
    options = contract("nxd-inference").options(f"{PACKAGE}.models.config.NeuronConfig", version)
    defaults = vars(nxdi("models.config").NeuronConfig())
    assert set(options) <= set(defaults) | {"torch_dtype", "logical_neuron_cores", "overrides_torch_dtype"}
    assert importlib.metadata.version("neuronx-distributed-inference").startswith(snapshot["version"])


def test_an_unknown_option_is_only_logged(machine: Neuron, caplog: pytest.LogCaptureFixture) -> None:
    """A misspelt name is no error, which is why options are checked before."""
    with caplog.at_level(logging.WARNING):
        assert nxdi("models.config").NeuronConfig(seq_length=4096).seq_len == 128
    assert "seq_length" in caplog.text


def test_a_call_that_the_version_does_not_take_is_refused(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """``dry_run`` is none of load's parameters."""
    with pytest.raises(TypeError, match="dry_run"):
        model(source).load(str(tmp_path), dry_run=True)


def test_the_environment_overrides_the_lnc_option(machine: Neuron, monkeypatch: pytest.MonkeyPatch) -> None:
    """NEURON_LOGICAL_NC_CONFIG before the keyword before the platform."""
    config = nxdi("models.config").NeuronConfig
    monkeypatch.setenv("NEURON_DOUBLE_INSTANCE", "trn2.48xlarge")
    lncs = [config().logical_nc_config, config(logical_nc_config=1).logical_nc_config]
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    assert [*lncs, config(logical_nc_config=1).logical_nc_config] == [2, 1, 2]


def test_graphs_of_other_shapes_are_not_loaded(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """Those of another configuration."""
    model(source).compile(str(tmp_path))
    with pytest.raises(RuntimeError, match="other shapes"):
        model(source, max_batch_size=2).load(str(tmp_path))


def test_a_neff_of_another_lnc_or_version_is_not_loaded(
    machine: Neuron, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime says so, when cores are held already."""
    monkeypatch.setenv("NEURON_DOUBLE_NEFF_VERSION", "3")
    with pytest.raises(RuntimeError, match="NEFF version mismatch"):
        loaded(source, tmp_path / "new")
    monkeypatch.delenv("NEURON_DOUBLE_NEFF_VERSION")
    importlib.import_module("neuron_double.runtime").reset_for_tests()
    monkeypatch.setenv("NEURON_DOUBLE_INSTANCE", "trn2.48xlarge")
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / "other"))  # else the persistent cache has the graphs
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    compiled = model(source)
    compiled.compile(str(tmp_path / "one"))
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    with pytest.raises(RuntimeError, match="lnc 1"):
        compiled.load(str(tmp_path / "one"))


def test_a_degree_beyond_the_visible_cores_is_refused(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """A degree of 4 on two cores."""
    with pytest.raises(RuntimeError, match="Could not find VNC id 2"):
        loaded(source, tmp_path, tp_degree=4)


@pytest.mark.parametrize(("at", "message"), [("allocate", "status=4"), ("execute", "status=4"), ("claim", "status=4")])
def test_planned_faults_come_in_the_load(machine: Neuron, source: Path, tmp_path: Path, at: str, message: str) -> None:
    """In the runtime's words: without memory for the weights, in the warm-up, or without cores."""
    machine.plan({"at": at, "status": 4})
    with pytest.raises(RuntimeError, match=message):
        loaded(source, tmp_path)


def test_fp8_needs_two_variables(
    machine: Neuron, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA_HANDLE_SPECIAL_SCALAR and UNSAFE_FP8FNCAST, by the guides: the closed compiler would show it."""
    with pytest.raises(RuntimeError, match="UNSAFE_FP8FNCAST"):
        model(source, kv_cache_quant=True).compile(str(tmp_path))
    monkeypatch.setenv("XLA_HANDLE_SPECIAL_SCALAR", "1")
    monkeypatch.setenv("UNSAFE_FP8FNCAST", "1")
    model(source, kv_cache_quant=True).compile(str(tmp_path))


def test_the_compiler_gets_the_flags_of_each_kind_of_graph(
    machine: Neuron, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of ``compiler_args``. NEURON_CC_FLAGS is not read, and the key of the cache holds the work folder."""
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O3")
    for work in ("a", "a", "b"):
        monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / work))
        flagged = model(source)
        flagged.models[0].compiler_args += "--my-flag "
        flagged.compile(str(tmp_path / "out"))
    flags = [str(line["flags"]) for line in importlib.import_module("neuron_double.compiler").compiles()]
    assert ["--my-flag" in graph_flags for graph_flags in flags] == [True, False] * 2
    assert not any("-O3" in graph_flags for graph_flags in flags)


def test_a_failed_compile_is_not_tried_again(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """ModelBuilder compiles through the persistent cache."""
    machine.plan({"at": "compile", "exit": 70, "times": 1})
    failing = model(source)
    with pytest.raises(RuntimeError, match="failed with 70"):
        failing.compile(str(tmp_path / "out"))
    with pytest.raises(RuntimeError, match="cached failed neff"):
        failing.compile(str(tmp_path / "out"))


def one_token(begun: Any) -> None:
    call(begun, [0], [[7, 0]], [[0, 0]], [[1, 0]])


def left_padding(begun: Any) -> None:
    call(begun, [0], [[0, 7, 8]], [[0, 0, 1]], [[0, 1, 1]])


def long_prompt(begun: Any) -> None:
    call(begun, [0], [[7, 8, 0]], [[0, 1, 2]], [[1, 1, 0]])


def unsorted(begun: Any) -> None:
    call(begun, [2, 0], [[5], [5]], [[5], [5]], [[1] * 5] * 2)


def own_token(begun: Any) -> None:
    call(begun, [0], [[5]], [[5]], [[1] * 6])


@pytest.mark.parametrize("rows", [one_token, left_padding, long_prompt, unsorted, own_token])
def test_rows_that_the_package_answers_wrongly_are_refused(
    machine: Neuron, source: Path, tmp_path: Path, rows: Callable[[Any], None]
) -> None:
    """It gives other tokens without an error; the mutants of the adapter show it over the package's own code."""
    begun = loaded(source, tmp_path)
    prefill(begun, 0)
    with pytest.raises(AssertionError):
        rows(begun)


def test_a_slot_that_is_left_out_is_overwritten(machine: Neuron, source: Path, tmp_path: Path) -> None:
    """With row 0's token at row 0's position."""
    begun = loaded(source, tmp_path)
    expected = prefill(begun, 0).logits[0, -1].argmax()
    prefill(begun, 2)
    before = call(begun, [0, 2], [[int(expected)]] * 2, [[5]] * 2, [[1] * 5] * 2).logits
    call(begun, [0], [[50]], [[3]], [[1] * 3])
    after = call(begun, [0, 2], [[int(expected)]] * 2, [[5]] * 2, [[1] * 5] * 2).logits
    assert torch.equal(before[0], before[1])
    assert not torch.equal(before[1], after[1])
