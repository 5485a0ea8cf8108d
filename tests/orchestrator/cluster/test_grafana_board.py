"""The board of the replicas in Ray's folder for Grafana; Ray's dashboard itself is in fleets/test_dashboard.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.cluster.own_ray import BOARD, UID, VARIABLE, name_board, write_board

FILE = "data_grafana_dashboard.json"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, "RAY_METRICS_OUTPUT_ROOT", "RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv(VARIABLE)


def written(folder: Path) -> Path:
    """Returns the folder's board of Ray Data, as Ray has written it."""
    folder.mkdir(parents=True)
    (folder / FILE).write_text("Ray's")
    return folder / FILE


def test_the_uid_is_that_of_the_board() -> None:
    assert json.loads(BOARD.read_text())["uid"] == UID


@pytest.mark.parametrize("variable", ["", "RAY_METRICS_OUTPUT_ROOT", "RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"])
def test_the_board_is_where_ray_writes_its_own(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder of Ray's settings or, without them, in the session's."""
    below = {"": "session/metrics/grafana/dashboards", "RAY_METRICS_OUTPUT_ROOT": "set/grafana/dashboards"}
    if variable:
        monkeypatch.setenv(variable, str(tmp_path / "set"))
    file = written(tmp_path / below.get(variable, "set"))
    name_board()
    write_board(tmp_path / "session")
    assert file.read_bytes() == BOARD.read_bytes()


def test_another_board_of_the_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its uid is in Ray's variable already."""
    monkeypatch.setenv(VARIABLE, "theirs")
    file = written(tmp_path / "metrics" / "grafana" / "dashboards")
    name_board()
    write_board(tmp_path)
    assert file.read_text() == "Ray's"


def test_a_folder_that_is_missing_does_not_stop_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name_board()
    write_board(tmp_path)
    assert "Grafana will not find the board" in caplog.text
