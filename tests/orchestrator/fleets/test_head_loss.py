"""The loss of the head of a Ray cluster: of its GCS alone, which ends the head's Ray, and of the whole machine. Streams
run through the gateways of the workers meanwhile."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.fleet import until
from tests.network_fleet import NetworkFleet, gateway_url, start_cluster
from tests.network_hosts import NetworkHost, needs_network_hosts, network_hosts
from tests.network_invariants import Held, held_cores
from tests.orchestrator.clients import Streamed, echo_text

SPEC = """\
version: 1
name: network
hosts: {emulate: inf2.48xlarge, count: 2}
defaults: {engine: echo, max_len: 4096, tp_degree: 24, engine_options: {step_ms: 20}}
models:
  first: {}
  second: {}
"""
MODELS = ("first", "second")
IDS = ("first/0", "second/0")
TOKENS = 3000  # 60 s
GAP_S = 2.0  # between two tokens of a stream
SWITCH = "10.77.0.254"  # where the test runs, and Redis
AWAY_S = 5.0  # from the loss of the head to the start of its Ray
BACK_S = 60.0  # from that start to an answer of the controller

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="redis-server is not installed (apt-get install redis-server)"
)
pytestmark = [pytest.mark.soak, pytest.mark.timeout(900), needs_network_hosts]


@contextlib.contextmanager
def redis() -> Iterator[None]:
    words = ("redis-server", "--bind", SWITCH, "--protected-mode", "no", "--save", "")
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        server.kill()
        server.wait()


def replicas(fleet: NetworkFleet) -> set[int]:
    """Returns the pids of the replicas on all hosts."""
    return {pid for worker in fleet.workers for pid in worker.processes("ray::Replica[")}


def holders(fleet: NetworkFleet) -> dict[str, list[Held]]:
    """Returns the cores that are held on each worker, and by which processes."""
    return {worker.name: sorted(held_cores(worker)) for worker in fleet.workers}


def streams(fleet: NetworkFleet, prompt: str) -> list[Streamed]:
    """Returns a stream of each model through each worker's gateway, all of which have begun."""
    started = [
        Streamed(fleet, model, prompt, TOKENS, gateway_url(worker)) for worker in fleet.workers for model in MODELS
    ]
    for stream in started:
        until(stream.begun.is_set, 30, f"a stream has begun: {stream.error}, {stream.broken}")
    return started


def lose_gcs(head: NetworkHost) -> None:
    """Kill Ray's GCS. The head's Ray ends with it, and its service kills the agents that are left."""
    head.kill("gcs_server")
    until(lambda: not head.processes("raylet/raylet"), 30, "the head's raylet has ended")
    until(lambda: not head.processes("ray::ControllerActor"), 30, "the controller has ended")
    head.kill("ray::")


def lose_machine(head: NetworkHost) -> None:
    """Replace the machine by a new one at its address, with an empty disk."""
    head.power_off()
    head.boot()


def answers(fleet: NetworkFleet) -> bool:
    """Returns whether the controller answers on the head, with all replicas ready, and the gateways serve."""
    try:
        states = [fleet.replica(id)["state"] for id in IDS]
        ready = [httpx.get(f"{gateway_url(worker)}/readyz").status_code for worker in fleet.workers]
        return states == ["ready"] * len(IDS) and ready == [200] * len(ready)
    except httpx.TransportError:  # no fleet.json on the new disk yet, or nothing listens
        return False


def survive(fleet: NetworkFleet, settings: dict[str, str], record: Callable[[str, object], None]) -> None:
    """Lose the head in both ways, and check that the fleet goes on with the same processes on the same cores, and that
    streams go on. Records the seconds from the start of the head's Ray to the answer of the controller, and the longest
    gap between two tokens."""
    until(lambda: answers(fleet), BACK_S, f"all gateways are ready\n{fleet.output()}")
    living, held, epochs = replicas(fleet), holders(fleet), [fleet.replica(id)["epoch"] for id in IDS]
    assert len(living) == len(IDS)
    for lose in (lose_gcs, lose_machine):
        prompt = f"through {lose.__name__}"
        running = streams(fleet, prompt)
        lose(fleet.head)
        time.sleep(AWAY_S)  # the head is away for a while: the test's fault, not a wait
        assert replicas(fleet) == living
        fleet.head.start_ray(settings=settings)()
        until(lambda: answers(fleet), BACK_S, f"the controller answers again after {lose.__name__}\n{fleet.output()}")
        record(lose.__name__, round(time.monotonic() - fleet.head.ray_began, 1))
        assert replicas(fleet) == living
        assert [fleet.replica(id)["epoch"] for id in IDS] == epochs
        for stream in running:
            until(stream.done.is_set, TOKENS, "the stream has ended")
            assert stream.text == echo_text(prompt, TOKENS), (stream.error, stream.broken)
        gap_s = max(stream.longest_gap_s for stream in running)
        record(f"{lose.__name__} longest gap", round(gap_s, 2))
        assert gap_s < GAP_S
        assert replicas(fleet) == living
        assert holders(fleet) == held
        assert fleet.complete("first", "hello", 8) == echo_text("hello", 8)


def is_removable_from(fleet: NetworkFleet, worker: NetworkHost) -> None:
    """Apply a changed spec on a worker, and take the fleet down there."""
    worker.path("spec.yaml").write_text(SPEC.replace("4096", "2048"))
    join = ("--ray-address", f"{fleet.head.address}:6379")
    output = worker.run("corewright", "up", "spec.yaml", *join, "--detach", deadline_s=180)
    assert "revision 2 is applied" in output
    worker.run("corewright", "down", *join, "--fleet", "network", deadline_s=180)
    until(lambda: not replicas(fleet), 20, "no replica is left")


@needs_redis
def test_replicas_outlive_the_head_with_a_gcs_in_redis(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The new controller adopts them, and commands work from a worker afterwards."""
    with network_hosts(3, tmp_path) as network, redis():
        settings = {"RAY_REDIS_ADDRESS": f"{SWITCH}:6379", "RAY_external_storage_namespace": "network"}
        start_cluster(network, settings)
        fleet = NetworkFleet(network, SPEC).wait_ready()
        survive(fleet, settings, record_property)
        is_removable_from(fleet, fleet.workers[0])


def test_replicas_outlive_the_head_with_a_gcs_in_rocksdb(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Its folder is on a disk that outlives the head."""
    with network_hosts(3, tmp_path / "logs") as network:
        settings = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(tmp_path / "gcs")}
        start_cluster(network, settings)
        survive(NetworkFleet(network, SPEC).wait_ready(), settings, record_property)


def test_replicas_end_with_the_head_without_a_store(tmp_path: Path) -> None:
    """The new GCS does not know the workers' nodes, which end. Streams go on until then, and have an end."""
    with network_hosts(3, tmp_path) as network:
        start_cluster(network)
        fleet = NetworkFleet(network, SPEC).wait_ready()
        until(lambda: answers(fleet), BACK_S, f"all gateways are ready\n{fleet.output()}")
        running = streams(fleet, "hello")
        lose_gcs(fleet.head)
        lengths = [len(stream.text) for stream in running]
        until(
            lambda: all(len(stream.text) > length for stream, length in zip(running, lengths, strict=True)),
            5,
            "streams go on",
        )
        fleet.head.start_ray()()
        until(lambda: not replicas(fleet), 60, "all replicas have ended")
        for stream in running:
            until(stream.done.is_set, 30, "the stream has ended")
            assert echo_text("hello", TOKENS).startswith(stream.text)
            assert stream.error or stream.broken
