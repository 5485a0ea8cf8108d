"""Replicas that gateways cannot connect to are reported, and connected again when that is possible."""

from __future__ import annotations

import asyncio
import errno
import itertools
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec.structs
import pytest

from orchestrator.gateway.serving import replica_link_pool as links_of
from orchestrator.gateway.serving.replica_link_pool import MAX_RECONNECT_S, LinkSettings, ReplicaLinks
from orchestrator.gateway.telemetry.exposition import page
from orchestrator.messages.gateway_places import GATEWAY_LOST_S
from orchestrator.messages.route_table import Route
from orchestrator.process.home import LONGEST_SOCKET, SOCKET_BYTES, Home
from orchestrator.scaling.demand_report import DemandReport
from tests.orchestrator.fakes import Played, settled_fleet, virtually
from tests.orchestrator.gateways import LiveGateway, routes, until
from tests.orchestrator.promql import Page
from tests.served import Served

SPEC = """\
version: 1
hosts: {emulate: inf2.48xlarge}
models:
  m: {engine: echo, replicas: {min: 2, max: 2}}
"""


def last(gateway: LiveGateway) -> list[str] | None:
    """What the last report names as unreachable; None before the first."""
    reports = list(gateway.controller.reports)
    return reports[-1].unreachable if reports else None


def test_an_unreachable_model_makes_the_gateway_unready(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is reported; once its replica listens again the gateway becomes ready automatically."""
    monkeypatch.setattr(links_of, "UNREACHABLE_S", 0.3)
    served = Served()
    gateway = LiveGateway()
    try:
        gateway.serve(routes("m", served))
        assert gateway.http.get("/readyz").status_code == 200

        served.kill()  # it stays in the routes, as one whose socket was removed
        until(lambda: gateway.http.get("/readyz").status_code == 503, 10, "unready")
        assert gateway.http.get("/readyz").text == "not ready\nm: unreachable\n"
        until(lambda: last(gateway) == ["m/0"], 10, "reported")

        served.restart_plane()
        until(lambda: gateway.http.get("/readyz").status_code == 200, 10, "ready again")
        until(lambda: last(gateway) == [], 10, "reported as reachable")
    finally:
        gateway.close()
        served.close()


def test_one_unreachable_replica_of_two_is_reported_and_leaves_the_gateway_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other one serves."""
    monkeypatch.setattr(links_of, "UNREACHABLE_S", 0.2)
    served = Served()
    gateway = LiveGateway()
    table = routes("m", served)
    with_unreachable = msgspec.structs.replace(table, replicas=[*table.replicas, Route("m/1", 1, "/nowhere/s")])
    try:
        gateway.controller.set(with_unreachable)
        until(lambda: last(gateway) == ["m/1"], 10, "reported")
        assert gateway.http.get("/readyz").status_code == 200
    finally:
        gateway.close()
        served.close()


def test_the_loss_of_another_machine_leaves_the_gateway_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load balancer would take all gateways out for one lost machine, and no model would be served."""
    monkeypatch.setattr(links_of, "UNREACHABLE_S", 0.2)
    gateway = LiveGateway()
    elsewhere = Route("m/0", 1, "/there/s", "tls://192.0.2.7:1")  # cannot be reached: there are no credentials
    try:
        gateway.controller.set(msgspec.structs.replace(routes("m"), replicas=[elsewhere]))
        until(lambda: last(gateway) == ["m/0"], 10, "reported")
        assert gateway.http.get("/readyz").status_code == 200
    finally:
        gateway.close()


def test_retries_of_an_unreachable_replica_become_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a pause of two seconds."""
    tried: list[float] = []

    async def refused(loop: asyncio.AbstractEventLoop, *_: Any) -> Any:
        tried.append(loop.time())
        raise OSError(errno.ENOENT, "gone")

    async def live() -> None:
        monkeypatch.setattr(links_of, "open_link", refused)
        links = ReplicaLinks(routes("m"), LinkSettings("g", "t"), Mock())
        links.update(msgspec.structs.replace(routes("m"), replicas=[Route("m/0", 1, "/nowhere/s")]))
        await asyncio.sleep(60.0)
        await links.stop()

    virtually(live)
    pauses = [round(after - before, 3) for before, after in itertools.pairwise(tried)]
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.2
    assert pauses[-1] == pytest.approx(MAX_RECONNECT_S)


@settled_fleet(SPEC)
async def test_unreachable_replicas_are_in_status_events_and_metrics(fleet: Played) -> None:
    """For any gateway, until all reach the replica again or that gateway has ended."""

    async def report(gateway: str, *ids: str) -> None:
        await fleet.controller.demand(DemandReport(gateway=gateway, number=1, seconds=1.0, unreachable=list(ids)))
        await asyncio.sleep(1.5)

    def condition() -> tuple[bool, str, str]:
        (reachable,) = (condition for condition in fleet.model("m")["conditions"] if condition["type"] == "Reachable")
        return reachable["status"], reachable["reason"], reachable["message"]

    async def metric() -> float:
        metrics = Page.read(page(await fleet.controller.metrics())[0].decode())
        return metrics.value("corewright_model_reachable", model="m")

    assert condition() == (True, "Connected", "")
    assert await metric() == 1.0
    await report("a", "m/1", "m/7")
    await report("b")
    assert condition() == (False, "Unreachable", "m/1")
    assert await metric() == 0.0
    assert fleet.happened().count("Unreachable") == 1
    await report("a")
    assert condition() == (True, "Connected", "")
    assert fleet.happened().count("Reachable") == 1
    await report("b", "m/0")
    assert condition() == (False, "Unreachable", "m/0")
    await asyncio.sleep(GATEWAY_LOST_S + 2.0)
    assert condition() == (True, "Connected", "")


@pytest.mark.parametrize(
    ("runtime", "used"),
    [("r", True), ("r" * 120, False), ("missing", False), ("", False), ("relative", False), ("file", False)],
)
def test_sockets_are_below_the_runtime_folder_where_their_paths_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str, used: bool
) -> None:
    """Else below /tmp. Ray's files, which may be large, are always there."""
    short = Path("/tmp") / f"cwx-{tmp_path.name[-8:]}"
    short.mkdir(exist_ok=True)
    try:
        folder = short / runtime
        if runtime == "file":
            folder.touch()
        elif runtime.startswith("r"):
            folder.mkdir(exist_ok=True)
        monkeypatch.chdir(short)
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime if runtime in ("", "relative") else str(folder))
        home = Home(tmp_path / "home")
        home.prepare()
        assert home.sockets.is_dir()
        assert home.sockets.is_relative_to(folder if used else home.temporary)
        assert home.ray.is_relative_to(home.temporary)
        assert len(str(home.sockets / LONGEST_SOCKET)) <= SOCKET_BYTES
        home.forget_fleet()
        assert not home.sockets.exists()
        assert not home.temporary.exists()
    finally:
        shutil.rmtree(short)


def test_a_runtime_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As passed on by `sudo -E`."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc/1/net" if Path("/").stat().st_uid else "/run")
    monkeypatch.setattr("os.getuid", lambda: 4711)
    home = Home(tmp_path)
    assert home.sockets == home.temporary
