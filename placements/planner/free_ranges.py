"""The free ranges of hosts, the best-fitting first."""

from __future__ import annotations

from placements.planner.board import Board, HostIndex, Rank, Tenant
from placements.planner.grid import windows

MOST_OWN = 24
"""Models with their own index of free ranges, because hosts lack memory or CPUs for them or spread excludes hosts."""


class FreeRanges:
    """The free ranges of a board."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._on_grid: dict[tuple[int, int], HostIndex] = {}  # by size and kind
        self._of_model: dict[tuple[int, int], HostIndex] = {}
        self._off_grid: dict[tuple[int, int], HostIndex | None] = {}

    def spot(self, tenant: Tenant) -> tuple[int, int] | None:
        """Returns (host, first core) of the best-fitting free range of the grid."""
        best: tuple[tuple[float, ...], int, int] | None = None
        for kind in tenant.demand.kinds:
            if kind not in self._board.kinds:
                continue
            index = self.index(tenant.size, kind)
            top = index.first()
            if top is not None and not tenant.demand.plain and not self._board.admits(tenant, top[1]):
                own = self._model_index(tenant, kind)
                some = index.ranked(1, self._board.admitting(tenant)) if own is None else own.ranked(1)
                top = some[0] if some else None
            if top is not None:
                candidate = (top[0][:3], top[1], int(top[0][3]))
                if best is None or candidate < best:
                    best = candidate
        return None if best is None else (best[1], best[2])

    def odd_spot(self, tenant: Tenant) -> tuple[int, int] | None:
        """Returns a free legal range off the grid."""
        best: tuple[tuple[float, ...], int, int] | None = None
        for kind in tenant.demand.kinds:
            if kind not in self._board.kinds:
                continue
            index = self._odd_index(tenant.size, kind)
            if index is None:
                continue
            for rank, host in index.ranked(1, self._board.admitting(tenant)):
                candidate = (rank[:2], host, int(rank[2]))
                if best is None or candidate < best:
                    best = candidate
        return None if best is None else (best[1], best[2])

    def index(self, size: int, kind: int) -> HostIndex:
        """Returns an index of the hosts of a kind by `rank`."""
        index = self._on_grid.get((size, kind))
        if index is None:
            index = self._on_grid[size, kind] = HostIndex(self._board.kinds[kind], lambda host: self.rank(host, size))
            self._board.indices.append(index)
        return index

    def rank(self, host: int, size: int) -> Rank | None:
        """Returns (on an idle pin, larger free ranges that it breaks up, host, start) of the host's best range."""
        space = self._board.spaces[host]
        best = space.grid.best(space.free & ~space.idle, size)
        if best is not None:
            return (0, best[0], host, best[1])
        best = space.grid.best(space.free, size) if space.idle else None
        return None if best is None else (1, best[0], host, best[1])

    def _model_index(self, tenant: Tenant, kind: int) -> HostIndex | None:
        """Returns an index of the hosts that admit a model, for the first few models that ask for it, else None."""
        key = (tenant.model, kind)
        index = self._of_model.get(key)
        if index is None and len(self._of_model) < MOST_OWN:

            def rank(host: int) -> Rank | None:
                return self.rank(host, tenant.size) if self._board.admits(tenant, host) else None

            index = self._of_model[key] = HostIndex(self._board.kinds[kind], rank)
            self._board.indices.append(index)
        return index

    def _odd_index(self, size: int, kind: int) -> HostIndex | None:
        """Returns an index of ranges off the grid; None if every legal range is on the grid."""
        index = self._off_grid.get((size, kind))
        if index is None and (size, kind) not in self._off_grid:
            hosts = [host for host in self._board.kinds[kind] if self._board.spaces[host].grid.has_others(size)]
            if hosts:
                index = HostIndex(hosts, lambda host: self._odd_rank(host, size))
                self._board.indices.append(index)
            self._off_grid[size, kind] = index
        return index

    def _odd_rank(self, host: int, size: int) -> Rank | None:
        space = self._board.spaces[host]
        if not windows(space.free, size) & space.grid.legal(size):
            return None
        start = space.grid.anywhere(space.free & ~space.idle, size)
        if start is not None:
            return (0, host, start)
        start = space.grid.anywhere(space.free, size)
        return None if start is None else (1, host, start)
