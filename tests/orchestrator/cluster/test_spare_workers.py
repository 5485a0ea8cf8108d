"""A worker of Ray waits for the next start, and another one once it is taken."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import psutil
import pytest
import ray

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


@pytest.fixture
def raylet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A raylet of this node without any call, as one of a version without the request for workers."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    node = {"NodeID": "n", "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
    monkeypatch.setattr(ray, "nodes", lambda: [node])
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "n"))
    yield
    server.stop(None)


GENERATED = "ray.core.generated.node_manager_pb2"
LACKS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "call": lambda _: None,
    "message": lambda patch: patch.delattr(f"{GENERATED}.PrestartWorkersRequest"),
    "fields": lambda patch: patch.setattr(f"{GENERATED}.PrestartWorkersRequest", lambda: None),
    "method": lambda patch: patch.setattr(f"{GENERATED}_grpc.NodeManagerServiceStub", lambda channel: object()),
    "module": lambda patch: patch.setitem(sys.modules, "ray._private.grpc_utils", None),
}


@pytest.mark.parametrize("lack", LACKS)
def test_a_ray_without_the_request_for_workers_is_not_asked_again(
    lack: str, raylet: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning says so: starts still fork a process, but at the time of the start."""
    LACKS[lack](monkeypatch)
    monkeypatch.setattr(ray_workers, "has_spare", lambda pid: False)
    spares = SpareWorkers(lambda: {"the command": 7})
    with caplog.at_level(logging.WARNING):
        spares.keep("01000000", {})
        spares._thread.join(DEADLINE_S)
        spares.keep("01000000", {})  # as the controller does every 15 s

    assert not spares._thread.is_alive()
    (record,) = caplog.records
    assert f"Ray {ray.__version__} keeps no worker for the next start" in record.getMessage()


def test_a_request_that_a_raylet_does_not_answer_is_repeated(raylet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be busy."""
    (node,) = ray.nodes()
    monkeypatch.setattr(ray, "nodes", lambda: [{**node, "NodeManagerPort": 1}])  # a closed port
    with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
        ray_workers.prestart("01000000", {})
