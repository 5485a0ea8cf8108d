"""`corewright node-resources` reads the instance type from the machine, and says so if there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.cli import main as cli
from workers.host.host_facts import DMI_PRODUCT, ROOT_VARIABLE


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a machine, which has nothing yet."""
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path))
    (tmp_path / "dev").mkdir()
    return tmp_path


def make_instance(root: Path, product: str) -> None:
    (root / "dev/neuron0").touch()
    (root / DMI_PRODUCT).parent.mkdir(parents=True)
    (root / DMI_PRODUCT).write_text(f"{product}\n")


def test_a_machine_with_devices_declares_its_own_cores(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_instance(root, "inf2.24xlarge")

    assert cli.run(["node-resources", "-o", "json"]) == 0
    declared = json.loads(capsys.readouterr().out)
    assert declared["labels"] == {"corewright-instance": "inf2.24xlarge"}
    assert declared["resources"] == {f"nc{core}": 1 for core in range(12)}


@pytest.mark.parametrize("product", [None, "inf1.24xlarge"])
def test_another_machine_needs_an_instance_type(
    root: Path, product: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if product is not None:
        make_instance(root, product)

    assert cli.run(["node-resources"]) == 1
    assert "no-neuron-instance" in capsys.readouterr().err
    assert cli.run(["node-resources", "--instance", "inf2.xlarge"]) == 0


def test_lnc_is_for_types_that_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["node-resources", "--instance", "trn2.3xlarge", "--lnc", "1", "-o", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["resources"]) == 8
    assert cli.run(["node-resources", "--instance", "inf2.xlarge", "--lnc", "1"]) == 64
