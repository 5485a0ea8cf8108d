"""Which host each pin lies on. Pins that name a host are given; the others take any host where their cores are free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from placements.planner.free_cores import FreeCores
from placements.spec.schema import Pin

SEARCH_STEPS = 2_000


def assign(
    pins: Sequence[Pin], free: Mapping[str, FreeCores], able: Sequence[frozenset[str]] | None = None
) -> tuple[str | None, ...]:
    """For each pin the name of its host, None where it has no place beside the pins before it.

    ``able`` holds for each pin the hosts that it may lie on; without, it may lie wherever its cores are free.

    A pin without a host gives way to later ones that name theirs, as long as another host is free for it.
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
    pins: Sequence[Pin], chosen: Sequence[int], free: Mapping[str, FreeCores], able: Sequence[frozenset[str]] | None
) -> dict[int, str] | None:
    """A host for every chosen pin, or None. The search is bounded; without pins that lack a host it is exact."""
    left = dict(free)
    result: dict[int, str] = {}
    floating: list[int] = []
    for i in chosen:
        host = pins[i].host
        if host is None:
            floating.append(i)
        elif host in left and left[host].holds(pins[i].cores):
            left[host] = left[host].without(pins[i].cores)
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
        for host, space in left.items():
            if not space.holds(cores) or space in tried or not (able is None or host in able[floating[depth]]):
                continue
            if able is None:
                tried.add(space)
            steps += 1
            if steps > SEARCH_STEPS:
                return False
            left[host] = space.without(cores)
            result[floating[depth]] = host
            if place(depth + 1):
                return True
            left[host] = space
        return False

    floating.sort(key=lambda i: (pins[i].cores, i))
    return result if place(0) else None
