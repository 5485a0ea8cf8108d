"""Idle workers of a raylet are ended, and no others."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping

import psutil
import pytest

from orchestrator.cluster.ray_workers import IDLE, end_idle_workers
from tests.fleet import until
from workers.host.host_facts import NODE_VARIABLE

TITLES = (IDLE, "ray::Replica[m].watch", "python")
DEADLINE_S = 10.0


def started(title: str, variables: Mapping[str, str] = os.environ) -> subprocess.Popen[bytes]:
    """A child of this process with that title, as Ray's workers are children of the raylet.

    Linux shows the title and the variables of a new program only some time after ``Popen`` has returned.
    """
    process = subprocess.Popen([title, "60"], executable="/bin/sleep", env=variables)
    child = psutil.Process(process.pid)
    until(lambda: child.cmdline()[:1] == [title] and child.environ(), DEADLINE_S, "the process shows its title")
    return process


@pytest.fixture
def workers() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Processes by their titles."""
    children = {title: started(title) for title in TITLES}
    yield children
    for process in children.values():
        process.kill()
        process.wait()


def test_an_idle_worker_is_ended(workers: dict[str, subprocess.Popen[bytes]]) -> None:
    assert end_idle_workers(os.getpid(), 0.0, None) == [workers[IDLE].pid]
    assert workers[IDLE].wait(10) != 0
    assert [workers[title].poll() for title in TITLES[1:]] == [None, None]


def test_a_worker_that_has_just_started_may_get_its_task(workers: dict[str, subprocess.Popen[bytes]]) -> None:
    assert end_idle_workers(os.getpid(), 60.0, None) == []
    assert workers[IDLE].poll() is None


def test_idle_workers_of_other_jobs_on_a_joined_cluster_stay(workers: dict[str, subprocess.Popen[bytes]]) -> None:
    """They may own objects that are in use, and lack the mark of the fleet's replicas."""
    with started(IDLE, {**os.environ, NODE_VARIABLE: "mark"}) as own:
        assert end_idle_workers(os.getpid(), 0.0, "mark") == [own.pid]
    assert workers[IDLE].poll() is None
