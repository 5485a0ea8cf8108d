"""Chooses the cheapest hosts to add for replicas that have no place, and hosts that no replica needs. Pure."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import Host
from placements.planner.plan import Plan, plan
from placements.planner.spec_hosts import HostGroup, host_groups, kept_hosts, least_hosts
from placements.spec.schema import Spec

MOST_PLANS = 64
"""The plans that the exact search may compute, before it falls back to a search by halves."""

MOST_TRIALS = 4
"""The hosts of one group that a search for a host to give back tries, the emptiest first."""

Draw = Callable[[tuple[Host, ...]], Plan]
"""Plans with these further hosts."""


@dataclass(frozen=True)
class AddedHost:
    """A host to add, and the replicas that the plan places there."""

    host: str
    instance: str
    price: float  # per hour
    replicas: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Returns the JSON of `plan -o json`."""
        return {
            "host": self.host,
            "instance": self.instance,
            "price_per_hour": round(self.price, 6),
            "replicas": list(self.replicas),
        }


@dataclass(frozen=True)
class HostChoice:
    """The hosts to add, and the plan with them."""

    plan: Plan
    hosts: tuple[Host, ...] = ()
    groups: tuple[HostGroup, ...] = field(default=(), repr=False)

    @property
    def all_hosts(self) -> tuple[Host, ...]:
        """The hosts that the groups keep, and those to add."""
        return (*least_hosts(self.groups), *self.hosts)

    def added(self) -> tuple[AddedHost, ...]:
        """Returns the chosen hosts with their prices and replicas."""
        group_of = {host.name: group for group in self.groups for host in group.hosts}
        replicas: dict[str, list[str]] = {host.name: [] for host in self.hosts}
        for placement in self.plan.placements:
            if placement.host in replicas:
                replicas[placement.host].append(f"{placement.model}/{placement.replica}")
        return tuple(
            AddedHost(host.name, group_of[host.name].instance, group_of[host.name].price, tuple(replicas[host.name]))
            for host in self.hosts
        )


def choose_hosts(
    spec: Spec,
    groups: Sequence[HostGroup],
    absent: Sequence[Host],
    draw: Draw,
    avoided: Collection[str] = (),
    bare: Plan | None = None,
) -> HostChoice:
    """Returns the cheapest hosts with which as much is placed as with all ``absent`` hosts of elastic groups.

    Of equal prices, the fewest hosts win, then the fewest cores, then the earlier groups. Hosts of one group are chosen
    in the order of ``absent``. Groups whose instance type is in ``avoided`` are chosen only if the others do not
    suffice. ``bare`` is the plan without further hosts, if it is known.

    1. Without missing replicas, or if all absent hosts place no more, none is chosen.
    2. Numbers of hosts per group are tried in the order of their price: the first that suffices is the cheapest.
    3. After MOST_PLANS plans: all hosts, reduced by halves group by group, the most expensive first.
    """
    bare = draw(()) if bare is None else bare
    names = {host.name: number for number, group in enumerate(groups) if group.elastic for host in group.hosts}
    offers: list[list[Host]] = [[] for _ in groups]
    for host in absent:
        if host.name in names:
            offers[names[host.name]].append(host)
    if not bare.unplaced or not any(offers):  # 1
        return HostChoice(bare, groups=tuple(groups))
    search = _Search(spec, groups, offers, draw, avoided)
    every = draw(search.hosts(search.all))
    target = search.missing(every)
    if target >= search.missing(bare):
        return HostChoice(bare, groups=tuple(groups))
    counts, drawn = search.cheapest(target, every)
    return HostChoice(drawn, search.hosts(counts), tuple(groups))


def plan_on_cluster(spec: Spec, hosts: Sequence[Host], checkpoints: Mapping[str, Checkpoint]) -> HostChoice:
    """Returns the plan of a fleet that has no more than the ``min`` hosts of each group yet, and the hosts to add."""
    groups = host_groups(spec, hosts)
    least = least_hosts(groups)
    absent = [host for group in groups for host in group.hosts[group.min :]]
    return choose_hosts(spec, groups, absent, lambda added: plan(spec, (*least, *added), checkpoints))


