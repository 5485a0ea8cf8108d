"""Makes a replica ready to be started: what it loads is fetched, or arrives in time; what it compiles is compiled."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any

from orchestrator.fleet.effects import ClusterClient, Fetched
from orchestrator.fleet.lifecycle import STARTING, Signal, State
from orchestrator.fleet.progress_text import fetched_text
from orchestrator.fleet.snapshot import ReplicaView
from orchestrator.rollout.preparation import lead_of, prepare
from orchestrator.starts.engine_resolution import resolve_engine
from orchestrator.state.fleet_state import FleetState, Level
from workers.artifacts.fetch.artifact_fetcher import wanted_by
from workers.messages.replica_config import Origin, ReplicaConfig
from workers.messages.status import Failure

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartEffects:
    """What the controller does for it."""

    view: Callable[[str, int], ReplicaView | None]  # of that id, where it has that epoch still
    store_view: Callable[[ReplicaView], ReplicaView]
    signal: Callable[[ReplicaView, Signal], ReplicaView]
    fail: Callable[[ReplicaView, Failure], None]
    apply_last_status: Callable[[str, int], None]  # what it has told last counts from now on
    fetched: Callable[[str, Fetched | None], None]  # by model, what a fetch brought; None: it failed
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    wake: Callable[[], None]  # asks for a round


@dataclass(frozen=True)
class _Arriving:
    """A replica whose process was asked for while the rest of what it loads arrives."""

    epoch: int
    aside_s: float  # of its start, before ``since``
    since: float  # from here on it does nothing but wait for the rest, on the controller's clock
    until: float  # the fetch's deadline

    def aside(self, now: float) -> float:
        return self.aside_s + max(0.0, now - self.since)


class StartPipeline:
    """Of all replicas of one controller, on its event loop."""

    def __init__(self, state: FleetState, cluster: ClusterClient, effects: StartEffects) -> None:
        self._state = state
        self._cluster = cluster
        self._effects = effects
        self._ahead: dict[str, asyncio.Task[ReplicaConfig | Failure]] = {}  # of replicas that are made ready to start
        self._arriving: dict[str, _Arriving] = {}  # those of them that have a process already

    @property
    def hosts(self) -> frozenset[str]:
        """Where what a replica loads arrives while it has its process already."""
        return frozenset(view.host for id in self._arriving if (view := self._state.views.get(id)))

    @property
    def arriving(self) -> Collection[str]:
        """The replicas that have a process, and not yet all that it loads."""
        return self._arriving.keys()

    def goes_on(self, id: str) -> bool:
        """Whether what it loads still arrives, though its process may be asked for."""
        return id in self._ahead

    def leave(self, id: str) -> None:
        """Nobody waits for it any more."""
        if (work := self._ahead.get(id)) is not None:
            self._leave(id, work)

    async def made_ready(self, id: str, config: ReplicaConfig) -> ReplicaConfig | Failure | None:
        """What its process is to be told; None when it was told to stop meanwhile. What it loads may still be arriving:
        then that goes on in ``_ahead``."""
        ready = await resolve_engine(config, self._state.generation_of(config.model, config.version), self._cluster)
        view = self._effects.view(id, config.epoch)
        if isinstance(ready, Failure) or view is None or view.state is not State.PENDING:
            return ready
        ready = self._state.pinned(ready)
        self._state.configs[id] = ready
        known = (config.model, config.version, config.host) in self._state.compiled_on
        watching = _Telling(self._state, self._effects, id, config.epoch)
        lead_s = self.lead_s(ready)
        work = asyncio.ensure_future(
            prepare(ready, self._cluster, watching, self._state.clock, compiled=known, lead_s=lead_s)
        )
        self._ahead[id] = work
        either: set[asyncio.Future[Any]] = {work, watching.loadable}
        goes_on = False
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            goes_on = not work.done() and self._ahead.get(id) is work
        finally:
            if not goes_on:
                self._leave(id, work)
        if goes_on:
            return watching.loadable.result()
        return None if work.cancelled() or not work.done() else work.result()

    def lead_s(self, config: ReplicaConfig) -> float | None:
        """See `lead_of`."""
        known = [view.load_s for view in self._state.replicas_of(config.model) if view.load_s is not None]
        return lead_of(config, min(known, default=None))

    def _leave(self, id: str, work: asyncio.Task[ReplicaConfig | Failure]) -> None:
        work.cancel()
        if self._ahead.get(id) is work:
            del self._ahead[id]
            self._arriving.pop(id, None)

    def go_on_fetching(self, id: str, config: ReplicaConfig) -> None:
        """An adopted replica may wait for what a former controller has asked for, and nobody asks for now."""
        now = self._state.clock()
        until = now + self._state.views[id].deadlines.fetch_s
        self._ahead[id] = asyncio.ensure_future(self._fetched_on(id, config))
        self._await_rest(id, config, _Arriving(config.epoch, 0.0, now, until))

    async def _fetched_on(self, id: str, config: ReplicaConfig) -> ReplicaConfig | Failure:
        found, watching = await self._cluster.fetch(config), _Telling(self._state, self._effects, id, config.epoch)
        if isinstance(found, Failure):
            watching.not_fetched(found)
            return found
        if found.moved:
            watching.fetched(found)
        return found.config

    def await_rest(self, id: str, config: ReplicaConfig, view: ReplicaView, until: float) -> None:
        """Its process is asked for while the rest of what it loads arrives, ``until`` the deadline of its fetch."""
        now = self._state.clock()
        since = now + (self.lead_s(config) or 0.0)
        self._await_rest(id, config, _Arriving(view.epoch, now - view.begun, since, until))

    def _await_rest(self, id: str, config: ReplicaConfig, rest: _Arriving) -> None:
        self._arriving[id] = rest
        self._effects.spawn(self._rest_of(id, config, rest, self._ahead[id]))

    async def _rest_of(
        self, id: str, config: ReplicaConfig, rest: _Arriving, work: asyncio.Task[ReplicaConfig | Failure]
    ) -> None:
        """Hear of the rest of what a replica loads that has its process already. Until then it is not ready, and its
        waiting is aside.

        1. All is there, and is what it was told: from now on all replicas of its version load that.
        2. The fetch has failed, or takes too long: so has its start.
        """
        found: ReplicaConfig | Failure
        try:
            while not work.done() and (left := rest.until - self._state.clock()) > 0:  # again after a pause
                await asyncio.wait({work}, timeout=left)
            if work.done():
                found = await work
            else:
                fetch_s = self._state.views[id].deadlines.fetch_s
                found = Failure(
                    "fetch-deadline", f"the fetch did not end within {fetch_s:.0f} s, while its process waits"
                )
        except Exception as error:
            log.exception("the rest of what %s loads is not heard of", id)
            found = Failure("start-failed", f"{type(error).__name__}: {error}")
        finally:
            self._leave(id, work)
        view = self._effects.view(id, rest.epoch)
        if view is None or view.state not in STARTING:
            return
        if not isinstance(found, Failure) and _contents(found) != _contents(config):
            found = Failure("fetch-ended", "what has arrived is not what it was told to load: its source has changed")
        if isinstance(found, Failure):  # 2
            self._effects.fail(view, found)
            return
        self._effects.store_view(dataclasses.replace(view, aside_s=rest.aside(self._state.clock()), fetch=None))  # 1
        self._state.pin(found)
        self._effects.apply_last_status(id, rest.epoch)
        self._effects.wake()

    def look(self) -> None:
        """Note of replicas that load meanwhile how far their fetches are, and that they wait for them."""
        for id, rest in self._arriving.items():
            view = self._effects.view(id, rest.epoch)
            if view is not None and view.state in STARTING:
                sources = {one.source for one in wanted_by(self._state.configs[id]) if one is not None}
                here = [one for one in self._state.fetches.get(view.host, ()) if one.source in sources]
                told = here[0] if here else view.fetch
                self._effects.store_view(dataclasses.replace(view, aside_s=rest.aside(self._state.clock()), fetch=told))


class _Telling:
    """Tells of what a replica waits for (`preparation.PreparationObserver`)."""

    def __init__(self, state: FleetState, effects: StartEffects, id: str, epoch: int) -> None:
        self._state = state
        self._effects = effects
        self._id = id
        self._epoch = epoch
        self.loadable: asyncio.Future[ReplicaConfig] = asyncio.get_running_loop().create_future()
        """Done once its process may be asked for, before all is there."""

    def fetching(self, sources: list[str]) -> None:
        self._tell("info", "Fetching", ", ".join(sources), Signal.FETCH)

    def fetched(self, found: Fetched) -> None:
        self._effects.fetched(self._id.rpartition("/")[0], found)
        what = fetched_text(found.bytes, found.moved, found.seconds, found.warning)
        self._tell("warning" if found.warning else "info", "Fetched", what)

    def arrives(self, config: ReplicaConfig, left_s: float) -> None:
        self._tell("info", "StartsEarly", f"about {left_s:.0f} s before all is here, which its process needs by then")
        self.loadable.set_result(config)

    def not_fetched(self, failure: Failure) -> None:
        self._effects.fetched(self._id.rpartition("/")[0], None)
        self._tell("error", "FetchFailed", str(failure))

    def checking(self) -> None:
        """The start itself finds that out: nobody asks for this."""

    def looking(self) -> None:
        view = self._effects.view(self._id, self._epoch)
        if view is not None and view.state is State.FETCHING:
            self._effects.signal(view, Signal.FETCHED)

    def unforeseen(self, failure: Failure) -> None:
        self._tell("warning", "ForeseeFailed", f"{failure}; it compiles on its cores what it must")

    def compiling(self, missing: list[str]) -> None:
        self._tell("info", "WillCompile", "; ".join(missing), Signal.COMPILE)

    def compiled(self, seconds: float) -> None:
        self._tell("info", "Compiled", f"ahead, in {seconds:.0f} s")

    def _tell(self, level: Level, reason: str, message: str, signal: Signal | None = None) -> None:
        view = self._effects.view(self._id, self._epoch)
        if view is None or view.state not in STARTING:
            return
        if signal is not None:
            view = self._effects.signal(view, signal)
        self._state.record_event(level, reason, message, view=view)


def _contents(config: ReplicaConfig) -> tuple[Origin | None, Origin | None]:
    return config.origin, config.draft_origin
