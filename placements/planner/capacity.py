"""The planner's board as the autoscaler uses it: replicas take and free cores, and ask where one more can run.

A replica has a place here if and only if `plan` gives it one without moving a running replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from placements.facts.checkpoints import Checkpoint
from placements.planner.board import Demand, Space, Tenant
from placements.planner.host_pool import HostPool
from placements.planner.packer import Packer
from placements.planner.pins import bits
from placements.planner.replica_demand import coreless_kinds, demands
from placements.spec.notation import CorePin
from placements.spec.schema import Spec

Place = tuple[int, int]
"""The number of a host in its pool, and the first core."""


class Need(NamedTuple):
    """What the replicas of one model need of hosts."""

    demand: Demand
    pins: tuple[CorePin, ...] = ()  # the places of its first replicas


class Vacancy(NamedTuple):
    """A range of cores where a replica can run once ``tenants`` are removed."""

    place: Place
    tenants: tuple[Tenant, ...]
    off_grid: bool  # a replica there fragments the cores
    pinned: bool  # the range is a pin of the replica's model: neither memory nor CPUs nor spread count, as in `plan`


def needs(spec: Spec, pool: HostPool, checkpoints: Mapping[str, Checkpoint]) -> dict[str, Need]:
    """Returns the needs of the models that use cores, by name. ``checkpoints`` are those of `plan`."""
    kinds = pool.kinds.hosts
    pairs = zip(spec.models, demands(spec, kinds, checkpoints), strict=True)
    return {model.name: Need(demand, model.cores) for model, demand in pairs if not coreless_kinds(model, kinds)}


class Capacity:
    """The cores of a pool's hosts: free, unusable, or held by a replica (a tenant)."""

    def __init__(self, pool: HostPool, pins: Sequence[CorePin] = ()) -> None:
        """``pins`` are those of all models: replicas without a pin avoid their cores."""
        self.pool = pool
        spaces = [pool.space(host, idle=pool.pin_mask(host, pins)) for host in range(len(pool.hosts))]
        self._packer = Packer(spaces, moves=0)
        self._held = [0] * len(pool.hosts)  # masks of the cores that running replicas hold

    @property
    def spaces(self) -> Sequence[Space]:
        """The hosts with their tenants and free cores, by number."""
        return self._packer.spaces

    def free(self, kinds: frozenset[int]) -> int:
        """Returns the number of free cores on hosts of these kinds."""
        return sum(space.free.bit_count() for space in self.spaces if space.kind in kinds)

    def hold(self, tenant: Tenant, place: Place) -> bool:
        """Adds a running replica. Returns False if `plan` would not keep it: its host does not have these cores, or
        they are reserved or held by another running replica. To be called before any other change."""
        host, first = place
        if not 0 <= host < len(self.pool.hosts) or not 0 <= first <= self.pool.cores[host] - tenant.size:
            return False
        mask = ((1 << tenant.size) - 1) << first
        if mask & (self._held[host] | self.pool.reserved[host]):
            return False
        self._held[host] |= mask
        tenant.host = tenant.home = host
        tenant.first = tenant.home_first = first
        tenant.at_home = True
        self._packer.settle(tenant)
        return True

    def place(self, tenant: Tenant, need: Need, own: Sequence[Tenant], *, most: float = 0.0) -> bool:
        """Places a new replica on free cores at a price of at most ``most``, the lowest price first.

        ``own`` are the other replicas of its model. New replicas are moved to make room, running ones are not.
        """
        pin = self._next_pin(need, own)
        if pin is not None:
            hosts = self.pool.pin_hosts(pin, need.demand.kinds)
            hosts.sort(key=lambda host: not self._packer.admits(tenant, host))
            return any(self.pool.prices[host] <= most and self._put(tenant, (host, pin.cores.first)) for host in hosts)
        for price, kinds in self.pool.kinds_by_price:
            demand = tenant.demand._replace(kinds=tenant.demand.kinds & kinds)
            if price <= most and demand.kinds:
                tenant.demand = demand
                placed = self._packer.enter(tenant)
                tenant.demand = need.demand
                if placed:
                    return True
        return False

    def mark(self) -> tuple[int, int]:
        """Returns the present state, for `undo_to`."""
        return self._packer.mark()

    def undo_to(self, mark: tuple[int, int]) -> None:
        """Reverts all changes since the mark."""
        self._packer.undo_to(mark)

    def put(self, tenant: Tenant, vacancy: Vacancy) -> bool:
        """Places a new replica on a vacancy; returns False if it is not free or the host does not admit the replica."""
        admitted = vacancy.pinned or self._packer.admits(tenant, vacancy.place[0])
        return admitted and self._put(tenant, vacancy.place)

    def _put(self, tenant: Tenant, place: Place) -> bool:
        host, first = place
        mask = ((1 << tenant.size) - 1) << first
        if self.spaces[host].free & mask != mask:
            return False
        self._packer.put(tenant, host, first)
        return True

    def remove(self, tenant: Tenant) -> None:
        """Frees the cores of a replica."""
        self._packer.remove(tenant)
        self._packer.forget_home(tenant)

    def vacancies(self, need: Need, own: Sequence[Tenant]) -> Iterator[Vacancy]:
        """Yields the ranges where a replica can run once their tenants are removed. Skips ranges that are free, and all
        but one of those with the same tenants."""
        demand, pin = need.demand, self._next_pin(need, own)
        for host, starts in self._starts(demand, pin).items():
            space = self.spaces[host]
            holders: list[Tenant | None] = [None] * self.pool.cores[host]
            for tenant in space.tenants:
                holders[tenant.first : tenant.first + tenant.size] = [tenant] * tenant.size
            on_grid = space.grid.starts(demand.size)
            seen: set[tuple[int, ...]] = set()
            for first in sorted(starts, key=lambda first: not on_grid >> first & 1):
                tenants = dict.fromkeys(tenant for tenant in holders[first : first + demand.size] if tenant is not None)
                leaving = list(tenants) if pin else self._with_easing(demand, host, list(tenants))
                key = tuple(map(id, leaving))
                if leaving and key not in seen:
                    seen.add(key)
                    yield Vacancy((host, first), tuple(leaving), not on_grid >> first & 1, pin is not None)

    def _starts(self, demand: Demand, pin: CorePin | None) -> dict[int, list[int]]:
        """Returns the legal first cores of a new replica on usable cores, by host."""
        if pin is not None:
            mask = bits(pin.cores)
            hosts = self.pool.pin_hosts(pin, demand.kinds)
            return {host: [pin.cores.first] for host in hosts if self.pool.allowed[host] & mask == mask}
        return {
            host: [first for first in range(self.pool.cores[host]) if space.grid.possible(demand.size) >> first & 1]
            for host, space in enumerate(self.spaces)
            if space.kind in demand.kinds
        }

    def _with_easing(self, demand: Demand, host: int, leaving: list[Tenant]) -> list[Tenant]:
        """Returns ``leaving`` with the tenants that must leave, too, until the host's memory, CPUs and spread admit one
        more; [] if they never do. The least important leave first."""
        if demand.plain:
            return leaving
        packer, mark = self._packer, self._packer.mark()
        trial = Tenant(demand.model, 0, demand.size, (0, True, True), demand)
        for tenant in leaving:
            packer.remove(tenant)
        rest = sorted(self.spaces[host].tenants, key=lambda tenant: (tenant.grade, tenant.replica), reverse=True)
        for tenant in rest:
            if packer.admits(trial, host):
                break
            leaving.append(tenant)
            packer.remove(tenant)
        admitted = packer.admits(trial, host)
        packer.undo_to(mark)
        return leaving if admitted else []

    def _next_pin(self, need: Need, own: Sequence[Tenant]) -> CorePin | None:
        """Returns the pin of the next replica; None if all pins are held: it may go anywhere."""
        unheld = sorted(need.pins, key=lambda pin: pin.host is None)
        for tenant in own:
            name = self.pool.hosts[tenant.host].name
            for pin in unheld:
                if pin.host in (None, name) and pin.cores.first == tenant.first and len(pin.cores) == tenant.size:
                    unheld.remove(pin)
                    break
        return min(
            (pin for pin in need.pins if pin in unheld), key=lambda pin: not self.pool.is_open(pin), default=None
        )
