"""The gateways of a joined cluster, as `up` sees them: their address, and whether they start. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec.structs

from orchestrator.fleet.fleet_status import GatewayInFleet
from orchestrator.fleet.gateway_places import HEAD, ClusterMachine, wanted_gateways
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.process.addresses import is_loopback
from orchestrator.process.failure import Failed
from placements.spec.problems import Problem


def client_url(gateway: GatewaySettings, places_on: str, machines: Iterable[ClusterMachine]) -> str:
    """Returns the address of the first gateway for clients."""
    known = list(machines)
    first = min(wanted_gateways(places_on, known), default=None)
    address = next((machine.address for machine in known if machine.place == first), "")
    return msgspec.structs.replace(gateway, machine=address).url


def loopback_warning(host: str, places_on: str, machines: int) -> Problem | None:
    """Returns the warning that only the programs of each machine reach its gateway."""
    if not is_loopback(host) or places_on == HEAD or machines < 2:
        return None
    return Problem(
        "gateways-on-loopback",
        "warning",
        "",
        f"the gateways of {machines} machines listen on {host}: each serves the programs of its own machine only",
        "set --host 0.0.0.0 for clients elsewhere, or --gateways-on head",
    )


def are_starting(gateways: Sequence[GatewayInFleet]) -> bool:
    """Returns whether a gateway of the controller's status may still start."""
    return not gateways or any(gateway.state == "starting" for gateway in gateways)


def not_started(gateways: Sequence[GatewayInFleet], places_on: str, log: str) -> list[str]:
    """Returns why gateways do not run, each with its machine. Raises Failed if none runs; ``log`` is its log there."""
    causes = [
        f"{gateway.machine}: {gateway.reason or 'it has not started yet'}"
        for gateway in gateways
        if gateway.address is None
    ]
    if len(causes) < len(gateways):
        return causes
    what = "; ".join(causes) or f"no machine of the cluster has one by the setting gateways_on: {places_on}"
    hint = f"see {log} on that machine; the fleet runs without it: `corewright down`"
    raise Failed("gateway-not-started", f"no gateway starts: {what}", hint)
