"""What a fleet on a Ray cluster would lose with the machine of the head, as far as the head shows it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil

from placements.spec.problems import Problem

ROOT = Path("/")


def has_store(environment: Mapping[str, str]) -> bool:
    """Returns whether the GCS with these variables keeps its tables outside its memory. Pure."""
    return bool(environment.get("RAY_REDIS_ADDRESS")) or environment.get("RAY_gcs_storage") in ("redis", "rocksdb")


def head_loss_warning(gcs_address: str, home: Path) -> Problem | None:
    """Returns the warning that nothing of the fleet would survive the loss of this machine, the head: neither has its
    GCS a store, nor is the home on a volume of its own."""
    environment = _gcs_environment(gcs_address.rpartition(":")[2])
    if environment is None or has_store(environment) or home.stat().st_dev != ROOT.stat().st_dev:
        return None
    return Problem(
        "head-loss-not-survived",
        "warning",
        "",
        "the loss of the head ends all replicas, and the journal is lost with its disk: its GCS has no store",
        "start the head with RAY_REDIS_ADDRESS, or with RAY_gcs_storage=rocksdb on a volume (docs/cluster.md)",
    )


def _gcs_environment(port: str) -> dict[str, str] | None:
    """Returns the variables of the GCS at that port of this machine; None if they cannot be read."""
    for process in psutil.process_iter():
        try:
            if process.name() == "gcs_server" and f"--gcs_server_port={port}" in process.cmdline():
                return process.environ()
        except (psutil.Error, OSError):
            continue
    return None
