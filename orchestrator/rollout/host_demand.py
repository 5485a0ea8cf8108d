"""Decides which of the hosts that come and go a fleet needs: those to request, and one to give back. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from orchestrator.rollout.rollout_step import Situation, compute_goal
from placements.facts.topology import Host
from placements.planner.host_choice import HostChoice, choose_hosts, spare_host
from placements.planner.plan import Plan
from placements.planner.spec_hosts import HostGroup, kept_hosts


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

    def choose(self, bare: Plan | None = None) -> HostChoice:
        """Returns the cheapest hosts to request for replicas that fit neither on present nor on coming hosts; ``bare``
        is the plan without further hosts, if it is known."""
        known = {*self.situation.hosts, *self.coming}
        absent = [host for group in self.groups for host in group.hosts if host not in known]
        return choose_hosts(self.situation.spec, self.groups, absent, self._plan, self.avoided, bare)

    def spare(self, needed: Collection[Host] = ()) -> Host | None:
        """Returns a host to give back, none of ``needed``; None if each is needed. See `spare_host`."""
        held_cores = {host.name: 0 for host in self.situation.hosts}
        for view in self.situation.views:
            if view.host in held_cores:
                held_cores[view.host] += 0 if view.gone else max(1, len(view.cores or ()))
        return spare_host(self.groups, self.used, held_cores, lambda without: self._plan((), without=without), needed)

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
