"""Real fleets whose models lie in S3 or on the hub: fetched once, resumed whatever dies, and no credential
to be seen."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.process.home import Home
from tests import leaks
from tests.checkpoints import make_checkpoint
from tests.fleet import LiveFleet, until
from tests.hub import TOKEN, HubServer, Repo
from tests.s3 import FaultProxy, S3Server

pytestmark = pytest.mark.soak

DEADLINE_S = 120.0
WEIGHTS = "tiny/model.safetensors"
SPAN = 8 * 2**20  # bytes of one request
SPEC = """\
version: 1
hosts: {{emulate: inf2.48xlarge}}
models:
  m: {{engine: cpu, source: {source}, replicas: {replicas}, max_batch: 2, max_len: 64, trust_remote_code: true}}
"""
"""There is no such code; but with it a process is not asked for before all is there, so these replicas stay `fetching`.
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a model of some spans, by key."""
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", hidden=512, layers=3, heads=8)
    return {f"tiny/{path.name}": path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def source(s3_server: S3Server, s3_proxy: FaultProxy, checkpoint: dict[str, bytes]) -> str:
    return s3_server.bucket(files=checkpoint) + "/tiny"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The files of two small models that answer differently, by name."""
    made = []
    for seed in (0, 1):
        folder = make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", seed=seed)
        made.append({path.name: path.read_bytes() for path in sorted(folder.iterdir())})
    return made[0], made[1]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """This process's environment leads to it, with its token."""
    with HubServer() as server:
        for name, value in {**server.env, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def fleets(home: Path) -> Iterator[list[LiveFleet]]:
    made: list[LiveFleet] = []
    yield made
    for fleet in made:
        fleet.clean()


def answer(fleet: LiveFleet, model: str = "m") -> str:
    body = {"model": model, "prompt": "A slot", "max_tokens": 8, "temperature": 0}
    reply = fleet.http.post("/v1/completions", json=body).json()
    text: str = reply["choices"][0]["text"]
    return text


def ready(fleet: LiveFleet, id: str, epoch: int) -> Any:
    """That replica, once it has been started so often and is ready."""

    def replica_in_state() -> Any:
        replica = next((r for model in fleet.status()["models"] for r in model["replicas"] if r["id"] == id), None)
        return replica is not None and (replica["epoch"], replica["state"]) == (epoch, "ready") and replica

    return until(replica_in_state, DEADLINE_S, f"{id}.{epoch} is ready: {fleet.output()}")


def kept(fleet: LiveFleet) -> dict[str, tuple[str, str]]:
    """The fetched models of this host: revision and folder, by source."""
    models = json.loads(fleet.corewright("cache", "ls", "-o", "json").stdout)["models"]
    return {model["source"]: (model["revision"], model["folder"]) for model in models}


def messages_of(fleet: LiveFleet, reason: str, model: str = "m") -> list[str]:
    """What the events of that reason say, oldest first."""
    events = json.loads(fleet.corewright("events", "--since", "0", "-o", "json").stdout)["events"]
    return [event["message"] for event in events if (event["reason"], event["model"]) == (reason, model)]


def host_actor(fleet: LiveFleet) -> int:
    pids: list[int] = until(lambda: fleet.named_pids("HostActor"), DEADLINE_S, "the host's actor has a process")
    return pids[0]


def seen(fleet: LiveFleet, home: Path, text: str) -> list[str]:
    """Secrets in what was told, in any file of the home and of Ray, and in what processes show."""
    shown = leaks.in_processes((*fleet.processes(), fleet.process.pid))
    return leaks.in_text(text) + leaks.in_files(home, Home(home).sockets) + shown


def test_two_replicas_that_start_together_transfer_the_bytes_once(
    home: Path, source: str, s3_proxy: FaultProxy, checkpoint: dict[str, bytes], fleets: list[LiveFleet]
) -> None:
    """Meanwhile the status, `up` and the events show the progress, and no output or file has a credential. A
    replica that dies restarts without S3.
    """
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
    until(lambda: "m/0 fetching" in fleet.output(), DEADLINE_S, "`up` tells of it")
    held.released.set()
    fleet.wait_ready()
    assert len(answer(fleet)) > 0
    assert s3_proxy.bytes(WEIGHTS) == len(checkpoint[WEIGHTS])
    events = fleet.corewright("events", "--since", "0", "-o", "json").stdout
    messages = [event["message"] for event in json.loads(events)["events"] if event["reason"] == "Fetched"]
    assert len(messages) == 2
    metrics = fleet.http.get("/metrics").text
    assert f'corewright_fetched_bytes_total{{model="m"}} {size}' in metrics
    assert seen(fleet, home, "".join((events, json.dumps(fleet.status()), fleet.output(), table, metrics))) == []

    s3_proxy.away()
    os.kill(fleet.replica("m/0")["pid"], signal.SIGKILL)
    until(lambda: (fleet.replica("m/0")["epoch"], fleet.replica("m/0")["state"]) == (2, "ready"), DEADLINE_S, "again")
    assert s3_proxy.bytes(WEIGHTS) == len(checkpoint[WEIGHTS])
    fleet.stop()


def test_a_fetch_resumes_after_the_death_of_any_process(
    home: Path, source: str, s3_proxy: FaultProxy, checkpoint: dict[str, bytes], fleets: list[LiveFleet]
) -> None:
    """The controller: the fetch continues meanwhile. The host's actor, and `up` with all its processes: what had
    arrived is not fetched again.
    """
    held = s3_proxy.hold(WEIGHTS, SPAN + 1000)
    fleet = LiveFleet(SPEC.format(source=source, replicas=1), home=home)
    fleets.append(fleet)
    assert held.reached.wait(DEADLINE_S), fleet.output()
    until(lambda: fleet.replica("m/0")["state"] == "fetching", DEADLINE_S, "it is fetched")
    actor = host_actor(fleet)
    os.kill(fleet.controller_pid(), signal.SIGKILL)
    until(
        lambda: '"epoch": 2' in (status := fleet.corewright("status", "-o", "json").stdout) and '"fetching"' in status,
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


HUB = """\
version: 1
hosts: {emulate: inf2.48xlarge}
models:
  m: {engine: cpu, source: org/tiny, revision: stable, replicas: {min: 1, max: 2}, max_batch: 2, max_len: 64}
"""


def test_a_fleet_keeps_the_commit_that_a_branch_had_at_first(
    home: Path, hub: HubServer, tiny: tuple[dict[str, bytes], dict[str, bytes]], fleets: list[LiveFleet]
) -> None:
    """Although the branch moves: a replica that died, a controller that died, a second replica and a manual restart get
    that commit, and none of them transfers a byte. The next fleet gets the current commit. No token is visible.
    """
    repo = hub.repos["org/tiny"] = Repo(private=True)
    first = repo.commit(tiny[0], "stable")
    fleet = LiveFleet(HUB, home=home).wait_ready()
    fleets.append(fleet)
    said, sent = answer(fleet), len(tiny[0]["model.safetensors"])
    assert sum(request.sent for request in hub.asked if "model.safetensors" in request.path) == sent

    second = repo.commit(tiny[1], "stable")
    began = hub.sent
    os.kill(fleet.replica("m/0")["pid"], signal.SIGKILL)
    ready(fleet, "m/0", 2)
    assert answer(fleet) == said
    os.kill(fleet.controller_pid(), signal.SIGKILL)
    until(lambda: "ready" in fleet.corewright("status").stdout, DEADLINE_S, "the controller is there again")
    assert fleet.corewright("scale", "m", "2").returncode == 0
    ready(fleet, "m/1", 1)
    assert messages_of(fleet, "Fetched")[-1].startswith("0 bytes: ")
    os.kill(ready(fleet, "m/0", 2)["pid"], signal.SIGSTOP)  # so that the other one answers
    assert answer(fleet) == said
    os.kill(fleet.replica("m/0")["pid"], signal.SIGCONT)
    assert fleet.corewright("rollout", "restart", "m").returncode == 0
    assert fleet.corewright("rollout", "status", "--wait").returncode == 0
    assert answer(fleet) == said
    assert kept(fleet)["org/tiny"][0] == first
    assert hub.sent == began
    assert [
        request.path for request in hub.asked if request.path.startswith("/api/models") and request.token != TOKEN
    ] == []
    shown = "".join(
        fleet.corewright(*command).stdout for command in (("events",), ("status", "-o", "json"), ("describe", "m"))
    )
    assert seen(fleet, home, shown + fleet.output() + fleet.http.get("/metrics").text) == []
    fleet.stop()

    other = LiveFleet(fleet.spec, home=home).wait_ready()
    fleets.append(other)
    assert answer(other) != said
    assert kept(other)["org/tiny"][0] == second
    other.stop()


TWO_HOSTS = """\
version: 1
hosts: {{emulate: inf2.xlarge, count: 2}}
models:
  m: {{engine: cpu, source: {source}, tp_degree: 2, replicas: 2, max_batch: 2, max_len: 64}}
"""


def test_two_hosts_of_one_machine_share_fetched_artifacts(
    home: Path, source: str, s3_proxy: FaultProxy, checkpoint: dict[str, bytes], fleets: list[LiveFleet]
) -> None:
    """Their actors fetch at once, for a replica on each; the bytes are transferred once, and one of the two waits."""
    held = s3_proxy.hold(WEIGHTS, SPAN + 1000)
    fleet = LiveFleet(TWO_HOSTS.format(source=source), home=home)
    fleets.append(fleet)
    assert held.reached.wait(DEADLINE_S), fleet.output()

    def phases() -> list[str]:
        fetches = [replica["fetch"] for replica in fleet.status()["models"][0]["replicas"]]
        return sorted(fetch["phase"] for fetch in fetches if fetch)

    until(lambda: phases() == ["fetching", "waiting"], DEADLINE_S, "one fetches and one waits")
    held.released.set()
    fleet.wait_ready()
    replicas = [ready(fleet, id, 1) for id in ("m/0", "m/1")]
    assert sorted(replica["host"] for replica in replicas) == ["inf2.xlarge/0", "inf2.xlarge/1"]
    assert s3_proxy.bytes(WEIGHTS) == len(checkpoint[WEIGHTS])
    assert [row.startswith("0 bytes: ") for row in sorted(messages_of(fleet, "Fetched"))] == [True, False]
    fleet.stop()
