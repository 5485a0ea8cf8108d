"""Moves new replicas to hosts that already hold their artifacts, where that costs no room.

A replica starts sooner there. The number of placed replicas never depends on the artifacts of hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from placements.planner.packer import Packer
from placements.planner.tenants import Tenant

Held = Mapping[int, frozenset[int]]
"""Model (its order in the spec) -> the hosts that hold its artifacts."""


def prefer_holders(packer: Packer, tenants: Sequence[Tenant], held: Held) -> None:
    """Moves new tenants to hosts that hold their model, one tenant after the other:

    1. to a free range on such a host of the same kind, if that breaks up no larger free range
    2. to the range of another new tenant of the same size, which loses nothing by the exchange

    ``tenants`` are the tenants that the packer has placed, the first to choose first.
    """
    movable = [tenant for tenant in tenants if tenant.host >= 0 and tenant.ran is None and not tenant.fixed]
    for tenant in movable:
        near = held.get(tenant.model, frozenset())
        if near and tenant.host not in near and not _to_free(packer, tenant, near):
            _to_others(packer, tenant, movable, held)


def _to_free(packer: Packer, tenant: Tenant, near: frozenset[int]) -> bool:
    old_host = tenant.host
    packer.begin()
    packer.remove(tenant)
    own_rank = packer.free.rank(old_host, tenant.size)
    kind = packer.spaces[old_host].kind
    ranks = [
        rank
        for host in sorted(near)
        if packer.spaces[host].kind == kind
        and packer.admits(tenant, host)
        and (rank := packer.free.rank(host, tenant.size)) is not None
    ]
    best = min(ranks, default=None)
    if best is None or own_rank is None or best[:2] > own_rank[:2]:
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


def _exchange(packer: Packer, tenant: Tenant, other: Tenant) -> bool:
    swaps = ((tenant, other.host, other.first), (other, tenant.host, tenant.first))
    packer.begin()
    packer.remove(tenant)
    packer.remove(other)
    for mover, host, first in swaps:
        if not packer.admits(mover, host):
            packer.undo()
            return False
        packer.put(mover, host, first)
    return True
