"""`init` writes a spec that fits the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.cli import main as cli
from orchestrator.cli.init import LEAST_GIB, spec_for
from placements.engines.evidence import served_on
from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import TOPOLOGIES, Machine, family_of
from placements.planner.plan import plan
from placements.planner.spec_hosts import hosts_for
from placements.rules.checks import check
from placements.spec.parse import parse
from tests.published_configs import PUBLISHED

QWEN = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "num_hidden_layers": 24,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
CONFIGS = PUBLISHED | {"Qwen/Qwen2.5-0.5B-Instruct": QWEN}


@pytest.mark.parametrize("instance", TOPOLOGIES)
def test_a_spec_for_any_instance_type_is_planned_there(instance: str) -> None:
    """With the shapes of its models, without a problem, and with the replicas that the load may add; a small machine
    may have too little memory to compile."""
    parsed = parse(spec_for(TOPOLOGIES[instance], "fleet.yaml"), "fleet.yaml")
    assert parsed.spec is not None
    assert parsed.problems == ()
    hosts = hosts_for(parsed.spec, Machine((0,)))
    checkpoints = {model.name: Checkpoint.from_config(CONFIGS[model.source]) for model in parsed.spec.models}
    small = {"compile-memory-exceeded"} if TOPOLOGIES[instance].memory_gib < LEAST_GIB else set()
    assert {problem.id for problem in check(parsed.spec, hosts, checkpoints)} == small
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


@pytest.mark.parametrize("instance", [name for name in TOPOLOGIES if served_on(family_of(name))])
def test_the_models_are_those_that_others_served_on_one_release(instance: str) -> None:
    """The file names the release, and the source of each."""
    text = spec_for(TOPOLOGIES[instance], "f.yaml")
    spec = parse(text, "f.yaml").spec
    assert spec is not None
    reports = {report.model: report for report in served_on(family_of(instance))}
    for model in spec.models:
        report = reports[model.source]
        assert model.tp_degree == int(report.tp_degree)
        assert f"{model.source}   # served by others: {report.source}" in text
        assert f"on Neuron SDK {report.sdk}. Reports are few" in text


def test_without_reports_the_file_states_that_none_is_known() -> None:
    """An example is trn2."""
    assert "# No report of these models on such machines is known." in spec_for(TOPOLOGIES["trn2.48xlarge"], "f.yaml")
