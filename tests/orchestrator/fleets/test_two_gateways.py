"""Two gateways on one port, with the same replicas behind them."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec.structs
import psutil
import pytest

from orchestrator.gateway.serving.model_queue import ModelQueue
from orchestrator.gateway.serving.replica_link_pool import LinkSettings
from orchestrator.messages.route_table import Route
from tests.fleet import LiveFleet, until
from tests.orchestrator.certificates import Authority
from tests.orchestrator.gateways import LiveGateway, routes
from tests.orchestrator.hostile import Closed, Steady, Wire, ask, completion
from tests.repeated import Repeated
from tests.served import Served

BACK_S = 2.0  # for a gateway that was killed
SPEC = """\
version: 1
hosts: {emulate: inf2.48xlarge}
defaults: {engine: echo, max_len: 4096}
models:
  m: {tp_degree: 2, replicas: 2, max_batch: 8}
"""


@pytest.fixture
def replicas() -> Iterator[list[Served]]:
    pair = [Served(slots=2, step_ms=1), Served(slots=2, step_ms=1)]
    yield pair
    for replica in pair:
        replica.close()


class Guard(Repeated):
    """Looks all the time whether a replica holds more than its slots."""

    pause_s = 0.001

    def __init__(self, replicas: list[Served]) -> None:
        self.most = 0
        self._replicas = replicas

    def look(self) -> None:
        for replica in self._replicas:
            stats = replica.batcher.stats
            self.most = max(self.most, stats.live + stats.waiting)


@pytest.mark.slow
def test_two_gateways_share_replicas_and_lose_nothing(replicas: list[Served]) -> None:
    """With many more clients than slots, every answer is exact, and no replica ever exceeds its slots."""
    first = LiveGateway()
    second = LiveGateway(port=first.port)
    try:
        for gateway in (first, second):
            gateway.serve(routes("m", *replicas))
        with Guard(replicas) as guard, Steady(first.port, clients=16, deadline_s=20) as steady:
            steady.wait_answered(1000, 60)
        assert steady.wrong == []
        assert guard.most == 2
        for gateway in (first, second):
            until(lambda gateway=gateway: gateway.queue("m").links.live == 0, 5, "nothing runs")  # type: ignore[misc]
            assert gateway.queue("m").waiting == 0
    finally:
        first.close()
        second.close()


@pytest.mark.slow
def test_a_busy_gateway_does_not_starve_the_other(replicas: list[Served]) -> None:
    """A single client of one gateway waits no longer than some of the many at the other."""
    crowded, quiet = LiveGateway(), LiveGateway()
    try:
        for gateway in (crowded, quiet):
            gateway.serve(routes("m", *replicas))
        with Steady(crowded.port, clients=24, tokens=40, deadline_s=30) as crowd:
            crowd.wait_answered(24)
            with Steady(quiet.port, clients=1, tokens=40, deadline_s=30) as single:
                single.wait_answered(20, 60)
        assert crowd.wrong == []
        assert single.wrong == []
        assert single.slowest_s <= crowd.slowest_s * 1.5 + 0.5, (single.slowest_s, crowd.slowest_s)
    finally:
        crowded.close()
        quiet.close()


@pytest.mark.slow
def test_a_gateway_that_ends_under_load_rejects_no_request(replicas: list[Served]) -> None:
    """Its started requests are completed, new ones go to the other; the same when it is back and the other ends."""
    first = LiveGateway(models=[routes("m", *replicas)])
    port = first.port
    second = LiveGateway(port=port, models=[routes("m", *replicas)])
    try:
        for gateway in (first, second):
            gateway.serve(routes("m", *replicas))
        with Steady(port, clients=8, may_lose=True, deadline_s=20) as steady:
            steady.wait_answered(100)
            first.close()
            steady.wait_answered(100)
            first = LiveGateway(port=port, models=[routes("m", *replicas)])
            steady.wait_answered(100)
            second.close()
            steady.wait_answered(100)
        assert steady.wrong == []
        assert steady.counts["lost"] <= 2, steady.counts  # that the kernel had given to a listener as it closed
    finally:
        first.close()
        second.close()


def test_a_spare_takes_the_port_at_once_regardless_of_the_files(replicas: list[Served], tmp_path: Path) -> None:
    """It listens as soon as the other is gone, with the certificate that it read while the files were valid."""
    authority = Authority(tmp_path)
    pair = authority.sign("server")
    tls = {"tls_cert": str(pair.cert), "tls_key": str(pair.key), "home": str(tmp_path / "home")}
    client = ssl.create_default_context(cafile=str(authority.file))
    first = LiveGateway(**tls)
    spare = LiveGateway(port=first.port, models=[routes("m", *replicas)], **tls)
    try:
        first.serve(routes("m", *replicas))
        assert spare.waits
        pair.cert.write_text("half of a certifi")

        first.close()
        until(lambda: not spare.waits, 2, "the spare listens")

        with Wire(spare.port, tls=client) as wire:
            wire.send(completion())
            assert wire.answer().status == 200
    finally:
        spare.close()


@pytest.mark.parametrize("ticks", range(12))
async def test_a_queue_ends_while_its_links_reconnect(ticks: int, tmp_path: Path) -> None:
    """A gateway that stops while it reconnects to a lost replica does not keep trying."""
    path = tmp_path / "nobody"
    models = routes("m")
    table = msgspec.structs.replace(models, replicas=[Route("m/0", 1, str(path))])
    queue = ModelQueue(table, LinkSettings("g", "t"), wake=lambda name: None)
    queue.update(table)
    for _ in range(ticks):
        await asyncio.sleep(0)

    await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(queue.links.stop())), 5)

    assert asyncio.all_tasks() == {asyncio.current_task()}


# A real fleet


def gateway_pids(fleet: LiveFleet) -> list[int]:
    """Those that listen on the fleet's port."""
    pids = []
    for pid in fleet.processes():
        try:
            listens = psutil.Process(pid).net_connections("tcp")
        except psutil.Error:
            continue
        if any(listen.status == psutil.CONN_LISTEN and listen.laddr.port == fleet.port for listen in listens):
            pids.append(pid)
    return pids


