"""Computes the CPU threads and the CPUs of a replica."""

from __future__ import annotations

from typing import Literal

from placements.facts.core_range import CoreRange
from placements.facts.topology import Host

Policy = Literal["share", "lmi"] | int  # an int is a fixed number of threads


def threads(policy: Policy, tp_degree: int, host: Host) -> int:
    """Returns OMP_NUM_THREADS of one replica, at least 1.

    ``share``: floor((cpus - reserve) x tp_degree / host cores), independent of other replicas, so that a start never
    changes the threads of others. On a plain CPU host: tp_degree threads, limited by the budget. ``lmi``: 2 x tp_degree
    as in LMI's Connection.java. A number: that number.
    """
    if isinstance(policy, int):
        return policy
    if policy == "lmi":
        return 2 * tp_degree
    budget = len(host.usable_cpus)
    if not host.cores:
        return max(1, min(tp_degree, budget))
    return max(1, budget * tp_degree // host.cores)


def arithmetic(policy: Policy, tp_degree: int, host: Host) -> str:
    """Returns the arithmetic of ``threads`` as text: "floor((192 - 8) x 8 / 24) = 61"."""
    result = threads(policy, tp_degree, host)
    if isinstance(policy, int):
        return f"fixed = {result}"
    if policy == "lmi":
        return f"2 x {tp_degree} = {result}"
    budget = f"({len(host.cpus)} - {host.reserve_vcpus})"
    if not host.cores:
        return f"min({tp_degree}, {budget}) = {result}"
    floor = len(host.usable_cpus) * tp_degree // host.cores
    rounded = ", at least 1" if floor < 1 else ""
    return f"floor({budget} x {tp_degree} / {host.cores}) = {floor}{rounded}"


def cpu_mask(host: Host, cores: CoreRange | None, count: int) -> tuple[int, ...]:
    """Returns the CPUs of the replica on ``cores`` with ``count`` threads; () if it is not bound.

    With B usable CPUs and C cores, the range a-b gets the usable CPUs floor(a*B/C) to floor((b+1)*B/C) - 1, so that
    disjoint ranges share no CPU. The replica is not bound if its share is less than one CPU, or if it has more threads
    than its share has CPUs.
    """
    if cores is None or not host.cores:
        return ()
    usable = host.usable_cpus
    if len(usable) * len(cores) < host.cores:
        return ()
    start, stop = cores.first * len(usable) // host.cores, (cores.last + 1) * len(usable) // host.cores
    mask = usable[start:stop]
    return mask if count <= len(mask) else ()
