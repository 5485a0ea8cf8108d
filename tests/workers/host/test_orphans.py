"""Replicas of a machine's former Ray node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.host.core_claims import held_cores
from workers.host.host_facts import NODE_VARIABLE, end_orphans, is_orphan, node_mark

CORES = {"old": (0, 1), "new": (2, 3)}
CLAIM = """\
import sys, time
from pathlib import Path
from workers.host.core_claims import CoreClaim
claim = CoreClaim(Path(sys.argv[1]), map(int, sys.argv[2:]))
print(flush=True)
time.sleep(600)
"""


def test_only_replicas_of_another_node_of_the_same_fleet_and_machine_are_orphans() -> None:
    now = node_mark("fleet", "10.0.0.1", "new")
    assert is_orphan(node_mark("fleet", "10.0.0.1", "old"), now)
    others = [now, node_mark("fleet", "10.0.0.2", "old"), node_mark("another", "10.0.0.1", "old"), ""]
    assert [is_orphan(other, now) for other in others] == [False] * len(others)


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """One process for each node, which has claimed its cores in a folder."""
    started = {
        node: subprocess.Popen(
            [sys.executable, "-c", CLAIM, str(tmp_path), *map(str, cores)],
            env={**os.environ, NODE_VARIABLE: node_mark("test-orphans", "10.0.0.1", node)},
            stdout=subprocess.PIPE,
        )
        for node, cores in CORES.items()
    }
    for process in started.values():
        assert process.stdout is not None
        process.stdout.readline()
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("frozen", [False, True])
def test_replicas_of_a_former_node_are_dead_before_the_host_reports_free_cores(
    replicas: dict[str, subprocess.Popen[bytes]], tmp_path: Path, *, frozen: bool
) -> None:
    """Also one that is frozen. Those of its present node go on."""
    old, new = replicas["old"], replicas["new"]
    if frozen:
        old.send_signal(signal.SIGSTOP)
    assert held_cores(tmp_path) == dict.fromkeys(CORES["old"], old.pid) | dict.fromkeys(CORES["new"], new.pid)
    assert end_orphans(node_mark("test-orphans", "10.0.0.1", "new"), 10.0) == []
    assert held_cores(tmp_path) == dict.fromkeys(CORES["new"], new.pid)
