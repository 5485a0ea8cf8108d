"""Faults of the machine under a running fleet: its disk fills up, and Ray's GCS is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.access.audit_log import Audit
from orchestrator.process.home import Home
from tests.fleet import LiveFleet, until
from tests.orchestrator.clients import Admin

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]

SPEC = """\
version: 1
hosts: {emulate: inf2.48xlarge}
defaults: {engine: echo, engine_options: {step_ms: 20}}
models:
  m: {tp_degree: 2, replicas: 2}
"""
CHANGED = SPEC.replace("replicas: 2", "replicas: 3")
DISK = "4m"


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    """A file system of a few megabytes."""
    folder = Path(tempfile.mkdtemp(prefix="cwd-", dir="/tmp"))
    try:
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=0700", "tmpfs", str(folder)]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("this user cannot mount a file system")
        try:
            yield folder
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
    finally:
        folder.rmdir()


@pytest.fixture(scope="module")
def fleet(disk: Path) -> Iterator[LiveFleet]:
    with LiveFleet(SPEC, home=disk / "h") as fleet:
        yield fleet.wait_ready()


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    """No block of the disk is free, and none of a log has room left."""
    filler = disk / "filler"
    try:
        for path in [filler, *disk.rglob("*.log")]:
            with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
                while path.name != "audit.log" and file.write(b"\n" * 4096):
                    pass
        yield
    finally:
        filler.unlink()


def answers(fleet: LiveFleet) -> bool:
    body = {"model": "m", "prompt": "x", "max_tokens": 2}
    return fleet.http.post("/v1/completions", json=body, timeout=10).status_code == 200


def apply(fleet: LiveFleet, text: str) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as spec:
        spec.write(text)
        spec.flush()
        return fleet.corewright("apply", spec.name, "--yes")


def test_a_full_disk_rejects_changes_and_ends_nothing(fleet: LiveFleet, disk: Path) -> None:
    """For every write to the home, and the output of `up`; once there is space again, the change succeeds."""
    with full(disk):
        before = fleet.status()
        host = before["hosts"][0]["name"]
        admin = Admin(fleet.home)  # the last pages of journal and audit log have room left
        until(lambda: admin.post("/cordon", host=host, cores="20-23")[0] == 507, 30, "a change is refused")
        refused = apply(fleet, CHANGED)
        assert refused.returncode != 0
        assert "-unwritable: " in refused.stderr
        for _ in range(50):
            assert answers(fleet)
        os.kill(before["models"][0]["replicas"][0]["pid"], signal.SIGKILL)
        until(lambda: fleet.corewright("status").returncode == 0, 30, "the fleet tells its status")
        assert fleet.status()["revision"] == before["revision"]
        os.kill(fleet.controller_pid(), signal.SIGKILL)
        until(lambda: fleet.corewright("status").returncode == 0, 60, "the controller is there again")
        assert answers(fleet)
    until(lambda: apply(fleet, CHANGED).returncode == 0, 30, "the change is made")
    until(
        lambda: [replica["state"] for replica in fleet.status()["models"][0]["replicas"]] == ["ready"] * 3,
        60,
        "three serve",
    )
    assert fleet.process.poll() is None, fleet.output()


def test_ray_without_its_gcs_ends_the_fleet_with_a_report_and_leaves_nothing(fleet: LiveFleet) -> None:
    """Running requests are completed. Runs last."""
    (gcs,) = [pid for pid in fleet.processes() if psutil.Process(pid).name() == "gcs_server"]
    lines: list[str] = []

    def stream() -> None:
        body = {"model": "m", "prompt": "p", "max_tokens": 300, "stream": True}
        with fleet.http.stream("POST", "/v1/completions", json=body, timeout=60) as answer:
            lines.extend(answer.iter_lines())

    reader = threading.Thread(target=stream)
    reader.start()
    os.kill(gcs, signal.SIGKILL)
    reader.join(60)
    assert lines[-2:] == ["data: [DONE]", ""]
    assert fleet.process.wait(120) == 1
    last = Audit(Home(fleet.home).audit).entries(1)[0]
    assert last.action == "end"
    assert f"error: {last.arguments['reason']}: " in fleet.output()
    assert not Home(fleet.home).record_file.exists()
    assert fleet.processes() == []
