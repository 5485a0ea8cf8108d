"""How long a fleet takes to come back, against the bare process and the bare Ray actor; and what a drain loses.

    .venv/bin/python -m benchmarks.operations

One fleet on an emulated host. Each ratio is the median of the rounds' ratios, and the two sides of a round are measured
one after the other:

- the controller actor is killed (-9) while streams are open, until an apply is accepted, against a bare Ray actor that
  is killed and answers again;
- 200 streams on two echo replicas, one of which is drained.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import Target, finish
from orchestrator.process.home import Home
from tests.fleet import LiveFleet, until
from tests.orchestrator.clients import Admin, Streamed, echo_text

ROUNDS = 3
STREAMS = 200
STREAM_TOKENS = 400
DEADLINE_S = 90.0
SPEC = """\
version: 1
name: operations
hosts: {emulate: inf2.48xlarge}
models:
  echo: {engine: echo, tp_degree: 2, replicas: 2, max_batch: 128, max_queue: 1000, engine_options: {step_ms: 20}}
"""
BARE_ACTOR = """\
import os, signal, sys, time
import ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
class Bare:
    def pid(self):
        return os.getpid()
actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)(Bare).remote()
pid = ray.get(actor.pid.remote())
began = time.perf_counter()
os.kill(pid, signal.SIGKILL)
while True:
    try:
        if ray.get(actor.pid.remote()) != pid:
            break
    except ray.exceptions.RayActorError:
        time.sleep(0.01)
print(time.perf_counter() - began, flush=True)
os._exit(0)
"""
TARGETS = {
    "controller_back_over_bare_actor": Target(2.0, at_least=False),
    "broken_streams_at_controller_kill": Target(0, at_least=False),
    "lost_by_drain_under_200_streams": Target(0, at_least=False),
}


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def bare_actor_back_s(address: str) -> float:
    """A Ray actor without any work of its own, from the kill to its next answer. In a process of its own, which Ray
    may end as it likes."""
    completed = subprocess.run(
        [sys.executable, "-c", BARE_ACTOR, address], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return float(completed.stdout.split()[-1])


def controller_back_s(fleet: LiveFleet, queue: int) -> tuple[float, int]:
    """From the kill to the next accepted apply, and how many of the open streams broke."""
    streams = [Streamed(fleet, "echo", f"stream {i}", STREAM_TOKENS) for i in range(8)]
    for stream in streams:
        assert stream.begun.wait(DEADLINE_S)
    pid = fleet.controller_pid()
    text = SPEC.replace("max_queue: 1000", f"max_queue: {queue}")
    admin = Admin(fleet.home)
    began = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not _alive(pid), DEADLINE_S, "the controller is dead")

    def accepted() -> Any:
        status, answer = admin.apply(text)
        return answer if status == 200 else None

    answer = until(accepted, DEADLINE_S, "an apply is accepted")
    seconds = time.perf_counter() - began
    assert answer["revision"] > 1
    return seconds, _broken(streams)


def _broken(streams: list[Streamed]) -> int:
    for stream in streams:
        assert stream.done.wait(DEADLINE_S), "a stream never ended"
    return sum(stream.text != echo_text(f"stream {i}", STREAM_TOKENS) for i, stream in enumerate(streams))


def lost_by_drain(fleet: LiveFleet) -> int:
    """Streams that did not get their whole text."""
    streams = [Streamed(fleet, "echo", f"stream {i}", STREAM_TOKENS) for i in range(STREAMS)]
    for stream in streams:
        assert stream.begun.wait(DEADLINE_S)
    id = next(m for m in fleet.status()["models"] if m["name"] == "echo")["replicas"][0]["id"]
    assert fleet.corewright("drain", id).returncode == 0
    return _broken(streams)


def main() -> None:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    measured: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="cwb-", dir="/tmp") as folder:
        spec = Path(folder) / "spec.yaml"
        spec.write_text(SPEC)
        fleet = LiveFleet(spec)
        try:
            fleet.wait_ready()
            record = Home(fleet.home).read_record()
            assert record is not None
            broken, ratios, seconds = 0, [], []
            for round in range(ROUNDS):
                theirs = bare_actor_back_s(record.ray_address)
                ours, lost = controller_back_s(fleet, 500 + round)
                print(f"controller: bare actor {theirs:.2f} s, killed to the next apply {ours:.2f} s", flush=True)
                ratios.append(ours / theirs)
                seconds.append(ours)
                broken += lost
            measured["controller_back_over_bare_actor"] = statistics.median(ratios)
            measured["controller_back_s"] = statistics.median(seconds)
            measured["broken_streams_at_controller_kill"] = broken
            measured["lost_by_drain_under_200_streams"] = lost_by_drain(fleet)
        finally:
            fleet.clean()
    finish("operations", measured, TARGETS)


if __name__ == "__main__":
    main()
