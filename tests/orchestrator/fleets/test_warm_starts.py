"""A running fleet whose replicas are forks of a warm process, which is killed, and models that return."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.cli.app import DEMO
from orchestrator.cluster.ray_workers import IDLE
from orchestrator.process.home import Home
from placements.engines.memory import PROCESS_GIB
from tests.fleet import LiveFleet, until
from tests.orchestrator.clients import complete

TINY = DEMO.parent / "models" / "tiny"
SPEC = f"""\
version: 1
name: warm
hosts: {{emulate: inf2.48xlarge}}
defaults: {{engine: cpu, max_len: 128}}
models:
  first: {{source: {TINY}}}
  second: {{source: {TINY}, tp_degree: 2}}
  sleeper: {{source: {TINY}, replicas: {{min: 0, max: 1}}, scaling: {{idle_s: 1}}}}
"""
BACK_S = 60.0
OLDER_RAY = """\
import sys
from importlib.machinery import PathFinder

class WithoutTheMessage:
    def find_spec(self, name, path=None, target=None):
        if name != "ray.core.generated.node_manager_pb2":
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            del module.PrestartWorkersRequest

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, WithoutTheMessage())
"""

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def fleet() -> Iterator[LiveFleet]:
    with LiveFleet(SPEC) as live:
        yield live.wait_ready()


def warm_pid(fleet: LiveFleet) -> int:
    """The warm process of the host."""
    pids: list[int] = until(lambda: fleet.named_pids("fork_server"), BACK_S, "a warm process runs")
    return pids[0]


def spares(warm: int) -> list[int]:
    """The forks that are Ray's workers without work."""
    return [fork.pid for fork in psutil.Process(warm).children() if fork.cmdline()[:1] == [IDLE]]


def is_fork(fleet: LiveFleet, id: str) -> bool:
    return psutil.Process(fleet.replica(id)["pid"]).ppid() == warm_pid(fleet)


def kill(fleet: LiveFleet, id: str) -> None:
    """Kills the replica, and waits until its next start serves."""
    before = fleet.replica(id)
    os.kill(before["pid"], signal.SIGKILL)

    def back() -> bool:
        now = fleet.replica(id)
        return bool(now["state"] == "ready" and now["epoch"] > before["epoch"])

    until(back, BACK_S, f"{id} is back")


def text(fleet: LiveFleet, model: str) -> Any:
    answer = complete(fleet, model, "What is a NeuronCore?", max_tokens=8, temperature=0, ignore_eos=True)
    return answer.json()["choices"][0]["text"]


def pss_gib(pids: list[int]) -> float:
    """The memory of these processes, of which shared pages count once."""
    return sum(psutil.Process(pid).memory_full_info().pss for pid in pids) / 2**30


def test_the_host_uses_the_warm_process_that_up_has_started(fleet: LiveFleet) -> None:
    """There is no other one."""
    (warm,) = fleet.named_pids("fork_server")
    assert "corewright" in " ".join(psutil.Process(psutil.Process(warm).ppid()).cmdline())


def test_replicas_are_forks_and_share_the_memory_of_their_imports(fleet: LiveFleet) -> None:
    """With the warm process they take less than the plan has for their processes alone."""
    pids = [fleet.replica(id)["pid"] for id in ("first/0", "second/0")]

    assert is_fork(fleet, "first/0")
    assert is_fork(fleet, "second/0")
    assert pss_gib([warm_pid(fleet), *pids]) < len(pids) * PROCESS_GIB


def test_a_killed_replica_returns_in_a_worker_that_has_waited(fleet: LiveFleet) -> None:
    """As a fork. The other replicas and the warm process are not affected, although Ray
    ends the dead one's process group."""
    other, warm, answer = fleet.replica("second/0")["pid"], warm_pid(fleet), text(fleet, "first")
    spare = until(lambda: spares(warm), BACK_S, "a worker waits")
    kill(fleet, "first/0")

    assert fleet.replica("first/0")["pid"] in spare
    assert is_fork(fleet, "first/0")
    assert (fleet.replica("second/0")["pid"], warm_pid(fleet)) == (other, warm)
    assert text(fleet, "first") == answer


def test_an_unloaded_model_is_parked_and_returns(fleet: LiveFleet) -> None:
    """The status shows the host and the expected time of a start."""
    answer = text(fleet, "sleeper")

    def parked() -> Any:
        (model,) = [model for model in fleet.status()["models"] if model["name"] == "sleeper"]
        return model["parked"]

    shown = until(parked, BACK_S, "the model is parked")
    assert shown["host"] == "inf2.48xlarge/0"
    assert shown["start_s"] > 0
    assert text(fleet, "sleeper") == answer


def test_a_replica_whose_fork_is_refused_serves_as_a_fresh_process(fleet: LiveFleet) -> None:
    """Ray has prepared a worker for any replica by then. Here nobody listens on the socket."""
    (path,) = Home(fleet.home).sockets.glob("warm-*")
    answer, aside = text(fleet, "first"), path.with_name("aside")
    path.rename(aside)
    path.touch()
    for pid in spares(warm_pid(fleet)):
        os.kill(pid, signal.SIGKILL)
    kill(fleet, "first/0")
    served, is_forked = text(fleet, "first"), is_fork(fleet, "first/0")
    aside.rename(path)

    assert (served, is_forked) == (answer, False)


def test_without_a_warm_process_replicas_start_as_fresh_ones(fleet: LiveFleet) -> None:
    """It was killed: its forks serve on, and another one is not started within a minute."""
    warm, answer = warm_pid(fleet), text(fleet, "second")
    os.kill(warm, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(warm) or fleet.named_pids("fork_server") == [], BACK_S, "it has ended")
    kill(fleet, "second/0")

    assert text(fleet, "first")
    assert text(fleet, "second") == answer
    assert psutil.Process(psutil.Process(fleet.replica("second/0")["pid"]).ppid()).name() == "raylet"


def test_where_ray_cannot_be_asked_for_a_worker_replicas_are_forks_of_their_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its version lacks the internal call: no process of this fleet finds the message of it."""
    (tmp_path / "sitecustomize.py").write_text(OLDER_RAY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    with LiveFleet(SPEC) as lacking:
        lacking.wait_ready()
        answer = text(lacking, "first")
        kill(lacking, "first/0")

        assert is_fork(lacking, "first/0")
        assert text(lacking, "first") == answer
        assert spares(warm_pid(lacking)) == []


def test_the_end_of_the_fleet_leaves_no_process(fleet: LiveFleet) -> None:
    """Neither forks nor warm processes."""
    assert fleet.stop() == 0
    assert fleet.processes() == []
