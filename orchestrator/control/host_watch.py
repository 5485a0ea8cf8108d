"""What is seen of the hosts in each round: which are gone, who holds their cores, what they hold and fetch."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Collection

from orchestrator.control.controller_metrics import Tally
from orchestrator.fleet.effects import ClusterClient, CoreOwner
from orchestrator.fleet.lifecycle import State
from orchestrator.process.home import Home
from orchestrator.records.journal import Quarantine
from orchestrator.state.fleet_state import FleetState
from orchestrator.state.quarantine import expire
from placements.facts.topology import Host
from workers.artifacts.fetch.artifact_fetcher import wanted_by
from workers.artifacts.fetch.progress import FetchStatus

log = logging.getLogger(__name__)

STALE_S = 30.0  # the Neuron tools' account of who holds a core is at most so old
HELD_S = 60.0  # between two looks at what the hosts hold of sources elsewhere, when nothing was fetched
TELL_S = 1.0  # for a host to tell what it holds, or how far its fetches are, while a round waits


class HostWatch:
    """Of one controller, on its event loop: what it sees goes into the state."""

    def __init__(self, state: FleetState, cluster: ClusterClient, home: Home, tally: Tally) -> None:
        self._state = state
        self._cluster = cluster
        self._home = home
        self._tally = tally
        self._deaf: set[str] = set()  # hosts that do not answer
        self._former: dict[int, float] = {}  # pids of replicas that were seen dead, and when
        self._held_until = float("-inf")  # what was told of what hosts hold counts

    def seen_dead(self, pid: int) -> None:
        """A replica's process is gone; the tools may still tell of it for a while."""
        self._former[pid] = self._state.clock()

    def fetched(self) -> None:
        """Some host holds more now: the next round asks again."""
        self._held_until = float("-inf")

    async def look(self) -> None:
        """Which hosts are gone, and which cores a process holds that is none of ours: those are quarantined."""
        state = self._state
        lost = await self._cluster.lost_hosts()
        for name in sorted(lost - state.lost):
            state.tell("error", "HostLost", "its Ray node is gone: its replicas go elsewhere", host=name)
        for name in sorted(state.lost - lost):
            state.tell("info", "HostBack", "its Ray node is there again", host=name)
        state.lost = lost
        expire(state)
        await asyncio.gather(
            *(
                self._look_at_cores(host, str(self._home.claims(index)) if host.emulated else None)
                for index, host in enumerate(state.hosts)
                if host.cores and host.name not in lost
            )
        )

    async def _look_at_cores(self, host: Host, claims: str | None) -> None:
        # one of them may end, and be forgotten, while we ask, or have ended since the tools were read
        now = self._state.clock()
        self._former = {pid: at for pid, at in self._former.items() if now - at < STALE_S}
        before = {view.pid for view in self._state.views.values() if view.pid is not None} | self._former.keys()
        try:
            held = await self._cluster.held_cores(claims, host.name)
        except Exception as error:  # the others must not wait for a deaf host; what was known of it stands
            if host.name not in self._deaf:
                self._deaf.add(host.name)
                log.warning("%s does not tell who holds its cores", host.name, exc_info=True)
                what = f"it does not tell who holds its cores: {error}"
                self._state.tell("error", "HostSilent", what, host=host.name)
            return
        self._deaf.discard(host.name)
        self._quarantine(host, {core: owner for core, owner in held.items() if owner.pid not in before})

    def _quarantine(self, host: Host, held: dict[int, CoreOwner]) -> None:
        state = self._state
        mine = [view for view in state.views.values() if view.host == host.name]
        ours = {view.pid for view in mine}
        # a replica may hold its cores before it could tell its pid
        starting = {
            core for view in mine if view.asked and view.pid is None and not view.gone for core in view.cores or ()
        }
        foreign = {core: owner for core, owner in held.items() if owner.pid not in ours and core not in starting}
        known = state.quarantined.setdefault(host.name, {})
        for core in sorted(foreign.keys() | known.keys()):
            before, after = known.get(core), foreign.get(core)
            if (before is None) == (after is None):
                continue
            owner = after or CoreOwner(None, None)
            if core not in state.suspects.get(host.name, {}):  # what is noted of that one stands
                state.note(
                    Quarantine(host=host.name, core=core, on=after is not None, pid=owner.pid, command=owner.command)
                )
            if after is not None:
                self._tally.quarantined(host.name, "held")
                what = f"core {core} is held by pid {owner.pid or 'unknown'} ({owner.command or 'unknown command'})"
                state.tell("warning", "CoreQuarantined", what, host=host.name)
            else:
                state.tell("info", "CoreFree", f"core {core} is free again", host=host.name)
        state.quarantined[host.name] = foreign

    async def look_at_held(self) -> None:
        """Which hosts hold what would have to be fetched: a new replica had better go there."""
        state, now = self._state, self._state.clock()
        sources = frozenset(source for model in state.current.spec.models for source in state.sources(model))
        if not sources or now < self._held_until:
            return
        self._held_until = now + HELD_S
        try:
            state.held = await asyncio.wait_for(self._cluster.held_sources(sources), TELL_S)
        except Exception:  # it is only a preference
            log.warning("the hosts do not tell what they hold", exc_info=True)

    async def look_at_fetches(self, also: Collection[str]) -> None:
        """How far the fetches of replicas are, and those of the hosts ``also``, for those who look."""
        state = self._state
        fetching = [view for view in state.views.values() if view.state is State.FETCHING]
        hosts = sorted({view.host for view in fetching} | set(also))
        told = await asyncio.gather(*(self._fetches_on(host) for host in hosts))
        state.fetches = dict(zip(hosts, told, strict=True))
        for view in fetching:
            sources = {origin.source for origin in wanted_by(state.configs[view.id]) if origin is not None}
            here = [one for one in state.fetches[view.host] if one.source in sources]
            current = state.views.get(view.id)
            if here and current is not None and (current.epoch, current.state) == (view.epoch, State.FETCHING):
                state.views[view.id] = dataclasses.replace(current, fetch=here[0])

    async def _fetches_on(self, host: str) -> tuple[FetchStatus, ...]:
        try:
            return tuple(await asyncio.wait_for(self._cluster.progress(host), TELL_S))
        except Exception:  # the fetch goes on all the same
            log.debug("%s does not tell how far its fetches are", host, exc_info=True)
            return ()
