"""The places of a fleet's gateways, and when one is lost."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

GATEWAY_LOST_S = 10.0  # a gateway without a report for this long has ended, or is cut off
HOSTS, HEAD = "hosts", "head"  # values of the setting `gateways_on`, besides a label KEY=VALUE


@dataclass(frozen=True, order=True)
class GatewayPlace:
    """A machine on which gateways run."""

    label: str  # its identity, which stays when it joins again
    node: str  # the id of its Ray node


@dataclass(frozen=True)
class ClusterMachine:
    """A living machine of the cluster, as its Ray node describes it."""

    place: GatewayPlace
    address: str
    host: str | None = None  # the planner's host that it is
    is_head: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)


def wanted_gateways(
    places_on: str, machines: Iterable[ClusterMachine], ended: Collection[str] = ()
) -> frozenset[GatewayPlace]:
    """Returns where gateways run by the setting ``places_on``; ``ended`` are hosts that are about to end.

    Ray nodes of one address are one machine, on which only one of them can have the port."""
    key, is_label, value = places_on.partition("=")
    by_address: dict[str, GatewayPlace] = {}
    for machine in machines:
        if is_label:
            fits = machine.labels.get(key) == value
        else:
            fits = machine.is_head if places_on == HEAD else machine.host is not None
        if fits and machine.host not in ended:
            by_address[machine.address] = min(machine.place, by_address.get(machine.address, machine.place))
    return frozenset(by_address.values())
