"""Observes the hosts in each round: lost hosts, owners of cores and stored sources."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Set
from functools import partial

from orchestrator.control.controller_metrics import ControllerCounters
from orchestrator.control.decisions.departures import noticed_departures
from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.control.effects import ClusterClient, CoreOwner, HostReport
from orchestrator.control.fleet_goal import remote_sources
from orchestrator.control.fleet_state import FleetState
from orchestrator.control.host_conditions import expire_quarantines
from orchestrator.control.journal.journal_records import Departure, HostUse, Quarantine
from orchestrator.process.home import Home
from placements.facts.topology import Host
from workers.host.task_boundary import task_boundary

log = logging.getLogger(__name__)

STALE_S = 30.0  # the Neuron tools' report of core owners is at most this old
HELD_S = 60.0  # between two queries for stored remote sources, unless something was fetched
NOTICES_S = 5.0  # between two queries for notices
REPLY_S = 1.0  # deadline of the hosts' replies, while a round waits


class HostWatch:
    """The host observer of one controller, on its event loop. It writes its observations into the state."""

    def __init__(self, state: FleetState, cluster: ClusterClient, home: Home, counters: ControllerCounters) -> None:
        self._state = state
        self._cluster = cluster
        self._home = home
        self._counters = counters
        self._unresponsive: set[str] = set()
        self._former: dict[str, dict[int, float]] = {}  # by host, pids of dead replicas, with the time of their death
        self._held_until = float("-inf")  # when stored sources are queried next
        self._noticed_until = float("-inf")  # when notices are queried next
        self.reports: Mapping[str, HostReport] = {}  # the last ones
        self._queries: dict[str, asyncio.Task[None]] = {}  # of core owners, by host
        self._returned: set[str] = set()  # hosts that are back and have not reported the owners of their cores
        self._begun = False  # the first round has observed the hosts
        self._reported: set[str] = set()  # hosts that have reported the owners of their cores to this controller

    def note_death(self, view: ReplicaView) -> None:
        """Remember the pid of a replica that its host has confirmed as dead: the tools may still report it for a
        while. A lost host has confirmed nothing, and its processes may be there when it is back."""
        if view.pid is not None and view.host not in self._state.lost:
            self._former.setdefault(view.host, {})[view.pid] = self._state.clock()

    def stop(self) -> None:
        """Cancel the queries that hosts have not answered."""
        for query in self._queries.values():
            query.cancel()

    def fetch_ended(self, model: str, moved: int, seconds: float) -> None:
        """Count a fetch, with ``moved`` bytes over the network; it changes what its host stores."""
        self._counters.fetched(model, moved, seconds)
        self._held_until = float("-inf")

    def fetch_failed(self, model: str) -> None:
        """Count a fetch that has failed."""
        self._counters.not_fetched(model)

    async def update(self) -> None:
        """Update the lost hosts, and quarantine cores that foreign processes hold.

        A host that is back counts as lost until it has reported the owners of its cores: replicas that it ran before
        may still be there.
        """
        state = self._state
        losses = await self._cluster.lost_hosts()
        lost = frozenset(losses)
        kept, uses = state.kept, state.records.state.uses
        for name in sorted((lost - state.lost) & kept - state.uses.waiting().keys()):
            if name in uses:
                state.records.note(HostUse(host=name, state="requested"))
            message = f"{losses[name].cause}; its replicas are moved"
            state.records.event("info" if losses[name].expected else "error", "HostLost", message, host=name)
        for name in lost:
            self._former.pop(name, None)
        with_cores = {host.name for host in state.hosts if host.cores}
        self._returned = with_cores & (self._returned | state.lost) - lost
        state.lost = (lost | self._returned) & kept
        expire_quarantines(state)
        await self._query_core_owners(lost)
        back = state.lost - lost - self._returned
        state.lost -= back
        for name in sorted(back | state.uses.waiting().keys() - state.lost):
            self._report_back(name)

    def _report_back(self, host: str) -> None:
        records, use = self._state.records, self._state.uses.waiting().get(host)
        if use is None:
            records.event("info", "HostBack", "its Ray node is back", host=host)
            return
        start_s = self._state.wall() - use.at
        records.note(HostUse(host=host, state="joined", start_s=start_s))
        records.event("info", "HostJoined", f"its machine has joined after {start_s:.0f} s", host=host)

    async def _query_core_owners(self, lost: Set[str]) -> None:
        """Query the living hosts. A host that does not reply in time must not delay the others: its reply is applied
        when it comes. Only the first round waits for all, since nothing is known before it."""
        queries = []
        for index, host in enumerate(self._state.hosts):
            if host.cores and host.name not in lost and host.name not in self._queries:
                claims = str(self._home.claims(index)) if host.emulated else None
                query = asyncio.get_running_loop().create_task(self._update_core_owners(host, claims))
                query.add_done_callback(partial(self._answered, host.name))
                self._queries[host.name] = query
                queries.append(query)
        if queries:
            await asyncio.wait(queries, timeout=REPLY_S if self._begun else None)
        self._begun = True

    def _answered(self, host: str, query: asyncio.Task[None]) -> None:
        self._queries.pop(host, None)

    async def update_notices(self) -> None:
        """Update which hosts will end, by the notices that they or Ray have."""
        state, now = self._state, self._state.clock()
        if now < self._noticed_until:
            return
        self._noticed_until = now + NOTICES_S
        with task_boundary(log, "the hosts do not report notices", level=logging.WARNING):
            self.reports = await asyncio.wait_for(self._cluster.host_reports(), REPLY_S)
            notices = {host: report.notice for host, report in self.reports.items()}
            for departure in noticed_departures(state.records.state.departures, notices):
                state.records.note(departure)
                self._report_departure(departure)

    def _report_departure(self, departure: Departure) -> None:
        records, host = self._state.records, departure.host
        if not departure.on:
            records.event("info", "HostStays", f"the {departure.cause} is over", host=host)
            return
        when = "" if departure.until is None else f" in {departure.until - self._state.wall():.0f} s"
        message = f"{departure.cause}: it ends{when}, and its replicas move to other hosts"
        records.event("warning", "HostLeaving", message, host=host)

    async def _update_core_owners(self, host: Host, claims: str | None) -> None:
        # a replica may end and be forgotten during the query, or may have ended since the tools ran
        before = self._pids(host.name)
        held: dict[int, CoreOwner] | None = None
        # its last report stays
        level = logging.DEBUG if host.name in self._unresponsive else logging.WARNING
        message, on_error = "%s does not report the owners of its cores", partial(self._note_silence, host.name)
        with task_boundary(log, message, host.name, level=level, on_error=on_error):
            held = await self._cluster.held_cores(claims, host.name)
        if held is None and host.name not in self._reported:
            self._withhold(host)
        elif held is not None:
            if host.name not in self._reported:
                self._state.foreign_cores[host.name] = {}
                self._reported.add(host.name)
            self._unresponsive.discard(host.name)
            self._returned.discard(host.name)
            known = before | self._pids(host.name)
            self._quarantine(host, {core: owner for core, owner in held.items() if owner.pid not in known})

    def _pids(self, host: str) -> set[int]:
        """Returns the pids of the replicas on a host, also of those that died a short time ago."""
        oldest = self._state.clock() - STALE_S
        former = self._former[host] = {pid: at for pid, at in self._former.get(host, {}).items() if at > oldest}
        living = (view.pid for view in self._state.views.of_host(host) if not view.gone and view.pid is not None)
        return {*living, *former}

    def _note_silence(self, host: str, error: Exception) -> None:
        if host not in self._unresponsive:
            self._unresponsive.add(host)
            message = f"it does not report the owners of its cores: {error}"
            self._state.records.event("error", "HostSilent", message, host=host)

    def _withhold(self, host: Host) -> None:
        """Quarantine the cores of a host that has not reported their owners since the controller started, except those
        of the fleet's replicas: others may be held by replicas that an earlier controller has lost."""
        own = {core for view in self._state.views.of_host(host.name) if not view.gone for core in view.cores or ()}
        unknown = dict.fromkeys(set(range(host.cores)) - own, CoreOwner(None, None))
        self._state.foreign_cores[host.name] = unknown

    def _quarantine(self, host: Host, held: dict[int, CoreOwner]) -> None:
        state = self._state
        mine = [view for view in state.views.of_host(host.name) if view.requested and not view.gone]
        # a replica may hold its cores before it reports its pid
        starting = {core for view in mine if view.pid is None for core in view.cores or ()}
        foreign = {core: owner for core, owner in held.items() if core not in starting}
        previous = state.foreign_cores.setdefault(host.name, {})
        for core in sorted(foreign.keys() | previous.keys()):
            before, after = previous.get(core), foreign.get(core)
            if (before is None) == (after is None):
                continue
            owner = after or CoreOwner(None, None)
            if core not in state.failed_cores.get(host.name, {}):  # its record stays
                state.records.note(
                    Quarantine(host=host.name, core=core, on=after is not None, pid=owner.pid, command=owner.command)
                )
            if after is not None:
                self._counters.quarantined(host.name, "held")
                message = f"core {core} is held by pid {owner.pid or 'unknown'} ({owner.command or 'unknown command'})"
                state.records.event("warning", "CoreQuarantined", message, host=host.name)
            else:
                state.records.event("info", "CoreFree", f"core {core} is free again", host=host.name)
        state.foreign_cores[host.name] = foreign

    async def update_held_sources(self) -> None:
        """Update which hosts store remote sources: placement prefers them."""
        state, now = self._state, self._state.clock()
        sources = frozenset(source for model in state.current.spec.models for source in remote_sources(state, model))
        if not sources or now < self._held_until:
            return
        self._held_until = now + HELD_S
        with task_boundary(log, "the hosts do not report which sources they store", level=logging.WARNING):
            state.held = await asyncio.wait_for(self._cluster.held_sources(sources), REPLY_S)
