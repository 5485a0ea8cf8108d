"""The spec that a container of SageMaker starts with."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from orchestrator.cli.serve_sagemaker import spec_file
from orchestrator.process.failure import Failed


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
    with pytest.raises(Failed, match="model-folder-empty"):
        spec_file(tmp_path, False)