def spare_host(
    groups: Sequence[HostGroup],
    used: Collection[str],
    held_cores: Mapping[str, int],
    draw_without: Callable[[Host | None], Plan],
    needed: Collection[Host] = (),
) -> Host | None:
    """Returns a host, none of ``needed``, without which as many replicas of each model have a place; None if each is
    needed.

    Of the most expensive group that has more than ``min`` hosts, one that waits for its machine, else the emptiest.
    ``used``: the names of the hosts that have or await a machine; ``held_cores``: by name, for those that have one.
    """
    placed = _placed(draw_without(None))
    for group in sorted(groups, key=lambda group: group.price, reverse=True):
        kept = kept_hosts([group], used)
        if not group.elastic or len(kept) <= group.min:
            continue
        candidates = [host for host in reversed(kept) if host not in needed]  # a fleet keeps its first hosts
        order = sorted(candidates, key=lambda host: held_cores.get(host.name, -1))
        for host in order[:MOST_TRIALS]:
            if _placed(draw_without(host)) >= placed:
                return host
    return None


def _placed(drawn: Plan) -> Counter[str]:
    return Counter(placement.model for placement in drawn.placements)


Counts = tuple[int, ...]


class _Search:
    """One search for the numbers of hosts per group."""

    def __init__(
        self,
        spec: Spec,
        groups: Sequence[HostGroup],
        offers: Sequence[Sequence[Host]],
        draw: Draw,
        avoided: Collection[str],
    ) -> None:
        self._groups, self._offers, self._draw = groups, offers, draw
        self._avoided = [group.instance in avoided for group in groups]
        self._models = {model.name: model for model in spec.models}
        self._priorities = sorted({model.priority for model in spec.models}, reverse=True)
        self.all: Counts = tuple(map(len, offers))

    def hosts(self, counts: Counts) -> tuple[Host, ...]:
        return tuple(host for offer, count in zip(self._offers, counts, strict=True) for host in offer[:count])

    def missing(self, drawn: Plan) -> tuple[int, ...]:
        """Returns the cores of missing replicas by priority, the highest first; less is better."""
        cores = dict.fromkeys(self._priorities, 0)
        for unplaced in drawn.unplaced:
            model = self._models[unplaced.model]
            cores[model.priority] += model.tp_degree
        return tuple(cores.values())

    def cost(self, counts: Counts) -> tuple[float, ...]:
        chosen = list(zip(self._groups, self._avoided, counts, strict=True))
        avoided = sum(count for _, avoid, count in chosen if avoid)
        price = round(sum(group.price * count for group, _, count in chosen), 9)
        cores = sum(group.hosts[0].cores * count for group, _, count in chosen)
        return avoided, price, sum(counts), cores

    def cheapest(self, target: tuple[int, ...], every: Plan) -> tuple[Counts, Plan]:
        none = tuple(0 for _ in self.all)
        heap = [(self.cost(none), none, none)]
        seen = {none}
        drawn = 0
        while heap and drawn < MOST_PLANS:  # 2
            *_, counts = heapq.heappop(heap)
            if any(counts):
                drawn += 1
                trial = self._draw(self.hosts(counts))
                if self.missing(trial) <= target:
                    return counts, trial
            for more in self._one_more(counts):
                if more not in seen:
                    seen.add(more)
                    heapq.heappush(heap, (self.cost(more), tuple(-count for count in more), more))
        return self._by_halves(target, every)

    def _one_more(self, counts: Counts) -> list[Counts]:
        return [
            (*counts[:i], count + 1, *counts[i + 1 :])
            for i, (count, most) in enumerate(zip(counts, self.all, strict=True))
            if count < most
        ]

    def _by_halves(self, target: tuple[int, ...], every: Plan) -> tuple[Counts, Plan]:
        """Reduces the numbers of all hosts, the most expensive group first, while they suffice."""
        counts, best = self.all, every
        groups = range(len(counts))
        for i in sorted(groups, key=lambda i: (self._avoided[i], self._groups[i].price), reverse=True):
            low, high = -1, counts[i]  # low does not suffice
            while high - low > 1:
                middle = (low + high) // 2
                tried = (*counts[:i], middle, *counts[i + 1 :])
                trial = self._draw(self.hosts(tried))
                if self.missing(trial) <= target:
                    counts, best, high = tried, trial, middle
                else:
                    low = middle
        return counts, best
