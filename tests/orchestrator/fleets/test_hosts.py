"""Several emulated hosts on one machine: one raylet each, replicas on their own, and the end of all of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.control.resolve.spec_file import examine, start_problems
from orchestrator.process.home import Home
from placements.facts.topology import Machine
from tests.fleet import LiveFleet, until
from tests.orchestrator.clients import complete, echo_text
from tests.orchestrator.conftest import temporary_home
from workers.host.core_claims import held_cores

SPEC = """\
version: 1
name: hosts
hosts: {emulate: inf2.48xlarge, count: 3}
defaults: {engine: echo, max_len: 512, tp_degree: 8}
models:
  first: {cores: ["inf2.48xlarge/0:8-15"]}
  second: {cores: ["inf2.48xlarge/1:0-7"]}
  third: {cores: ["inf2.48xlarge/2:0-7"]}
"""
HOSTS = {"first/0": 0, "second/0": 1, "third/0": 2}


DRIVER = """
import os, sys
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # Ray prints too
import asyncio, json
from pathlib import Path
import ray
from orchestrator.process.awake_clock import AwakeClock
from orchestrator.cluster.ray_cluster import RayCluster
from orchestrator.cluster.ray_names import ray_name
from workers.host import host_facts as host
from workers.artifacts.store.store import StoreSettings

address, pid, claims, log = sys.argv[1:]
started = host.process_start(int(pid))
ray.init(address=address, namespace=ray_name("hosts"), log_to_driver=False, logging_level="error")

def report(*values):
    print(json.dumps(values), file=replies, flush=True)

async def main():
    store = StoreSettings(root=str(Path(claims).parent / "store"))
    loop, clock = asyncio.get_running_loop(), AwakeClock()
    beating = loop.create_task(clock.beat())
    cluster = RayCluster(store, clock=clock, home=str(Path(claims).parent.parent), name="hosts")
    cluster.add_hosts(f"inf2.48xlarge/{i}" for i in range(4))
    report(*sorted(await cluster.lost_hosts()))
    held = await cluster.held_cores(claims, host="inf2.48xlarge/2")
    report(*sorted(held))
    sys.stdin.readline()  # meanwhile the raylet of host 2 is killed
    began = loop.time()
    gone = await cluster.end("third/0.1", int(pid), started, host="inf2.48xlarge/2")
    deadline = loop.time() + 5
    while (held := await cluster.held_cores(claims, host="inf2.48xlarge/2")) and loop.time() < deadline:
        await asyncio.sleep(0.05)  # the controller checks, too, and a check locks a core for a moment
    tail = (await cluster.read_log(log, 3, "inf2.48xlarge/2", ended=True)).text.splitlines()
    alive = host.is_alive(int(pid), started)
    report(gone, alive, sorted(held), len(tail), loop.time() - began)
    while "inf2.48xlarge/2" not in (lost := await cluster.lost_hosts()):
        await asyncio.sleep(0.1)
    report(sorted(lost), loop.time() - began)
    again = await cluster.end("third/0.1", int(pid), started, host="inf2.48xlarge/2")
    report(again, sorted(await cluster.held_cores(claims, host="inf2.48xlarge/2")))

