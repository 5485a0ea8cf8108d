"""A fleet on a Ray cluster that demands a token and mutual TLS, started from outside of the cluster."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from orchestrator.cluster.reach import speaks_tls
from tests.fleet import until
from tests.network_fleet import NetworkFleet, start_cluster
from tests.network_hosts import DASHBOARD_PORT, GCS_PORT, Network, needs_network_hosts, network_hosts
from tests.orchestrator.certificates import Authority
from tests.orchestrator.clients import echo_text

SPEC = """\
version: 1
name: secured
hosts: {emulate: inf2.48xlarge}
models:
  first: {engine: echo, max_len: 512, tp_degree: 24}
"""
DIFFERS = {  # what another client lacks, and the problem that `up` reports for it
    "ray-token-missing": {"RAY_AUTH_MODE": "disabled"},
    "ray-token-refused": {"RAY_AUTH_TOKEN": "f" * 64},
    "ray-tls-differs": {"RAY_USE_TLS": "0"},
}
UP = ("corewright", "up", "spec.yaml", "--ray-address", "auto")
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}

pytestmark = [pytest.mark.soak, needs_network_hosts]


def mutual_tls(folder: Path, network: Network) -> dict[str, str]:
    """Returns the variables of Ray's TLS, with one certificate for all hosts."""
    authority = Authority(folder)
    addresses = [host.address for host in network.hosts]
    pair = authority.sign("node", peer=True, hosts=("localhost", "127.0.0.1", *addresses))
    files = {"SERVER_CERT": pair.cert, "SERVER_KEY": pair.key, "CA_CERT": authority.file}
    return {"RAY_USE_TLS": "1", **{f"RAY_TLS_{name}": str(file) for name, file in files.items()}}


def test_a_job_from_outside_starts_a_fleet_on_a_cluster_with_token_and_tls(tmp_path: Path) -> None:
    """An `up` without one of them reports what it lacks. `down` removes the fleet, and Ray stays."""
    with network_hosts(2) as network:
        head, worker = network.hosts
        tls = mutual_tls(tmp_path, network)
        for host in network.hosts:
            host.variables.update(TOKEN | tls)
        outside = network.add("outside", 100)
        outside.variables.update(TOKEN)
        start_cluster(network, dashboard=True)
        assert speaks_tls(head.address, GCS_PORT)
        dashboard = f"http://{head.address}:{DASHBOARD_PORT}"
        assert httpx.get(f"{dashboard}/api/jobs/").status_code == 401

        fleet = NetworkFleet(network, SPEC, "--detach", outside=outside)
        assert fleet.process.wait(180) == 0, fleet.output()
        assert fleet.wait_ready().complete("first", "hello", 8) == echo_text("hello", 8)
        assert worker.processes("Replica[first]")
        for problem, variables in DIFFERS.items():
            other = head.spawn(*UP, log="other.log", **variables, COREWRIGHT_HOME=str(head.folder / "other"))
            assert other.wait(60) == 1
            assert f"error: {problem}:" in head.read("other.log"), head.read("other.log")

        head.run("corewright", "down")
        until(lambda: not worker.processes("Replica["), 20, "no replica is left")
        assert worker.processes("raylet/raylet")
