"""Requests for machines of Ray's autoscaler: a pending placement group for each host that has none.

Such a group has an owner and can be withdrawn alone, unlike Ray's `request_resources`, of which the cluster has one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from orchestrator.fleet.cluster_names import HOST_ACTOR, ray_name
from orchestrator.fleet.node_declaration import INSTANCE_LABEL, core_resources
from placements.facts.topology import Host

NO_NODE_TYPE = (
    "no node type of Ray's autoscaler can start a machine with the label corewright-instance={}: none has it with the "
    "resources of its cores, or max_workers is reached"
)
STATUS_S = 3  # deadline of the autoscaler's status


def request_machines(fleet: str, hosts: Collection[Host], others: Collection[str]) -> None:
    """Request a machine for each of the hosts, and withdraw the fleet's other requests. Blocks.

    The nodes ``others`` are none of these machines, although their cores may be free.
    """
    wanted = {request_name(fleet, host.name): host for host in hosts}
    for id, group in requests_of(fleet).items():
        if wanted.pop(group["name"], None) is None:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(id))))
    for name, host in wanted.items():
        assert host.topology is not None
        selector = {INSTANCE_LABEL: host.topology.instance}
        if others:
            selector["ray.io/node-id"] = f"!in({','.join(sorted(others))})"
        placement_group(
            [core_resources(host.topology.cores)],
            strategy="STRICT_PACK",
            name=name,
            lifetime="detached",  # the controller may be restarted
            bundle_label_selector=[selector],
        )


def request_name(fleet: str, host: str) -> str:
    """Returns the name of the placement group; `down` removes all groups that begin with the fleet's name."""
    return f"{ray_name(fleet)}/want/{host}"


def requests_of(fleet: str) -> dict[str, dict[str, Any]]:
    """Returns the placement groups that are requests of the fleet, by id. Blocks."""
    prefix, groups = request_name(fleet, ""), placement_group_table()
    return {
        id: group for id, group in groups.items() if group["name"].startswith(prefix) and group["state"] != "REMOVED"
    }


def refused_types() -> dict[str, str]:
    """Returns why the autoscaler starts no machine, by instance type. Blocks. Launches that the cloud refuses are not
    reported by Ray 2.60."""
    reply = GetClusterStatusReply()
    gcs = GcsClient(ray.get_runtime_context().gcs_address)
    reply.ParseFromString(gcs.get_cluster_status(timeout_s=STATUS_S))
    selectors = [
        constraint
        for gang in reply.autoscaling_state.infeasible_gang_resource_requests
        for request in gang.requests
        for selector in request.label_selectors
        for constraint in selector.label_constraints
    ]
    return {
        instance: NO_NODE_TYPE.format(instance)
        for constraint in selectors
        if constraint.label_key == INSTANCE_LABEL
        for instance in constraint.label_values
    }


def end_host_actors(fleet: str, used: Collection[str]) -> None:
    """End the fleet's host actors on other machines than those with these labels. Blocks.

    Ray's autoscaler removes a machine only if it is idle, and it is not while an actor lives there.
    """
    namespace = ray_name(fleet)
    for actor in ray.util.list_named_actors(all_namespaces=True):
        name = actor["name"]
        is_own = actor["namespace"] == namespace and name.startswith(HOST_ACTOR)
        if is_own and name.removeprefix(HOST_ACTOR) not in used:
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                ray.kill(ray.get_actor(name, namespace), no_restart=True)
