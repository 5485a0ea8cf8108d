"""Requests for machines belong to one fleet of a cluster."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from orchestrator.cluster import nodes
from orchestrator.cluster.nodes import request_machines, request_name
from placements.facts.topology import TOPOLOGIES, Host

INF2 = TOPOLOGIES["inf2.48xlarge"]


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """The placement groups of a cluster, by id, as Ray reports them."""
    table: dict[str, dict[str, Any]] = {}

    def create(bundles: list[dict[str, float]], *, name: str, **_: object) -> None:
        table[ray.PlacementGroupID.from_random().hex()] = {"name": name, "state": "PENDING"}

    def remove(group: Any) -> None:
        table[group.id.hex()]["state"] = "REMOVED"

    monkeypatch.setattr(nodes, "placement_group", create)
    monkeypatch.setattr(nodes, "remove_placement_group", remove)
    monkeypatch.setattr(nodes, "placement_group_table", lambda: table)
    return table


def pending(groups: dict[str, dict[str, Any]]) -> list[str]:
    return sorted(group["name"] for group in groups.values() if group["state"] == "PENDING")


def hosts(*numbers: int) -> list[Host]:
    return [Host(f"inf2.48xlarge/{number}", INF2, (0,)) for number in numbers]


@pytest.mark.parametrize("other", ["shop2", "sho", "shop-want"])
def test_a_fleet_withdraws_no_request_of_another(other: str, groups: dict[str, dict[str, Any]]) -> None:
    """Even if the name of one begins with that of the other."""
    request_machines("shop", hosts(0, 1), ())
    request_machines(other, hosts(0), ())
    request_machines("shop", hosts(1), ())
    expected = {request_name("shop", "inf2.48xlarge/1"), request_name(other, "inf2.48xlarge/0")}
    assert pending(groups) == sorted(expected)
    request_machines(other, (), ())
    assert pending(groups) == [request_name("shop", "inf2.48xlarge/1")]


def test_a_host_is_requested_once(groups: dict[str, dict[str, Any]]) -> None:
    for _ in range(3):
        request_machines("shop", hosts(0), ())
    assert len(groups) == 1
