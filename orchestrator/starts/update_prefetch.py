"""Prepares updates before old replicas stop: fetches, checks and compiles what new replicas load."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec.structs

from orchestrator.fleet.effects import ClusterClient, Fetched
from orchestrator.fleet.progress_text import fetched_text
from orchestrator.fleet.snapshot import LOOKING_S
from orchestrator.rollout.preparation import Preparation, prepare
from orchestrator.rollout.rollout_step import ReplicaTarget
from orchestrator.starts.engine_resolution import resolve_engine
from orchestrator.state.fleet_state import FleetState
from placements.spec.schema import Deadlines
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, Reaction

log = logging.getLogger(__name__)

_LATE = {"fetching": "fetch-deadline", "compiling": "compile-deadline"}  # by phase; else it is the start's

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class UpdatePrefetch:
    """The preparations of one controller, on its event loop. The state holds their progress."""

    def __init__(
        self,
        state: FleetState,
        cluster: ClusterClient,
        *,
        config_of: Callable[[ReplicaTarget], ReplicaConfig],
        log_of: Callable[[str], Path],
        spawn: Spawn,
        fetched: Callable[[str, Fetched | None], None],
        wake: Callable[[], None],
    ) -> None:
        """``config_of``: the configuration of a placed target's replica; ``log_of``: the compiler log of a model;
        ``fetched``: receives the result of a model's fetch, or None if it failed; ``wake``: requests a round."""
        self._state = state
        self._cluster = cluster
        self._config_of = config_of
        self._log_of = log_of
        self._spawn = spawn
        self._fetched = fetched
        self._wake = wake
        self._tasks: dict[tuple[str, str, str], asyncio.Task[None]] = {}  # by `Preparation.key`
        self._refreshes: dict[tuple[str, str, str], int] = {}  # `FleetState.source_refreshes` at its start

    @property
    def hosts(self) -> frozenset[str]:
        """The hosts with a preparation."""
        return frozenset(host for _, _, host in self._tasks)

    def round(self) -> None:
        """Start the preparations of the next targets, and cancel those that are not needed any more."""
        state, now = self._state, self._state.clock()
        targets = {(preparation := state.preparation(target)).key: (preparation, target) for target in state.upcoming}
        for key in self._tasks.keys() - {
            key for key in targets if self._refreshes.get(key) == state.source_refreshes[key[0]]
        }:
            self._tasks.pop(key).cancel()
        for key, (preparation, target) in targets.items():
            if key not in self._tasks and now >= preparation.retry_at and target.placement is not None:
                self._refreshes[key] = state.source_refreshes[key[0]]
                self._tasks[key] = self._spawn(self._prepare(preparation, self._config_of(target)))
        state.preparing = {key: state.preparing.get(key, "waiting") for key in self._tasks}

    def stop(self) -> None:
        """Cancel all preparations."""
        for task in self._tasks.values():
            task.cancel()

    async def _prepare(self, before: Preparation, config: ReplicaConfig) -> None:
        state, refreshes = self._state, self._state.source_refreshes[before.model]
        ready = await self._ready_config(before, config)
        if refreshes != state.source_refreshes[before.model]:
            return  # the source has changed since, and another task fetches it
        if isinstance(ready, Failure):
            after = before.failed(ready, state.clock(), stopped=ready.reaction is Reaction.STOP)
            message = f"{ready}; the old replicas keep serving"
            state.records.event("error", "PreparationFailed", message, model=before.model, host=before.host)
        else:
            after = dataclasses.replace(before, done=True, failures=0, reason=None)
            state.pin(ready)
            state.compiled_on.add(before.key)
        state.preparations[before.key] = after
        self._tasks.pop(before.key, None)
        self._wake()

    async def _ready_config(self, before: Preparation, config: ReplicaConfig) -> ReplicaConfig | Failure:
        state = self._state
        model = state.current.spec.model(before.model)
        deadlines = Deadlines() if model is None else model.deadlines
        try:
            ready = await resolve_engine(config, state.revision_of_version(config.model, config.version), self._cluster)
            if isinstance(ready, Failure):
                return ready
            # not the log of the serving replica with that number
            ready = msgspec.structs.replace(state.pinned(ready), log=str(self._log_of(before.model)))
            observer = _UpdateObserver(state, before, self._fetched, self._wake)
            work = prepare(ready, self._cluster, observer, state.clock, checks=True)
            return await self._with_deadlines(deadlines, observer, work)
        except Exception as error:  # the old replicas keep serving, and the preparation is retried
            log.exception("%s cannot be prepared on %s", before.model, before.host)
            return Failure("start-failed", f"{type(error).__name__}: {error}")

    @staticmethod
    async def _wait_for_change(task: asyncio.Future[Any], changed: asyncio.Event, left_s: float) -> None:
        other = asyncio.ensure_future(changed.wait())
        try:
            await asyncio.wait({task, other}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            other.cancel()

    async def _with_deadlines(
        self, deadlines: Deadlines, observer: _UpdateObserver, work: Coroutine[Any, Any, ReplicaConfig | Failure]
    ) -> ReplicaConfig | Failure:
        """Returns the result of ``work``, or a Failure if a phase exceeds its deadline."""
        limits = {"fetching": deadlines.fetch_s, "compiling": deadlines.compile_s}
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                phase = observer.phase
                limit_s = limits.get(phase, LOOKING_S)
                left_s = limit_s - (self._state.clock() - observer.since)
                if left_s <= 0.0:
                    message = f"it has been {phase} for {limit_s:.0f} s on {observer.host}"
                    return Failure(_LATE.get(phase, "start-deadline"), message)
                observer.changed.clear()
                await self._wait_for_change(task, observer.changed, left_s)
            return task.result()
        finally:
            task.cancel()


class _UpdateObserver:
    """Reports preparation progress as events (`preparation.PreparationObserver`)."""

    def __init__(
        self,
        state: FleetState,
        of: Preparation,
        fetched: Callable[[str, Fetched | None], None],
        wake: Callable[[], None],
    ) -> None:
        self._state = state
        self._of = of
        self._fetched = fetched
        self._wake = wake
        self.host = of.host
        self.phase = "looking"
        self.since = state.clock()
        self.changed = asyncio.Event()

    def _enter(self, phase: str) -> None:
        self.phase, self.since = phase, self._state.clock()
        self._state.preparing = {**self._state.preparing, self._of.key: phase}
        self.changed.set()
        self._wake()

    def fetching(self, sources: list[str]) -> None:
        self._enter("fetching")
        self._record("Fetching", f"{', '.join(sources)}, while the old replicas serve")

    def fetched(self, found: Fetched) -> None:
        self._fetched(self._of.model, found)
        message = fetched_text(found.bytes, found.moved, found.seconds, found.warning)
        self._state.records.event(
            "warning" if found.warning else "info", "Fetched", message, model=self._of.model, host=self._of.host
        )

    def arrives(self, config: ReplicaConfig, left_s: float) -> None:
        """Not used: an old replica is stopped only after the fetch has ended."""

    def not_fetched(self, failure: Failure) -> None:
        self._fetched(self._of.model, None)
        self._state.records.event("error", "FetchFailed", str(failure), model=self._of.model, host=self._of.host)

    def checking(self) -> None:
        self._enter("checking")

    def looking(self) -> None:
        self._enter("looking")

    def unforeseen(self, failure: Failure) -> None:
        message = f"{failure}; the start compiles missing graphs on its cores"
        self._state.records.event("warning", "ForeseeFailed", message, model=self._of.model, host=self._of.host)

    def compiling(self, missing: list[str]) -> None:
        self._enter("compiling")
        self._record("WillCompile", "; ".join(missing))

    def compiled(self, seconds: float) -> None:
        self._record("Compiled", f"ahead, in {seconds:.0f} s")

    def _record(self, reason: str, message: str) -> None:
        self._state.records.event("info", reason, message, model=self._of.model, host=self._of.host)
