"""A fleet on a Ray cluster of network hosts: the first is the head, the others have cores."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import httpx

from tests.fleet import READY_DEADLINE_S, Fleet, until
from tests.network_hosts import DASHBOARD_PORT, Network, NetworkHost
from tests.orchestrator.clients import Admin

PORT = 8080
CORES = 24
PROBE_S, MISSES = 2.0, 2  # of docs/cluster.md
WORKER_SETTINGS = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "5",  # on SIGTERM; 30 by default
}


def start_cluster(network: Network, settings: Mapping[str, str] | None = None, *, dashboard: bool = False) -> None:
    """Start Ray on each host, and wait until all are registered. ``settings`` are variables of the head's Ray."""
    head, *workers = network.hosts
    head.start_ray(dashboard=dashboard, settings=settings)()
    for wait in [start_worker(worker, head) for worker in workers]:
        wait()


def start_worker(worker: NetworkHost, head: NetworkHost) -> Any:
    """Start Ray on a host with cores, as its service would after a boot. Returns the wait for its registration."""
    return worker.start_ray(head.address, cores=CORES, settings=WORKER_SETTINGS)


def gateway_url(machine: NetworkHost) -> str:
    return f"http://{machine.address}:{PORT}"


class Services:
    """Ray on each machine, as services keep it that restart always."""

    def __init__(self, network: Network, settings: Mapping[str, str]) -> None:
        """``settings`` are variables of the head's Ray."""
        self._network = network
        self._settings = settings
        start_cluster(network, settings)

    def restart(self) -> list[NetworkHost]:
        """Start Ray where it has ended. Returns these machines."""
        head, *workers = self._network.hosts
        ended = [machine for machine in self._network.hosts if machine.ray.poll() is not None]
        for machine in ended:
            machine.kill_rest()
            if machine in workers:
                start_worker(machine, head)
            else:
                head.start_ray(settings=self._settings)
        return ended


class Balancer:
    """A load balancer's choice of gateways: those whose /readyz is 200, and all that have been ready if none is."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._misses: dict[str, int] = {}  # since it was ready
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._probe, args=(url,), daemon=True) for url in urls]

    def __enter__(self) -> Balancer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _probe(self, url: str) -> None:
        while not self._over.wait(PROBE_S):
            ready = False
            with contextlib.suppress(httpx.TransportError):
                ready = httpx.get(f"{url}/readyz", timeout=PROBE_S).status_code == 200
            if ready or url in self._misses:
                self._misses[url] = 0 if ready else self._misses[url] + 1

    @property
    def ready(self) -> list[str]:
        return [url for url, misses in list(self._misses.items()) if misses < MISSES]

    def choose(self) -> str:
        return random.choice(self.ready or list(self._misses))


class NetworkAdmin(Admin):
    """The admin API on the loopback of a machine, through restarts of its Ray."""

    back_s = 240.0

    def __init__(self, machine: NetworkHost) -> None:
        self._machine = machine
        super().__init__(machine.path("home"))

    def send(self, method: str, route: str, **options: Any) -> httpx.Response:
        return self._machine.inside(partial(super().send, method, route, **options))


class NetworkFleet(Fleet):
    """One `up --ray-address` on the head, or a job that runs it there. It ends with the hosts."""

    def __init__(
        self, network: Network, spec: str, *arguments: str, outside: NetworkHost | None = None, insecure: bool = True
    ) -> None:
        """``outside``: a machine without Ray, which submits `up` as a job. ``insecure``: no keys are needed."""
        self.head, *self.workers = network.hosts
        super().__init__(gateway_url(self.workers[0]))
        self.head.path("spec.yaml").write_text(spec)
        join = ("up", str(self.head.folder / "spec.yaml"), "--ray-address", f"{self.head.address}:6379")
        listen = ("--host", "0.0.0.0", "--port", str(PORT), *(["--insecure"] if insecure else []))
        words = ("corewright", *join, *listen, *arguments)
        if outside is not None:
            words = ("ray", "job", "submit", f"--address=http://{self.head.address}:{DASHBOARD_PORT}", "--", *words)
        self._caller = outside or self.head
        self._targets = {gateway_url(machine): machine for machine in network.hosts}
        self._balancer: Balancer | None = None
        self.process = self._caller.spawn(*words, log="up.log")

    @contextlib.contextmanager
    def balanced(self) -> Iterator[None]:
        """In this block, clients of ``entrance`` go through a load balancer with all machines as targets."""
        with Balancer(list(self._targets)) as balancer:
            until(lambda: balancer.ready, READY_DEADLINE_S, "a gateway is ready")
            self._balancer = balancer
            yield
        self._balancer = None

    def entrance(self) -> str:
        return self._balancer.choose() if self._balancer is not None else self.url

    def gateway_machine(self, url: str) -> NetworkHost:
        return self._targets[url]

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

    @property
    def admin(self) -> NetworkAdmin:
        return NetworkAdmin(self.head)

    def status(self) -> Any:
        """Raises httpx.TransportError if the controller does not answer."""
        return self.admin.send("GET", "/status").json()

    def events(self, reason: str) -> list[Any]:
        """Returns the events with that reason."""
        events = self.admin.send("GET", "/events", params={"after": 0, "limit": 1000}).json()["events"]
        return [event for event in events if event["reason"] == reason]

    def machine_of(self, host: str) -> NetworkHost:
        """Returns the machine of a planner's host, by the folder of its claims."""
        folder = f"home/emulated/emu-{host.rpartition('/')[2]}"
        return next(worker for worker in self.workers if worker.path(folder).is_dir())

    def worker_of(self, id: str) -> NetworkHost:
        """Returns the host on which the replica's process runs."""
        title = f"Replica[{id.partition('/')[0]}]"
        return next(worker for worker in self.workers if worker.processes(title))
