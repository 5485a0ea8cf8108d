"""The gateways: Serve applications, each pinned to a machine.

Serve does not let its callers choose which replica of a deployment ends, and a changed selector restarts all of them;
so a machine joins or leaves by an application of its own. Its name has the Ray node: a machine that joins again gets a
new one. So what runs is known from the names alone. Ray Serve is imported only where it is used: it would delay the
restarts of the controller.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec.structs
import ray
from ray.exceptions import RayTaskError

from orchestrator.cluster.calls import Head
from orchestrator.cluster.nodes import CONTROLLER, HEAD, own_interpreter
from orchestrator.cluster.ray_names import ray_name
from orchestrator.gateway.controller_client import ControllerAway, ControllerFailed
from orchestrator.gateway.settings import DRAIN_S, GatewaySettings
from orchestrator.messages.controller_replies import Hosting
from orchestrator.messages.gateway_places import GatewayPlace
from orchestrator.messages.route_table import RouteTable
from orchestrator.process import logs
from orchestrator.process.awake_clock import AwakeClock
from orchestrator.process.collector import settle_collector
from orchestrator.process.home import Home
from orchestrator.scaling.demand_report import DemandReply, DemandReport
from workers.messages.metric_family import MetricFamily

NODE_LABEL = "ray.io/node-id"  # that Ray gives each node
START_S = 60.0  # for the gateways of a joined cluster to run; a failed one is reported by then
DELETE_S = 30.0  # more than gateways give their requests
CALL_S = START_S + 30.0  # for the task, which imports Serve
POLL_S = 0.5  # a status of Serve has all details of all applications
KEPT = ("RUNNING", "DEPLOYING", "UNHEALTHY")  # Serve replaces unhealthy gateways; a new deployment ends all of them
BETWEEN = "@"  # the names of fleet and machine in the name of an application: in none of them
SPEC_S = 60.0  # to read a model's folder and to plan
REPLY_S = 10.0  # for a reply of the controller, or for the lookup of its actor
_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Failed): ")  # the last line of a traceback, not indented


def application_name(fleet: str, place: GatewayPlace) -> str:
    """Returns the name of the application of a machine; without a label it is that of the fleet's own Ray."""
    return f"{ray_name(fleet)}{BETWEEN}{place.label}-{place.node[:8]}" if place.label else ray_name(fleet)


def applications_of(fleet: str, names: Iterable[str]) -> list[str]:
    """Returns those of the fleet among the names of all applications."""
    return [name for name in names if name.partition(BETWEEN)[0] == ray_name(fleet)]


def start_serve() -> None:
    """Start Ray Serve if it does not run. Its controller gets this process's runtime environment."""
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled")


