"""Prepares replicas for their start: resolves engines, fetches artifacts and compiles graphs ahead."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any

from orchestrator.fleet.effects import ClusterClient, Fetched
from orchestrator.fleet.progress_text import fetched_text
from orchestrator.fleet.replica_states import STARTING, Signal, State
from orchestrator.fleet.snapshot import ReplicaView
from orchestrator.rollout.preparation import lead_of, prepare
from orchestrator.starts.engine_resolution import resolve_engine
from orchestrator.state.fleet_state import FleetState
from orchestrator.state.record_writer import Level
from workers.artifacts.fetch.artifact_fetcher import wanted_by
from workers.messages.replica_config import Origin, ReplicaConfig
from workers.messages.status import Failure

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartEffects:
    """The operations that the controller provides."""

    view: Callable[[str, int], ReplicaView | None]  # the replica, if it still has that epoch
    store_view: Callable[[ReplicaView], ReplicaView]
    signal: Callable[[ReplicaView, Signal], ReplicaView]
    fail: Callable[[ReplicaView, Failure], None]
    apply_last_status: Callable[[str, int], None]  # a last status that was held back counts now
    fetched: Callable[[str, Fetched | None], None]  # the result of a model's fetch; None: it failed
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    wake: Callable[[], None]  # requests a reconcile round


@dataclass(frozen=True)
class _Arriving:
    """A replica whose process was started before its fetch has ended."""

    epoch: int
    aside_s: float  # seconds before ``since`` that do not count as load time
    since: float  # from then on it only waits for the fetch, on the controller's clock
    until: float  # the deadline of the fetch

    def aside(self, now: float) -> float:
        return self.aside_s + max(0.0, now - self.since)


class StartPipeline:
    """The preparation of all starts of one controller, on its event loop."""

    def __init__(self, state: FleetState, cluster: ClusterClient, effects: StartEffects) -> None:
        self._state = state
        self._cluster = cluster
        self._effects = effects
        self._ahead: dict[str, asyncio.Task[ReplicaConfig | Failure]] = {}  # of replicas in preparation
        self._arriving: dict[str, _Arriving] = {}  # those of them that already have a process

    @property
    def hosts(self) -> frozenset[str]:
        """The hosts that fetch for replicas with a process."""
        return frozenset(view.host for id in self._arriving if (view := self._state.views.get(id)))

    @property
    def arriving(self) -> Collection[str]:
        """The replicas that have a process while their fetch continues."""
        return self._arriving.keys()

    def is_fetching(self, id: str) -> bool:
        """Returns whether the replica's fetch continues after ``prepare_start``."""
        return id in self._ahead

    def cancel(self, id: str) -> None:
        """Cancel the replica's preparation."""
        if (work := self._ahead.get(id)) is not None:
            self._cancel(id, work)

    async def prepare_start(self, id: str, config: ReplicaConfig) -> ReplicaConfig | Failure | None:
        """Returns the configuration for the process; None if the replica was stopped meanwhile.

        The fetch may continue in ``_ahead``."""
        ready = await resolve_engine(
            config, self._state.revision_of_version(config.model, config.version), self._cluster
        )
        view = self._effects.view(id, config.epoch)
        if isinstance(ready, Failure) or view is None or view.state is not State.PENDING:
            return ready
        ready = self._state.pinned(ready)
        self._state.configs[id] = ready
        compiled = (config.model, config.version, config.host) in self._state.compiled_on
        observer = _StartObserver(self._state, self._effects, id, config.epoch)
        lead_s = self.lead_s(ready)
        work = asyncio.ensure_future(
            prepare(ready, self._cluster, observer, self._state.clock, compiled=compiled, lead_s=lead_s)
        )
        self._ahead[id] = work
        either: set[asyncio.Future[Any]] = {work, observer.loadable}
        still_fetching = False
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            still_fetching = not work.done() and self._ahead.get(id) is work
        finally:
            if not still_fetching:
                self._cancel(id, work)
        if still_fetching:
            return observer.loadable.result()
        return None if work.cancelled() or not work.done() else work.result()

    def lead_s(self, config: ReplicaConfig) -> float | None:
        """Returns how long before the end of a fetch the process may start, in seconds; see `lead_of`."""
        load_times = [view.load_s for view in self._state.replicas_of(config.model) if view.load_s is not None]
        return lead_of(config, min(load_times, default=None))

    def _cancel(self, id: str, work: asyncio.Task[ReplicaConfig | Failure]) -> None:
        work.cancel()
        if self._ahead.get(id) is work:
            del self._ahead[id]
            self._arriving.pop(id, None)

    def resume_fetch(self, id: str, config: ReplicaConfig) -> None:
        """Request the fetch of an adopted replica again: the controller that requested it is gone."""
        now = self._state.clock()
        until = now + self._state.views[id].deadlines.fetch_s
        self._ahead[id] = asyncio.ensure_future(self._fetch(id, config))
        self._await_fetch(id, config, _Arriving(config.epoch, 0.0, now, until))

    async def _fetch(self, id: str, config: ReplicaConfig) -> ReplicaConfig | Failure:
        fetched, observer = (
            await self._cluster.fetch(config),
            _StartObserver(self._state, self._effects, id, config.epoch),
        )
        if isinstance(fetched, Failure):
            observer.not_fetched(fetched)
            return fetched
        if fetched.moved:
            observer.fetched(fetched)
        return fetched.config

    def await_fetch(self, id: str, config: ReplicaConfig, view: ReplicaView, until: float) -> None:
        """Track a fetch that continues while the process starts; ``until`` is its deadline."""
        now = self._state.clock()
        since = now + (self.lead_s(config) or 0.0)
        self._await_fetch(id, config, _Arriving(view.epoch, now - view.begun, since, until))

    def _await_fetch(self, id: str, config: ReplicaConfig, arriving: _Arriving) -> None:
        self._arriving[id] = arriving
        self._effects.spawn(self._finish_fetch(id, config, arriving, self._ahead[id]))

    async def _finish_fetch(
        self, id: str, config: ReplicaConfig, arriving: _Arriving, work: asyncio.Task[ReplicaConfig | Failure]
    ) -> None:
        """Wait for the fetch of a replica that has a process. Until then the replica is not ready, and this time does
        not count as load time.

        1. The fetch ends with the expected files: all replicas of the version load these from now on.
        2. The fetch fails or is late: the start fails.
        """
        result: ReplicaConfig | Failure
        try:
            while not work.done() and (left_s := arriving.until - self._state.clock()) > 0:  # again after a pause
                await asyncio.wait({work}, timeout=left_s)
            if work.done():
                result = await work
            else:
                fetch_s = self._state.views[id].deadlines.fetch_s
                result = Failure(
                    "fetch-deadline", f"the fetch did not end within {fetch_s:.0f} s, while its process waits"
                )
        except Exception as error:
            log.exception("the fetch of %s failed", id)
            result = Failure("start-failed", f"{type(error).__name__}: {error}")
        finally:
            self._cancel(id, work)
        view = self._effects.view(id, arriving.epoch)
        if view is None or view.state not in STARTING:
            return
        if not isinstance(result, Failure) and _contents(result) != _contents(config):
            result = Failure(
                "fetch-ended", "the fetched files are not those that the process loads: the source has changed"
            )
        if isinstance(result, Failure):  # 2
            self._effects.fail(view, result)
            return
        self._effects.store_view(
            dataclasses.replace(view, aside_s=arriving.aside(self._state.clock()), fetch=None)
        )  # 1
        self._state.pin(result)
        self._effects.apply_last_status(id, arriving.epoch)
        self._effects.wake()

    def update_progress(self) -> None:
        """Update the fetch progress and the waiting time of replicas with a process."""
        for id, arriving in self._arriving.items():
            view = self._effects.view(id, arriving.epoch)
            if view is not None and view.state in STARTING:
                sources = {fetch.source for fetch in wanted_by(self._state.configs[id]) if fetch is not None}
                fetches = [fetch for fetch in self._state.fetches.get(view.host, ()) if fetch.source in sources]
                progress = fetches[0] if fetches else view.fetch
                self._effects.store_view(
                    dataclasses.replace(view, aside_s=arriving.aside(self._state.clock()), fetch=progress)
                )


