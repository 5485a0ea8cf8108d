"""`up` warns of a head whose loss ends the fleet, by what its GCS shows on the head's machine."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.cluster import reach
from orchestrator.cluster.reach import head_loss_warning

ADDRESS = "10.0.0.1:65123"
Run = Callable[..., None]


@pytest.fixture
def gcs(tmp_path: Path) -> Iterator[Run]:
    """Starts a process that looks like the GCS at the address, with these variables."""
    program = tmp_path / "gcs_server"
    shutil.copy("/bin/bash", program)
    started: list[subprocess.Popen[str]] = []

    def run(**variables: str) -> None:
        command = [str(program), "-c", "echo runs; read", "--gcs_server_port=65123"]
        process = subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "runs\n"

    yield run
    for process in started:
        process.communicate("\n")


@pytest.mark.parametrize(
    ("variables", "warns"),
    [
        ({}, True),
        ({"RAY_REDIS_ADDRESS": ""}, True),
        ({"RAY_REDIS_ADDRESS": "10.0.0.9:6379"}, False),
        ({"RAY_gcs_storage": "rocksdb"}, False),
    ],
)
def test_a_head_without_a_store_is_warned_of(
    gcs: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], warns: bool
) -> None:
    """One with Redis or RocksDB is not."""
    monkeypatch.setattr(reach, "ROOT", tmp_path)
    gcs(**variables)
    warning = head_loss_warning(ADDRESS, tmp_path)
    assert (warning is not None and warning.id) == (warns and "head-loss-not-survived")


def test_a_journal_on_a_volume_survives_the_head(gcs: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file system than that of the root."""
    monkeypatch.setattr(reach, "ROOT", Path("/"))
    gcs()
    assert head_loss_warning(ADDRESS, Path("/proc")) is None
