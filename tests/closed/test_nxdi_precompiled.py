"""Sources that NxD Inference's own code has compiled or sharded elsewhere."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest

from placements.facts.versions import reaches
from tests.closed.nxd_lane import real_nxdi as real_nxdi
from tests.closed.test_nxdi import nxd as nxd
from tests.closed.test_nxdi import pytestmark as pytestmark
from tests.doubles import Neuron
from tests.workers.conftest import checkpoint as checkpoint
from tests.workers.engines import test_nxd_precompiled as double
from tests.workers.engines.test_nxd_precompiled import Checkpoints, answers, compiles
from tests.workers.engines.test_nxd_precompiled import llama as llama
from tests.workers.nxdi_traffic import replica_config
from workers.engines.nxd_inference.package import import_package
from workers.engines.open_engine import open_engine
from workers.messages.engine_protocol import EngineLoadError

test_fields_without_effect_on_graphs_may_differ = double.test_fields_without_effect_on_graphs_may_differ
test_all_fields_that_differ_are_reported_at_once = double.test_all_fields_that_differ_are_reported_at_once
test_a_missing_or_truncated_shard_is_reported = double.test_a_missing_or_truncated_shard_is_reported


def test_weights_that_were_not_saved_are_divided_again(nxd: Neuron, checkpoint: Checkpoints, tmp_path: Path) -> None:
    """From the original beside the graphs."""
    if not reaches(import_package().version, "0.7"):
        pytest.skip("earlier versions read the folder of the compiling host")
    double.test_weights_that_were_not_saved_are_divided_again(nxd, checkpoint, tmp_path)
    assert not list(tmp_path.rglob("weights"))  # nor are they saved now


def test_a_source_compiled_elsewhere_is_loaded(
    nxd: Neuron, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compiled, and the original weights are not needed."""
    double.test_a_source_compiled_elsewhere_is_loaded("", nxd, checkpoint, tmp_path, monkeypatch)
    assert not list(tmp_path.rglob("model.safetensors"))


def test_shards_are_the_weights_of_an_own_compile(
    nxd: Neuron, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are neither divided again nor copied."""
    double.test_shards_are_the_weights_of_an_own_compile("", nxd, checkpoint, tmp_path, monkeypatch)
    assert {file.parent for file in tmp_path.rglob("*.safetensors")} == {tmp_path / "given" / "weights"}


def test_a_folder_compiled_by_the_package_alone_is_loaded(nxd: Neuron, checkpoint: Checkpoints, tmp_path: Path) -> None:
    """By the package's own keywords and defaults, buckets among them."""
    original, source = checkpoint("llama"), tmp_path / "given"
    shutil.copytree(original, source)
    modeling = importlib.import_module("neuronx_distributed_inference.models.llama.modeling_llama")
    config = importlib.import_module("neuronx_distributed_inference.models.config")
    adapter = importlib.import_module("neuronx_distributed_inference.utils.hf_adapter")
    neuron_config = config.NeuronConfig(
        tp_degree=2,
        batch_size=4,
        ctx_batch_size=1,
        is_continuous_batching=True,
        seq_len=256,
        enable_bucketing=True,
        torch_dtype="float32",
        save_sharded_checkpoint=True,
    )
    load_config = adapter.load_pretrained_config(str(original))
    inference_config = modeling.LlamaInferenceConfig(neuron_config, load_config=load_config)
    modeling.NeuronLlamaForCausalLM(str(original), inference_config).compile(str(source))
    (source / "model.safetensors").unlink()
    before = compiles()
    usual = {"max_len": 256, "allow_pickle": True}
    engine = open_engine(replica_config(source, None, prefill_buckets=[], decode_buckets=[], **usual))
    engine.load()
    assert answers(engine, original) == []
    assert compiles() == before
    with pytest.raises(EngineLoadError, match=r"buckets\.prefill \(context_encoding_buckets\): needs 64 256, "):
        open_engine(replica_config(source, None, prefill_buckets=[64, 256], decode_buckets=[], **usual)).load()