@pytest.fixture
def fleet_of() -> Iterator[list[LiveFleet]]:
    fleets: list[LiveFleet] = []
    yield fleets
    for fleet in fleets:
        fleet.stop()
        fleet.clean()


def listeners(port: int) -> int:
    """How many sockets listen there, as the kernel has it: asked quickly, under load too."""
    wanted = f":{port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(line[1].endswith(wanted) and line[3] == "0A" for line in lines)


def all_stand_by(fleet: LiveFleet, gateways: int) -> bool:
    """Returns whether so many listen, and one more has started and does nothing."""
    listening = gateway_pids(fleet)
    spare = [pid for pid in fleet.named_pids("ServeReplica:") if pid not in listening]
    return len(listening) == gateways and len(spare) == 1 and psutil.Process(spare[0]).cpu_percent(0.5) < 10


def answers(port: int) -> bool:
    """Returns whether a request gets its tokens now."""
    try:
        return ask(port, completion(), deadline_s=5).status == 200
    except (OSError, Closed):
        return False


def kill(fleet: LiveFleet) -> tuple[float, float]:
    """One of the gateways, as the kernel kills it; gives when it was killed and when it was dead (monotonic)."""
    killed = gateway_pids(fleet)[0]
    began = time.monotonic()
    os.kill(killed, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(killed), 5, "it is dead, with all its threads")
    return began, time.monotonic()


@pytest.mark.live
@pytest.mark.timeout(400)
def test_one_of_two_gateways_is_killed_and_no_connection_is_refused(fleet_of: list[LiveFleet]) -> None:
    """The other's connections continue, new ones are accepted all the time, and within two seconds there are two
    again.
    """
    fleet = LiveFleet(SPEC, arguments=("--no-dashboard", "--gateways", "2"), spare=True)
    fleet_of.append(fleet)
    fleet.wait_ready()
    for _ in range(2):
        until(lambda: all_stand_by(fleet, 2), 60, "two gateways listen, and one stands by")
        with Steady(fleet.port, clients=8, may_lose=True, deadline_s=30) as steady:
            steady.wait_answered(100)
            killed, dead = kill(fleet)
            until(lambda: listeners(fleet.port) == 2, 20, "two listen again")
            took = time.monotonic() - killed
            steady.wait_answered(100)
        assert took < BACK_S
        assert steady.wrong == []
        # Each client has one request at most on the gateway at its death. While the kernel closes the files of the
        # dead process one by one, its listener may take one more, and holds it until it is closed itself.
        interrupted = Counter(lost.client for lost in steady.lost if lost.began < killed)
        assert set(interrupted.values()) <= {1}, (killed, dead, steady.lost)
        assert set(Counter(lost.client for lost in steady.lost).values()) <= {1, 2}, (killed, dead, steady.lost)
        assert [lost for lost in steady.lost if lost.began > dead] == [], (killed, dead)


@pytest.mark.live
@pytest.mark.timeout(400)
def test_the_only_gateway_is_back_within_two_seconds(fleet_of: list[LiveFleet]) -> None:
    """From the kill to the next complete answer."""
    fleet = LiveFleet(SPEC, spare=True)
    fleet_of.append(fleet)
    fleet.wait_ready()
    for _ in range(3):
        until(lambda: all_stand_by(fleet, 1), 60, "one gateway listens, and one stands by")
        began, _ = kill(fleet)
        until(lambda: answers(fleet.port), 30, "it answers again")
        assert time.monotonic() - began < BACK_S
