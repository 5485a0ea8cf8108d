"""A fleet on a Ray cluster that others started: the machines are its hosts, and its end leaves the cluster."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fleet import LiveFleet, until
from tests.orchestrator.clients import complete
from tests.orchestrator.conftest import temporary_home

SPEC = """\
version: 1
name: {name}
hosts: {{emulate: inf2.48xlarge}}
defaults: {{engine: echo, max_len: 512, tp_degree: 24}}
models:
  {name}: {{}}
"""
MACHINES = ("a", "b")
NOTICE_S = 40

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without cores, and two machines of 24."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="cwr-", dir="/tmp") as folder:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_TMPDIR", folder)
        light = {"include_dashboard": False, "include_log_monitor": False}
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **light})
        for machine in MACHINES:
            nodes.add_node(
                num_cpus=2,
                include_log_monitor=False,
                resources={f"nc{core}": 1 for core in range(24)},
                labels={"corewright-host": machine, "corewright-instance": "inf2.48xlarge"},
            )
        yield nodes
        nodes.shutdown()


def test_fleets_share_a_cluster_and_no_machine(cluster: Any) -> None:
    """Each serves on a machine of its own. The end of one leaves the other, and what somebody else runs there; a
    machine that Ray drains is empty before its end, and the cluster has all its cores after the end of both."""
    import ray
    from ray import serve

    ray.init(address=cluster.address, namespace="theirs", log_to_driver=False)
    try:
        tenant = ray.remote(num_cpus=0)(Tenant).options(name="tenant", lifetime="detached").remote()
        serve.start(proxy_location="Disabled")
        app = serve.deployment(Tenant).options(ray_actor_options={"num_cpus": 0}).bind()
        serve.run(app, name="theirs", route_prefix=None)
        with temporary_home() as home, temporary_home() as other_home:
            red, blue = [
                LiveFleet(SPEC.format(name=name), home=at, arguments=("--ray-address", cluster.address))
                for name, at in (("red", home), ("blue", other_home))
            ]
            for fleet in (red, blue):
                fleet.wait_ready()
            assert [complete(fleet, name).status_code for fleet, name in ((red, "red"), (blue, "blue"))] == [200, 200]
            assert held(ray) == len(MACHINES)
            down = red.corewright("down")
            assert (down.returncode, red.process.wait(30)) == (0, 0), red.output()
            until(lambda: held(ray) == 1, 20, "the machine of the ended fleet is free")
            assert complete(blue, "blue").status_code == 200
            drain_busy_machine(cluster.address, ray, NOTICE_S)
            until(lambda: held(ray) == 0, NOTICE_S, "the drained machine is empty before its end")
            events = blue.corewright("events", "-o", "json").stdout
            assert '"HostLeaving"' in events
            assert '"NotMoved"' in events
            down = blue.corewright("down")
            assert (down.returncode, blue.process.wait(30)) == (0, 0), blue.output()
        until(lambda: held(ray) == 0, 20, "all cores are free")
        names = ray.util.list_named_actors(all_namespaces=True)
        assert [actor for actor in names if actor["namespace"].startswith("corewright")] == []
        assert list(serve.status().applications) == ["theirs"]
        assert ray.get(tenant.answer.remote()) == serve.get_app_handle("theirs").answer.remote().result() == "here"
        assert all(node["Alive"] for node in ray.nodes())
    finally:
        ray.shutdown()


def drain_busy_machine(address: str, ray: Any, seconds: int) -> None:
    """Announces the end of the machine whose first core is held, as Ray's autoscaler does."""
    free = ray._private.state.available_resources_per_node()
    busy = [node["NodeID"] for node in ray.nodes() if "nc0" in node["Resources"] and "nc0" not in free[node["NodeID"]]]
    reason = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the test")
    drain = (
        "drain-node",
        "--address",
        address,
        "--node-id",
        *busy,
        *reason,
        "--deadline-remaining-seconds",
        str(seconds),
    )
    subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *drain], check=True, timeout=60)


def held(ray: Any) -> int:
    """Returns the number of machines whose first core is held."""
    return len(MACHINES) - int(ray.available_resources().get("nc0", 0))


class Tenant:
    """Something that another user of the cluster runs."""

    def answer(self) -> str:
        return "here"
