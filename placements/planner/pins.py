"""Assigns a host to each pin: the host that it names, or any host where its cores are free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from placements.planner.free_cores import FreeCores
from placements.spec.notation import CorePin

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
