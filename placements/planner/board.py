"""The hosts and their tenants while a plan is made: places, moves and undo."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from placements.planner.host_index import HostIndex
from placements.planner.tenants import Space, Tenant


class Board:
    """Hosts and their tenants. ``moves`` limits the running tenants that may be moved; None: any number."""

    def __init__(self, spaces: Sequence[Space], moves: int | None) -> None:
        self.spaces = spaces
        self.moves = moves
        self.moved = 0  # running tenants placed elsewhere, without those displaced by a higher grade
        self.spent = 0.0  # cost of these moves
        self.displaced: list[Tenant] = []
        self.sizes: set[int] = set()  # of all tenants
        self.kinds: dict[int, list[int]] = {}  # kind -> hosts
        for host, space in enumerate(spaces):
            self.kinds.setdefault(space.kind, []).append(host)
        self.indices: list[HostIndex] = []  # notified of each host that changes
        self._log: list[tuple[Tenant, int, int, int]] = []  # (tenant, host, first, home) as before
        self._begun = 0  # number of displaced tenants when the log began

    def put(self, tenant: Tenant, host: int, first: int) -> None:
        """Places a tenant on these cores, which must be free."""
        self._log.append((tenant, tenant.host, tenant.first, tenant.home))
        self._take(tenant, host, first)

    def remove(self, tenant: Tenant) -> None:
        """Removes a tenant from its place."""
        self._log.append((tenant, tenant.host, tenant.first, tenant.home))
        self._leave(tenant)

    def _take(self, tenant: Tenant, host: int, first: int) -> None:
        space = self.spaces[host]
        tenant.host, tenant.first = host, first
        space.free &= ~tenant.mask
        space.tenants.append(tenant)
        self._charge(space, tenant, 1)
        if host == tenant.home and first == tenant.home_first:
            tenant.at_home = True
            self.moved -= 1
            self.spent -= tenant.cost

    def _leave(self, tenant: Tenant) -> None:
        space = self.spaces[tenant.host]
        if tenant.at_home:
            tenant.at_home = False
            self.moved += 1
            self.spent += tenant.cost
        space.free |= tenant.mask & space.allowed
        space.tenants.remove(tenant)
        self._charge(space, tenant, -1)
        tenant.host = tenant.first = -1

    def _charge(self, space: Space, tenant: Tenant, sign: int) -> None:
        demand = tenant.demand
        if demand.memory:
            space.memory -= sign * demand.memory[space.kind]
        if demand.cpus:
            space.cpus -= sign * demand.cpus[space.kind]
        host = tenant.host
        for index in self.indices:
            index.changed.add(host)

    def settle(self, tenant: Tenant) -> None:
        """Adds a tenant at its ``host`` and ``first``, before anything is placed."""
        space = self.spaces[tenant.host]
        self.sizes.add(tenant.size)
        space.free &= ~tenant.mask
        space.tenants.append(tenant)
        self._charge(space, tenant, 1)

    def begin(self) -> None:
        """Commits all changes; `undo` returns to this state."""
        self._log.clear()
        self._begun = len(self.displaced)

    def undo(self) -> None:
        """Reverts all changes since `begin`."""
        self.undo_to((0, self._begun))

    @property
    def touched(self) -> list[Tenant]:
        """The tenants that were placed or removed since `begin`."""
        return list(dict.fromkeys(entry[0] for entry in self._log))

    def mark(self) -> tuple[int, int]:
        """Returns the present state, for `undo_to`."""
        return len(self._log), len(self.displaced)

    def undo_to(self, mark: tuple[int, int]) -> None:
        """Reverts all changes since the mark."""
        while len(self._log) > mark[0]:
            tenant, host, first, home = self._log.pop()
            if tenant.home != home:
                tenant.home = home
                self.moved += 1
                self.spent += tenant.cost
                continue
            if tenant.host >= 0:
                self._leave(tenant)
            if host >= 0:
                self._take(tenant, host, first)
        del self.displaced[mark[1] :]

    def admits(self, tenant: Tenant, host: int) -> bool:
        """Returns whether memory, CPUs and spread allow the tenant on the host now."""
        demand, space = tenant.demand, self.spaces[host]
        if demand.memory and demand.memory[space.kind] > space.memory + 1e-9:
            return False
        if demand.insists and demand.cpus[space.kind] > space.cpus:
            return False
        return not demand.most or space.count(tenant.model) < demand.most

    def admitting(self, tenant: Tenant) -> Callable[[int], bool] | None:
        """Returns `admits` for the tenant; None if all suitable hosts admit it."""
        return None if tenant.demand.plain else lambda host: self.admits(tenant, host)

    def forget_home(self, tenant: Tenant) -> None:
        """Treats a displaced tenant as new, so that its next place is not a move."""
        if tenant.home >= 0:
            self._log.append((tenant, -1, -1, tenant.home))
            tenant.home = -1
            self.moved -= 1
            self.spent -= tenant.cost

    def within_moves(self) -> bool:
        """Returns whether no more running tenants are moved than allowed."""
        return self.moves is None or self.moved <= self.moves
