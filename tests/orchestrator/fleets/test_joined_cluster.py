"""A fleet on a Ray cluster that others started: the machines are its hosts, and its end leaves the cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from orchestrator.process.home import Home
from tests.fleet import LiveFleet, until
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


def test_the_console_keeps_its_address_when_the_controller_restarts(cluster: Any) -> None:
    """On the port of the settings or, without it, on the one that was free at the start: links and tunnels name it."""
    with temporary_home() as home:
        join = ("--ray-address", cluster.address, "--detach")
        fleet = LiveFleet(SPEC.format(name="green"), home=home, arguments=join)
        assert fleet.process.wait(120) == 0, fleet.output()
        record = Home(home).read_record()
        assert record is not None
        assert (
            f"console      {record.console}   (log in with the key of `corewright console` on the head)"
            in fleet.output()
        )
        os.kill(record.pid, signal.SIGKILL)

        def restarted() -> bool:
            now = Home(home).read_record()
            return now is not None and now.pid != record.pid and fleet.corewright("status").returncode == 0

        until(restarted, 60, "the controller is back")
        assert httpx.get(record.console).status_code == 200
        assert fleet.corewright("down").returncode == 0


def test_fleets_live_on_a_cluster_until_down(cluster: Any) -> None:
    """Two fleets are on machines of their own, also without their `up`; a second `up` changes one. A machine that Ray
    drains is empty before its end. `down` removes a fleet also without its controller, and leaves the other fleet and
    the work of other users there."""
    import ray
    from ray import serve

    class Tenant:  # local, so that the cluster gets its code: Serve's workers have the path of whoever started Serve
        """Something that another user of the cluster runs."""

        def answer(self) -> str:
            return "here"

    ray.init(address=cluster.address, namespace="theirs", log_to_driver=False)
    try:
        tenant = ray.remote(num_cpus=0)(Tenant).options(name="tenant", lifetime="detached").remote()
        serve.start(proxy_location="Disabled")
        app = serve.deployment(Tenant).options(ray_actor_options={"num_cpus": 0}).bind()
        serve.run(app, name="theirs", route_prefix=None)
        with temporary_home() as home, temporary_home() as other_home:
            join = ("--ray-address", cluster.address)
            red = LiveFleet(SPEC.format(name="red"), home=home, arguments=join)
            blue = LiveFleet(SPEC.format(name="blue"), home=other_home, arguments=(*join, "--detach"))
            assert blue.process.wait(120) == 0, blue.output()
            red.wait_ready()
            until(lambda: "watching the fleet red" in red.output(), 60, "`up` has become a viewer")
            assert red.corewright("status").returncode == 0
            assert red.stop(signal.SIGINT) == 0, red.output()
            assert "the fleet red runs on" in red.output()
            assert [served(red, "red"), served(blue, "blue")] == [True, True]
            assert held(ray) == len(MACHINES)

            blue.spec.write_text(SPEC.format(name="blue").replace("512", "256"))
            again = blue.corewright("up", str(blue.spec), "--port", str(blue.port), *join, "--detach")
            assert "the fleet blue runs already: revision 2 is applied" in again.stderr, again.stderr
            assert again.returncode == 0

            down = red.corewright("down")
            assert down.returncode == 0, down.stderr
            assert red.corewright("status").returncode == 1
            until(lambda: held(ray) == 1, 20, "the machine of the removed fleet is free")
            assert served(blue, "blue")
            drained = drain_busy_machine(cluster.address, ray, NOTICE_S)
            until(lambda: held(ray) == 0, NOTICE_S, "the drained machine is empty before its end")
            events = blue.corewright("events", "-o", "json").stdout
            assert '"HostLeaving"' in events
            assert '"NotMoved"' in events
            ray.kill(ray.get_actor("controller", "corewright-blue"), no_restart=True)
            down = blue.corewright("down", "--ray-address", cluster.address)
            assert down.returncode == 0, down.stderr
        until(lambda: held(ray) == 0, 20, "all cores are free")
        names = ray.util.list_named_actors(all_namespaces=True)
        assert [actor for actor in names if actor["namespace"].startswith("corewright")] == []
        assert list(serve.status().applications) == ["theirs"]
        assert ray.get(tenant.answer.remote()) == serve.get_app_handle("theirs").answer.remote().result() == "here"
        assert all(node["Alive"] or node["NodeID"] in drained for node in ray.nodes())  # Ray ends it when it is idle
    finally:
        ray.shutdown()


def drain_busy_machine(address: str, ray: Any, seconds: int) -> list[str]:
    """Announces the end of the machine whose first core is held, as Ray's autoscaler does. Returns its node."""
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
    return busy


def served(fleet: LiveFleet, model: str) -> bool:
    with httpx.Client(base_url=fleet.url, timeout=60.0) as http:
        body = {"model": model, "messages": [{"role": "user", "content": "x"}]}
        return http.post("/v1/chat/completions", json=body).status_code == 200


def held(ray: Any) -> int:
    """Returns the number of machines whose first core is held."""
    return int(ray.cluster_resources().get("nc0", 0) - ray.available_resources().get("nc0", 0))
