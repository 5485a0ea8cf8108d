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
from ray.exceptions import RayTaskError

from orchestrator.fleet.cluster_names import ray_name
from orchestrator.fleet.gateway_places import GatewayPlace
from orchestrator.fleet.hosting import Hosting
from orchestrator.fleet.route_table import RouteTable
from orchestrator.gateway.controller_client import ControllerAway, ControllerFailed
from orchestrator.gateway.server import DRAIN_S, GatewayServer
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.on_ray.ray_nodes import CONTROLLER, HEAD, own_interpreter
from orchestrator.process import logs
from orchestrator.process.collector import settle_collector
from orchestrator.process.home import Home
from orchestrator.scaling.demand_report import DemandReply, DemandReport
from workers.host.task_boundary import task_boundary
from workers.messages.metric_family import MetricFamily

GATEWAY = "gateway"
SPEC_S = 60.0  # to read a model's folder and to plan
REPLY_S = 10.0  # for a reply of the controller, or for the lookup of its actor
NODE_LABEL = "ray.io/node-id"  # that Ray gives each node

log = logging.getLogger(__name__)


class RemoteController:
    """A gateway's client of the controller actor, which is looked up by name since it may be restarted.

    Every call has a deadline: without the machine of the controller, a call waits for ever, and a lookup for as long as
    Ray's head is away."""

    def __init__(self, fleet: str, place: str = "") -> None:
        """``fleet`` is the fleet's name, ``place`` the label of the gateway's machine on a joined cluster."""
        self._namespace = ray_name(fleet)
        self._place = place
        self._actor: Any = None
        self._lookup: asyncio.Future[Any] | None = None

    async def routes(self, seen: int, timeout_s: float) -> tuple[int, RouteTable]:
        answer: tuple[int, RouteTable] = await self._call("routes", seen, timeout_s, wait_s=timeout_s)
        return answer

    async def keys(self, seen: str, timeout_s: float) -> tuple[str, bytes]:
        answer: tuple[str, bytes] = await self._call("keys", seen, timeout_s, wait_s=timeout_s)
        return answer

    async def wake(self, model: str) -> None:
        await self._call("wake", model)

    async def demand(self, report: DemandReport) -> DemandReply | None:
        """Send the demand since the gateway's last report; duplicates are counted once."""
        reply: DemandReply | None = await self._call("demand", report)
        return reply

    async def metrics(self) -> list[MetricFamily]:
        families: list[MetricFamily] = await self._call("metrics", *([self._place] if self._place else []))
        return families

    async def hosted(self) -> list[tuple[str, str]]:
        models: list[tuple[str, str]] = await self._call("hosted")
        return models

    async def host_model(self, name: str, folder: str, *, again: bool, wait_s: float) -> Hosting:
        hosting: Hosting = await self._call("host_model", name, folder, again, wait_s, wait_s=wait_s + SPEC_S)
        return hosting

    async def unhost_model(self, name: str) -> Hosting:
        hosting: Hosting = await self._call("unhost_model", name, wait_s=SPEC_S)
        return hosting

    async def _call(self, method: str, *arguments: Any, wait_s: float = 0.0) -> Any:
        try:
            if self._actor is None:
                self._actor = await self._found()
            return await asyncio.wait_for(getattr(self._actor, method).remote(*arguments), wait_s + REPLY_S)
        except RayTaskError as error:  # it is of the cause's type, too
            raise ControllerFailed(str(error)) from error
        except asyncio.TimeoutError:
            self._actor = None
            raise ControllerAway(f"it has not replied for {wait_s + REPLY_S:.0f} s") from None
        except Exception as error:  # Ray raises many types while the controller starts again
            self._actor = None
            raise ControllerAway(str(error)) from error

    async def _found(self) -> Any:
        """Returns the controller. Calls share one lookup, which cannot be stopped and keeps its thread."""
        lookup = self._lookup
        if lookup is None or lookup.done():
            work = asyncio.to_thread(ray.get_actor, CONTROLLER, self._namespace)
            self._lookup = lookup = asyncio.ensure_future(work)
            lookup.add_done_callback(lambda done: done.cancelled() or done.exception())  # its callers may have left
        return await asyncio.wait_for(asyncio.shield(lookup), REPLY_S)


class GatewayDeployment:
    """A gateway that Serve keeps alive and shows in the dashboard; requests use its own port instead of Serve's."""

    def __init__(self, settings: GatewaySettings, fleet: str) -> None:
        path = Home(Path(settings.home)).logs / "gateway.log"
        logs.set_up(path, settings.log_format, prompts=settings.log_prompts)
        settings = msgspec.structs.replace(settings, machine=ray.util.get_node_ip_address())
        self._server = GatewayServer(RemoteController(fleet, settings.place), settings)
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
    graceful_shutdown_timeout_s=DRAIN_S + 5,  # its requests end first
    graceful_shutdown_wait_loop_s=0.1,
)(GatewayDeployment)


_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Failed): ")  # the last line of a traceback, not indented


def start_gateway(settings: GatewaySettings, fleet: str) -> None:
    """Deploy the gateways of the fleet of that name, and wait until they listen. Raises RuntimeError if they do not."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled")
    try:
        serve.run(_application(settings, fleet, resources=HEAD), name=ray_name(fleet), route_prefix=None)
    except RuntimeError as error:
        application = None
        with task_boundary(log, "Serve does not report why the gateway failed to start"):
            application = serve.status().applications.get(ray_name(fleet))
        raise RuntimeError(cause_of(application) or str(error)) from error


def gateway_application(settings: GatewaySettings, fleet: str, place: GatewayPlace) -> Any:
    """Returns the application of the gateways on one machine of a joined cluster."""
    settings = msgspec.structs.replace(settings, place=place.label)
    return _application(settings, fleet, label_selector={NODE_LABEL: place.node}, **own_interpreter())


def _application(settings: GatewaySettings, fleet: str, **options: Any) -> Any:
    replicas = settings.gateways + settings.gateway_spare
    return _gateway.options(num_replicas=replicas, ray_actor_options={"num_cpus": 0, **options}).bind(settings, fleet)


def cause_of(application: Any) -> str:
    """Returns the error of the last gateway that failed to start, from the status of its application; empty:
    unknown."""
    messages = [] if application is None else [deployment.message for deployment in application.deployments.values()]
    lines = [line for message in messages for line in message.splitlines()]
    return next((line.strip() for line in reversed(lines) if _RAISED.match(line)), "")


def stop_serve() -> None:
    """Stop the gateways and Ray Serve, which must be the fleet's own."""
    serve.shutdown()
