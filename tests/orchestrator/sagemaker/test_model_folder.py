"""What a folder of SageMaker asks for: a spec, LMI's settings or a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.process.failure import Failed
from orchestrator.sagemaker.model_folder import examined, problems_of, read_folder, text_of
from placements.facts.topology import Machine

CPU = Machine(tuple(range(8)))
INF2 = Machine(tuple(range(192)), "inf2.48xlarge")
LLAMA_7B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}


def checkpoint(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_7B | config))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # no tensors
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    return folder


def fields(folder: Path, machine: Machine = CPU, **environment: str) -> dict[str, Any]:
    (only,) = read_folder(folder, environment, machine).models.values()
    return only


def test_a_checkpoint_is_served_as_it_is(tmp_path: Path) -> None:
    assert fields(checkpoint(tmp_path)) == {"source": str(tmp_path), "tp_degree": 1}


def test_a_checkpoint_gets_the_smallest_degree_that_holds_it(tmp_path: Path) -> None:
    """13 GB of weights exceed the 16 GB of one core with the cache and the overhead, and two cores hold them."""
    spec = read_folder(checkpoint(tmp_path), {}, INF2).spec
    degree = spec["models"]["model"]["tp_degree"]
    spec["models"]["model"]["tp_degree"] = degree // 2
    assert degree > 1
    assert [problem.id for problem in problems_of(examined(spec, INF2))] != []


def test_the_folders_below_are_models_by_name(tmp_path: Path) -> None:
    """As in LMI's layout for several models."""
    for name in ("chat", "code"):
        checkpoint(tmp_path / name)
    models = read_folder(tmp_path, {}, CPU).models
    assert {name: model["source"] for name, model in models.items()} == {
        "chat": str(tmp_path / "chat"),
        "code": str(tmp_path / "code"),
    }


def test_lmis_settings_choose_the_degree_on_devices(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    (tmp_path / "serving.properties").write_text(
        "engine=Python\noption.entryPoint=djl_python.transformers_neuronx\noption.tensor_parallel_degree=4\n"
        "option.n_positions=1024\noption.rolling_batch=auto\n"
    )
    model = fields(tmp_path, INF2)
    assert (model["source"], model["tp_degree"], model["max_len"]) == (str(tmp_path), 4, 1024)


def test_lmis_variables_are_read_without_its_file(tmp_path: Path) -> None:
    model = fields(checkpoint(tmp_path), INF2, OPTION_TENSOR_PARALLEL_DEGREE="8", OPTION_N_POSITIONS="512", PATH="/bin")
    assert (model["source"], model["tp_degree"], model["max_len"]) == (str(tmp_path), 8, 512)


def test_a_setting_without_a_replacement_prevents_the_start_on_devices(tmp_path: Path) -> None:
    """LMI would do what corewright cannot."""
    checkpoint(tmp_path)
    (tmp_path / "serving.properties").write_text("option.entryPoint=djl_python.deepspeed\n")
    with pytest.raises(Failed, match="lmi-refused"):
        read_folder(tmp_path, {}, INF2)


def test_lmis_settings_for_devices_are_dropped_without_them(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    (tmp_path / "serving.properties").write_text("option.tensor_parallel_degree=2\noption.neuron_optimize_level=3\n")
    found = read_folder(tmp_path, {}, CPU)
    assert found.spec["hosts"] == {"emulate": "inf2.48xlarge"}
    assert examined(found.spec, CPU).spec is not None
    assert any("neuron_optimize_level" in note for note in found.notes)


def test_paths_of_an_own_spec_begin_in_its_folder(tmp_path: Path) -> None:
    spec = {
        "version": 1,
        "defaults": {"neff_cache": "./neff"},
        "models": {
            "chat": {
                "server": {"command": ["./serve", "./argument"], "slots": 4},
                "engine_options": {"quantized_checkpoints_path": "./q", "other": "./o"},
                "source": "./weights",
                "draft": {"source": "./draft"},
                "adapters": {"a": "../a", "b": "o/b"},
            }
        },
    }
    (tmp_path / "corewright.yaml").write_text(text_of(spec))
    (model,) = read_folder(tmp_path, {"OPTION_MODEL_ID": "ignored"}, CPU).models.values()
    assert model == {
        "neff_cache": f"{tmp_path}/neff",
        "source": f"{tmp_path}/weights",
        "draft": {"source": f"{tmp_path}/draft"},
        "adapters": {"a": f"{tmp_path}/../a", "b": "o/b"},
        "server": {"command": [f"{tmp_path}/serve", "./argument"], "slots": 4},
        "engine_options": {"quantized_checkpoints_path": f"{tmp_path}/q", "other": "./o"},
    }


FAULTY = [
    "models: [a]",
    "{",
    "a: &a [*a]",
    "models: {a: 1}",
    "version: 1",
    "\udcff",
    "models: {m: {source: ./x, d: 2026-99-99}}",
    "models: {m: {source: ./x, engine_options: {d: 2026-99-99}}}",
    "x: !!float a",
    "defaults: [1]\nmodels: {m: {source: ./x}}",
]


@pytest.mark.parametrize("text", FAULTY)
def test_an_own_spec_that_cannot_be_read_is_reported_with_its_path(text: str, tmp_path: Path) -> None:
    path = tmp_path / "corewright.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(Failed, match=f"model-folder-unreadable: {path}"):
        read_folder(tmp_path, {}, CPU)


@pytest.mark.parametrize("place", ["empty", "missing"])
def test_a_folder_without_a_model_is_reported(place: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    what = {"empty": "has no model", "missing": "does not exist"}[place]
    with pytest.raises(Failed, match=f"model-folder-empty: .*{what}"):
        read_folder(tmp_path / place, {}, CPU)


def test_a_spec_as_text_is_read_back(tmp_path: Path) -> None:
    spec = read_folder(checkpoint(tmp_path), {}, CPU).spec
    assert yaml.safe_load(text_of(spec)) == spec
