"""A fleet on a Ray cluster that others started: the machines are its hosts, and its end leaves the cluster."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fleet import LiveFleet, until
from tests.orchestrator.clients import complete
from tests.orchestrator.conftest import temporary_home

SPEC = """\
version: 1
name: joined
hosts: {emulate: inf2.48xlarge, count: 2}
defaults: {engine: echo, max_len: 512, tp_degree: 24}
models:
  first: {}
  second: {}
"""
MACHINES = ("a", "b")

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without cores, and two machines of 24."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="cwr-", dir="/tmp") as folder:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_TMPDIR", folder)
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        for machine in MACHINES:
            nodes.add_node(
                num_cpus=2,
                resources={f"nc{core}": 1 for core in range(24)},
                labels={"corewright-host": machine, "corewright-instance": "inf2.48xlarge"},
            )
        yield nodes
        nodes.shutdown()


def test_models_are_served_on_the_machines_of_a_joined_cluster(cluster: Any) -> None:
    """Each on a machine of its own, since none has room for both; the cluster has all its cores after the end."""
    import ray

    with temporary_home() as home:
        fleet = LiveFleet(SPEC, home=home, arguments=("--ray-address", cluster.address)).wait_ready()
        replicas = [fleet.replica(f"{model}/0") for model in ("first", "second")]
        assert {replica["host"] for replica in replicas} == {"inf2.48xlarge/0", "inf2.48xlarge/1"}
        assert [complete(fleet, model).status_code for model in ("first", "second")] == [200, 200]
        down = fleet.corewright("down")
        assert (down.returncode, fleet.process.wait(30)) == (0, 0), fleet.output()
    ray.init(address=cluster.address, namespace="corewright", log_to_driver=False)
    try:
        until(lambda: ray.available_resources().get("nc0") == len(MACHINES), 20, "all cores are free")
        assert ray.util.list_named_actors() == []
        assert all(node["Alive"] for node in ray.nodes())
    finally:
        ray.shutdown()
