"""A fleet on hosts with networks of their own, one of which is cut off."""

from __future__ import annotations

import pytest

from tests.fleet import until
from tests.network_fleet import NetworkFleet, start_cluster, start_worker
from tests.network_hosts import needs_network_hosts, network_hosts
from tests.orchestrator.clients import echo_text

SPEC = """\
version: 1
name: network
hosts: {emulate: inf2.48xlarge, count: 2}
defaults: {engine: echo, max_len: 512, tp_degree: 24}
models:
  first: {}
  second: {}
"""
DEAD_S = 40.0  # after 18 s by the cluster's health checks, on an idle machine
LEARNT_S = 90.0  # until a raylet whose link is back learns that it counts as dead: 20 to 24 s on an idle machine

pytestmark = [pytest.mark.live, needs_network_hosts]


def test_a_host_that_was_cut_off_serves_again_once_it_has_joined_again() -> None:
    """The other one serves all the while, and no core of the lost host is held by its old replica then."""
    with network_hosts(3) as network:
        start_cluster(network)
        fleet = NetworkFleet(network, SPEC).wait_ready()
        cut = fleet.worker_of("second/0")
        (old,) = cut.processes("Replica[second]")
        cut.cut()
        until(lambda: fleet.events("HostLost"), DEAD_S, "the controller has the host lost")
        assert fleet.complete("first", "hello", 8) == echo_text("hello", 8)
        assert old in cut.processes("Replica[second]"), "a host that is cut off keeps its replicas"
        cut.heal()
        until(lambda: not cut.processes("ray::"), LEARNT_S, "its raylet has ended, and its replicas")
        start_worker(cut, fleet.head)()
        until(lambda: fleet.replica("second/0")["state"] == "ready", 60, "its replica is ready again")
        ask = {"model": "second", "prompt": "hello", "max_tokens": 1}
        until(lambda: fleet.http.post("/v1/completions", json=ask).is_success, 20, "the gateway has its route")
        assert fleet.complete("second", "hello", 8) == echo_text("hello", 8)
        assert fleet.replica("second/0")["epoch"] > 1
        assert fleet.process.poll() is None, fleet.output()