asyncio.run(main())
"""


def test_up_starts_several_emulated_hosts_and_one_real_machine() -> None:
    """A count above 1 is rejected for real machines only."""
    many = SPEC.replace("emulate", "instance")
    machine = Machine(cpus=tuple(range(192)), instance="inf2.48xlarge")
    assert start_problems(examine(SPEC, "spec.yaml", "/", Machine(cpus=(0, 1)))) == ()
    refused = start_problems(examine(many, "spec.yaml", "/", machine))
    assert [problem.id for problem in refused] == ["hosts-not-served"]


@pytest.fixture(scope="module")
def fleet() -> Iterator[LiveFleet]:
    """One fleet for all tests below, which run in the order of its life."""
    with temporary_home() as home:
        yield LiveFleet(SPEC, home=home, secure=True).wait_ready()


@pytest.mark.live
@pytest.mark.parametrize(("id", "index"), HOSTS.items())
def test_a_replica_runs_under_the_raylet_of_its_host(id: str, index: int, fleet: LiveFleet) -> None:
    """It holds the core claims of that host, and serves."""
    replica = fleet.replica(id)
    assert replica["host"] == f"inf2.48xlarge/{index}"
    assert psutil.Process(replica["pid"]).ppid() == fleet.raylet_pid(index)
    assert set(held_cores(Home(fleet.home).claims(index)).values()) == {replica["pid"]}
    assert serves(fleet, id.partition("/")[0])


@pytest.mark.live
def test_each_host_has_leased_the_cores_of_its_replica(fleet: LiveFleet) -> None:
    assert [host["leased"] for host in fleet.status()["hosts"]] == [8, 8, 8]


@pytest.mark.live
def test_the_raylets_are_children_of_the_daemon_and_the_daemon_of_up(fleet: LiveFleet) -> None:
    """Raylets end with the daemon, and the daemon ends with `up`."""
    (daemon,) = {psutil.Process(fleet.raylet_pid(index)).ppid() for index in range(3)}
    assert psutil.Process(daemon).ppid() == fleet.process.pid


@pytest.mark.live
@pytest.mark.parametrize("name", ["::ControllerActor", "::ServeController", "::ServeReplica"])
def test_the_controller_and_the_gateway_run_on_the_first_host(name: str, fleet: LiveFleet) -> None:
    """The loss of another host loses neither."""
    (pid,) = fleet.named_pids(name)
    assert psutil.Process(pid).ppid() == fleet.raylet_pid(0)


@pytest.mark.live
def test_a_host_without_its_raylet_is_lost(fleet: LiveFleet) -> None:
    """The process of its replica is killed and its claims become free; other hosts continue to serve."""
    lost = fleet.replica("third/0")
    driver = start_driver(fleet, lost["pid"], Home(fleet.home).claims(2), lost["log_file"])
    assert next_reply(driver) == ["inf2.48xlarge/3"]  # absent: there never was one
    assert next_reply(driver) == list(range(8))
    os.kill(lost["pid"], signal.SIGSTOP)  # so that it outlives its raylet
    os.kill(fleet.raylet_pid(2), signal.SIGKILL)
    assert driver.stdin is not None
    driver.stdin.write("\n")
    driver.stdin.flush()

    gone, alive, held, lines, took = next_reply(driver)
    assert (gone, alive, held, lines > 0, took < 10) == (True, False, [], True, True)
    names, seen_after = next_reply(driver)
    assert (names, seen_after < 10) == (["inf2.48xlarge/2", "inf2.48xlarge/3"], True)
    assert next_reply(driver) == [True, []]
    assert driver.wait(30) == 0
    assert serves(fleet, "first")
    assert serves(fleet, "second")


@pytest.mark.live
def test_down_leaves_nothing_of_a_fleet_that_has_lost_a_host(fleet: LiveFleet) -> None:
    began = time.monotonic()
    result = fleet.corewright("down")
    assert result.returncode == 0, result.stderr
    assert fleet.process.wait(30) == 0
    assert time.monotonic() - began < 30
    assert fleet.processes() == []
    assert not Home(fleet.home).sockets.exists()


def serves(fleet: LiveFleet, model: str) -> bool:
    text = complete(fleet, model, max_tokens=4).json()["choices"][0]["text"]
    return bool(text == echo_text("hello", 4))


def start_driver(fleet: LiveFleet, pid: int, claims: Path, log: str) -> subprocess.Popen[str]:
    """Starts a process with a second `RayCluster`, beside the controller's."""
    record = Home(fleet.home).read_record()
    assert record is not None
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, record.ray_address, str(pid), str(claims), log],
        env={**fleet.env, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(Home(fleet.home).ray_token_file)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def next_reply(driver: subprocess.Popen[str]) -> Any:
    assert driver.stdout is not None
    return json.loads(driver.stdout.readline())


@pytest.mark.soak
def test_after_kill_9_of_the_daemon_the_next_up_ends_the_leftovers_of_all_raylets(home: Path) -> None:
    """Within 10 s of the next `up` no process of any host is left; the new fleet has all hosts, and ends completely."""
    first = LiveFleet(SPEC, home=home).wait_ready()
    old = [psutil.Process(pid) for pid in first.processes()]
    assert {first.raylet_pid(index) for index in range(3)} <= {process.pid for process in old}
    first.process.kill()
    first.process.wait()

    second = LiveFleet(SPEC, home=home)
    until(lambda: not any(process.is_running() for process in old), 10, "the old processes are gone")
    second.wait_ready()
    claims = [set(held_cores(Home(home).claims(index)).values()) for index in range(3)]
    assert claims == [{second.replica(id)["pid"]} for id in HOSTS]
    assert second.stop(signal.SIGINT) == 0
    assert second.processes() == []
