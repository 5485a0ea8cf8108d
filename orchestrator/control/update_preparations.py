"""Prepares updates before old replicas stop: fetches, checks and compiles what new replicas load."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable

from orchestrator.control.decisions.preparation import Key, Preparation, preparation_of
from orchestrator.control.decisions.replica_view import LOOKING_S
from orchestrator.control.effects import ClusterClient
from orchestrator.control.fleet_state import FleetState
from orchestrator.control.host_watch import HostWatch
from orchestrator.control.record_writer import Level
from orchestrator.control.resolve.resolved_revision import replica_config
from orchestrator.control.start_steps import StartFailed, StartSteps
from orchestrator.process.home import Home
from workers.artifacts.fetch.progress import FetchStatus
from workers.host.task_boundary import task_boundary
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, Reaction

log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class _Running:
    """A preparation in progress."""

    before: Preparation
    since: float  # when its phase began
    refreshes: int  # `FleetState.source_refreshes` at its start
    task: asyncio.Task[None] | None = None


class UpdatePreparations:
    """The preparations of one controller, on its event loop. The state holds their progress."""

    def __init__(
        self, state: FleetState, cluster: ClusterClient, home: Home, hosts: HostWatch, wake: Callable[[], None]
    ) -> None:
        """``wake`` requests a round."""
        self._state = state
        self._cluster = cluster
        self._home = home
        self._hosts = hosts
        self._wake = wake
        self._running: dict[Key, _Running] = {}

    def round(self) -> None:
        """Start the preparations of the next targets, and end those that are late or not needed any more."""
        state, now = self._state, self._state.clock()
        targets = {
            (preparation := preparation_of(target, state.preparations)).key: (preparation, target)
            for target in state.upcoming
        }
        for key, running in list(self._running.items()):
            if key not in targets or running.refreshes != state.source_refreshes[key[0]]:
                self._end(running)
            elif (late := self._overdue(key, now - running.since)) is not None:
                self._finish(running, late)
        for key, (preparation, target) in targets.items():
            if key not in self._running and now >= preparation.retry_at and target.placement is not None:
                revision = state.revision_of_version(target.model, target.version)
                config = replica_config(revision, target.placement, self._home, state.settings)
                self._start(_Running(preparation, now, state.source_refreshes[target.model]), config)

    def stop(self) -> None:
        """Cancel all preparations."""
        for running in list(self._running.values()):
            self._end(running)

    def _start(self, running: _Running, config: ReplicaConfig) -> None:
        # not the log of the serving replica with that number
        config = config.with_run(log=str(self._home.logs / f"compile-{config.model.name}.log"))
        self._running[running.before.key] = running
        self._state.preparing = {**self._state.preparing, running.before.key: "waiting"}
        running.task = asyncio.get_running_loop().create_task(self._prepare(running, config))

    def _end(self, running: _Running) -> None:
        key, state = running.before.key, self._state
        del self._running[key]
        state.preparing = {other: phase for other, phase in state.preparing.items() if other != key}
        state.fetches.pop(key, None)
        if running.task is not None:
            running.task.cancel()

    def _overdue(self, key: Key, spent_s: float) -> Failure | None:
        """Returns the failure of a preparation that has spent more time in its phase than its deadline allows."""
        deadlines, phase = self._state.deadlines(key[0]), self._state.preparing[key]
        limits = {"fetching": ("fetch", deadlines.fetch_s), "compiling": ("compile", deadlines.compile_s)}
        kind, limit_s = limits.get(phase, ("start", LOOKING_S))
        if spent_s < limit_s:
            return None
        return Failure(f"{kind}-deadline", f"it has been {phase} for {limit_s:.0f} s on {key[2]}")

    async def _prepare(self, running: _Running, config: ReplicaConfig) -> None:
        def fail(error: Exception) -> None:
            self._finish(running, Failure("start-failed", f"{type(error).__name__}: {error}"))

        host = running.before.host  # its old replicas keep serving, and the preparation is retried
        steps = StartSteps(self._state, self._cluster, self._hosts, _Progress(self._state, running, self._wake), True)
        with task_boundary(log, "%s cannot be prepared on %s", running.before.model, host, on_error=fail):
            try:
                config = await steps.fetch(await steps.resolve(config))
                await steps.check(config)
                await steps.compile(config)
            except StartFailed as failed:
                self._finish(running, failed.failure)
            else:
                self._finish(running, config)

    def _finish(self, running: _Running, outcome: ReplicaConfig | Failure) -> None:
        state, before = self._state, running.before
        if self._running.get(before.key) is not running:
            return
        if running.refreshes != state.source_refreshes[before.model]:
            return  # the source has changed since: the next round fetches it again
        if isinstance(outcome, Failure):
            after = before.failed(outcome, state.clock(), stopped=outcome.reaction is Reaction.STOP)
            message = f"{outcome}; the old replicas keep serving"
            state.records.event("error", "PreparationFailed", message, model=before.model, host=before.host)
        else:
            after = dataclasses.replace(before, done=True, failures=0, reason=None)
            state.pins.pin(outcome)
            state.compiled_on.add(before.key)
        state.preparations[before.key] = after
        self._end(running)
        self._wake()


@dataclasses.dataclass(frozen=True)
class _Progress:
    """The progress of a preparation in the state, as long as it runs."""

    state: FleetState
    running: _Running
    wake: Callable[[], None]

    def enter(self, phase: str) -> None:
        key = self.running.before.key
        self.running.since = self.state.clock()
        self.state.preparing = {**self.state.preparing, key: phase}
        self.state.fetches.pop(key, None)
        self.wake()

    def note(self, level: Level, reason: str, message: str) -> None:
        self.state.records.event(level, reason, message, model=self.running.before.model, host=self.running.before.host)

    def arriving(self, status: FetchStatus, config: ReplicaConfig | None) -> None:
        self.state.fetches[self.running.before.key] = status
