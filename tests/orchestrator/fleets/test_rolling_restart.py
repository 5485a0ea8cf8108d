"""A rolling restart: Ray is restarted on one machine of a joined cluster after the other, under load."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.fleet import until
from tests.network_fleet import NetworkFleet, start_cluster, start_worker
from tests.network_hosts import needs_network_hosts, network_hosts
from tests.network_invariants import CoreWatch, differences, held_cores
from tests.orchestrator.clients import Load, echo_questions

MODELS = ("wide", "pair", "single")
SPEC = """\
version: 1
name: rolled
hosts: {emulate: inf2.48xlarge, count: 4}
defaults: {engine: echo, max_len: 512, max_batch: 4, engine_options: {step_ms: 20}, deadlines: {drain_s: 20}}
models:
  wide: {tp_degree: 8, replicas: 4}
  pair: {tp_degree: 12, replicas: 2}
  single: {tp_degree: 8}
"""
LONGEST = 250  # tokens: streams of five seconds
CLIENTS = 12
TURN_S = 120.0  # for one host to be empty, restarted and full again

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900), needs_network_hosts]


def test_no_request_fails_while_ray_is_restarted_on_host_after_host(
    record_property: Callable[[str, object], None],
) -> None:
    """Every stream gets its exact answer, no core is held twice, and each replica holds its own cores afterwards."""
    with network_hosts(5) as network:
        start_cluster(network)
        fleet = NetworkFleet(network, SPEC).wait_ready()
        load = Load(fleet, echo_questions(MODELS, seed=1, longest=LONGEST), CLIENTS, permits=lambda failure: False)
        with CoreWatch(fleet.workers) as watch, fleet.balanced(), load:
            load.wait_answered(CLIENTS)
            began = time.monotonic()
            names = [host["name"] for host in fleet.status()["hosts"]]
            assert len(names) == len(fleet.workers)
            for name in names:
                restart(fleet, name)
                assert load.wrong == []
            record_property("rolled_s", round(time.monotonic() - began, 1))
            until(lambda: not differences(fleet.status(), fleet.workers), TURN_S, "every replica has its place")
            load.wait_answered(CLIENTS, kind="exact")
        assert load.wrong == []
        assert load.failed == {}
        record_property("answers", load.answered)
        assert watch.violations == []
        assert watch.looks > 0
        fleet.head.run("corewright", "down")
        until(lambda: not any(map(held_cores, fleet.workers)), 20, "no core is held")
        assert all(worker.processes("raylet/raylet") for worker in fleet.workers)


def restart(fleet: NetworkFleet, host: str) -> None:
    """Empty a host, restart Ray on its machine, and use it again, as its operator does."""
    drained = fleet.corewright("drain", host, "--wait", "--timeout", f"{TURN_S:g}")
    machine = fleet.machine_of(host)
    assert not machine.processes("ray::Replica[")
    machine.stop_ray()
    start_worker(machine, fleet.head)()
    fleet.corewright("hosts", "wait", host, "--after", drained["node"], "--timeout", f"{TURN_S:g}")
    fleet.corewright("uncordon", host)
    fleet.corewright("hosts", "wait", host, "--timeout", f"{TURN_S:g}")
