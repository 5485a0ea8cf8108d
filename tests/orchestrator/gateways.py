"""A gateway without Ray: the real web server, in this process, with a controller that a test plays."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec.structs

from orchestrator.access.keys import KeyFeed, KeyFile
from orchestrator.control.gateway_reports import LiveRequests
from orchestrator.gateway.controller_client import ControllerAway
from orchestrator.gateway.http.http_server import HttpServer
from orchestrator.gateway.openapi import GatewayRoute
from orchestrator.gateway.server import GatewayServer
from orchestrator.gateway.serving.model_queue import ModelQueue
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.messages.controller_replies import Hosting
from orchestrator.messages.key_usage import KeyUsageExchange
from orchestrator.messages.replica_states import ModelState
from orchestrator.messages.route_table import ModelRoutes, Route, RouteTable
from orchestrator.process.addresses import free_port
from orchestrator.scaling.demand_report import DemandReply, DemandReport, DemandWindow
from placements.facts.encoders import Kind
from tests.fleet import until
from tests.orchestrator.encoded import EncoderReplica
from tests.served import EPOCH, TOKEN, Served
from workers.messages.metric_family import MetricFamily

VERSION = "7d3f"


class PlayedController:
    """Says what the test sets; remembers what the gateway asked for."""

    def __init__(self) -> None:
        self.version = 1
        self.table = RouteTable(ready=False, stopping=False, token=TOKEN, models=[])
        self.woken: list[str] = []
        self.answers = True
        self.families: list[MetricFamily] = []
        self.hosting: dict[str, str] = {}  # folders by model
        self.loads: list[tuple[str, bool]] = []
        self.load_replies: list[Hosting] = []
        self.hosts: Callable[[str, str], Hosting] = lambda name, folder: self.load_replies.pop(0)
        self.away_for = 0  # loads
        self.failure: Exception | None = None  # of loads and unloads
        self.reports: list[DemandReport] = []
        self.key_feed = KeyFeed(KeyFile(Path("/nonexistent/keys.json")))
        self.usage = KeyUsageExchange()
        self.live_requests = LiveRequests(time.monotonic)
        self._changed = threading.Condition()

    def set(self, *models: ModelRoutes, ready: bool = True, stopping: bool = False) -> None:
        with self._changed:
            self.version += 1
            self.table = RouteTable(ready=ready, stopping=stopping, token=TOKEN, models=list(models))
            self._changed.notify_all()

    def change(self, **fields: Any) -> None:
        """Change fields of the routes."""
        with self._changed:
            self.version += 1
            self.table = msgspec.structs.replace(self.table, **fields)
            self._changed.notify_all()

    async def routes(self, seen: int, timeout_s: float) -> tuple[int, RouteTable]:
        if not self.answers:
            raise ControllerAway("the controller is gone")
        await asyncio.to_thread(self._wait, seen, timeout_s)
        return self.version, self.table

    async def keys(self, seen: str, timeout_s: float) -> tuple[str, bytes]:
        if not self.answers:
            raise ControllerAway("the controller is gone")
        return await self.key_feed.next(seen, min(timeout_s, 0.5))

    async def wake(self, model: str) -> None:
        self.woken.append(model)

    async def metrics(self) -> list[MetricFamily]:
        return self.families

    async def hosted(self) -> list[tuple[str, str]]:
        if not self.answers:
            raise ControllerAway("the controller is gone")
        return sorted(self.hosting.items())

    async def host_model(self, name: str, folder: str, *, again: bool, wait_s: float) -> Hosting:
        self.loads.append((name, again))
        if self.failure is not None:
            raise self.failure
        if self.away_for:
            self.away_for -= 1
            raise ControllerAway("the controller is gone")
        return self.hosts(name, folder)

    async def unhost_model(self, name: str) -> Hosting:
        if self.failure is not None:
            raise self.failure
        if not self.answers:
            raise ControllerAway("the controller is gone")
        found = self.hosting.pop(name, None)
        self.change(models=[model for model in self.table.models if model.name != name])
        return Hosting(200, "unloaded") if found else Hosting(404, f"the model {name} is not loaded")

    async def demand(self, report: DemandReport) -> DemandReply:
        self.reports.append(report)
        if not self.answers:
            raise ControllerAway("the controller is gone")
        reply = DemandReply(usage=self.usage.receive(report.gateway, report.usage))
        return msgspec.structs.replace(reply, **self.live_requests.receive(report))

    def demand_of(self, model: str) -> DemandWindow:
        """Returns the demand of the last report; an empty one before the first."""
        last = self.reports[-1].models if self.reports else []
        return next((demand for demand in last if demand.model == model), DemandWindow(model=model))

    def total(self, count: str) -> float:
        """Of all models and reports."""
        return sum(getattr(demand, count) for report in list(self.reports) for demand in report.models)

    def _wait(self, seen: int, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.version > seen, min(timeout_s, 0.5))


def routes(
    name: str,
    *replicas: Served | EncoderReplica,
    state: ModelState | None = None,
    max_queue: int = 256,
    max_len: int = 4096,
    holds: bool = False,
    reason: str | None = None,
    engine: str = "echo",
    source: str | None = None,
    kind: Kind = "generate",
) -> ModelRoutes:
    """The routes of an echo model with these replicas, all of one version."""
    return ModelRoutes(
        name=name,
        state=state or (ModelState.READY if replicas else ModelState.LOADING),
        reason=reason,
        engine=engine,
        kind=kind,
        source=source,
        max_len=max_len,
        max_queue=max_queue,
        loads_on_request=holds,
        replicas=[Route(f"{name}/{i}", EPOCH, str(served.path), version=VERSION) for i, served in enumerate(replicas)],
    )


class LiveGateway:
    """One gateway, and a client of it."""

    def __init__(self, **settings: Any) -> None:
        """``settings`` are fields of GatewaySettings; without ``port`` it is a free one. ``models`` are the routes to
        replicas that it finds when it starts, ``http_routes`` those for clients."""
        self.controller = PlayedController()
        self.controller.answers = settings.pop("answers", True)
        http_routes: Sequence[GatewayRoute] | None = settings.pop("http_routes", None)
        if models := settings.pop("models", ()):
            self.controller.set(*models)
        self.port: int = settings.pop("port", None) or free_port()
        self.url = f"http{'s' if 'tls_cert' in settings else ''}://127.0.0.1:{self.port}"
        self._home = tempfile.TemporaryDirectory(prefix="cwt-", dir="/tmp")
        self.home = Path(settings.pop("home", self._home.name))
        self.settings = GatewaySettings(host="127.0.0.1", port=self.port, home=str(self.home), **settings)
        self._server = GatewayServer(self.controller, self.settings, http_routes)
        self._server.start()
        self.http = httpx.Client(base_url=self.url, timeout=20)

    def serve(self, *models: ModelRoutes, ready: bool = True) -> LiveGateway:
        """Set the routes and wait until every replica is connected."""
        self.controller.set(*models, ready=ready)
        queues = self._server.gateway.served.queues

        def connected() -> bool:
            return all(
                model.name in queues
                and queues[model.name].routes == model
                and queues[model.name].links.slots >= len(model.replicas)
                for model in models
            )

        until(connected, 10, "every replica is connected")
        return self

    @property
    def queues(self) -> dict[str, ModelQueue]:
        return self._server.gateway.served.queues

    @property
    def http_server(self) -> HttpServer:
        return self._server.gateway.server

    def queue(self, model: str) -> ModelQueue:
        return self._server.gateway.served.queues[model]

    @property
    def waits(self) -> bool:
        """Returns whether it is a spare, which does not listen."""
        return self._server._server is None

    @property
    def connections(self) -> int:
        """Of clients, that are open."""
        return len(self._server.gateway.server.connections)

    def abort_connections(self) -> None:
        """Closes those of clients at once, as the end of the process would."""
        for connection in list(self.http_server.connections):
            assert self._server._loop is not None
            self._server._loop.call_soon_threadsafe(connection.abort)

    @property
    def cpu_s(self) -> float:
        """CPU time that its event loop has taken."""
        ident = self._server._thread.ident
        assert ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(ident))

    @property
    def paths(self) -> list[str]:
        """Of all routes without parameters."""
        return [route.path for route in self._server.gateway.routes.all if not route.path_parameters]

    def close(self) -> None:
        """Raises AssertionError where a queue without requests counts some."""
        self.http.close()
        counted = {
            queue.name: queue.dispatcher.headroom.present - queue.waiting - queue.links.live
            for queue in self.queues.values()
        }
        self._server.stop()
        assert not any(counted.values()), counted
        self._home.cleanup()
