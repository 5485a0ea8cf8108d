"""A fleet on a Ray cluster of network hosts: the first is the head, the others have cores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.fleet import Fleet
from tests.network_hosts import DASHBOARD_PORT, Network, NetworkHost

PORT = 8080
CORES = 24


def start_cluster(network: Network, settings: Mapping[str, str] | None = None, *, dashboard: bool = False) -> None:
    """Start Ray on each host, and wait until all are registered. ``settings`` are variables of the head's Ray."""
    head, *workers = network.hosts
    head.start_ray(dashboard=dashboard, settings=settings)()
    for wait in [start_worker(worker, head) for worker in workers]:
        wait()


def start_worker(worker: NetworkHost, head: NetworkHost) -> Any:
    """Start Ray on a host with cores, as its service would after a boot. Returns the wait for its registration."""
    return worker.start_ray(head.address, cores=CORES, settings={"RAY_gcs_rpc_server_reconnect_timeout_s": "600"})


class NetworkFleet(Fleet):
    """One `up --ray-address` on the head, or a job that runs it there. It ends with the hosts."""

    def __init__(self, network: Network, spec: str, *arguments: str, outside: NetworkHost | None = None) -> None:
        """``outside``: a machine without Ray, which submits `up` as a job."""
        self.head, *self.workers = network.hosts
        super().__init__(f"http://{self.head.address}:{PORT}")
        self.head.path("spec.yaml").write_text(spec)
        join = ("up", str(self.head.folder / "spec.yaml"), "--ray-address", f"{self.head.address}:6379")
        words = ("corewright", *join, "--host", "0.0.0.0", "--port", str(PORT), "--insecure", *arguments)
        if outside is not None:
            words = ("ray", "job", "submit", f"--address=http://{self.head.address}:{DASHBOARD_PORT}", "--", *words)
        self._caller = outside or self.head
        self.process = self._caller.spawn(*words, log="up.log")

    def complete(self, model: str, prompt: str, max_tokens: int) -> str:
        """Returns the text of a completion."""
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens}
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["text"]
        return text

    def output(self) -> str:
        """What `up` has printed, and the end of the controller's log."""
        return self._caller.read("up.log") + self.head.read("home/logs/controller.log")[-4000:]

    def corewright(self, *arguments: str) -> Any:
        """Returns the JSON that the command prints on the head."""
        return json.loads(self.head.run("corewright", *arguments, "-o", "json"))

    def status(self) -> Any:
        return self.corewright("status")

    def events(self, reason: str) -> list[Any]:
        """Returns the events with that reason."""
        return [event for event in self.corewright("events", "--since", "0")["events"] if event["reason"] == reason]

    def worker_of(self, id: str) -> NetworkHost:
        """Returns the host on which the replica's process runs."""
        title = f"Replica[{id.partition('/')[0]}]"
        return next(worker for worker in self.workers if worker.processes(title))
