"""Runs the controller as a Ray actor and the gateways as a Serve deployment."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.util.metrics import Gauge

from orchestrator.api.operator import Operator
from orchestrator.api.refused import Refused
from orchestrator.api.server import AdminApi, serve_admin
from orchestrator.control.controller import Controller
from orchestrator.control.controller_metrics import CORE_STATES
from orchestrator.fleet.controller_settings import ControllerSettings
from orchestrator.fleet.route_table import RouteTable
from orchestrator.gateway.controller_client import ControllerAway
from orchestrator.gateway.server import GatewayServer, settle_collector
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.on_ray.ray_cluster import RayCluster
from orchestrator.on_ray.ray_nodes import NAMESPACE, here
from orchestrator.process import logs
from orchestrator.process.awake_clock import AwakeClock
from orchestrator.process.home import Home
from orchestrator.records.journal import Journal
from orchestrator.scaling.demand_report import DemandReport
from orchestrator.state.record_writer import RecordWriter
from orchestrator.state.resumption import resume_fleet
from placements.spec.problems import Problem
from workers.artifacts.store.store_settings import StoreSettings
from workers.host.task_boundary import task_boundary
from workers.messages.metric_family import MetricFamily
from workers.serving.replica_metrics import REFRESH_S

CONTROLLER = "controller"
GATEWAY = "gateway"

log = logging.getLogger(__name__)


class ControllerActor:
    """The controller as a named actor, which Ray restarts if it dies; it then adopts live replicas."""

    def __init__(self, settings: ControllerSettings) -> None:
        logs.set_up(Path(settings.home) / "logs" / "controller.log", settings.log_format)
        self._down = asyncio.Event()
        home = Home(Path(settings.home))
        clock = AwakeClock()
        cluster = RayCluster(settings.store or StoreSettings(root=str(home.store)), clock=clock)
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
        return await self._controller.change(seen, timeout_s), self._controller.routes()

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
            logging.getLogger(__name__).exception("the apply failed")
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
    return actor.options(
        name=CONTROLLER,
        namespace=NAMESPACE,
        lifetime="detached",
        scheduling_strategy=here(),  # Ray places actors without CPUs on any host, which could be lost
    ).remote(settings)


class RemoteController:
    """A gateway's client of the controller actor, which is looked up by name since it may be restarted."""

    def __init__(self) -> None:
        self._actor: Any = None

    async def routes(self, seen: int, timeout_s: float) -> tuple[int, RouteTable]:
        answer: tuple[int, RouteTable] = await self._call("routes", seen, timeout_s)
        return answer

    async def wake(self, model: str) -> None:
        await self._call("wake", model)

    async def demand(self, report: DemandReport) -> None:
        """Send the demand since the gateway's last report; duplicates are counted once."""
        await self._call("demand", report)

    async def metrics(self) -> list[MetricFamily]:
        families: list[MetricFamily] = await self._call("metrics")
        return families

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            if self._actor is None:
                self._actor = await asyncio.to_thread(ray.get_actor, CONTROLLER, NAMESPACE)
            return await getattr(self._actor, method).remote(*arguments)
        except Exception as error:  # Ray raises many types while the controller starts again
            self._actor = None
            raise ControllerAway(str(error)) from error


class GatewayDeployment:
    """A gateway that Serve keeps alive and shows in the dashboard; requests use its own port instead of Serve's."""

    def __init__(self, settings: GatewaySettings) -> None:
        path = Home(Path(settings.home)).logs / "gateway.log"
        logs.set_up(path, settings.log_format, prompts=settings.log_prompts)
        self._server = GatewayServer(RemoteController(), settings)
        self._server.start()
        settle_collector()

    def check_health(self) -> None:
        self._server.check()

    def __del__(self) -> None:
        self._server.stop()


_gateway: Any = serve.deployment(
    name=GATEWAY,
    health_check_period_s=1,  # a dead gateway is replaced after 0.9 s; after 9.4 s at Serve's default of 10
    health_check_timeout_s=5,
    graceful_shutdown_timeout_s=3,
    graceful_shutdown_wait_loop_s=0.1,
    ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},  # beside the controller
)(GatewayDeployment)


_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Failed): ")  # the last line of a traceback, not indented


def start_gateway(settings: GatewaySettings) -> None:
    """Deploy the gateways and wait until they listen. Raises RuntimeError if they do not start."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled")
    deployment = _gateway.options(num_replicas=settings.gateways + settings.gateway_spare)
    try:
        serve.run(deployment.bind(settings), name=GATEWAY, route_prefix=None)
    except RuntimeError as error:
        raise RuntimeError(_cause() or str(error)) from error


def _cause() -> str:
    """Returns the error of the last gateway that failed to start, from Serve's status; empty: unknown."""
    application = None
    with task_boundary(log, "Serve does not report why the gateway failed to start"):
        application = serve.status().applications.get(GATEWAY)
    messages = [] if application is None else [deployment.message for deployment in application.deployments.values()]
    lines = [line for message in messages for line in message.splitlines()]
    return next((line.strip() for line in reversed(lines) if _RAISED.match(line)), "")


def stop_gateway() -> None:
    serve.shutdown()
