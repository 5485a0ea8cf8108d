"""Runs the gateways as a Serve deployment."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path
from typing import Any

import msgspec.structs
import ray
from ray import serve

from orchestrator.fleet.cluster_names import ray_name
from orchestrator.fleet.route_table import RouteTable
from orchestrator.gateway.controller_client import ControllerAway
from orchestrator.gateway.server import GatewayServer
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.on_ray.ray_nodes import CONTROLLER, HEAD, own_interpreter
from orchestrator.process import logs
from orchestrator.process.collector import settle_collector
from orchestrator.process.home import Home
from orchestrator.scaling.demand_report import DemandReport
from workers.host.task_boundary import task_boundary
from workers.messages.metric_family import MetricFamily

GATEWAY = "gateway"

log = logging.getLogger(__name__)


class RemoteController:
    """A gateway's client of the controller actor, which is looked up by name since it may be restarted."""

    def __init__(self, fleet: str) -> None:
        """``fleet`` is the fleet's name."""
        self._namespace = ray_name(fleet)
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
                self._actor = await asyncio.to_thread(ray.get_actor, CONTROLLER, self._namespace)
            return await getattr(self._actor, method).remote(*arguments)
        except Exception as error:  # Ray raises many types while the controller starts again
            self._actor = None
            raise ControllerAway(str(error)) from error


class GatewayDeployment:
    """A gateway that Serve keeps alive and shows in the dashboard; requests use its own port instead of Serve's."""

    def __init__(self, settings: GatewaySettings, fleet: str) -> None:
        path = Home(Path(settings.home)).logs / "gateway.log"
        logs.set_up(path, settings.log_format, prompts=settings.log_prompts)
        settings = msgspec.structs.replace(settings, machine=ray.util.get_node_ip_address())
        self._server = GatewayServer(RemoteController(fleet), settings)
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
)(GatewayDeployment)


_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Failed): ")  # the last line of a traceback, not indented


def start_gateway(settings: GatewaySettings, fleet: str, *, joined: bool = False) -> None:
    """Deploy the gateways of the fleet of that name, and wait until they listen. ``joined``: on a Ray cluster that
    others started. Raises RuntimeError if they do not listen."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled")
    deployment = _gateway.options(
        num_replicas=settings.gateways + settings.gateway_spare,
        ray_actor_options={"num_cpus": 0, "resources": HEAD, **(own_interpreter() if joined else {})},
    )
    try:
        serve.run(deployment.bind(settings, fleet), name=ray_name(fleet), route_prefix=None)
    except RuntimeError as error:
        raise RuntimeError(_cause(ray_name(fleet)) or str(error)) from error


def _cause(name: str) -> str:
    """Returns the error of the last gateway that failed to start, from Serve's status; empty: unknown."""
    application = None
    with task_boundary(log, "Serve does not report why the gateway failed to start"):
        application = serve.status().applications.get(name)
    messages = [] if application is None else [deployment.message for deployment in application.deployments.values()]
    lines = [line for message in messages for line in message.splitlines()]
    return next((line.strip() for line in reversed(lines) if _RAISED.match(line)), "")


def stop_serve() -> None:
    """Stop the gateways and Ray Serve, which must be the fleet's own."""
    serve.shutdown()
