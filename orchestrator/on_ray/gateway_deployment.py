"""Runs the gateways as a Serve deployment."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import msgspec.structs
import ray
from ray import serve

from orchestrator.fleet.cluster_names import ray_name
from orchestrator.fleet.gateway_places import GatewayPlace
from orchestrator.gateway.settings import DRAIN_S, GatewaySettings
from orchestrator.on_ray.ray_nodes import HEAD, own_interpreter
from orchestrator.process import logs
from orchestrator.process.collector import settle_collector
from orchestrator.process.home import Home
from workers.host.task_boundary import task_boundary

GATEWAY = "gateway"
NODE_LABEL = "ray.io/node-id"  # that Ray gives each node

log = logging.getLogger(__name__)


class GatewayDeployment:
    """A gateway that Serve keeps alive and shows in the dashboard; requests use its own port instead of Serve's."""

    def __init__(self, settings: GatewaySettings, fleet: str) -> None:
        from workers.text.tokenizer_pool import nursery

        if settings.tokenizers:
            nursery()  # it imports transformers while this process imports what follows, half a second each
        from orchestrator.gateway.server import GatewayServer
        from orchestrator.on_ray.remote_controller import RemoteController

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
        application = _application(settings, fleet, settings.gateways, resources=HEAD)
        serve.run(application, name=ray_name(fleet), route_prefix=None)
    except RuntimeError as error:
        application = None
        with task_boundary(log, "Serve does not report why the gateway failed to start"):
            application = serve.status().applications.get(ray_name(fleet))
        raise RuntimeError(cause_of(application) or str(error)) from error


def start_spare_gateway(settings: GatewaySettings, fleet: str) -> None:
    """Deploy the one that stands by, without waiting for it. It is an application of its own: Serve replaces all
    gateways of an application that is changed."""
    spare = _application(settings, fleet, 1, resources=HEAD)
    targets = [serve.RunTarget(spare, name=f"{ray_name(fleet)}-spare", route_prefix=None)]
    serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def gateway_application(settings: GatewaySettings, fleet: str, place: GatewayPlace) -> Any:
    """Returns the application of the gateways on one machine of a joined cluster."""
    settings = msgspec.structs.replace(settings, place=place.label)
    replicas = settings.gateways + settings.gateway_spare
    return _application(settings, fleet, replicas, label_selector={NODE_LABEL: place.node}, **own_interpreter())


def _application(settings: GatewaySettings, fleet: str, replicas: int, **options: Any) -> Any:
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
