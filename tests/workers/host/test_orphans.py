"""Replicas of a machine's former Ray node."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from workers.host.orphans import NODE_VARIABLE, end_orphans, is_orphan, mark_of


def test_only_replicas_of_another_node_of_the_same_fleet_and_machine_are_orphans() -> None:
    now = mark_of("fleet", "10.0.0.1", "new")
    assert is_orphan(mark_of("fleet", "10.0.0.1", "old"), now)
    others = [now, mark_of("fleet", "10.0.0.2", "old"), mark_of("another", "10.0.0.1", "old"), ""]
    assert [is_orphan(other, now) for other in others] == [False] * len(others)


@pytest.fixture
def replicas() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """One process for each node."""
    started = {
        node: subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); import time; time.sleep(600)"],
            env={NODE_VARIABLE: mark_of("test-orphans", "10.0.0.1", node)},
            stdout=subprocess.PIPE,
        )
        for node in ("old", "new")
    }
    for process in started.values():
        assert process.stdout is not None
        process.stdout.readline()
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


def test_replicas_of_a_former_node_are_dead_before_the_host_reports_free_cores(
    replicas: dict[str, subprocess.Popen[bytes]],
) -> None:
    """Those of its present node go on."""
    assert end_orphans(mark_of("test-orphans", "10.0.0.1", "new"), 10.0)
    assert replicas["old"].wait(10) != 0
    assert replicas["new"].poll() is None
