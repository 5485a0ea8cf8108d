"""A replica is started while the rest of its model arrives from S3: the report of its host, and real fleets."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.cluster.host_actor import HostActor
from tests.checkpoints import make_checkpoint
from tests.fleet import LiveFleet, until
from tests.s3 import Fault, FaultProxy, S3Server
from workers.artifacts.fetch.artifact_fetcher import FetchedArtifact, WantedArtifact
from workers.artifacts.fetch.progress import FetchStatus
from workers.artifacts.store import manifest
from workers.artifacts.store.store import StoreSettings

DEADLINE_S = 120.0
WEIGHTS = "tiny/model.safetensors"
SPAN = 8 * 2**20  # bytes of one request
SPEC = """\
version: 1
hosts: {{emulate: inf2.48xlarge}}
models:
  m: {{engine: cpu, source: {source}, max_batch: 2, max_len: 64}}
"""


def test_a_host_reports_artifacts_that_can_be_loaded_while_they_arrive(
    tmp_path: Path, s3_server: S3Server, s3_proxy: FaultProxy
) -> None:
    """With the final folder and key."""
    source = s3_server.bucket(files={"m/config.json": b"{}", "m/model.safetensors": b"w" * 2**20}) + "/m"
    held = s3_proxy.hold("m/model.safetensors", 2**19)
    actor = HostActor.__ray_metadata__.modified_class(  # type: ignore[attr-defined]
        StoreSettings(root=str(tmp_path / "store")), str(tmp_path / "home")
    )
    wanted = WantedArtifact(source=source)
    try:
        assert not isinstance(actor.fetch("a waiter", wanted, 0.0), FetchedArtifact)
        assert held.reached.wait(DEADLINE_S)
        ends = time.monotonic() + DEADLINE_S  # what has been sent has not yet come
        while isinstance(going := actor.fetch("a waiter", wanted, 0.1), FetchStatus) and not going.moved:
            assert time.monotonic() < ends
    finally:
        held.released.set()
    landed = actor.fetch("a waiter", wanted, DEADLINE_S)
    assert isinstance(landed, FetchedArtifact)
    assert isinstance(going, FetchStatus)
    assert going.folder == landed.folder
    assert going.total == landed.bytes
    assert 0 < going.done < going.total


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a model of some spans, by key."""
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", hidden=512, layers=3, heads=8)
    return {f"tiny/{path.name}": path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def arriving(
    home: Path, s3_server: S3Server, s3_proxy: FaultProxy, checkpoint: dict[str, bytes]
) -> Iterator[tuple[LiveFleet, Fault]]:
    """A fleet whose replica was started when all but a little of its weights had come; the rest is held."""
    size = len(checkpoint[WEIGHTS])
    assert size > 3 * SPAN
    source = s3_server.bucket(files=checkpoint) + "/tiny"
    first, last = s3_proxy.hold(WEIGHTS, 0), s3_proxy.hold(WEIGHTS, size - 2**18)
    fleet = LiveFleet(SPEC.format(source=source), home=home)
    try:
        for file in (first, last):
            assert file.reached.wait(DEADLINE_S), fleet.output()
        until(lambda: (fleet.replica("m/0")["fetch"] or {}).get("bytes"), DEADLINE_S, "its fetch is seen")
        first.released.set()
        yield fleet, last
    finally:
        last.released.set()
        fleet.clean()


def loading(fleet: LiveFleet) -> Any:
    """The replica, once its process is there and loads."""

    def event() -> Any:
        replica = fleet.replica("m/0")
        return replica if replica["state"] == "loading" and replica["pid"] else None

    return until(event, DEADLINE_S, f"its process loads: {fleet.output()}")


def reasons(fleet: LiveFleet) -> list[str]:
    events = json.loads(fleet.corewright("events", "--since", "0", "-o", "json").stdout)["events"]
    return [event["reason"] for event in events if event["model"] == "m"]


def artifact(home: Path) -> Path:
    folders = list((home / "store" / "artifacts").iterdir())
    assert len(folders) == 1
    return folders[0]


def refuses(fleet: LiveFleet) -> bool:
    """Returns whether the gateway reports that it is not ready; False while it does not listen."""
    try:
        return fleet.http.get("/readyz").status_code == 503
    except httpx.ConnectError:
        return False


def answer(fleet: LiveFleet) -> str:
    body = {"model": "m", "prompt": "A slot", "max_tokens": 4, "temperature": 0}
    text: str = fleet.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    return text


@pytest.mark.live
def test_a_replica_loads_during_the_fetch_and_serves_when_it_is_complete(
    arriving: tuple[LiveFleet, Fault], home: Path, s3_proxy: FaultProxy, checkpoint: dict[str, bytes]
) -> None:
    """Its process exists, the status shows the progress of the fetch, and nothing is transferred twice."""
    fleet, last = arriving
    pid = loading(fleet)["pid"]
    until(lambda: fleet.replica("m/0")["fetch"], DEADLINE_S, "its fetch is reported while it loads")
    assert manifest.published(artifact(home)) is None
    until(lambda: refuses(fleet), DEADLINE_S, "the gateway listens, and reports that it is not ready")
    last.released.set()
    fleet.wait_ready()
    assert fleet.replica("m/0")["pid"] == pid
    assert fleet.replica("m/0")["restarts"] == 0
    assert manifest.published(artifact(home)) is not None
    assert len(answer(fleet)) > 0
    assert s3_proxy.bytes(WEIGHTS) == len(checkpoint[WEIGHTS])
    steps = [
        reason for reason in reasons(fleet) if reason in ("Starting", "Fetching", "StartsEarly", "Fetched", "Ready")
    ]
    assert steps == ["Starting", "Fetching", "StartsEarly", "Fetched", "Ready"]
    fleet.stop()


@pytest.mark.soak
def test_the_fetching_process_may_die_while_a_replica_waits(
    arriving: tuple[LiveFleet, Fault], home: Path, s3_proxy: FaultProxy, checkpoint: dict[str, bytes]
) -> None:
    """The host's actor, and the controller after it: the rest is fetched for the same process, and it serves."""
    fleet, last = arriving
    pid = loading(fleet)["pid"]
    again = s3_proxy.hold(WEIGHTS, len(checkpoint[WEIGHTS]) - 2**18)
    os.kill(fleet.named_pids("HostActor")[0], signal.SIGKILL)
    last.released.set()
    assert again.reached.wait(DEADLINE_S), fleet.output()
    os.kill(fleet.controller_pid(), signal.SIGKILL)
    until(
        lambda: '"Adopted"' in fleet.corewright("events", "--since", "0", "-o", "json").stdout,
        DEADLINE_S,
        "its successor finds it",
    )
    again.released.set()
    fleet.wait_ready()
    assert (fleet.replica("m/0")["pid"], fleet.replica("m/0")["epoch"]) == (pid, 1)
    assert len(answer(fleet)) > 0
    assert s3_proxy.bytes(WEIGHTS) - len(checkpoint[WEIGHTS]) <= 2 * SPAN
    fleet.stop()
