"""The gateways as `up` sees them: the address for clients, whether they start, and whether they can serve."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from urllib.parse import urlsplit

import msgspec.structs

from orchestrator.access.tls import certified_name
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.messages.fleet_status import GatewayInFleet
from orchestrator.messages.gateway_places import HEAD, ClusterMachine, wanted_gateways
from orchestrator.process.addresses import is_loopback
from orchestrator.process.failure import Failed
from orchestrator.process.home import WILDCARDS
from placements.spec.problems import Problem

ANSWER_S = 2.0
WAIT_S = 60.0  # a tokenizer that takes longer delays only the requests of its model
POLL_S = 0.1


def gateway_url(gateway: GatewaySettings) -> str:
    """Returns the URL for clients. If the gateway listens on every address with TLS, it has a name of the certificate,
    because no certificate is for 0.0.0.0."""
    host, cert = gateway.host, gateway.tls_cert
    if cert is not None and host in WILDCARDS:
        host = certified_name(cert)
    return f"{'http' if cert is None else 'https'}://{f'[{host}]' if ':' in host else host}:{gateway.port}"


def client_url(gateway: GatewaySettings, places_on: str, machines: Iterable[ClusterMachine]) -> str:
    """Returns the address of the first gateway of a joined cluster for clients."""
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
    fact = "; ".join(causes) or f"no machine of the cluster has one by the setting gateways_on: {places_on}"
    hint = f"see {log} on that machine; the fleet runs without it: `corewright down`"
    raise Failed("gateway-not-started", f"no gateway starts: {fact}", hint)


def listens(url: str) -> bool:
    """Returns whether something accepts connections at that address."""
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname or "", address.port or 0), ANSWER_S).close()
    except OSError:
        return False
    return True


def is_waiting(url: str) -> bool:
    """Returns whether the gateway at that address is not ready yet, as while it loads tokenizers; False if it cannot
    be queried, as with mutual TLS."""
    address = urlsplit(url)
    host, port = address.hostname or "", address.port
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
        if address.scheme == "https":
            anyone = ssl._create_unverified_context()  # nothing is sent, and only a status is read
            connection = http.client.HTTPSConnection(host, port, timeout=ANSWER_S, context=anyone)
        with contextlib.closing(connection):
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 503
    return False


def wait_for_gateway(url: str, between: Callable[[], None]) -> None:
    """Returns when the gateway is ready, or after ``WAIT_S``. ``between`` is called between two queries."""
    deadline = time.monotonic() + WAIT_S
    while is_waiting(url) and time.monotonic() < deadline:
        between()
        time.sleep(POLL_S)
