"""Decides which of the hosts that come and go a fleet needs, and whether one can be drained. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from orchestrator.control.decisions.rollout_step import Situation, compute_goal
from orchestrator.messages.replica_states import State
from placements.facts.topology import Host
from placements.planner.host_choice import HostChoice, choose_hosts, spare_host
from placements.planner.plan import Plan
from placements.planner.spec_hosts import HostGroup, kept_hosts

START_S = 300.0
"""Assumed from the request of a machine until it joins, if none of its type was measured."""
CHECK_S = 10.0
"""Between two searches for a host to give back."""
SPARE_S = 60.0
"""A host is given back once it was spare for this long, and for the time that its machine takes to start."""


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


def drained(situation: Situation, host: str) -> Situation:
    """Returns the situation in which the host's cores are blocked and its replicas have to leave."""
    every = {
        host: frozenset(
            core for candidate in situation.hosts if candidate.name == host for core in range(candidate.cores)
        )
    }
    return dataclasses.replace(
        situation, blocked={**situation.blocked, **every}, drained={**situation.drained, **every}
    )


def refusal(situation: Situation, host: str, *, partly: bool) -> str | None:
    """Returns why models cannot be served as now without the host, or None: those with a ready replica on it, with all
    of these; ``partly``: with fewer of them. No model that serves may lose all its replicas, since one with a higher
    priority takes their place."""
    staying = tuple(view for view in situation.views if view.host != host)
    goal = compute_goal(dataclasses.replace(drained(situation, host), views=staying))
    ready = [view for view in situation.views if view.state is State.READY]
    lost = {view.model for view in ready} - {target.model for target in goal.targets}
    if not partly:
        lost |= {view.model for view in ready if view.host == host}
    missing = [problem.what for group in goal.plan.unplaced if group.model in lost for problem in group.problems]
    return "; ".join(dict.fromkeys(missing)) or None
