"""The hosts of one entry of a spec's ``hosts``, with the bounds of their number."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from placements.facts.topology import Host
from placements.spec.schema import HostsSpec, Spec


@dataclass(frozen=True)
class HostGroup:
    """Hosts of one type, interchangeable, of which the fleet uses ``min`` to all."""

    hosts: tuple[Host, ...]
    min: int
    elastic: bool = False  # the spec has ``max``: hosts beyond ``min`` are used only if replicas need them
    price_per_core_hour: float = 0.0

    @property
    def price(self) -> float:
        """The price of one host per hour."""
        return self.price_per_core_hour * self.hosts[0].cores

    @property
    def instance(self) -> str:
        """The instance type."""
        topology = self.hosts[0].topology
        return "" if topology is None else topology.instance


def host_groups(spec: Spec, hosts: Sequence[Host]) -> tuple[HostGroup, ...]:
    """Returns the groups of ``hosts``, which are those of `hosts_for`."""
    groups, first = [], 0
    for entry in spec.hosts or (HostsSpec(count=max(1, len(hosts))),):
        own, first = tuple(hosts[first : first + entry.most]), first + entry.most
        if own:
            groups.append(HostGroup(own, entry.least, entry.max is not None, entry.price_per_core_hour))
    return tuple(groups)


def least_hosts(groups: Sequence[HostGroup]) -> tuple[Host, ...]:
    """Returns the hosts that the fleet keeps, used or not."""
    return tuple(host for group in groups for host in group.hosts[: group.min])


def kept_hosts(groups: Sequence[HostGroup], used: Collection[str]) -> tuple[Host, ...]:
    """Returns the hosts of a fleet that uses these of the hosts that come and go: at least ``min`` of each group."""
    kept: list[Host] = []
    for group in groups:
        wanted = {host.name for host in group.hosts if not group.elastic or host.name in used}
        others = [host.name for host in group.hosts if host.name not in wanted]
        wanted.update(others[: max(0, group.min - len(wanted))])
        kept += [host for host in group.hosts if host.name in wanted]
    return tuple(kept)
