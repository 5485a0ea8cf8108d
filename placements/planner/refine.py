"""Refining a packing by trying: a few hosts are filled in another order, and what is worse is undone.

The tries are random, from a fixed seed, and as many each time: the same packing is always refined in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from placements.planner.packer import Packer, largest_first
from placements.planner.tenants import Grade, Tenant

SERVE_TRIES = 300
"""How often `serve_more` tries."""

SERVED_AT_ONCE = 40
"""How many of many that are missing take part in one try."""

MOVE_TRIES = 30_000
"""How often `move_fewer` tries on one host; on n hosts an n-th of it, and at most 300 times."""

_SKIPPED = (0, 0, 1, 1, 2, 3, 4, 6, 9)


def serve_more(packer: Packer, missing: Sequence[Tenant]) -> list[Tenant]:
    """Empty a few hosts of what is new there and fill them again in another order, as long as more is served.

    Where memory, CPUs or spread decide, largest first is not the best order, and there is no order that always is.
    Those that find no room in the end come back.
    """
    left = list(missing)
    if not left:
        return left
    new = [(host, one) for host, space in enumerate(packer.spaces) for one in space.tenants if _is_new(one)]
    hosts = list(dict.fromkeys(host for host, _ in new))
    if not hosts or all(one.demand.plain for one in (*left, *(one for _, one in new))):
        return left
    random = Random(0)
    for _ in range(SERVE_TRIES):
        if not left:
            break
        left = _refill(packer, left, random, hosts)
    packer.begin()
    packer.hope_again()
    return left


def _refill(packer: Packer, missing: list[Tenant], random: Random, movable: Sequence[int]) -> list[Tenant]:
    """One try. The result is what is missing afterwards."""
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
    left = []
    for *_, tenant in pool:
        random.shuffle(hosts)
        spot = _spot_on(packer, tenant, hosts) or packer.free_spot(tenant) or packer.odd_spot(tenant)
        if spot is None:
            left.append(tenant)
        else:
            packer.put(tenant, *spot)
    if _worse(left, waiting):
        packer.undo()
        return missing
    taken = set(map(id, waiting))
    return left + [tenant for tenant in missing if id(tenant) not in taken]


def _spot_on(packer: Packer, tenant: Tenant, hosts: Sequence[int]) -> tuple[int, int] | None:
    """A free range of the grid on the first of these hosts that has one."""
    for host in hosts:
        space = packer.spaces[host]
        if space.kind in tenant.demand.kinds and packer.admits(tenant, host):
            found = space.grid.best(space.free, tenant.size)
            if found is not None:
                return host, found[1]
    return None


_WEIGHTS: tuple[Callable[[Tenant], float], ...] = (
    lambda tenant: float(tenant.size),
    lambda tenant: tenant.size / (1.0 + max(tenant.demand.memory, default=0.0)),
    lambda tenant: max(tenant.demand.memory, default=0.0) + 0.01 * tenant.size,
    lambda tenant: 1.0,
)
"""Who is placed first, within a grade: those that weigh most."""


def _is_new(tenant: Tenant) -> bool:
    return not tenant.fixed and not tenant.at_home


def _worse(left: Sequence[Tenant], before: Sequence[Tenant]) -> bool:
    """Whether more cores go without a place, at the most important grade where the two differ."""
    lost: Counter[Grade] = Counter()
    for tenant in left:
        lost[tenant.grade] += tenant.size
    for tenant in before:
        lost[tenant.grade] -= tenant.size
    return next((count > 0 for _, count in sorted(lost.items()) if count), False)


def move_fewer(packer: Packer) -> None:
    """Let those that have moved back, and find other room for what took theirs, as long as that costs no more.

    On many hosts nothing is tried: there each try gains little of the whole.
    """
    away = [one for space in packer.spaces for one in space.tenants if _is_away(one)]
    if not away or packer.large:
        return
    random = Random(0)
    for _ in range(min(300, MOVE_TRIES // len(packer.spaces))):
        if not away:
            break
        tenant, skip = random.choice(away), random.choice(_SKIPPED)
        if _bring_home(packer, tenant, [one for one in away if one.home == tenant.home], skip):
            away = [one for one in dict.fromkeys([*away, *packer.touched]) if _is_away(one)]
    packer.begin()


def _is_away(tenant: Tenant) -> bool:
    return tenant.home >= 0 and not tenant.at_home


def _bring_home(packer: Packer, tenant: Tenant, neighbours: Sequence[Tenant], skip: int) -> bool:
    """One try: the tenant goes home, and so do all neighbours whose cores that frees."""
    packer.begin()
    before, home = (packer.spent, packer.moved), packer.spaces[tenant.home]
    wanted = ((1 << tenant.size) - 1) << tenant.home_first
    intruders = [one for one in home.tenants if one.mask & wanted]
    if any(one.fixed for one in intruders):
        return False
    for one in intruders:
        packer.remove(one)
    for one in neighbours:
        mask = ((1 << one.size) - 1) << one.home_first
        if one.host >= 0 and home.free & mask == mask:
            packer.remove(one)
            if not packer.admits(one, one.home):
                packer.undo()
                return False
            packer.put(one, one.home, one.home_first)
    intruders = sorted((one for one in intruders if one.host < 0), key=largest_first)
    if all(packer.enter(one, skip=skip) for one in intruders) and (packer.spent, packer.moved) <= before:
        return True
    packer.undo()
    return False
