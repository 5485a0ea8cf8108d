"""The gateways of a fleet on a joined cluster: where they run, and what the controller knows of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.messages.gateway_places import ClusterMachine, GatewayPlace, wanted_gateways
from orchestrator.messages.key_usage import KeyUsage, KeyUsageExchange
from orchestrator.scaling.demand_report import DemandReport, DemandWindow
from tests.orchestrator.fakes import Played, settled_fleet
from tests.orchestrator.fleet_records import fleet_record
from workers.messages.status import Notice

SPEC = """\
version: 1
hosts: {emulate: inf2.48xlarge, count: 2}
models:
  a: {engine: echo, tp_degree: 4, replicas: 2}
"""
HOSTS = ["inf2.48xlarge/0", "inf2.48xlarge/1"]
RECORD = fleet_record(name="fleet", pid=0, on_cluster=True)
HEAD = ClusterMachine(GatewayPlace("head", "n0"), "10.0.0.1", is_head=True)
MACHINES = [
    HEAD,
    ClusterMachine(GatewayPlace("b", "n2"), "10.0.0.2", "inf2.48xlarge/1", labels={"zone": "x"}),
    ClusterMachine(GatewayPlace("a", "n1"), "10.0.0.2", "inf2.48xlarge/0"),
    ClusterMachine(GatewayPlace("c", "n3"), "10.0.0.3", "inf2.48xlarge/2", labels={"zone": "x"}),
    ClusterMachine(GatewayPlace("d", "n4"), "10.0.0.4", labels={"zone": "x"}),
]


@pytest.mark.parametrize(
    ("places_on", "ended", "labels"),
    [
        ("hosts", (), "ac"),
        ("hosts", ("inf2.48xlarge/2",), "a"),
        ("hosts", ("inf2.48xlarge/0",), "bc"),
        ("head", (), ["head"]),
        ("zone=x", (), "bcd"),
        ("zone=y", (), ""),
    ],
)
def test_each_machine_has_its_gateway_by_the_setting(places_on: str, ended: tuple[str, ...], labels: str) -> None:
    """One for an address, since Ray nodes of one machine share its port; none where a host ends."""
    assert sorted(place.label for place in wanted_gateways(places_on, MACHINES, ended)) == list(labels)


async def reported(played: Played, *hosts: str, seconds: float = 0.0, **fields: Any) -> None:
    """The gateways of these hosts report each second."""
    for number in range(1 + round(seconds)):
        for host in hosts:
            about = {"place": f"m-{host}", "address": f"http://{host}", **fields}
            await played.controller.demand(DemandReport(gateway=f"g-{host}", number=number, seconds=1.0, **about))
        await asyncio.sleep(1.0)


def states(played: Played) -> dict[str, str]:
    return {str(gateway.host): gateway.state for gateway in played.controller.status().gateways}


@settled_fleet(SPEC, record=RECORD)
async def test_gateways_follow_the_hosts(played: Played) -> None:
    """A lost host has none, and one that joins again gets one on its new Ray node."""
    both = frozenset({GatewayPlace(f"m-{host}", "1") for host in HOSTS})
    assert played.cluster.gateways == both
    await played.cluster.lose(HOSTS[1])
    await asyncio.sleep(3.0)
    assert played.cluster.gateways == {GatewayPlace(f"m-{HOSTS[0]}", "1")}
    played.cluster.lost_now.clear()
    played.cluster.nodes[HOSTS[1]] = "2"
    await asyncio.sleep(5.0)
    assert played.cluster.gateways == {GatewayPlace(f"m-{HOSTS[0]}", "1"), GatewayPlace(f"m-{HOSTS[1]}", "2")}


@settled_fleet(SPEC, record=RECORD)
async def test_gateways_that_do_not_report_are_started_again(played: Played) -> None:
    """Serve may have been shut down by others. While all report, Serve is left alone."""
    await reported(played, *HOSTS)
    played.cluster.gateways = frozenset()
    await reported(played, *HOSTS, seconds=60.0)
    assert states(played) == dict.fromkeys(HOSTS, "ready")
    assert not played.cluster.gateways
    await reported(played, HOSTS[0], seconds=45.0)
    assert len(played.cluster.gateways) == 2
    assert states(played) == {HOSTS[0]: "ready", HOSTS[1]: "starting"}


@settled_fleet(SPEC, record=RECORD)
async def test_a_host_that_ends_sends_its_clients_away_until_shortly_before_its_end(played: Played) -> None:
    played.cluster.notices[HOSTS[1]] = Notice(cause="spot interruption", until=played.controller.state.wall() + 60.0)
    await reported(played, *HOSTS, seconds=20.0)
    assert played.controller.routes().draining == [f"m-{HOSTS[1]}"]
    assert states(played) == {HOSTS[0]: "ready", HOSTS[1]: "draining"}
    assert len(played.cluster.gateways) == 2, "it answers its last requests"
    await reported(played, *HOSTS, seconds=40.0)
    assert played.cluster.gateways == {GatewayPlace(f"m-{HOSTS[0]}", "1")}


@settled_fleet(SPEC, record=RECORD)
async def test_one_gateway_exports_the_metrics_of_the_fleet(played: Played) -> None:
    """Another one does after its end."""
    first, second = (f"m-{host}" for host in HOSTS)
    await reported(played, *HOSTS)
    assert await played.controller.metrics(first)
    assert not await played.controller.metrics(second)
    await reported(played, HOSTS[1], seconds=12.0)
    assert await played.controller.metrics(second)


REPORTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["x", "y"]), st.integers(0, 3), st.integers(-5, 9)), max_size=30
)


@given(REPORTS)
def test_each_gateway_learns_once_what_keys_used_at_the_others(
    reports: list[tuple[str, str, int, int]],
) -> None:
    exchange = KeyUsageExchange()
    used: dict[str, dict[str, list[int]]] = {name: {"x": [0, 0], "y": [0, 0]} for name in "abc"}
    learned: dict[str, dict[str, list[float]]] = {name: {"x": [0, 0], "y": [0, 0]} for name in "abc"}

    def report(machine: str, usage: list[KeyUsage]) -> None:
        for item in exchange.receive(machine, usage):
            learned[machine][item.key][0] += item.requests
            learned[machine][item.key][1] += item.tokens

    for machine in "abc":
        report(machine, [])
    for machine, key, requests, tokens in reports:
        used[machine][key][0] += requests
        used[machine][key][1] += tokens
        report(machine, [KeyUsage(key, requests, tokens)])
    for machine in "abc":
        report(machine, [])
    for machine in "abc":
        for key in "xy":
            others = [used[other][key] for other in "abc" if other != machine]
            assert learned[machine][key] == [sum(part) for part in zip(*others, strict=True)]


def test_live_requests_count_at_other_gateways_until_their_gateway_is_forgotten() -> None:
    exchange = KeyUsageExchange()
    exchange.receive("g1", [KeyUsage("k", live=3)])
    assert exchange.receive("g2", [KeyUsage("k", live=2)]) == [KeyUsage("k", live=3)]
    assert exchange.receive("g3", []) == [KeyUsage("k", live=5)]
    exchange.forget("g2")
    assert exchange.receive("g1", [KeyUsage("k", live=1)]) == []
    assert exchange.receive("g3", []) == [KeyUsage("k", live=1)]


@settled_fleet(SPEC, record=RECORD)
async def test_a_host_is_busy_while_its_gateway_has_requests(played: Played) -> None:
    """Also without a replica: its machine must not be stopped."""
    before = {host.name: host.busy for host in played.controller.status().hosts}
    await reported(played, HOSTS[1], models=[DemandWindow(model="a", waiting=1, live=2)])
    busy = {host.name: host.busy for host in played.controller.status().hosts}
    assert busy == {**before, HOSTS[1]: before[HOSTS[1]] + 3}
