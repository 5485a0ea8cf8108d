"""A host is silent under load: it is cut off, or frozen, for a moment or until it is replaced by a spare host."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleet import READY_DEADLINE_S, until
from tests.network_faults import Faults
from tests.network_fleet import NetworkFleet, gateway_url, start_cluster, start_worker
from tests.network_hosts import NetworkHost, needs_network_hosts, network_hosts
from tests.network_invariants import CoreWatch, differences, held_cores, running_on
from tests.orchestrator.clients import Load, echo_questions

SPEC = """\
version: 1
name: silent
hosts: {emulate: inf2.48xlarge, count: 3}
defaults: {engine: echo, max_len: 512, max_batch: 4, engine_options: {step_ms: 20}}
models:
  wide: {tp_degree: 24, replicas: 2}
"""
CLIENTS = 6
LONGEST = 150  # tokens: streams of three seconds
LEFT_S = 15.0  # until no request waits for the silent host: gateways notice it after 4 s
SHORT_S = 5.0  # Ray has declared a host dead after 9 s at the earliest (tests/network_hosts.py)
DEAD_S = 60.0  # until the host is lost: 18 s by the health checks, on an idle machine
TURN_S = 120.0  # for a replica to be replaced, or a machine to be back

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600), needs_network_hosts]


class Clients(NetworkFleet):
    """A fleet whose clients use the gateways of the hosts that stay."""

    silent: NetworkHost

    def entrance(self) -> str:
        return gateway_url(random.choice([worker for worker in self.workers if worker is not self.silent]))


def leaves(fleet: Clients, other: str | None) -> bool:
    """Returns whether each gateway answers at once, with that replica or with any."""
    for worker in fleet.workers:
        if worker is not fleet.silent:
            body = {"model": "wide", "prompt": "hello", "max_tokens": 1}
            try:
                response = httpx.post(f"{gateway_url(worker)}/v1/completions", json=body, timeout=3)
            except httpx.TransportError:
                return False
            replica = response.headers.get("x-corewright-replica")
            if response.status_code != 200 or replica != (other or replica):
                return False
    return True


def used(fleet: Clients, id: str) -> bool:
    """Returns whether a gateway gets an answer of that replica."""
    body = {"model": "wide", "prompt": "hello", "max_tokens": 1}
    response = httpx.post(f"{fleet.entrance()}/v1/completions", json=body, timeout=30)
    return response.headers.get("x-corewright-replica") == id


@pytest.mark.parametrize(
    ("silence", "returns"),
    [
        pytest.param(NetworkHost.cut, NetworkHost.heal, id="cut off"),
        pytest.param(NetworkHost.freeze, NetworkHost.thaw, id="frozen"),
    ],
)
def test_a_silent_host_costs_only_its_own_streams(
    silence: Callable[[NetworkHost], None],
    returns: Callable[[NetworkHost], None],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Requests are answered by the other replica within seconds. If the host is back before Ray has it dead, its
    replica serves again; else the spare host has the replica, and the old one has ended before its host is used."""
    with network_hosts(4, tmp_path) as network:
        start_cluster(network)
        fleet = Clients(network, SPEC).wait_ready()
        silent, stays = [worker for worker in fleet.workers if running_on(worker)]
        fleet.silent = silent
        until(lambda: leaves(fleet, None), READY_DEADLINE_S, "all gateways answer")
        old, other = running_on(silent), running_on(stays)[0].id
        id = old[0].id
        before = fleet.replica(id)
        with (
            CoreWatch(fleet.workers) as watch,
            Faults(fleet, watch) as faults,
            Load(fleet, echo_questions(("wide",), seed=1, longest=LONGEST), CLIENTS, faults.permits) as load,
        ):
            load.wait_answered(CLIENTS, kind="exact")
            with faults.of(silent.name):
                began = time.monotonic()
                silence(silent)
                until(lambda: leaves(fleet, other), LEFT_S, "no request waits for the silent host")
                record_property("left_s", round(time.monotonic() - began, 1))
                time.sleep(max(0.0, began + SHORT_S - time.monotonic()))  # the fault's length
                returns(silent)
                until(lambda: used(fleet, id), TURN_S, "its replica is used again")
            assert running_on(silent) == old
            assert fleet.replica(id)["epoch"] == before["epoch"]
            with faults.of(silent.name):
                began = time.monotonic()
                silence(silent)
                until(lambda: fleet.events("HostLost"), DEAD_S, f"the host is lost\n{fleet.output()}")
                record_property("lost_s", round(time.monotonic() - began, 1))
                until(lambda: replaced(fleet, id, before), TURN_S, f"the spare host has it\n{fleet.output()}")
                record_property("replaced_s", round(time.monotonic() - began, 1))
                assert running_on(silent) == old, "a silent host keeps its replica and the cores"
                returns(silent)
                until(lambda: silent.ray.poll() is not None, TURN_S, "its raylet has ended")
                until(lambda: not running_on(silent), TURN_S, "its replica has ended")
                silent.kill_rest()
                start_worker(silent, fleet.head)()
                until(lambda: not differences(fleet.status(), fleet.workers), TURN_S, "every replica has its place")
            load.wait_answered(CLIENTS, kind="exact")
        record_property("answers", dict(load.kinds))
        record_property("slowest_s", round(load.slowest_s, 1))
        assert load.wrong == []
        assert watch.violations == []
        assert watch.looks > 0
        fleet.head.run("corewright", "down")
        until(lambda: not any(map(held_cores, fleet.workers)), 20, "no core is held")


def replaced(fleet: NetworkFleet, id: str, before: dict[str, Any]) -> bool:
    """Returns whether the replica is ready in a later epoch."""
    replica = fleet.replica(id)
    return replica["state"] == "ready" and replica["epoch"] > before["epoch"]
