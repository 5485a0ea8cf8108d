"""The spec that a container of SageMaker starts with."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from orchestrator.cli import serve_sagemaker
from orchestrator.cli.serve_sagemaker import spec_file
from orchestrator.control.resolve import spec_file as spec_file_module
from orchestrator.process.failure import Failed
from placements.facts.topology import Machine
from placements.planner.plan import plan
from tests.stubs import LLAMA, stub_checkpoint


@pytest.mark.parametrize("multi_model", [False, True])
def test_a_folders_own_spec_is_used_where_it_is(multi_model: bool, tmp_path: Path) -> None:
    """So that all its relative paths begin there."""
    own = tmp_path / "corewright.yaml"
    own.write_text("version: 1\nmodels: {}\n")
    assert spec_file(tmp_path, multi_model) == own


def test_a_container_for_many_models_starts_without_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    assert yaml.safe_load(spec_file(tmp_path, True).read_text())["models"] == {}


def test_a_container_without_a_model_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    with pytest.raises(Failed, match="model-folder-empty") as failed:
        spec_file(tmp_path, False)
    assert "--multi-model" in failed.value.problem.hint


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on an inf2.24xlarge."""
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(serve_sagemaker, "this_machine", lambda: Machine(tuple(range(96)), "inf2.24xlarge"))
    return tmp_path / "models"


def test_a_checkpoint_alone_uses_the_host_as_advised(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the smallest degree one replica would use one of 12 cores. What was chosen is shown."""
    stub_checkpoint(models)
    model = yaml.safe_load(spec_file(models, False).read_text())["models"]["model"]
    assert model["tp_degree"] * model["replicas"] > 6
    assert f"tp_degree: {model['tp_degree']}, max_batch: {model['max_batch']}" in capsys.readouterr().err


def test_several_checkpoints_have_the_smallest_degrees(models: Path) -> None:
    """So that each finds room."""
    for name in ("a", "b"):
        stub_checkpoint(models / name)
    read = yaml.safe_load(spec_file(models, False).read_text())["models"]
    assert {name: fields.keys() for name, fields in read.items()} == {
        name: {"source", "tp_degree"} for name in ("a", "b")
    }


def test_a_checkpoint_that_does_not_fit_keeps_its_own_problems(models: Path) -> None:
    stub_checkpoint(models, {**LLAMA, "hidden_size": 24 * 1024, "num_hidden_layers": 200})
    model = yaml.safe_load(spec_file(models, False).read_text())["models"]["model"]
    assert model == {"source": str(models), "tp_degree": 1}


def test_a_container_with_some_devices_plans_on_their_cores(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By /dev and the machine's type. The runtime's variable has no effect, since each replica gets its own."""
    root = models.parent
    (root / "dev").mkdir()
    for name in ("neuron4", "neuron5", "neuron", "neuron_extra"):
        (root / "dev" / name).touch()
    product = root / "sys/devices/virtual/dmi/id/product_name"
    product.parent.mkdir(parents=True)
    product.write_text("inf2.24xlarge\n")
    monkeypatch.setenv("COREWRIGHT_HOST_ROOT", str(root))
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    monkeypatch.setattr(serve_sagemaker, "this_machine", spec_file_module.this_machine)
    for name in ("a", "b"):
        stub_checkpoint(models / name)
    file = spec_file_module.load(str(spec_file(models, False)))
    assert file.spec is not None
    placements = plan(file.spec, file.hosts, file.checkpoints).placements
    assert sorted(str(place.cores) for place in placements) == ["8", "9"]
