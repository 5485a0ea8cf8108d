"""The journal, then the home folder, is taken away under a running fleet."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator

import pytest

from tests.fleet import LiveFleet, until

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]

SPEC = "version: 1\nhosts: {emulate: inf2.xlarge}\nmodels: {m: {engine: echo, replicas: 1}}\n"


@pytest.fixture(scope="module")
def fleet() -> Iterator[LiveFleet]:
    fleet = LiveFleet(SPEC)
    try:
        yield fleet.wait_ready()
    finally:
        fleet.clean()


def test_a_controller_that_finds_a_link_in_place_of_its_journal_serves_and_says_so(fleet: LiveFleet) -> None:
    """It is restarted after a kill, and adopts the replicas."""
    journal = fleet.home / "journal"
    journal.rename(fleet.home / "moved")
    journal.symlink_to("moved")
    before = fleet.controller_pid()
    os.kill(before, signal.SIGKILL)
    until(lambda: "journal-lost" in fleet.corewright("status").stdout, 60, "the new controller reports it")

    assert fleet.controller_pid() != before
    assert fleet.http.post("/v1/completions", json={"model": "m", "prompt": "a"}).status_code == 200
    assert fleet.process.poll() is None


def test_a_fleet_without_its_home_serves_refuses_an_apply_and_can_be_ended(fleet: LiveFleet) -> None:
    """`status` says why, and `down` leaves no process."""
    spec = fleet.home.with_name(f"{fleet.home.name}.yaml")
    spec.write_text(SPEC.replace("replicas: 1", "replicas: 2"))
    shutil.rmtree(fleet.home)
    try:
        until(lambda: "journal-lost" in fleet.corewright("status").stdout, 30, "the status says so")
        applied = fleet.corewright("apply", "--yes", str(spec))
        answer = fleet.http.post("/v1/completions", json={"model": "m", "prompt": "a b", "max_tokens": 2})
        ended = fleet.corewright("down")
    finally:
        spec.unlink()

    assert (applied.returncode, "journal-lost" in applied.stderr) == (1, True)
    assert answer.status_code == 200
    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "draining\nstopped\n")
    assert fleet.process.wait(30) == 0
    assert fleet.processes() == []
