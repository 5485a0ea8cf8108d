"""`init` writes a spec that fits the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.cli import main as cli
from orchestrator.cli.init import spec_for
from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import TOPOLOGIES, Machine
from placements.planner.plan import plan
from placements.planner.spec_hosts import hosts_for
from placements.rules.checks import check
from placements.spec.parse import parse

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
QWEN = {
    "model_type": "qwen2",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "num_hidden_layers": 36,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
SMALL = QWEN | {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
}
CONFIGS = {"llama-3.1-8b": LLAMA_8B, "qwen2.5-3b": QWEN, "small": SMALL}


@pytest.mark.parametrize("instance", TOPOLOGIES)
def test_a_spec_for_any_instance_type_is_planned_there(instance: str) -> None:
    """With the shapes of its models, without a problem, and with the replicas that the load may add."""
    parsed = parse(spec_for(TOPOLOGIES[instance], "fleet.yaml"), "fleet.yaml")
    assert parsed.spec is not None
    assert parsed.problems == ()
    hosts = hosts_for(parsed.spec, Machine((0,)))
    checkpoints = {model.name: Checkpoint.from_config(CONFIGS[model.name]) for model in parsed.spec.models}
    assert [problem.what for problem in check(parsed.spec, hosts, checkpoints)] == []
    most = {model.name: model.replicas.max for model in parsed.spec.models}
    placed = plan(parsed.spec, hosts, checkpoints, wanted=most)
    assert [problem.what for missing in placed.unplaced for problem in missing.problems] == []


def test_without_devices_the_models_of_the_package_are_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fleet.yaml"
    assert cli.run(["init", str(path)]) == 0
    assert cli.run(["validate", str(path)]) == 0
    parsed = parse(path.read_text(), str(path))
    assert parsed.spec is not None
    assert all((Path(model.source) / "model.safetensors").is_file() for model in parsed.spec.models)


def test_a_file_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("mine")
    assert cli.run(["init", str(path)]) == 1
    assert "spec-exists" in capsys.readouterr().err
    assert path.read_text() == "mine"


def test_standard_output_gets_only_the_spec(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["init", "-", "--instance", "inf2.xlarge"]) == 0
    out, err = capsys.readouterr()
    assert parse(out, "fleet.yaml").ok
    assert err == ""


def test_an_unknown_instance_type_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["init", "-", "--instance", "p4d.24xlarge"]) == 64
    assert "'p4d.24xlarge' is not one of inf2.xlarge" in capsys.readouterr().err


def test_a_folder_that_is_missing_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["init", str(tmp_path / "missing" / "fleet.yaml")]) == 1
    assert "output-unwritable" in capsys.readouterr().err


@pytest.mark.parametrize(("here", "line"), [(True, "this inf2.48xlarge: 24"), (False, "inf2.48xlarge: 24")])
def test_only_this_machine_is_called_so(here: bool, line: str) -> None:
    """Not the type of --instance."""
    assert spec_for(TOPOLOGIES["inf2.48xlarge"], "f.yaml", here=here).startswith(f"# A fleet on {line}")


@pytest.mark.parametrize("instance", sorted(TOPOLOGIES))
def test_a_gated_model_is_called_so(instance: str) -> None:
    """It cannot be fetched without a token."""
    text = spec_for(TOPOLOGIES[instance], "f.yaml")
    assert ("meta-llama/" in text) == ("gated" in text) == ("HF_TOKEN" in text)
