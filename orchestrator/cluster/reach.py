"""Finds out whether this process can join a Ray cluster, and if not, what is to be done; and joins it.

Ray itself tries for 22 s, and reports each cause in the same words.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import ssl
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc
import psutil
import ray
from ray._common.usage.usage_constants import CLUSTER_METADATA_KEY
from ray._private import ray_constants, services
from ray._private.grpc_utils import init_grpc_channel
from ray._private.utils import compute_version_info
from ray.core.generated import gcs_pb2, gcs_service_pb2, gcs_service_pb2_grpc

from orchestrator.cluster.ray_names import ray_name
from orchestrator.process.failure import Failed
from placements.spec.problems import Problem

log = logging.getLogger(__name__)

REACH_S = 3.0  # to connect to the head's port


def reach(address: str) -> str:
    """Returns the HOST:PORT of the cluster at ``address``, which may be `auto`. Raises Failed with the cause."""
    at = find_address(address) if address == "auto" else address
    if at is None:
        hint = "start Ray on this machine with `ray start --address=HEAD:6379`, or pass HOST:PORT of the head"
        raise Failed("ray-unreachable", "no Ray node runs on this machine", hint)
    host, port = _listening(at)
    try:
        facts = look(at)
    except ClusterRefuses as error:
        sides = Sides(has_token(), os.environ.get("RAY_AUTH_MODE") == "token", _uses_tls(), speaks_tls(host, port))
        raise refused(at, error.refusal, str(error), sides) from None
    refuse_versions(at, facts.versions, own_versions())
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


LOOK_S = 3.0  # for each call to the GCS
Refusal = Literal["token", "silent", "broken"]


class ClusterRefuses(Exception):
    """The GCS has not answered: the token was refused, it was silent, or the connection broke (TLS on one side)."""

    def __init__(self, refusal: Refusal, text: str) -> None:
        super().__init__(text)
        self.refusal = refusal


@dataclass(frozen=True)
class ClusterFacts:
    """A cluster, as its GCS describes it."""

    versions: tuple[str, str]  # of Ray and Python
    addresses: frozenset[str]  # of its living nodes


def find_address(address: str) -> str | None:
    """Returns HOST:PORT for an address that may be `auto`; None if no cluster runs on this machine."""
    resolved: str = services.canonicalize_bootstrap_address(address) or ""
    return None if resolved in ("", "auto") else resolved


def own_versions() -> tuple[str, str]:
    """Returns the versions of Ray and Python of this process."""
    ray_version, python_version = compute_version_info()
    return ray_version, python_version


def look(address: str) -> ClusterFacts:
    """Returns the facts of the cluster whose GCS listens at ``address``. Raises ClusterRefuses."""
    channel = init_grpc_channel(address)
    try:
        stored = _reply(
            gcs_service_pb2_grpc.InternalKVGcsServiceStub(channel).InternalKVGet,
            gcs_service_pb2.InternalKVGetRequest(
                key=CLUSTER_METADATA_KEY, namespace=ray_constants.KV_NAMESPACE_CLUSTER
            ),
        )
        nodes = _reply(
            gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel).GetAllNodeInfo,
            gcs_service_pb2.GetAllNodeInfoRequest(state_filter=gcs_pb2.GcsNodeInfo.ALIVE),
        )
    finally:
        channel.close()
    metadata = json.loads(stored.value)
    addresses = frozenset(node.node_manager_address for node in nodes.node_info_list)
    return ClusterFacts((metadata["ray_version"], metadata["python_version"]), addresses)


def _reply(call: Any, request: Any) -> Any:
    try:
        return call(request, timeout=LOOK_S)
    except grpc.RpcError as error:
        code = error.code()
        refusal: Refusal = "broken"
        if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            refusal = "token"
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
            refusal = "silent"
        raise ClusterRefuses(refusal, error.details() or code.name) from None
    except ray.exceptions.AuthenticationError as error:  # this process has no token
        raise ClusterRefuses("token", str(error).partition("\n")[0]) from None


ROOT = Path("/")


def has_store(environment: Mapping[str, str]) -> bool:
    """Returns whether the GCS with these variables keeps its tables outside its memory. Pure."""
    return bool(environment.get("RAY_REDIS_ADDRESS")) or environment.get("RAY_gcs_storage") in ("redis", "rocksdb")


def head_loss_warning(gcs_address: str, home: Path) -> Problem | None:
    """Returns the warning that nothing of the fleet would survive the loss of this machine, the head: neither has its
    GCS a store, nor is the home on a volume of its own."""
    environment = _gcs_environment(gcs_address.rpartition(":")[2])
    if environment is None or has_store(environment) or home.stat().st_dev != ROOT.stat().st_dev:
        return None
    return Problem(
        "head-loss-not-survived",
        "warning",
        "",
        "the loss of the head ends all replicas, and the journal is lost with its disk: its GCS has no store",
        "start the head with RAY_REDIS_ADDRESS, or with RAY_gcs_storage=rocksdb on a volume (docs/cluster.md)",
    )


def _gcs_environment(port: str) -> dict[str, str] | None:
    """Returns the variables of the GCS at that port of this machine; None if they cannot be read."""
    for process in psutil.process_iter():
        try:
            if process.name() == "gcs_server" and f"--gcs_server_port={port}" in process.cmdline():
                return process.environ()
        except (psutil.Error, OSError):
            continue
    return None


def join(address: str, name: str) -> dict[str, Any]:
    """Connect to the Ray cluster at ``address`` (HOST:PORT) for the fleet ``name``. Returns Ray's addresses.

    Blocks for half a minute if the head does not reply. Raises Failed for what Ray raises: many types, with pages of
    text."""
    try:
        context = ray.init(address=address, namespace=ray_name(name), log_to_driver=False, logging_level="error")
    except Exception as error:
        log.exception("Ray cannot be joined")
        cause = str(error).strip().partition("\n")[0]
        message = f"the Ray cluster at {address} does not admit this machine: {cause}"
        hint = "see daemon.log; check that the Ray node of this machine runs: ray status"
        raise Failed("ray-not-joined", message, hint) from None
    return dict(context.address_info)
