"""Holding: of otherwise equal hosts a replica goes to one that holds what it loads, for it starts there sooner.

Only new replicas are given another place, and only where that spoils no more room: how much is placed never depends on
what hosts hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from placements.planner.packer import Packer
from placements.planner.tenants import Tenant

Held = Mapping[int, frozenset[int]]
"""By model, in the order of the spec: the hosts that hold what it loads."""


def go_where_held(packer: Packer, tenants: Sequence[Tenant], held: Held) -> None:
    """Give new tenants that lie where their model is not held another place, one after the other:

    1. a free range on a host of the same kind that holds it, which spoils no more than its own
    2. that of another new tenant of its size, which loses nothing by taking its own

    ``tenants`` are those that the packer has dealt with, in the order in which they may choose.
    """
    movable = [tenant for tenant in tenants if tenant.host >= 0 and tenant.ran is None and not tenant.fixed]
    for tenant in movable:
        near = held.get(tenant.model, frozenset())
        if near and tenant.host not in near and not _to_free(packer, tenant, near):
            _to_others(packer, tenant, movable, held)


def _to_free(packer: Packer, tenant: Tenant, near: frozenset[int]) -> bool:
    there = tenant.host
    packer.begin()
    packer.remove(tenant)
    here = packer.free_rank(there, tenant.size)
    kind = packer.spaces[there].kind
    ranks = [
        rank
        for host in sorted(near)
        if packer.spaces[host].kind == kind
        and packer.admits(tenant, host)
        and (rank := packer.free_rank(host, tenant.size)) is not None
    ]
    best = min(ranks, default=None)
    if best is None or here is None or best[:2] > here[:2]:
        packer.undo()
        return False
    packer.put(tenant, int(best[2]), int(best[3]))
    return True


def _to_others(packer: Packer, tenant: Tenant, movable: Sequence[Tenant], held: Held) -> None:
    for other in movable:
        if other.size != tenant.size or other.host not in held[tenant.model] or other.model == tenant.model:
            continue
        loses = other.host in held.get(other.model, ()) and tenant.host not in held.get(other.model, ())
        alike = packer.spaces[other.host].kind == packer.spaces[tenant.host].kind
        if alike and not loses and _exchange(packer, tenant, other):
            return


def _exchange(packer: Packer, one: Tenant, other: Tenant) -> bool:
    mine, theirs = (one.host, one.first), (other.host, other.first)
    packer.begin()
    packer.remove(one)
    packer.remove(other)
    if not packer.admits(one, theirs[0]):
        packer.undo()
        return False
    packer.put(one, *theirs)
    if not packer.admits(other, mine[0]):
        packer.undo()
        return False
    packer.put(other, *mine)
    return True
