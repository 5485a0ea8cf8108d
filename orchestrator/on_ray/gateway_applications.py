"""The gateways of a joined cluster: one Serve application for each machine, which is pinned to its Ray node.

Serve does not let its callers choose which replica of a deployment ends, and a changed selector restarts all of them;
so a machine joins or leaves by an application of its own. Its name has the Ray node: a machine that joins again gets a
new one. So what runs is known from the names alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import ray

from orchestrator.fleet.cluster_names import ray_name
from orchestrator.fleet.gateway_places import GatewayPlace
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.on_ray.head import Head
from orchestrator.on_ray.ray_nodes import HEAD, own_interpreter
from orchestrator.process.awake_clock import AwakeClock

log = logging.getLogger(__name__)

START_S = 60.0  # for the gateways to run; a failed one is reported by then
DELETE_S = 30.0  # more than gateways give their requests
CALL_S = START_S + 30.0  # for the task, which imports Serve
POLL_S = 0.2
KEPT = ("RUNNING", "DEPLOYING", "UNHEALTHY")  # Serve replaces unhealthy gateways; a new deployment ends all of them
BETWEEN = "@"  # the names of fleet and machine in the name of an application: in none of them


def application_name(fleet: str, place: GatewayPlace) -> str:
    """Returns the name of the application of a machine."""
    return f"{ray_name(fleet)}{BETWEEN}{place.label}-{place.node[:8]}"


def applications_of(fleet: str, names: Iterable[str]) -> list[str]:
    """Returns those of the fleet among the names of all applications."""
    own = ray_name(fleet)
    return [name for name in names if name == own or name.startswith(own + BETWEEN)]


class GatewayApplications:
    """The applications of one fleet. Serve is used in a short Ray task on the head: it would delay the controller's
    restarts, and its calls block."""

    def __init__(self, settings: GatewaySettings, fleet: str) -> None:
        """``fleet`` is the fleet's name."""
        self._settings = settings
        self._fleet = fleet

    async def run(self, places: Collection[GatewayPlace], head: Head, clock: AwakeClock) -> dict[str, str]:
        """See `effects.ClusterClient.run_gateways`. Raises RayError or asyncio.TimeoutError."""
        task: Any = ray.remote(num_cpus=0, resources=HEAD, max_retries=0, **own_interpreter())(run_applications)
        begin = partial(task.remote, self._fleet, self._settings, sorted(places))
        reply = await head.ask(begin, "gateways", None)  # no deadline: it may begin whenever the head is back
        try:
            problems: dict[str, str] = await clock.within(reply, CALL_S)
        except BaseException:
            ray.cancel(reply, force=True)
            raise
        return problems


def run_applications(fleet: str, settings: GatewaySettings, places: Collection[GatewayPlace]) -> dict[str, str]:
    """Run the fleet's applications of these places, and end its others. Returns why gateways do not run, by the labels
    of their machines."""
    from ray import serve

    from orchestrator.on_ray.gateway_deployment import cause_of, gateway_application

    start_serve()
    known = serve.status().applications
    wanted = {application_name(fleet, place): place for place in places}
    delete_applications([name for name in applications_of(fleet, known) if name not in wanted], wait_s=0.0)
    missing = [name for name in wanted if name not in known or known[name].status not in KEPT]
    if missing:
        targets = [
            serve.RunTarget(gateway_application(settings, fleet, wanted[name]), name=name, route_prefix=None)
            for name in missing
        ]
        serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    deadline = time.monotonic() + START_S
    while True:
        known = serve.status().applications
        late = {name for name in wanted if name not in known or known[name].status != "RUNNING"}
        failed = {name for name in late if name in known and known[name].status == "DEPLOY_FAILED"}
        if late == failed or time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    return {wanted[name].label: cause_of(known.get(name)) or "it has not started yet" for name in late}


def start_serve() -> None:
    """Start Ray Serve if it does not run. Its controller gets this process's runtime environment."""
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled")


def delete_applications(names: Collection[str], wait_s: float = DELETE_S) -> None:
    """Delete applications of Serve, all at once, and wait until they are gone."""
    from ray import serve

    for name in names:
        serve.delete(name, _blocking=False)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline and serve.status().applications.keys() & set(names):
        time.sleep(POLL_S)
