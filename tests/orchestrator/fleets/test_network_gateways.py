"""Gateways on each host of a joined cluster, on hosts with networks of their own."""

from __future__ import annotations

import sys
from functools import partial

import httpx
import pytest

from orchestrator.access.keys import Allowance, KeyFile
from tests.fleet import until
from tests.network_fleet import PORT, NetworkFleet, start_cluster
from tests.network_hosts import NetworkHost, needs_network_hosts, network_hosts
from tests.orchestrator.clients import echo_text

SPEC = """\
version: 1
name: network
hosts: {emulate: inf2.48xlarge, count: 2}
defaults: {engine: echo, max_len: 512, tp_degree: 12}
models:
  first: {}
  second: {}
"""
LIMIT = 60
SILENT_S = 12  # a gateway beside the controller is not ready after less
END_CONTROLLER = """
import ray
ray.init(address="auto", namespace="corewright-network", log_to_driver=False)
ray.kill(ray.get_actor("controller"), no_restart=True)
"""

pytestmark = [pytest.mark.live, needs_network_hosts]


def ask(worker: NetworkHost, path: str, key: str = "", **body: object) -> httpx.Response:
    """Sends a request to the gateway of a host."""
    headers = {"connection": "close", **({"authorization": f"Bearer {key}"} if key else {})}
    method = "POST" if body else "GET"
    url = f"http://{worker.address}:{PORT}{path}"
    return httpx.request(method, url, headers=headers, json=body or None, timeout=60.0)


def complete(worker: NetworkHost, model: str, key: str) -> httpx.Response:
    return ask(worker, "/v1/completions", key, model=model, prompt="hello", max_tokens=8)


def answers(worker: NetworkHost) -> bool:
    try:
        return ask(worker, "/readyz").status_code == 200
    except httpx.TransportError:
        return False


def accepted_until_limited(worker: NetworkHost, key: str) -> int:
    """Sends requests until one is over the key's limit. Returns the number of accepted ones."""
    statuses: list[int] = []

    def is_limited() -> bool:
        statuses.append(complete(worker, "first", key).status_code)
        return statuses[-1] == 429

    until(is_limited, 30, "a request is over the limit")
    assert statuses == [200] * (len(statuses) - 1) + [429]
    return len(statuses) - 1


def routes_age_s(worker: NetworkHost) -> int:
    reply = ask(worker, "/readyz")
    assert reply.status_code == 200, reply.text
    return int(reply.text.split("routes: ")[1].split(" s old")[0])


def test_each_host_has_a_gateway_that_serves_without_the_head() -> None:
    """All gateways have the keys of the head, and share a key's limit. A host that drains sends its clients away. While
    the head is frozen, both gateways serve; without a controller also a new one does, with the keys and the routes of
    its host's files."""
    with network_hosts(3) as network:
        start_cluster(network)
        head, one, other = network.hosts
        keys = KeyFile(head.path("home/keys.json"))
        _, key = keys.create("ann")
        _, limited_key = keys.create("ben", allowance=Allowance(requests_per_minute=LIMIT))
        fleet = NetworkFleet(network, SPEC, "--detach", insecure=False)
        assert fleet.process.wait(180) == 0, fleet.output()
        for worker in (one, other):
            until(partial(answers, worker), 60, f"{worker.name} is ready")
            for model in ("first", "second"):
                assert complete(worker, model, key).json()["choices"][0]["text"] == echo_text("hello", 8)
            assert complete(worker, "first", "wrong").status_code == 401
        assert not head.processes("ServeReplica"), "the head has no gateway"

        assert [complete(one, "first", limited_key).status_code for _ in range(LIMIT)] == [200] * LIMIT
        assert accepted_until_limited(other, limited_key) < LIMIT, "the other gateway knows of these requests"

        (drained,) = [gateway["host"] for gateway in fleet.status()["gateways"] if gateway["machine"] == one.address]
        head.run("corewright", "drain", drained)
        until(lambda: ask(one, "/readyz").status_code == 503, 10, "its gateway sends clients away")
        assert complete(one, "first", key).status_code == 200
        assert answers(other)
        head.run("corewright", "uncordon", drained)
        until(partial(answers, one), 10, "its gateway is ready again")

        head.freeze()
        until(lambda: routes_age_s(one) > SILENT_S and routes_age_s(other) > SILENT_S, 60, "the head is away for long")
        assert [complete(worker, "first", key).status_code for worker in (one, other)] == [200, 200]
        head.thaw()
        until(lambda: routes_age_s(one) < SILENT_S, 60, "the controller is back")

        head.run(sys.executable, "-c", END_CONTROLLER)
        before = one.processes("ServeReplica")
        one.kill("ServeReplica")
        until(lambda: not before.keys() & one.processes("ServeReplica").keys(), 30, "its gateways have ended")
        until(partial(answers, one), 60, "a new gateway is ready")
        assert complete(one, "second", key).json()["choices"][0]["text"] == echo_text("hello", 8)
        assert complete(one, "second", "wrong").status_code == 401
