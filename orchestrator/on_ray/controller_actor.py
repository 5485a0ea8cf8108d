"""Runs the controller as a Ray actor. Does not import Ray Serve, which would delay its restart."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import ray
from ray.util.metrics import Gauge

from orchestrator.api.operator import Operator
from orchestrator.api.refused import Refused
from orchestrator.api.server import AdminApi, serve_admin
from orchestrator.control.controller import Controller
from orchestrator.control.controller_metrics import CORE_STATES
from orchestrator.fleet.cluster_names import ray_name
from orchestrator.fleet.controller_settings import ControllerSettings
from orchestrator.fleet.route_table import RouteTable
from orchestrator.on_ray.ray_cluster import RayCluster
from orchestrator.on_ray.ray_nodes import CONTROLLER, HEAD, here
from orchestrator.process import logs
from orchestrator.process.awake_clock import AwakeClock
from orchestrator.process.home import Home
from orchestrator.records.journal import Journal
from orchestrator.scaling.demand_report import DemandReport
from orchestrator.state.record_writer import RecordWriter
from orchestrator.state.resumption import resume_fleet
from placements.spec.problems import Problem
from workers.artifacts.store.store_settings import StoreSettings
from workers.messages.metric_family import MetricFamily
from workers.serving.replica_metrics import REFRESH_S

log = logging.getLogger(__name__)


class ControllerActor:
    """The controller as a named actor, which Ray restarts if it dies; it then adopts live replicas."""

    def __init__(self, settings: ControllerSettings) -> None:
        logs.set_up(Path(settings.home) / "logs" / "controller.log", settings.log_format)
        self._down = asyncio.Event()
        home = Home(Path(settings.home))
        clock = AwakeClock()
        store = settings.store or StoreSettings(root=str(home.store))
        cluster = RayCluster(store, clock=clock, joined=settings.joined, home=settings.home, name=settings.name)
        restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        state = resume_fleet(settings, RecordWriter(Journal(home.journal)), clock, restarted=restarted)
        self._controller = Controller(state, cluster, resumed=clock.resumed_at)
        cluster.add_hosts(host.name for host in state.hosts)
        self._operator = Operator(self._controller, cluster)
        loop = asyncio.get_running_loop()  # Ray makes an async actor's object on its event loop
        self._beating = loop.create_task(clock.beat())
        self._running = loop.create_task(self._controller.run())
        self._admin = loop.create_task(self._serve_admin())
        self._metrics = loop.create_task(self._export_cores())

    async def _serve_admin(self) -> None:
        await self._controller.settled()  # before that, operations would find no replicas
        await serve_admin(AdminApi(self._operator, self._request_shutdown), self._controller.settings.admin_port)

    async def _export_cores(self) -> None:
        """Export the cores of each host by state to Ray's metrics; their sum is always the number of its cores."""
        gauge = Gauge("corewright_cores", "NeuronCores by host and state.", ("host", "state"))
        await self._controller.settled()
        while True:
            for host in self._controller.status()["hosts"]:
                for state, key in CORE_STATES.items():
                    gauge.set(host[key], {"host": host["name"], "state": state})
            await asyncio.sleep(REFRESH_S)

    async def routes(self, seen: int, timeout_s: float) -> tuple[int, RouteTable]:
        return await self._controller.next_routes(seen, timeout_s)

    async def status(self, seen: int, timeout_s: float) -> tuple[int, dict[str, Any]]:
        for task in (self._running, self._admin, self._metrics, self._beating):
            if task.done():
                task.result()  # raises its error: a fleet without its loop must not look alive
        return await self._controller.change(seen, timeout_s), self._controller.status()

    async def wake(self, model: str) -> None:
        await self._controller.wake(model)

    async def demand(self, report: DemandReport) -> None:
        await self._controller.demand(report)

    async def metrics(self) -> list[MetricFamily]:
        return await self._controller.metrics()

    async def apply(self, text: str, file: str, base_dir: str, by: str, cause: str) -> dict[str, Any]:
        """Apply a spec like the admin API; a rejection is returned as `error` with its `problems`."""
        try:
            return await self._operator.apply(text, file, base_dir, by=by, cause=cause)
        except Refused as refused:
            return {"error": refused.problem, "problems": refused.problems, "status": refused.status}
        except Exception as error:
            log.exception("the apply failed")
            problem = Problem("apply-failed", "error", file, f"{type(error).__name__}: {error}", "see controller.log")
            return {"error": problem, "problems": (), "status": 500}

    async def wait_down(self) -> None:
        """Wait until the admin API requests a shutdown, or the fleet has shut down."""
        await self._down.wait()

    async def shutdown(self, drain_s: float) -> None:
        try:
            await self._controller.shutdown(drain_s)
        finally:
            self._down.set()

    async def _request_shutdown(self) -> None:
        self._down.set()


def start_controller(settings: ControllerSettings) -> Any:
    """Start the controller actor and return its handle."""
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=1000)(ControllerActor)
    # Ray places actors without CPUs on any host, which could be lost. A new head has a new node id.
    place = {"resources": HEAD} if settings.joined else {"scheduling_strategy": here()}
    namespace = ray_name(settings.name)
    return actor.options(name=CONTROLLER, namespace=namespace, lifetime="detached", **place).remote(settings)
