"""Several emulated hosts on one machine: one raylet each, replicas on their own, and the end of all of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.process.home import Home
from orchestrator.revisions.spec_file import examine, start_problems
from placements.planner.spec_hosts import Machine
from tests.fleet import LiveFleet, until
from tests.orchestrator.clients import complete, echo_text
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


ASK = """
import os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # Ray prints too
import asyncio, json
from pathlib import Path
import ray
from orchestrator.process.awake_clock import AwakeClock
from orchestrator.on_ray.ray_cluster import RayCluster
from orchestrator.on_ray.ray_nodes import NAMESPACE, host_labels
from workers.host import host_facts as host
from workers.artifacts.store.store_settings import StoreSettings

address, pid, claims, log = sys.argv[1:]
started = host.process_start(int(pid))
ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")

def tell(*values):
    print(json.dumps(values), file=answers, flush=True)

async def main():
    store = StoreSettings(root=str(Path(claims).parent / "store"))
    loop, clock = asyncio.get_running_loop(), AwakeClock()
    beating = loop.create_task(clock.beat())
    cluster = RayCluster(store, host_labels(f"inf2.48xlarge/{i}" for i in range(4)), clock=clock)
    tell(*sorted(await cluster.lost_hosts()))
    held = await cluster.held_cores(claims, host="inf2.48xlarge/2")
    tell(*sorted(held))
    sys.stdin.readline()  # meanwhile the raylet of host 2 is killed
    began = loop.time()
    gone = await cluster.end("third/0.1", int(pid), started, host="inf2.48xlarge/2")
    deadline = loop.time() + 5
    while (held := await cluster.held_cores(claims, host="inf2.48xlarge/2")) and loop.time() < deadline:
        await asyncio.sleep(0.05)  # the controller looks too, and one who looks holds a core for a moment
    tail = await cluster.log_tail(log, 3, host="inf2.48xlarge/2")
    alive = host.is_alive(int(pid), started)
    tell(gone, alive, sorted(held), len(tail), loop.time() - began)
    while "inf2.48xlarge/2" not in (lost := await cluster.lost_hosts()):
        await asyncio.sleep(0.1)
    tell(sorted(lost), loop.time() - began)
    again = await cluster.end("third/0.1", int(pid), started, host="inf2.48xlarge/2")
    tell(again, sorted(await cluster.held_cores(claims, host="inf2.48xlarge/2")))

asyncio.run(main())
"""


def test_up_starts_several_emulated_hosts_and_one_real_machine() -> None:
    """A count above 1 is rejected for real machines only."""
    many = SPEC.replace("emulate", "instance")
    machine = Machine(cpus=tuple(range(192)), instance="inf2.48xlarge")
    assert start_problems(examine(SPEC, "spec.yaml", "/", Machine(cpus=(0, 1)))) == ()
    refused = start_problems(examine(many, "spec.yaml", "/", machine))
    assert [problem.id for problem in refused] == ["hosts-not-served"]


@pytest.mark.live
def test_each_host_has_its_raylet_and_its_replicas_and_a_killed_one_is_lost(home: Path) -> None:
    """Replicas run under their host's raylet with separate claims. A host without its raylet is lost, its replica's
    process is ended, and `down` leaves nothing.
    """
    fleet = LiveFleet(SPEC, home=home, secure=True).wait_ready()
    raylets = [fleet.raylet_pid(index) for index in range(3)]
    replicas = {id: fleet.replica(id) for id in HOSTS}
    for id, index in HOSTS.items():
        replica = replicas[id]
        assert replica["host"] == f"inf2.48xlarge/{index}"
        assert psutil.Process(replica["pid"]).ppid() == raylets[index]
        assert set(held_cores(Home(home).claims(index)).values()) == {replica["pid"]}
        model = id.partition("/")[0]
        assert complete(fleet, model, max_tokens=4).json()["choices"][0]["text"] == echo_text("hello", 4)
    assert [host["leased"] for host in fleet.status()["hosts"]] == [8, 8, 8]
    (daemon,) = {psutil.Process(pid).ppid() for pid in raylets}  # they die with it, and it dies with `up`
    assert psutil.Process(daemon).ppid() == fleet.process.pid
    for name in ("::ControllerActor", "::ServeController", "::ServeReplica"):
        (pid,) = fleet.named_pids(name)
        assert psutil.Process(pid).ppid() == raylets[0]  # none of them is lost with another host

    lost = replicas["third/0"]
    driver = asking(fleet, lost["pid"], Home(home).claims(2), lost["log_file"])
    assert answer(driver) == ["inf2.48xlarge/3"]  # absent: there never was one
    assert answer(driver) == list(range(8))
    os.kill(lost["pid"], signal.SIGSTOP)  # so that it outlives its raylet
    os.kill(raylets[2], signal.SIGKILL)
    assert driver.stdin is not None
    driver.stdin.write("\n")
    driver.stdin.flush()

    gone, alive, held, lines, took = answer(driver)
    assert (gone, alive, held) == (True, False, [])
    assert lines > 0
    assert took < 10
    names, seen_after = answer(driver)
    assert names == ["inf2.48xlarge/2", "inf2.48xlarge/3"]
    assert seen_after < 10
    assert answer(driver) == [True, []]
    assert driver.wait(30) == 0
    for model in ("first", "second"):
        assert complete(fleet, model, max_tokens=4).json()["choices"][0]["text"] == echo_text("hello", 4)

    began = time.monotonic()
    result = fleet.corewright("down")
    assert result.returncode == 0, result.stderr
    assert fleet.process.wait(40) == 0
    assert time.monotonic() - began < 30
    assert fleet.processes() == []
    assert not Home(home).sockets.exists()


def asking(fleet: LiveFleet, pid: int, claims: Path, log: str) -> subprocess.Popen[str]:
    """A `RayCluster` beside the controller's."""
    record = Home(fleet.home).read_record()
    assert record is not None
    return subprocess.Popen(
        [sys.executable, "-c", ASK, record.ray_address, str(pid), str(claims), log],
        env={**fleet.env, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(Home(fleet.home).ray_token_file)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def answer(driver: subprocess.Popen[str]) -> Any:
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
