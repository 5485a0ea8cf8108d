"""The first phase of joining a Ray cluster: whether this process can, and if not, what is to be done."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import psutil

from orchestrator.process.failure import Failed

REACH_S = 3.0  # to connect to the head's port


def reach(address: str) -> str:
    """Returns the HOST:PORT of the cluster at ``address``, which may be `auto`. Raises Failed with the cause."""
    from orchestrator.on_ray import cluster_facts

    at = cluster_facts.find_address(address) if address == "auto" else address
    if at is None:
        hint = "start Ray on this machine with `ray start --address=HEAD:6379`, or pass HOST:PORT of the head"
        raise Failed("ray-unreachable", "no Ray node runs on this machine", hint)
    host, port = _listening(at)
    try:
        facts = cluster_facts.look(at)
    except cluster_facts.ClusterRefuses as error:
        sides = Sides(has_token(), os.environ.get("RAY_AUTH_MODE") == "token", _uses_tls(), speaks_tls(host, port))
        raise refused(at, error.refusal, str(error), sides) from None
    refuse_versions(at, facts.versions, cluster_facts.own_versions())
    if not local_addresses() & facts.addresses:
        message = f"no node of the Ray cluster at {at} runs on this machine: its nodes are {_some(facts.addresses)}"
        hint = "run `corewright up` on one of them; from outside: ray job submit -- corewright up SPEC --detach"
        raise Failed("not-on-a-node", message, hint)
    return at


def refuse_versions(at: str, cluster: tuple[str, str], own: tuple[str, str]) -> None:
    """Raises Failed if Ray would not admit this process to the cluster."""
    parts = 2 if os.environ.get("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL") == "minor" else 3
    if cluster[0] == own[0] and cluster[1].split(".")[:parts] == own[1].split(".")[:parts]:
        return
    message = f"the Ray cluster at {at} has Ray {cluster[0]} and Python {cluster[1]}, and this is {own[0]} and {own[1]}"
    hint = "use the Ray and the Python of the cluster, down to the patch version"
    raise Failed("ray-version-differs", message, hint)


def local_addresses() -> frozenset[str]:
    """Returns the addresses of this machine's network interfaces."""
    return frozenset(item.address for items in psutil.net_if_addrs().values() for item in items)


def _listening(at: str) -> tuple[str, int]:
    """Returns host and port if something listens there. Raises Failed."""
    host, _, port = at.rpartition(":")
    host = host.strip("[]")
    try:
        socket.create_connection((host, int(port)), REACH_S).close()
    except (OSError, ValueError) as error:
        cause = error.strerror or error if isinstance(error, OSError) else "it is not HOST:PORT"
        message = f"no Ray cluster listens at {at}: {cause}"
        hint = "check the address and the firewall; `ray status --address` shows a running cluster"
        raise Failed("ray-unreachable", message, hint) from None
    return host, int(port)


@dataclass(frozen=True)
class Sides:
    """The settings of this process and of the cluster that must agree."""

    token: bool  # this process has a token
    sends_token: bool
    uses_tls: bool  # this process
    cluster_tls: bool


def refused(at: str, refusal: str, text: str, sides: Sides) -> Failed:
    """Returns the problem of a GCS that has not answered, given ``ClusterRefuses.refusal`` and its text."""
    if refusal == "token" and not (sides.token and sides.sends_token):
        lacks = "RAY_AUTH_MODE is not `token` here" if sides.token else "this process has none"
        hint = "set RAY_AUTH_MODE=token, and the token in RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"
        return Failed("ray-token-missing", f"the Ray cluster at {at} requires a token, and {lacks}", hint)
    if refusal == "token":
        hint = "use the token of the cluster: the file ~/.ray/auth_token of its head, or its Kubernetes secret"
        return Failed("ray-token-refused", f"the Ray cluster at {at} refuses the token of this process: {text}", hint)
    if sides.uses_tls != sides.cluster_tls or (sides.uses_tls and refusal == "broken"):
        message = f"the Ray cluster at {at} {'uses' if sides.cluster_tls else 'does not use'} TLS, and RAY_USE_TLS is "
        message += f"{'set' if sides.uses_tls else 'not set'} here: {text}"
        hint = "set RAY_USE_TLS and RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY, RAY_TLS_CA_CERT as on the cluster's nodes"
        return Failed("ray-tls-differs", message, hint)
    hint = "check that `ray status` works on the head; if the head has just started, try again"
    return Failed("ray-silent", f"the Ray cluster at {at} does not answer: {text}", hint)


def has_token() -> bool:
    """Returns whether Ray would find a token for this process."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return "RAY_AUTH_TOKEN" in os.environ or (Path(path) if path else Path.home() / ".ray" / "auth_token").is_file()


def _uses_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def speaks_tls(host: str, port: int) -> bool:
    """Returns whether a TLS server listens there, whatever its certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host, port), REACH_S) as raw, context.wrap_socket(raw):
            return True
    except ssl.SSLError as error:
        return "WRONG_VERSION" not in str(error) and "RECORD" not in str(error) and "EOF" not in str(error)
    except OSError:
        return False


def _some(addresses: Collection[str]) -> str:
    named = sorted(addresses)[:3]
    return ", ".join(named) + (f" and {len(addresses) - 3} more" if len(addresses) > 3 else "")
