"""The numbered hosts of one planning run, with masks of their usable cores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from placements.facts.topology import Host
from placements.planner.board import NEVER, Space
from placements.planner.grid import Grid, grid_of
from placements.planner.pins import FreeCores, bits
from placements.planner.replica_demand import kinds_of
from placements.spec.notation import CorePin


class HostPool:
    """Hosts, numbered in their order. Sets of cores are bit masks: bit i stands for core i."""

    def __init__(
        self, hosts: Sequence[Host], blocked: Mapping[str, frozenset[int]], prices: Mapping[str, float] | None = None
    ) -> None:
        """``blocked`` holds, by host, cores that cannot be used (cordons, quarantine); ``prices`` the price of one core
        per hour, 0.0 if not named. Hosts of different prices are of different kinds."""
        self.hosts = tuple(hosts)
        self.blocked = blocked
        self.prices = tuple((prices or {}).get(host.name, 0.0) for host in self.hosts)
        self.kinds = kinds_of(self.hosts, self.prices)
        self.numbers = {host.name: i for i, host in enumerate(self.hosts)}
        self.cores = [host.cores for host in self.hosts]
        self.reserved = [sum(1 << core for core in host.reserved_cores) for host in self.hosts]
        self.allowed = [FreeCores.of(host, blocked.get(host.name, ())).mask for host in self.hosts]

    @cached_property
    def kinds_by_price(self) -> tuple[tuple[float, frozenset[int]], ...]:
        """The prices, ascending, each with the kinds of its hosts."""
        kinds: dict[float, set[int]] = {}
        for price, kind in zip(self.prices, self.kinds.of, strict=True):
            kinds.setdefault(price, set()).add(kind)
        return tuple((price, frozenset(own)) for price, own in sorted(kinds.items()))

    def family(self, host: int) -> str:
        """Returns the family of the host's instance type, or "" for a plain CPU host."""
        topology = self.hosts[host].topology
        return topology.family if topology else ""

    def grid(self, host: int, fixed: int = 0) -> Grid:
        """Returns the grid of the usable cores, without the pinned ones (``fixed``)."""
        return grid_of(self.family(host), self.cores[host], self.allowed[host] & ~fixed)

    def space(self, host: int, fixed: int = 0, idle: int = 0) -> Space:
        """Returns the empty host; ``fixed`` are the cores of placed pins, ``idle`` those of unused pins."""
        machine, allowed = self.hosts[host], self.allowed[host]
        memory = NEVER if machine.memory_gib is None else machine.memory_gib
        cpus = NEVER if machine.emulated else len(machine.usable_cpus)
        return Space(self.kinds.of[host], self.grid(host, fixed), allowed, allowed, idle, memory, cpus)

    def pin_mask(self, host: int, pins: Iterable[CorePin]) -> int:
        """Returns the cores of a host that one of the pins names."""
        mask = 0
        for pin in pins:
            if pin.host in (None, self.hosts[host].name):
                mask |= bits(pin.cores)
        return mask

    def pin_hosts(self, pin: CorePin, kinds: frozenset[int]) -> list[int]:
        """Returns the hosts of a pin: the one that it names, or all of these kinds (none: of any) that can hold it."""
        if pin.host is not None:
            return [self.numbers[pin.host]] if pin.host in self.numbers else []
        return [
            host
            for host, kind in enumerate(self.kinds.of)
            if (not kinds or kind in kinds)
            and pin.cores.last < self.cores[host]
            and self.grid(host).legal(len(pin.cores)) >> pin.cores.first & 1
        ]

    def is_open(self, pin: CorePin) -> bool:
        """Returns whether one of the pin's hosts has none of its cores blocked."""
        mask = bits(pin.cores)
        return any(self.allowed[host] & mask == mask for name, host in self.numbers.items() if pin.host in (None, name))
