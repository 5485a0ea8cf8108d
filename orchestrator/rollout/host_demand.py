"""Decides which of the hosts that come and go a fleet needs: those to request, and one to give back. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from orchestrator.rollout.rollout_step import Situation, compute_goal
from placements.facts.topology import Host
from placements.planner.host_choice import HostChoice, choose_hosts
from placements.planner.host_groups import HostGroup, kept_hosts
from placements.planner.plan import Plan

MOST_TRIALS = 4
"""The hosts of one group that a search for a host to give back tries, the emptiest first."""


@dataclass(frozen=True)
class HostDemand:
    """The input of both decisions. The hosts of ``situation`` have a machine; those of ``used`` have or await one.

    Instance types in ``avoided`` did not start lately: they stay requested, but are not relied upon.
    """

    situation: Situation
    groups: tuple[HostGroup, ...]
    used: frozenset[str]
    avoided: Collection[str] = ()

    @property
    def coming(self) -> list[Host]:
        """The hosts whose machines were requested and are relied upon."""
        present = set(self.situation.hosts)
        return [
            host
            for group in self.groups
            if group.elastic and group.instance not in self.avoided
            for host in kept_hosts([group], self.used)
            if host not in present
        ]

    def choose(self) -> HostChoice:
        """Returns the cheapest hosts to request for replicas that fit neither on present nor on coming hosts."""
        known = {*self.situation.hosts, *self.coming}
        absent = [host for group in self.groups for host in group.hosts if host not in known]
        return choose_hosts(self.situation.spec, self.groups, absent, self._plan, self.avoided)

    def spare(self, needed: Collection[Host] = ()) -> Host | None:
        """Returns a host, none of ``needed``, without which as many replicas of each model have a place; None if each
        is needed.

        Of the most expensive group that has more than ``min`` hosts, one that waits for its machine, else the emptiest.
        """
        placed = _placed(self._plan(()))
        present = set(self.situation.hosts)
        leased = Counter[str]()
        for view in self.situation.views:
            leased[view.host] += 0 if view.gone else max(1, len(view.cores or ()))
        for group in sorted(self.groups, key=lambda group: group.price, reverse=True):
            kept = kept_hosts([group], self.used)
            if not group.elastic or len(kept) <= group.min:
                continue
            candidates = [host for host in reversed(kept) if host not in needed]  # a fleet keeps its first hosts
            order = sorted(candidates, key=lambda host: (host in present, leased[host.name]))
            for host in order[:MOST_TRIALS]:
                if _placed(self._plan((), without=host)) >= placed:
                    return host
        return None

    def with_hosts(self, added: Sequence[Host], without: Host | None = None) -> Situation:
        """Returns the situation once the coming and the ``added`` hosts are there, and ``without`` is not."""
        chosen = {*self.situation.hosts, *self.coming, *added} - {without}
        hosts = tuple(host for group in self.groups for host in group.hosts if host in chosen)
        views = self.situation.views
        if without is not None:
            views = tuple(view for view in views if view.host != without.name)
        return dataclasses.replace(self.situation, hosts=hosts, views=views)

    def _plan(self, added: Sequence[Host], without: Host | None = None) -> Plan:
        return compute_goal(self.with_hosts(added, without)).plan


def _placed(plan: Plan) -> Counter[str]:
    return Counter(placement.model for placement in plan.placements)
