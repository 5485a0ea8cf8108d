"""Improves a packing: by local search, and by moving new replicas to hosts that hold their artifacts.

The search refills a few hosts in another order, and reverts what is worse. It is random with a fixed seed and a fixed
number of tries, so that the same packing has the same result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random

from placements.planner.board import Grade, Tenant
from placements.planner.packer import Packer, largest_first

SERVE_TRIES = 300
"""Tries of `serve_more`."""

SERVED_AT_ONCE = 40
"""The most missing tenants that take part in one try."""

MOVE_TRIES = 30_000
"""Tries of `move_fewer` divided by the number of hosts; at most 300."""

_SKIPPED = (0, 0, 1, 1, 2, 3, 4, 6, 9)


def serve_more(packer: Packer, missing: Sequence[Tenant]) -> list[Tenant]:
    """Removes the new tenants of a few hosts and places them in another order, and keeps the result if it is better.

    If memory, CPUs or spread are scarce, largest first is not always the best order, and no other order is. Returns
    the tenants that are still missing.
    """
    remaining = list(missing)
    if not remaining:
        return remaining
    new = [(host, tenant) for host, space in enumerate(packer.spaces) for tenant in space.tenants if _is_new(tenant)]
    hosts = list(dict.fromkeys(host for host, _ in new))
    if not hosts or all(tenant.demand.plain for tenant in (*remaining, *(tenant for _, tenant in new))):
        return remaining
    random = Random(0)
    for _ in range(SERVE_TRIES):
        if not remaining:
            break
        remaining = _refill(packer, remaining, random, hosts)
    packer.begin()
    packer.hope_again()
    return remaining


def _refill(packer: Packer, missing: list[Tenant], random: Random, movable: Sequence[int]) -> list[Tenant]:
    """Makes one try. Returns the missing tenants."""
    packer.begin()
    hosts = random.sample(movable, min(len(movable), random.choice((1, 2, 2, 3, 4))))
    emptied = [tenant for host in hosts for tenant in packer.spaces[host].tenants if _is_new(tenant)]
    for tenant in emptied:
        packer.remove(tenant)
    waiting = missing
    if len(missing) > SERVED_AT_ONCE:
        waiting = random.sample(missing, SERVED_AT_ONCE)
    weigh, noise = random.choice(_WEIGHTS), random.choice((0.0, 0.3, 1.0))
    pool = [(t.grade, -weigh(t) * (1 + noise * random.random()), t.model, t.replica, t) for t in (*emptied, *waiting)]
    pool.sort(key=lambda entry: entry[:4])
    remaining = []
    for *_, tenant in pool:
        random.shuffle(hosts)
        spot = _spot_on(packer, tenant, hosts) or packer.free.spot(tenant) or packer.free.odd_spot(tenant)
        if spot is None:
            remaining.append(tenant)
        else:
            packer.put(tenant, *spot)
    if _worse(remaining, waiting):
        packer.undo()
        return missing
    tried = set(map(id, waiting))
    return remaining + [tenant for tenant in missing if id(tenant) not in tried]


def _spot_on(packer: Packer, tenant: Tenant, hosts: Sequence[int]) -> tuple[int, int] | None:
    """Returns a free range of the grid on the first of these hosts that has one."""
    for host in hosts:
        space = packer.spaces[host]
        if space.kind in tenant.demand.kinds and packer.admits(tenant, host):
            fit = space.grid.best(space.free, tenant.size)
            if fit is not None:
                return host, fit[1]
    return None


_WEIGHTS: tuple[Callable[[Tenant], float], ...] = (
    lambda tenant: float(tenant.size),
    lambda tenant: tenant.size / (1.0 + max(tenant.demand.memory, default=0.0)),
    lambda tenant: max(tenant.demand.memory, default=0.0) + 0.01 * tenant.size,
    lambda tenant: 1.0,
)
"""Orders within a grade: tenants with the highest weight are placed first."""


def _is_new(tenant: Tenant) -> bool:
    return not tenant.fixed and not tenant.at_home


def _worse(after: Sequence[Tenant], before: Sequence[Tenant]) -> bool:
    """Returns whether more cores have no place, at the most important grade where the two differ."""
    lost: Counter[Grade] = Counter()
    for tenant in after:
        lost[tenant.grade] += tenant.size
    for tenant in before:
        lost[tenant.grade] -= tenant.size
    return next((count > 0 for _, count in sorted(lost.items()) if count), False)


def move_fewer(packer: Packer) -> None:
    """Moves tenants back to where they run and places the intruders elsewhere, as long as that costs no more.

    Does nothing with many hosts, where each try gains little.
    """
    away = [other for space in packer.spaces for other in space.tenants if _is_away(other)]
    if not away or packer.prices.large:
        return
    random = Random(0)
    for _ in range(min(300, MOVE_TRIES // len(packer.spaces))):
        if not away:
            break
        tenant, skip = random.choice(away), random.choice(_SKIPPED)
        if _bring_home(packer, tenant, [other for other in away if other.home == tenant.home], skip):
            away = [other for other in dict.fromkeys([*away, *packer.touched]) if _is_away(other)]
    packer.begin()


def _is_away(tenant: Tenant) -> bool:
    return tenant.home >= 0 and not tenant.at_home


def _bring_home(packer: Packer, tenant: Tenant, neighbours: Sequence[Tenant], skip: int) -> bool:
    """Makes one try: moves the tenant home, and all neighbours whose cores that frees."""
    packer.begin()
    before, home = (packer.spent, packer.moved), packer.spaces[tenant.home]
    home_mask = ((1 << tenant.size) - 1) << tenant.home_first
    intruders = [other for other in home.tenants if other.mask & home_mask]
    if any(other.fixed for other in intruders):
        return False
    for other in intruders:
        packer.remove(other)
    for other in neighbours:
        mask = ((1 << other.size) - 1) << other.home_first
        if other.host >= 0 and home.free & mask == mask:
            packer.remove(other)
            if not packer.admits(other, other.home):
                packer.undo()
                return False
            packer.put(other, other.home, other.home_first)
    intruders = sorted((other for other in intruders if other.host < 0), key=largest_first)
    if all(packer.enter(other, skip=skip) for other in intruders) and (packer.spent, packer.moved) <= before:
        return True
    packer.undo()
    return False


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
