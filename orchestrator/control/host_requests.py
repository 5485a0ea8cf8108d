"""Requests machines for replicas that have no place, and gives machines back that no replica needs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable

from orchestrator.control.controller_metrics import ControllerCounters
from orchestrator.control.decisions.host_demand import CHECK_S, SPARE_S, HostDemand
from orchestrator.control.effects import ClusterClient
from orchestrator.control.fleet_goal import situation_of
from orchestrator.control.fleet_state import FleetState
from orchestrator.control.gateways import Gateways
from orchestrator.control.journal.journal_records import Cordon, Departure, HostUse
from placements.facts.topology import Host
from placements.planner.host_choice import HostChoice
from workers.host.task_boundary import task_boundary

log = logging.getLogger(__name__)

KEEP_S = 5.0  # between two calls of the cluster without changes
NOT_NEEDED = "no replica needs it"  # the cause of the departure of a host that is given back


class HostRequests:
    """The hosts of one fleet that come and go, on the controller's event loop."""

    def __init__(
        self, state: FleetState, cluster: ClusterClient, counters: ControllerCounters, gateways: Gateways
    ) -> None:
        self._state = state
        self._cluster = cluster
        self._gateways = gateways
        self._counters = counters
        self._kept: frozenset[str] = frozenset()  # the last set that the cluster received
        self._keep_at = float("-inf")
        self._keeping: asyncio.Task[None] | None = None
        self._check_at = float("-inf")
        self._spare: tuple[str, float] | None = None  # instance type of which a host is spare, and since when

    def stop(self) -> None:
        """Cancel the call that the cluster has not answered."""
        if self._keeping is not None:
            self._keeping.cancel()

    async def round(self) -> None:
        """Decide which hosts the fleet uses, after its goal was computed. Without groups with ``max``, nothing."""
        state = self._state
        if not any(group.elastic for group in state.current.groups):
            return
        self._give_up_lost()
        self._use_least()
        self._warn(state.uses.report_late())
        with task_boundary(log, "the hosts are not decided", on_error=self._counters.failed_round):
            await self._decide()
        self._keep()

    # Decisions

    def _give_up_lost(self) -> None:
        """Release hosts that were to leave and whose machine is gone."""
        records = self._state.records
        for host in records.state.uses.keys() & records.state.departures.keys() & self._state.lost:
            self._release(host, "its machine has ended")

    def _use_least(self) -> None:
        """Request the hosts that the fleet uses by ``min`` alone, unless they have a machine."""
        state = self._state
        elastic = {host.name for group in state.current.groups if group.elastic for host in group.hosts}
        for host in sorted((state.kept & elastic) - state.records.state.uses.keys()):
            if host in state.lost:
                self._request(host, "a machine is requested, since the spec always has it")
            else:
                state.records.note(HostUse(host=host, state="joined"))

    async def _decide(self) -> None:
        """Request hosts for replicas without a place; else look for a host that is not needed.

        1. During an update, a relocation or in a paused rollout: nothing. They free cores by themselves.
        2. Replicas without a place: hosts that are leaving stay; if none is, the cheapest further hosts are requested.
        3. A leaving host without replicas, and without requests in its gateways, is released.
        4. A host that is spare for long enough leaves; one that waits for its machine is released at once.
        """
        state = self._state
        goal, situation = state.goal, situation_of(state)
        updating = any(step.old and not situation.evacuates(name) for name, step in goal.steps.items())
        if updating or state.frozen or state.in_canary or state.memory.relocation is not None:  # 1
            return
        leaving = self._leaving()
        demand = HostDemand(situation, state.current.groups, state.kept, state.uses.avoided())
        state.uses.expected, needed = (), ()
        if goal.plan.unplaced:  # 2
            self._spare = None
            if leaving:
                self._stay(leaving)
                return
            choice = await state.in_thread(demand.choose)
            state.uses.expected = choice.plan.placements
            self._request_chosen(choice)
            needed = choice.hosts
        if leaving:  # 3
            for host in leaving:
                empty = not any(view.host == host and not view.gone for view in state.views.values())
                if empty and not self._gateways.requests().get(host):
                    self._release(host, NOT_NEEDED)
            return
        await self._give_back(demand, needed)  # 4

    def _leaving(self) -> list[str]:
        records = self._state.records.state
        return [host for host, departure in records.departures.items() if departure.cause == NOT_NEEDED]

    def _stay(self, hosts: list[str]) -> None:
        for host in hosts:
            self._state.records.note(Departure(host=host, on=False, cause=NOT_NEEDED))
            self._state.records.event("info", "HostStays", "replicas need it again", host=host)

    def _request_chosen(self, choice: HostChoice) -> None:
        for added in choice.added():
            if added.host in self._state.kept:
                continue  # it is requested, although its type did not start lately
            price = f", {added.price:g} per hour" if added.price else ""
            self._request(added.host, f"a machine is requested for {', '.join(added.replicas)}{price}")

    async def _give_back(self, demand: HostDemand, needed: Collection[Host]) -> None:
        state, now = self._state, self._state.clock()
        if now < self._check_at:
            return
        self._check_at = now + CHECK_S
        host = await state.in_thread(demand.spare, needed)
        if host is None:
            self._spare = None
        elif host.name in state.uses.waiting():
            self._release(host.name, NOT_NEEDED)
        else:
            instance = host.name.rpartition("/")[0]
            if self._spare is None or self._spare[0] != instance:
                self._spare = instance, now
            elif now - self._spare[1] >= max(SPARE_S, state.uses.start_s(instance)):
                self._spare = None
                state.records.note(Departure(host=host.name, on=True, cause=NOT_NEEDED))
                message = f"{NOT_NEEDED}: it is emptied and given back"
                state.records.event("info", "HostLeaving", message, host=host.name)

    def _request(self, host: str, message: str) -> None:
        self._state.records.note(HostUse(host=host, state="requested"))
        self._state.lost |= {host}
        self._state.records.event("info", "HostRequested", message, host=host)

    def _release(self, host: str, why: str) -> None:
        records = self._state.records
        records.note(HostUse(host=host, state="released"))
        if host in records.state.departures:
            records.note(Departure(host=host, on=False))
        if host in records.state.cordons:  # the next machine of this name is another one
            records.note(Cordon(host=host, cores=None, on=False, by="the controller"))
        records.event("info", "HostReleased", why, host=host)

    # Effects

    def _keep(self) -> None:
        """Have the cluster use the hosts, at once after a change."""
        state, now = self._state, self._state.clock()
        done = self._keeping is None or self._keeping.done()
        if done and (state.kept != self._kept or now >= self._keep_at):
            self._keep_at = now + KEEP_S
            self._keeping = asyncio.get_running_loop().create_task(self._keep_hosts(state.kept))

    async def _keep_hosts(self, kept: frozenset[str]) -> None:
        state = self._state
        departures = state.records.state.departures
        elastic = [
            host
            for group in state.current.groups
            if group.elastic
            for host in group.hosts
            if host.name in kept and host.name not in departures
        ]
        with task_boundary(log, "the cluster does not take the hosts", level=logging.WARNING):
            await state.records.durable()
            reasons = await self._cluster.keep_hosts(kept, elastic)
            self._kept = kept
            self._warn(state.uses.report(reasons))

    def _warn(self, instances: Iterable[str]) -> None:
        """Record an event for each host that waits for a machine of these types."""
        uses = self._state.uses
        for instance in instances:
            for host in uses.waiting():
                if host.rpartition("/")[0] == instance:
                    self._state.records.event("warning", "HostNotStarted", uses.why_waiting(host), host=host)
