"""Reads the versions and nodes of a Ray cluster before it is joined.

Ray itself tries for 22 s, and reports each cause in the same words.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import grpc
import ray
from ray._common.usage.usage_constants import CLUSTER_METADATA_KEY
from ray._private import ray_constants, services
from ray._private.grpc_utils import init_grpc_channel
from ray._private.utils import compute_version_info
from ray.core.generated import gcs_pb2, gcs_service_pb2, gcs_service_pb2_grpc

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
