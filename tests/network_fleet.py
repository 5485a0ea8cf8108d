"""A fleet on a Ray cluster of network hosts: the first is the head, the others have cores."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import httpx

from tests.fleet import READY_DEADLINE_S, until
from tests.network_hosts import Network, NetworkHost

PORT = 8080
CORES = 24


def start_cluster(network: Network, **head_settings: str) -> None:
    """Start Ray on each host, and wait until all are registered. ``head_settings`` are variables of the head's Ray."""
    head, *workers = network.hosts
    head.start_ray(settings=head_settings)()
    for wait in [start_worker(worker, head) for worker in workers]:
        wait()


def start_worker(worker: NetworkHost, head: NetworkHost) -> Any:
    """Start Ray on a host with cores, as its service would after a boot. Returns the wait for its registration."""
    return worker.start_ray(head.address, cores=CORES, settings={"RAY_gcs_rpc_server_reconnect_timeout_s": "600"})


class NetworkFleet:
    """One `up --ray-address` on the head. It ends with the hosts."""

    def __init__(self, network: Network, spec: str, *arguments: str) -> None:
        self.head, *self.workers = network.hosts
        self.url = f"http://{self.head.address}:{PORT}"
        self.http = httpx.Client(base_url=self.url, timeout=60.0)
        self.head.path("spec.yaml").write_text(spec)
        listen = ("--host", "0.0.0.0", "--port", str(PORT), "--insecure")
        words = ("corewright", "up", "spec.yaml", "--ray-address", f"{self.head.address}:6379", *listen, *arguments)
        self.process: subprocess.Popen[bytes] = self.head.spawn(*words, log="up.log")

    def wait_ready(self, deadline_s: float = READY_DEADLINE_S) -> NetworkFleet:
        def ready() -> bool:
            assert self.process.poll() is None, f"up has ended: {self.output()}"
            try:
                return self.http.get("/readyz").status_code == 200
            except httpx.TransportError:
                return False

        try:
            until(ready, deadline_s, "the fleet is ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output()}") from None
        return self

    def complete(self, model: str, prompt: str, max_tokens: int) -> str:
        """Returns the text of a completion."""
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens}
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["text"]
        return text

    def output(self) -> str:
        """What `up` has printed, and the end of the controller's log."""
        return self.head.read("up.log") + self.head.read("home/logs/controller.log")[-4000:]

    def corewright(self, *arguments: str) -> Any:
        """Returns the JSON that the command prints on the head."""
        return json.loads(self.head.run("corewright", *arguments, "-o", "json"))

    def status(self) -> Any:
        return self.corewright("status")

    def replica(self, id: str) -> Any:
        """Returns its entry in the status, or that of a replica without a process if it is not planned now."""
        replicas = (replica for model in self.status()["models"] for replica in model["replicas"])
        return next((replica for replica in replicas if replica["id"] == id), {"state": "none", "epoch": 0})

    def events(self, reason: str) -> list[Any]:
        """Returns the events with that reason."""
        return [event for event in self.corewright("events", "--since", "0")["events"] if event["reason"] == reason]

    def worker_of(self, id: str) -> NetworkHost:
        """Returns the host on which the replica's process runs."""
        title = f"Replica[{id.partition('/')[0]}]"
        return next(worker for worker in self.workers if worker.processes(title))
