"""The Grafana board of the replicas, which Ray's dashboard embeds in its Metrics tab if Grafana runs.

Ray 2.60 embeds two boards by their uids: its own for tasks and nodes, which other pages use as well, and its own for
Ray Data, which no fleet uses. Ours takes the place of the second: its uid by Ray's variable, its content in the file
that Ray writes for a Grafana of its own configuration.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from workers.host.task_boundary import task_boundary

log = logging.getLogger(__name__)

BOARD = Path(__file__).parent / "replica_board.json"
UID = "corewright-replicas"
VARIABLE = "RAY_GRAFANA_DATA_DASHBOARD_UID"  # set by users for a board of their own
_FILE = "data_grafana_dashboard.json"


def name_board() -> None:
    """Has a Ray that this process starts embed the board."""
    os.environ.setdefault(VARIABLE, UID)


def write_board(session: Path) -> None:
    """Replaces the board that Ray has written for Ray Data, which has the same uid now. Requires that Ray's dashboard
    has started, in the folder ``session``."""
    if os.environ.get(VARIABLE) != UID:
        return
    root = Path(os.environ.get("RAY_METRICS_OUTPUT_ROOT") or session / "metrics")
    folder = Path(os.environ.get("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR") or root / "grafana" / "dashboards")
    with task_boundary(log, "Grafana will not find the board of the replicas"):
        shutil.copyfile(BOARD, folder / _FILE)
