"""A worker of Ray waits for the next start, and another one once it is taken."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import psutil
import pytest

from orchestrator.cluster import ray_workers
from orchestrator.cluster.ray_workers import SpareWorkers, has_spare
from tests.fleet import until

DEADLINE_S = 30.0
FORKS = """\
import os, sys
for title in sys.argv[1:]:
    if os.fork() == 0:
        if title:
            os.execv("/bin/sleep", [title, "600"])
        sys.stdin.read()
        os._exit(0)
sys.stdin.read()
"""


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The runtime environments for which Ray was asked for a worker."""
    requested: list[dict[str, Any]] = []
    monkeypatch.setattr(ray_workers, "prestart", lambda job, runtime_env: requested.append(runtime_env))
    return requested


def test_one_worker_is_requested_at_a_time(requests: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not exist at once; when it has been taken, the next one is requested without delay."""
    spares = SpareWorkers(lambda: {"the command": 7})
    exists = iter([False, False, True, False])
    monkeypatch.setattr(ray_workers, "has_spare", lambda pid: next(exists))
    counts = []
    for _ in range(4):
        spares._look()
        counts.append(len(requests))

    assert counts == [1, 1, 1, 2]
    assert requests[0] == {"env_vars": {}, "py_executable": "the command"}


@pytest.mark.parametrize(
    ("titles", "is_there"),
    [([], False), (["ray::Replica[m]"], False), (["ray::Replica[m]", "ray::IDLE"], True), ([""], True)],
)
def test_a_fork_without_work_is_a_spare_one(titles: list[str], is_there: bool) -> None:
    """Also one that Ray has not given a title yet; replicas are none."""
    command = [sys.executable, "-c", FORKS, *titles]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:

        def shown() -> list[str]:
            forks = psutil.Process(process.pid).children()
            return sorted(" ".join(fork.cmdline()[:1]) for fork in forks)  # empty while it is replaced

        until(lambda: shown() == sorted(title or sys.executable for title in titles), DEADLINE_S, "the forks")
        spare, forks = has_spare(process.pid), psutil.Process(process.pid).children()
        for fork in forks:
            fork.kill()
        process.kill()

    assert spare == is_there
