"""Idle workers of a raylet are ended, and no others."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from orchestrator.cluster.ray_workers import IDLE, end_idle_workers
from workers.host.host_facts import NODE_VARIABLE

TITLES = (IDLE, "ray::Replica[m].watch", "python")


@pytest.fixture
def workers() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Children of this process, as Ray's are of the raylet, each named by its title."""
    started = {title: subprocess.Popen([title, "60"], executable="/bin/sleep") for title in TITLES}
    yield started
    for process in started.values():
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
    env = {**os.environ, NODE_VARIABLE: "mark"}
    with subprocess.Popen([IDLE, "60"], executable="/bin/sleep", env=env) as own:
        assert end_idle_workers(os.getpid(), 0.0, "mark") == [own.pid]
    assert workers[IDLE].poll() is None
