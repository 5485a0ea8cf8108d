"""The free cores of a host as a bit mask, and the host of each pin: the one that it names, or any with free cores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from placements.facts.core_range import CoreRange
from placements.facts.topology import Host
from placements.spec.notation import CorePin


class FreeCores(NamedTuple):
    """The free cores of a host: bit i of ``mask`` stands for core i."""

    cores: int
    mask: int

    @classmethod
    def of(cls, host: Host, taken: Iterable[int] = ()) -> FreeCores:
        """Returns the cores of a host that are neither reserved nor ``taken``."""
        mask = (1 << host.cores) - 1
        for core in (*host.reserved_cores, *taken):
            if 0 <= core < host.cores:
                mask &= ~(1 << core)
        return cls(host.cores, mask)

    def without(self, cores: CoreRange) -> FreeCores:
        """Returns a copy in which ``cores`` are not free."""
        return self._replace(mask=self.mask & ~bits(cores))

    def holds(self, cores: CoreRange) -> bool:
        """Returns whether all of ``cores`` are free."""
        mask = bits(cores)
        return cores.last < self.cores and self.mask & mask == mask


def bits(cores: CoreRange) -> int:
    """Returns the mask with these cores set."""
    return ((1 << len(cores)) - 1) << cores.first


SEARCH_STEPS = 2_000


def assign(
    pins: Sequence[CorePin], free: Mapping[str, FreeCores], able: Sequence[frozenset[str]] | None = None
) -> tuple[str | None, ...]:
    """Returns the host of each pin, None for a pin without a place beside the pins before it.

    ``able`` holds the hosts that each pin may use; None: all hosts.

    A pin without a host leaves its cores to a later pin that names the host, if another host has its cores free.
    """
    accepted: list[int] = []
    hosts: dict[int, str] = {}
    together = _together(pins, list(range(len(pins))), free, able)
    if together is not None:
        return tuple(together[i] for i in range(len(pins)))
    for i in range(len(pins)):
        trial = _together(pins, [*accepted, i], free, able)
        if trial is not None:
            accepted.append(i)
            hosts = trial
    return tuple(hosts.get(i) for i in range(len(pins)))


def _together(
    pins: Sequence[CorePin], chosen: Sequence[int], free: Mapping[str, FreeCores], able: Sequence[frozenset[str]] | None
) -> dict[int, str] | None:
    """Returns a host for every chosen pin, or None. The search is bounded if pins do not name a host, else exact."""
    remaining = dict(free)
    result: dict[int, str] = {}
    floating: list[int] = []
    for i in chosen:
        host = pins[i].host
        if host is None:
            floating.append(i)
        elif host in remaining and remaining[host].holds(pins[i].cores):
            remaining[host] = remaining[host].without(pins[i].cores)
            result[i] = host
        else:
            return None
    steps = 0

    def place(depth: int) -> bool:
        nonlocal steps
        if depth == len(floating):
            return True
        cores = pins[floating[depth]].cores
        tried: set[FreeCores] = set()
        for host, space in remaining.items():
            if not space.holds(cores) or space in tried or not (able is None or host in able[floating[depth]]):
                continue
            if able is None:
                tried.add(space)
            steps += 1
            if steps > SEARCH_STEPS:
                return False
            remaining[host] = space.without(cores)
            result[floating[depth]] = host
            if place(depth + 1):
                return True
            remaining[host] = space
        return False

    floating.sort(key=lambda i: (pins[i].cores, i))
    return result if place(0) else None