class _StartObserver:
    """Reports start progress as events (`preparation.PreparationObserver`)."""

    def __init__(self, state: FleetState, effects: StartEffects, id: str, epoch: int) -> None:
        self._state = state
        self._effects = effects
        self._id = id
        self._epoch = epoch
        self.loadable: asyncio.Future[ReplicaConfig] = asyncio.get_running_loop().create_future()
        """Done as soon as the process may be started before the end of the fetch."""

    def fetching(self, sources: list[str]) -> None:
        self._record("info", "Fetching", ", ".join(sources), Signal.FETCH)

    def fetched(self, found: Fetched) -> None:
        self._effects.fetched(self._id.rpartition("/")[0], found)
        message = fetched_text(found.bytes, found.moved, found.seconds, found.warning)
        self._record("warning" if found.warning else "info", "Fetched", message)

    def arrives(self, config: ReplicaConfig, left_s: float) -> None:
        self._record("info", "StartsEarly", f"about {left_s:.0f} s before the end of the fetch, to load in parallel")
        self.loadable.set_result(config)

    def not_fetched(self, failure: Failure) -> None:
        self._effects.fetched(self._id.rpartition("/")[0], None)
        self._record("error", "FetchFailed", str(failure))

    def checking(self) -> None:
        """Not used: the start itself runs these checks."""

    def looking(self) -> None:
        view = self._effects.view(self._id, self._epoch)
        if view is not None and view.state is State.FETCHING:
            self._effects.signal(view, Signal.FETCHED)

    def unforeseen(self, failure: Failure) -> None:
        self._record("warning", "ForeseeFailed", f"{failure}; missing graphs are compiled on its cores")

    def compiling(self, missing: list[str]) -> None:
        self._record("info", "WillCompile", "; ".join(missing), Signal.COMPILE)

    def compiled(self, seconds: float) -> None:
        self._record("info", "Compiled", f"ahead, in {seconds:.0f} s")

    def _record(self, level: Level, reason: str, message: str, signal: Signal | None = None) -> None:
        view = self._effects.view(self._id, self._epoch)
        if view is None or view.state not in STARTING:
            return
        if signal is not None:
            view = self._effects.signal(view, signal)
        self._state.records.event(level, reason, message, view=view)


def _contents(config: ReplicaConfig) -> tuple[Origin | None, Origin | None]:
    return config.origin, config.draft_origin
