"""Ray's own autoscaler starts the machines of a fleet's hosts, and removes those that the fleet gives back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.process.addresses import free_port
from tests.fleet import LiveFleet, until
from tests.orchestrator.conftest import temporary_home

IDLE_S = 10
HEAD = "f" * 51 + "00000"  # the id of the head's node, which Ray's fake provider knows
SPEC = """\
version: 1
name: elastic
hosts: [{emulate: inf2.48xlarge, min: 0, max: 2}]
defaults: {engine: echo, max_len: 512, tp_degree: 24}
models:
  first: {}
"""
SECOND = "  second: {}\n"
UNUSED = ("docker", "file_mounts", "head_node", "auth")
LISTS = (
    "setup_commands",
    "initialization_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
    "cluster_synced_files",
    "rsync_exclude",
    "rsync_filter",
)

pytestmark = pytest.mark.soak


def autoscaler_config(address: str) -> dict[str, Any]:
    """Two node types of one machine each: they share an address, so that a label names the machine."""
    cores = {f"nc{core}": 1 for core in range(24)}

    def machine(label: str) -> dict[str, Any]:
        return {
            "resources": {"CPU": 2, "object_store_memory": 100_000_000, **cores},
            "node_config": {},
            "min_workers": 0,
            "max_workers": 1,
            "labels": {"corewright-instance": "inf2.48xlarge", "corewright-host": label},
        }

    module = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
    return {
        "cluster_name": "fake",
        "max_workers": 2,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": IDLE_S / 60,
        "provider": {
            "type": "external",
            "module": module,
            "gcs_address": address,
            "launch_multiple": True,
            "head_node_id": HEAD,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "inf2-a": machine("a"),
            "inf2-b": machine("b"),
        },
        "head_node_type": "ray.head.default",
        "file_mounts_sync_continuously": False,
        **{name: {} for name in UNUSED},
        **{name: [] for name in LISTS},
    }


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a head without cores, whose autoscaler can start two machines."""
    with tempfile.TemporaryDirectory(prefix="cwa-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        monkeypatch.setenv("RAY_TMPDIR", folder)
        address = f"127.0.0.1:{free_port()}"
        config = Path(folder) / "autoscaling.json"
        config.write_text(json.dumps(autoscaler_config(address)))
        settings = {
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": HEAD,
            "RAY_NODE_TYPE_NAME": "ray.head.default",
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        }
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *("--node-ip-address=127.0.0.1", f"--port={address.rpartition(':')[2]}", f"--temp-dir={folder}"),
            *("--num-cpus=1", "--object-store-memory=100000000", "--dashboard-agent-listen-port=0"),
            *("--include-dashboard=false", "--include-log-monitor=false", f"--autoscaling-config={config}"),
        ]
        with (Path(folder) / "head.log").open("w") as log:
            head = subprocess.Popen(
                command, env={**os.environ, **settings}, stdout=log, stderr=log, start_new_session=True
            )
        try:
            until(lambda: "Ray runtime started" in (Path(folder) / "head.log").read_text(), 90, "the head runs")
            yield address
        finally:
            end_all(folder)
            head.wait(30)


def end_all(folder: str) -> None:
    """Ends the processes of that Ray, which have its folder in their command lines or are below one that has."""
    import psutil

    own = [process for process in psutil.process_iter(["cmdline"]) if folder in " ".join(process.info["cmdline"] or ())]
    below = [child for process in own for child in process.children(recursive=True)]
    for process in {*own, *below}:
        if process.is_running():
            process.send_signal(signal.SIGKILL)


def hosts(fleet: LiveFleet) -> list[str]:
    """Returns the hosts that the fleet uses and that have a machine."""
    return [host["name"] for host in fleet.status()["hosts"] if not host["starting"] and not host["lost"]]


def test_machines_come_for_models_and_go_after_them(cluster: str) -> None:
    """The first machine comes for the first model; the second one for a second model, and Ray removes it after that
    model is removed. `down` leaves neither a request nor an actor."""
    import ray

    ray.init(address=cluster, namespace="theirs", log_to_driver=False)
    try:
        with temporary_home() as home:
            fleet = LiveFleet(SPEC, home=home, arguments=("--ray-address", cluster, "--detach"))
            assert fleet.process.wait(150) == 0, fleet.output()
            assert len(hosts(fleet)) == machines(ray) == 1
            fleet.spec.write_text(SPEC + SECOND)
            planned = json.loads(fleet.corewright("plan", str(fleet.spec), "-o", "json").stdout)
            assert [(host["host"], host["replicas"]) for host in planned["hosts_to_add"]] == [
                ("inf2.48xlarge/1", ["second/0"])
            ]
            applied = fleet.corewright("apply", str(fleet.spec), "--wait")
            assert applied.returncode == 0, applied.stderr
            assert len(hosts(fleet)) == machines(ray) == 2
            fleet.spec.write_text(SPEC)
            assert fleet.corewright("apply", str(fleet.spec), "--wait", "--yes").returncode == 0
            until(lambda: machines(ray) == 1, 150, "the machine of the removed model is gone")
            assert len(hosts(fleet)) == 1
            down = fleet.corewright("down")
            assert down.returncode == 0, down.stderr
            assert [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"] == []
            until(lambda: machines(ray) == 0, 60, "the last machine is gone, too")
    finally:
        ray.shutdown()


def machines(ray: Any) -> int:
    return sum(node["Alive"] and "nc0" in node["Resources"] for node in ray.nodes())