def run_applications(
    fleet: str,
    settings: GatewaySettings,
    places: Collection[GatewayPlace],
    start_s: float = START_S,
    between: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """Run the fleet's applications of these places, and end its others. Returns why gateways do not run after
    ``start_s``, by the labels of their machines. ``between`` is called between two looks at them."""
    from ray import serve

    start_serve()
    known = serve.status().applications
    wanted = {application_name(fleet, place): place for place in places}
    delete_applications([name for name in applications_of(fleet, known) if name not in wanted], wait_s=0.0)
    _deploy(
        {
            name: _application(settings, fleet, place, _count(settings, place))
            for name, place in wanted.items()
            if name not in known or known[name].status not in KEPT
        }
    )
    deadline = time.monotonic() + start_s
    while True:
        known = serve.status().applications
        late = {name for name in wanted if name not in known or known[name].status != "RUNNING"}
        failed = {name for name in late if name in known and known[name].status == "DEPLOY_FAILED"}
        if late == failed or time.monotonic() > deadline:
            break
        between()
        time.sleep(POLL_S)
    return {wanted[name].label: cause_of(known.get(name)) or "it has not started yet" for name in late}


def start_spare_gateway(settings: GatewaySettings, fleet: str) -> None:
    """Deploy the gateway that stands by on the fleet's own Ray, without waiting for it: the first one starts sooner
    without it. It is an application of its own, since Serve replaces all gateways of one that is changed. Its settings
    are those of the others: it may take the seat of any of them."""
    _deploy({f"{ray_name(fleet)}-spare": _application(settings, fleet, GatewayPlace("", ""), 1)})


def _deploy(applications: dict[str, Any]) -> None:
    from ray import serve

    if applications:
        targets = [serve.RunTarget(made, name=name, route_prefix=None) for name, made in applications.items()]
        serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _count(settings: GatewaySettings, place: GatewayPlace) -> int:
    """Returns the number of gateways on one machine; on a joined cluster their spare is one of the application."""
    return settings.gateways + 1 if settings.gateway_spare and place.label else settings.gateways


def _application(settings: GatewaySettings, fleet: str, place: GatewayPlace, count: int) -> Any:
    """Returns the application of ``count`` gateways on one machine: of a joined cluster or, without a label, the
    head."""
    from ray import serve

    options = {"label_selector": {NODE_LABEL: place.node}, **own_interpreter()} if place.label else {"resources": HEAD}
    deployment: Any = serve.deployment(
        name="gateway",
        num_replicas=count,
        ray_actor_options={"num_cpus": 0, **options},
        health_check_period_s=1,  # a dead gateway is replaced after 0.9 s; after 9.4 s at Serve's default of 10
        health_check_timeout_s=5,
        graceful_shutdown_timeout_s=DRAIN_S + 5,  # its requests end first
        graceful_shutdown_wait_loop_s=0.1,
    )(GatewayDeployment)
    return deployment.bind(msgspec.structs.replace(settings, place=place.label), fleet)


def cause_of(application: Any) -> str:
    """Returns the error of the last gateway that failed to start, from the status of its application; empty:
    unknown."""
    messages = [] if application is None else [deployment.message for deployment in application.deployments.values()]
    lines = [line for message in messages for line in message.splitlines()]
    return next((line.strip() for line in reversed(lines) if _RAISED.match(line)), "")


def delete_applications(names: Collection[str], wait_s: float = DELETE_S) -> None:
    """Delete applications of Serve, all at once, and wait until they are gone."""
    from ray import serve

    for name in names:
        serve.delete(name, _blocking=False)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline and serve.status().applications.keys() & set(names):
        time.sleep(POLL_S)


def stop_serve() -> None:
    """Stop the gateways and Ray Serve, which must be the fleet's own."""
    from ray import serve

    serve.shutdown()


async def run_gateways(
    fleet: str, settings: GatewaySettings, places: Collection[GatewayPlace], head: Head, clock: AwakeClock
) -> dict[str, str]:
    """See `effects.ClusterClient.run_gateways`. Serve's calls block, so they are made in a short Ray task on the head.
    Raises RayError or asyncio.TimeoutError."""
    task: Any = ray.remote(num_cpus=0, resources=HEAD, max_retries=0, **own_interpreter())(run_applications)
    begin = partial(task.remote, fleet, settings, sorted(places))
    reply = await head.ask(begin, "gateways", None)  # no deadline: it may begin whenever the head is back
    try:
        problems: dict[str, str] = await clock.within(reply, CALL_S)
    except BaseException:
        ray.cancel(reply, force=True)
        raise
    return problems


class GatewayDeployment:
    """A gateway that Serve keeps alive and shows in the dashboard; requests use its own port instead of Serve's."""

    def __init__(self, settings: GatewaySettings, fleet: str) -> None:
        from workers.text.tokenizer_pool import nursery

        if settings.tokenizers:
            nursery()  # it imports transformers while this process imports what follows, half a second each
        from orchestrator.gateway.server import GatewayServer

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


class RemoteController:
    """A gateway's calls of the controller actor, which is looked up by name since it may be restarted.

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

    async def demand(self, report: DemandReport) -> DemandReply:
        """Send the demand since the gateway's last report. A duplicate is counted once, except the usage of keys."""
        reply: DemandReply = await self._call("demand", report)
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
