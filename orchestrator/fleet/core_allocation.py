"""Tracks which replica owns which cores of each host, for the autoscaler's capacity decisions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from placements.facts.topology import Host

Place = tuple[int, int]  # host, first core
Rows = tuple[tuple[tuple[int, float], ...], tuple[frozenset[int], ...]]
"""By host, the number of usable cores with their price, and the unusable cores."""
Owner = tuple[str, int]  # model, index of the replica
_NONE_WITHHELD: Mapping[str, Iterable[int]] = MappingProxyType({})


def core_rows(
    hosts: Sequence[Host], prices: Mapping[str, float], withheld: Mapping[str, Iterable[int]] = _NONE_WITHHELD
) -> Rows:
    """Returns the rows of `CoreAllocation`; ``withheld`` are unusable cores by host, beside the reserved ones."""
    blocked = tuple(
        frozenset(core for core in {*withheld.get(host.name, ()), *host.reserved_cores} if 0 <= core < host.cores)
        for host in hosts
    )
    rows = tuple((host.cores - len(shut), prices[host.name]) for host, shut in zip(hosts, blocked, strict=True))
    return rows, blocked


class CoreAllocation:
    """Cores, each free, blocked or owned by a replica. A replica has contiguous cores, aligned to their number."""

    def __init__(self, hosts: Sequence[tuple[int, float]], blocked: Sequence[frozenset[int]] = ()) -> None:
        """``hosts``: number of usable cores and their price; ``blocked``: further cores of each that are unusable."""
        self.prices = [price for _, price in hosts]
        self._owners: list[list[Owner | bool | None]] = []  # True: blocked
        for i, (cores, _) in enumerate(hosts):
            closed = blocked[i] if i < len(blocked) else frozenset()
            row: list[Owner | bool | None] = [None] * (cores + len(closed))
            for core in closed:
                if core < len(row):
                    row[core] = True
            self._owners.append(row)
        self._windows: dict[tuple[int, int], list[tuple[Place, tuple[Owner, ...]]]] = {}  # by host and size
        self._free = [row.count(None) for row in self._owners]

    @property
    def free(self) -> int:
        """The number of free cores."""
        return sum(self._free)

    def price(self, place: Place | None) -> float:
        """Returns the price of a core per hour; 0.0 for an unknown place."""
        return 0.0 if place is None else self.prices[place[0]]

    def take(self, owner: Owner, cores: int, place: Place) -> bool:
        """Assign cores to a replica. Returns False if one of them is missing or not free."""
        host, first = place
        if not 0 <= host < len(self._owners) or first < 0:
            return False
        row = self._owners[host]
        if first + cores > len(row) or any(row[core] is not None for core in range(first, first + cores)):
            return False
        row[first : first + cores] = [owner] * cores
        self._free[host] -= cores
        self._changed(host)
        return True

    def leave(self, owner: Owner, cores: int, place: Place) -> None:
        """Free the cores of a replica."""
        host, first = place
        if self._owners[host][first] == owner:
            self._owners[host][first : first + cores] = [None] * cores
            self._free[host] += cores
            self._changed(host)

    def room(self, cores: int, *, most: float = 0.0) -> Place | None:
        """Returns free contiguous cores up to that price: the cheapest, then on the fullest host, then the first."""
        best, rank = None, (0.0, 0)
        for host, free in enumerate(self._free):
            price = self.prices[host]
            if free < cores or price > most or (best is not None and (price, free) >= rank):
                continue
            row = self._owners[host]
            for first in range(0, len(row) - cores + 1, cores):
                if row[first] is None and all(owner is None for owner in row[first : first + cores]):
                    best, rank = (host, first), (price, free)
                    break
        return best

    def windows(self, cores: int) -> Iterator[tuple[Place, tuple[Owner, ...]]]:
        """Yields windows of contiguous cores without blocked ones, with their owners. Skips windows that are free."""
        for host in range(len(self._owners)):
            windows = self._windows.get((host, cores))
            if windows is None:
                windows = self._windows[host, cores] = list(self._windows_of(host, cores))
            yield from windows

    def _windows_of(self, host: int, cores: int) -> Iterator[tuple[Place, tuple[Owner, ...]]]:
        row = self._owners[host]
        for first in range(0, len(row) - cores + 1, cores):
            owners = dict.fromkeys(owner for owner in row[first : first + cores] if owner is not None)
            if owners and True not in owners:
                yield (host, first), tuple(owner for owner in owners if not isinstance(owner, bool))

    def _changed(self, host: int) -> None:
        for key in [key for key in self._windows if key[0] == host]:
            del self._windows[key]
