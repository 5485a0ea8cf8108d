"""Real fleets whose model lies in S3: fetched once, resumed whatever dies, and no credential to be seen."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.home import Home
from tests.checkpoints import make_checkpoint
from tests.fleet import LiveFleet, until
from tests.s3 import ACCESS_KEY, SECRET_KEY, SESSION_TOKEN, FaultProxy, S3Server

pytestmark = pytest.mark.slow

DEADLINE_S = 120.0
WEIGHTS = "tiny/model.safetensors"
SPAN = 8 * 2**20  # bytes of one request
SECRETS = (ACCESS_KEY, SECRET_KEY, SESSION_TOKEN, "X-Amz-Signature", "X-Amz-Security-Token", "Signature=")
SPEC = """\
version: 1
hosts: {{emulate: inf2.48xlarge}}
models:
  m: {{engine: cpu, source: {source}, replicas: {replicas}, max_batch: 2, max_len: 64}}
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a model of some spans, by key."""
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", hidden=512, layers=3, heads=8)
    return {f"tiny/{path.name}": path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def source(s3_server: S3Server, s3_proxy: FaultProxy, checkpoint: dict[str, bytes]) -> str:
    return s3_server.bucket(files=checkpoint) + "/tiny"


@pytest.fixture
def fleets(home: Path) -> Iterator[list[LiveFleet]]:
    made: list[LiveFleet] = []
    yield made
    for fleet in made:
        fleet.clean()


def answer(fleet: LiveFleet) -> str:
    told = fleet.http.post("/v1/completions", json={"model": "m", "prompt": "A slot", "max_tokens": 4}).json()
    text: str = told["choices"][0]["text"]
    return text


def host_actor(fleet: LiveFleet) -> int:
    found: list[int] = until(lambda: fleet.named_pids("HostActor"), DEADLINE_S, "the host's actor has a process")
    return found[0]


def leaks(fleet: LiveFleet, home: Path, told: str) -> list[str]:
    """Where a credential is to be seen: in what was told, in any file of the home and of Ray, in a command line."""
    found = [f"told: {mark}" for mark in SECRETS if mark in told]
    for root in (home, Home(home).sockets):
        for path in root.rglob("*"):
            if path.is_file() and path.suffix != ".safetensors" and path.stat().st_size < 64 * 2**20:
                data = path.read_bytes()
                found += [f"{path}: {mark}" for mark in SECRETS if mark.encode() in data]
    for pid in (*fleet.processes(), fleet.process.pid):
        if psutil.pid_exists(pid):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            found += [f"the command line of {pid}: {mark}" for mark in SECRETS if mark.encode() in line]
    return found


def test_two_replicas_that_start_together_transfer_the_bytes_once(
    home: Path, source: str, s3_proxy: FaultProxy, checkpoint: dict[str, bytes], fleets: list[LiveFleet]
) -> None:
    """Meanwhile the status, `up` and the events tell how far it is, and nothing that is told or kept holds a
    credential. A replica that dies is started again without S3."""
    held = s3_proxy.hold(WEIGHTS, SPAN + 1000)
    fleet = LiveFleet(SPEC.format(source=source, replicas=2), home=home)
    fleets.append(fleet)
    assert held.reached.wait(DEADLINE_S), fleet.output()

    def fetching() -> bool:
        return all(
            replica["fetch"] and replica["fetch"]["bytes"] for replica in fleet.status()["models"][0]["replicas"]
        )

    until(fetching, DEADLINE_S, "both replicas are seen to wait for it")
    status = fleet.status()
    size = sum(map(len, checkpoint.values()))
    assert [replica["state"] for replica in status["models"][0]["replicas"]] == ["fetching", "fetching"]
    assert status["models"][0]["replicas"][0]["fetch"]["total"] == size
    table = fleet.corewright("status").stdout
    assert "fetching" in table
    assert source in table
    held.released.set()
    fleet.wait_ready()
    assert len(answer(fleet)) > 0
    assert s3_proxy.bytes(WEIGHTS) == len(checkpoint[WEIGHTS])
    events = fleet.corewright("events", "-o", "json").stdout
    assert "m/0 fetching" in fleet.output()
    told = [event["message"] for event in json.loads(events)["events"] if event["reason"] == "Fetched"]
    assert len(told) == 2
    metrics = fleet.http.get("/metrics").text
    assert f'corewright_fetched_bytes_total{{model="m"}} {size}' in metrics
    assert leaks(fleet, home, "".join((events, json.dumps(fleet.status()), fleet.output(), table, metrics))) == []

    s3_proxy.away()
    os.kill(fleet.replica("m/0")["pid"], signal.SIGKILL)
    until(lambda: (fleet.replica("m/0")["epoch"], fleet.replica("m/0")["state"]) == (2, "ready"), DEADLINE_S, "again")
    assert s3_proxy.bytes(WEIGHTS) == len(checkpoint[WEIGHTS])
    fleet.stop()


def test_a_fetch_is_resumed_whoever_is_killed_in_the_middle_of_it(
    home: Path, source: str, s3_proxy: FaultProxy, checkpoint: dict[str, bytes], fleets: list[LiveFleet]
) -> None:
    """The controller: the fetch goes on meanwhile. The host's actor, and `up` with all it has: what had arrived is not
    fetched again."""
    held = s3_proxy.hold(WEIGHTS, SPAN + 1000)
    fleet = LiveFleet(SPEC.format(source=source, replicas=1), home=home)
    fleets.append(fleet)
    assert held.reached.wait(DEADLINE_S), fleet.output()
    until(lambda: fleet.replica("m/0")["state"] == "fetching", DEADLINE_S, "it is fetched")
    actor = host_actor(fleet)
    os.kill(fleet.controller_pid(), signal.SIGKILL)
    until(
        lambda: '"epoch": 2' in (told := fleet.corewright("status", "-o", "json").stdout) and '"fetching"' in told,
        DEADLINE_S,
        "it is there again",
    )
    assert host_actor(fleet) == actor
    again = s3_proxy.hold(WEIGHTS, SPAN + 1000)
    os.kill(actor, signal.SIGKILL)
    held.released.set()
    assert again.reached.wait(DEADLINE_S), fleet.output()
    os.kill(fleet.process.pid, signal.SIGKILL)
    fleet.process.wait()
    s3_proxy.heal()
    second = LiveFleet(fleet.spec, home=home)
    fleets.append(second)
    second.wait_ready()

    assert len(answer(second)) > 0
    arrived_twice = s3_proxy.bytes(WEIGHTS) - len(checkpoint[WEIGHTS])
    assert arrived_twice <= 2 * SPAN  # those that were under way at the two deaths
    second.stop()
