"""The lives of replicas: each start of one is a coroutine, from its decision to its confirmed death."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec.structs

from orchestrator.control.decisions.replica_view import EarlyStart, ReplicaView
from orchestrator.control.decisions.rollout_step import ReplicaTarget
from orchestrator.control.effects import ClusterClient, HostLost, LogText, ReplicaDied, Survivor
from orchestrator.control.fleet_state import FleetState
from orchestrator.control.host_watch import HostWatch
from orchestrator.control.record_writer import Level
from orchestrator.control.replica_table import ReplicaStart, ReplicaTable, Superseded, Turn
from orchestrator.control.resolve.resolved_revision import replica_config
from orchestrator.control.start_steps import RemainingTime, StartFailed, StartSteps, lead_of
from orchestrator.control.start_times import parked_start, start_times
from orchestrator.messages.replica_states import AHEAD, ENDING, STARTING, Signal, State
from orchestrator.messages.route_table import remote_address
from orchestrator.process.home import Home
from placements.engines.registry import needs_neuron
from placements.facts.core_range import CoreRange
from workers.artifacts.fetch.artifact_fetcher import wanted_by
from workers.artifacts.fetch.progress import FetchStatus
from workers.host.neuron_faults import after_serving
from workers.host.task_boundary import task_boundary
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, Phase

log = logging.getLogger(__name__)

LOG_LINES = 8
LOG_READ_S = 3.0  # deadline for reading the log of a dead replica
WATCHED = frozenset({State.PENDING, State.LOADING, State.READY, State.DRAINING})


class ReplicaLives:
    """The lives of one controller's replicas, on its event loop."""

    def __init__(
        self,
        state: FleetState,
        cluster: ClusterClient,
        home: Home,
        hosts: HostWatch,
        table: ReplicaTable,
        publish: Callable[[], Awaitable[None]],
    ) -> None:
        """``publish`` notifies the gateways of changed routes."""
        self.state = state
        self.cluster = cluster
        self.home = home
        self.hosts = hosts
        self.table = table
        self.publish = publish
        self.running: set[asyncio.Task[None]] = set()

    def start(self, target: ReplicaTarget, previous: ReplicaView | None) -> ReplicaView:
        """Start the target's replica with the next epoch; ``previous`` is its last start. Returns its view."""
        state, now = self.state, self.state.clock()
        epoch = state.epochs[target.id] = state.epochs.get(target.id, 0) + 1
        revision = state.revision_of_version(target.model, target.version)
        if target.placement is not None:
            config = replica_config(revision, target.placement, self.home, state.settings)
        else:  # an older version that continues to serve
            config = state.configs[target.id]
        # a path without the model's name: socket paths are limited, and names may be long
        socket = str(self.home.sockets / f"{state.model_number(target.model)}-{target.replica}.{epoch}")
        parked = parked_start(state, target.model)
        proven = parked is not None and (parked.host, parked.version) == (target.host, target.version)
        config = config.with_run(epoch=epoch, socket=socket, proven=proven)
        view = ReplicaView(
            model=target.model,
            replica=target.replica,
            epoch=epoch,
            host=target.host,
            cores=target.cores,
            state=State.PENDING,
            since=now,
            begun=now,
            socket=socket,
            version=target.version,
            heard=now,
            deadlines=state.deadlines(target.model),
        )
        if previous is not None:
            view = view.following(previous)
        state.records.decision("start", view, "planned" if previous is None else "started again")
        state.configs[target.id] = config
        self.table.store(view)
        state.records.event("info", "Starting", f"epoch {epoch} on {target.host}, cores {target.cores}", view=view)
        life = self._begin(view)
        life.start.preparing = self.spawn(life.prepare(config))
        return view

    def adopt(self, survivor: Survivor) -> None:
        """Continue the life of a replica that outlived its controller."""
        state, now = self.state, self.state.clock()
        config, status = survivor.config, survivor.status
        phase = {Phase.READY: State.READY, Phase.DRAINING: State.DRAINING}.get(status.phase, State.LOADING)
        phases = {name: seconds for name, seconds in status.load_phases.items() if name != "process"}  # not in load_s
        view = ReplicaView(
            model=config.model.name,
            replica=config.place.replica,
            epoch=config.run.epoch,
            host=config.place.host,
            cores=CoreRange(config.place.cores[0], config.place.cores[-1]) if config.place.cores else None,
            state=phase,
            since=now,
            begun=now - status.age_s,
            requested=True,
            pid=status.pid,
            started=status.started,
            socket=config.run.socket,
            remote=remote_address(status),
            version=config.run.version,
            served=phase is not State.LOADING,
            load_s=status.load_s,
            load_phases={} if status.load_s is None else phases,
            compile_s=status.compile_s,
            heard=now,
            restarts=max(0, state.records.state.starts.get(config.id, 1) - 1),
            deadlines=state.deadlines(config.model.name),
        )
        state.adopt(view, config)
        life = self._begin(view)
        life.start.process = self.spawn(life.watch())
        if phase is State.LOADING and lead_of(config, None) is not None and wanted_by(config):
            # the controller that requested its fetch is gone
            self.table.store(dataclasses.replace(view, early=EarlyStart(now, now)))
            life.start.preparing = self.spawn(life.prepare(config))
        if phase is State.DRAINING and state.hold is None:
            life.start.turns.put_nowait(Turn.DRAIN)

    def _begin(self, view: ReplicaView) -> ReplicaLife:
        start = self.table.starts[view.id] = ReplicaStart(view.id, view.epoch)
        life = ReplicaLife(start, self)
        start.living = self.spawn(life.live())
        return life

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a task, and logs its error."""
        task = asyncio.get_running_loop().create_task(work)
        self.running.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self.running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an effect failed; it is retried in the next round", exc_info=error)

    def drain(self, replica: ReplicaView) -> None:
        """Let the replica's live requests end, then stop it."""
        self.table.signal(replica, Signal.DRAIN)
        self.table.starts[replica.id].turns.put_nowait(Turn.DRAIN)

    def release(self, replica: ReplicaView) -> bool:
        """Have the host confirm that the replica's process is dead. Returns False if that is in progress already."""
        start = self.table.starts[replica.id]
        if start.releasing:
            return False
        start.releasing = True
        start.turns.put_nowait(Turn.RELEASE)
        return True

    def resume(self) -> None:
        """Continue lives and watches that have failed: otherwise a death would go unnoticed, or cores would stay
        taken."""
        for id, view in self.state.views.items():
            start = self.table.starts[id]
            if view.gone:
                continue
            if start.living is None or start.living.done():
                start.living = self.spawn(ReplicaLife(start, self).live())
            latest = start.process or start.preparing
            if view.state in WATCHED and (latest is None or latest.done()):
                start.process = self.spawn(ReplicaLife(start, self).watch())

    async def shut_down(self, id: str, drain_s: float) -> None:
        """Drain the replica for at most ``drain_s`` and stop it, at the end of the fleet."""
        view = self.state.views[id]
        if view.state in (State.READY, State.DRAINING):
            if view.state is State.READY:
                self.table.signal(view, Signal.DRAIN)
            await self.wait_drained(view.actor, drain_s)
        view = self.table.signal(self.state.views[id], Signal.STOP, "the fleet shuts down")
        dead = await self.cluster.end(view.actor, view.pid, view.started, view.host)
        log.info("%s: %s", view.id, "gone" if dead else "still alive")

    async def wait_drained(self, name: str, drain_s: float) -> None:
        """Wait up to ``drain_s`` for the replica's live requests to end. The replica's timer includes pauses and this
        one does not, so an interrupted drain is continued."""
        deadline = self.state.clock() + drain_s
        remaining_s = drain_s
        while not await self.cluster.drain(name, remaining_s) and (remaining_s := deadline - self.state.clock()) > 0:
            pass


@dataclass(frozen=True)
class ReplicaLife:
    """The coroutine of one start, and its parts in the order in which they run. It implements `StartProgress`."""

    start: ReplicaStart
    lives: ReplicaLives
    remaining: RemainingTime = field(default_factory=RemainingTime)  # of its fetch

    async def live(self) -> None:
        """Carries out the turns of one start until the death of its process is confirmed.

        Meanwhile tasks prepare its host (`prepare`), start its process (`_run`) and watch it (`watch`).

        1. DRAIN: its live requests end; then it is stopped.
        2. END: the preparation is cancelled. The start of a process is not: the process could then not be found.
        3. RELEASE: its host confirms its death; in each round again until it does.
        """
        while True:
            turn = await self.start.turns.get()
            if turn is Turn.DRAIN:
                self.lives.spawn(self._drain())
            elif turn is Turn.END:
                if self.start.preparing is not None:
                    self.start.preparing.cancel()
            elif await self._release():
                return

    async def prepare(self, config: ReplicaConfig) -> None:
        """Prepare the host, then start the process, unless it was started before the end of its fetch."""
        state, adopted = self.lives.state, self.start.process is not None
        steps = StartSteps(state, self.lives.cluster, self.lives.hosts, self)
        async with self._boundary(config):
            if not adopted:
                config = await steps.resolve(config)
                state.configs[self._starting.id] = config
            config = await steps.fetch(config, again=adopted)
            if not adopted:
                await steps.compile(config)
            if self._starting.early is None:
                self._launch(config)
            else:
                self._end_early_start(config)

    def enter(self, phase: str) -> None:
        view = self._starting
        if phase == "fetching":
            self.lives.table.signal(view, Signal.FETCH)
        elif phase == "compiling":
            self.lives.table.signal(view, Signal.COMPILE)
        elif view.state is State.FETCHING:
            self.lives.table.signal(view, Signal.FETCHED)

    def note(self, level: Level, reason: str, message: str) -> None:
        self.lives.state.records.event(level, reason, message, view=self._starting)

    def arriving(self, status: FetchStatus, config: ReplicaConfig | None) -> None:
        """Starts the process, once, when little enough of the fetch is left."""
        state, view = self.lives.state, self._starting
        self.lives.table.store(dataclasses.replace(view, fetch=status))
        if config is None or self.start.process is not None:
            return
        lead_s = lead_of(config, start_times(state, config.model.name).before_weights_s)
        left_s = self.remaining.estimate(status, state.clock())
        if lead_s is None or left_s is None or left_s >= lead_s:
            return
        self.note("info", "StartsEarly", f"about {left_s:.0f} s before the end of the fetch, to load in parallel")
        self._launch(config, EarlyStart(view.since, state.clock() + lead_s))

    def _launch(self, config: ReplicaConfig, early: EarlyStart | None = None) -> None:
        """Start the process on a prepared host; with ``early``, before the fetch has ended."""
        state, table, view = self.lives.state, self.lives.table, self._starting
        state.configs[view.id] = config
        if early is None:
            state.pins.pin(config)
        fetch = None if early is None else view.fetch
        if view.state in AHEAD:
            view = table.signal(view, Signal.FETCHED if view.state is State.FETCHING else Signal.COMPILED)
        # the time so far does not count as start: waiting for fetches and compiles, and asking the engine
        aside_s = state.clock() - view.begun
        table.store(dataclasses.replace(view, aside_s=aside_s, fetch=fetch, early=early))
        self.start.process = self.lives.spawn(self._run(config))

    def _end_early_start(self, config: ReplicaConfig) -> None:
        """Note the end of the fetch that the process waits for: all replicas of the version load this content."""
        state, view = self.lives.state, self._starting
        if config.fetched_folders() == state.configs[view.id].fetched_folders():
            state.pins.pin(config)
            self.lives.table.end_early_start(self.start, view)
        else:
            message = "the fetched files are not those that the process loads: the source has changed"
            self.lives.table.fail(view, Failure("fetch-ended", message))

    async def _run(self, config: ReplicaConfig) -> None:
        """Start the process, and watch it."""
        state, table, started = self.lives.state, self.lives.table, False
        async with self._boundary(config):
            await state.records.durable()
            view = self._starting
            foreign = state.foreign_cores.get(config.place.host, {}).keys() & set(config.place.cores)
            if foreign:  # meanwhile; the next round places it elsewhere
                reason = f"core {min(foreign)} was taken by another process before its start"
                table.signal(view, Signal.STOP, reason)
                return
            table.store(dataclasses.replace(view, requested=True))
            await self.lives.cluster.start(config)
            started = True
            if (current := self._view) is None or current.state in ENDING:  # its end may have preceded its process
                await self.lives.cluster.end(view.actor, None, None, config.place.host)
                return
        if started:
            await self.watch()

    @contextlib.asynccontextmanager
    async def _boundary(self, config: ReplicaConfig) -> AsyncIterator[None]:
        """Fails the replica on an error of its body. If its host was lost after the round that had planned it there, it
        is stopped instead, and the next round places it elsewhere."""
        with task_boundary(log, "%s could not be started", self.start.id, on_error=self._fail_start):
            try:
                yield
            except Superseded:
                pass
            except StartFailed as failed:
                if (view := self._view) is not None:
                    self.lives.table.fail(view, failed.failure)
            except HostLost as loss:
                if config.place.host not in await self.lives.cluster.lost_hosts():
                    raise  # it does not reply
                view = self._view
                if view is not None and view.state in STARTING:
                    self.lives.table.signal(view, Signal.STOP, f"its host is lost: {loss}")

    def _fail_start(self, error: Exception) -> None:
        if (view := self._view) is not None:
            self.lives.table.fail(view, Failure("start-failed", f"{type(error).__name__}: {error}"))

    async def watch(self) -> None:
        """Turn status reports into signals until the process is to end."""
        version = 0
        while (view := self._view) is not None and view.state not in ENDING:
            try:
                status = await self.lives.cluster.watch(view.actor, version)
            except ReplicaDied as death:
                await self._handle_death(str(death))
                return
            view = self._view
            if view is None:
                return
            self.lives.table.report(self.start, view, status, new=status.version > version)
            version = max(version, status.version)
            if status.phase is Phase.FAILED:
                return

    async def _handle_death(self, death: str) -> None:
        """Fail a replica that died without a failure report. Its log may show why the runtime aborted the process."""
        view, failure = self._view, Failure("replica-died", death)
        if view is None:
            return
        if needs_neuron(self.lives.state.configs[view.id].model.engine):
            fault = (await self._last_log(view)).fault
            if fault is not None:
                failure = after_serving(fault) if view.served else fault
                failure = msgspec.structs.replace(failure, what=f"{failure.what}; {death}")
        if (current := self._view) is not None:
            self.lives.table.fail(current, failure)

    async def _drain(self) -> None:
        view = self._view
        if view is None:
            return
        await self.lives.state.records.durable()
        await self.lives.publish()  # remove it from the routes first
        await self.lives.wait_drained(view.actor, view.deadlines.drain_s)
        current = self._view
        if current is not None and current.state is State.DRAINING:
            self.lives.table.signal(current, Signal.STOP, "drained")

    async def _release(self) -> bool:
        """Returns whether the host has confirmed that the process is dead, and its cores are free."""
        try:
            with task_boundary(log, "the end of %s failed; it is retried in the next round", self.start.id):
                return await self._is_released()
            return False
        finally:
            self.start.releasing = False

    async def _is_released(self) -> bool:
        view = self._view
        if view is None:
            return True
        await self.lives.state.records.durable()
        if not await self.lives.cluster.end(view.actor, view.pid, view.started, view.host):
            return False
        self.lives.hosts.note_death(view)
        tail = tuple((await self._last_log(view)).text.splitlines())
        if (current := self._view) is not None:
            self.lives.table.store(dataclasses.replace(current.without_work(), gone=True, log=tail))
        self.lives.table.wake()
        return True

    async def _last_log(self, view: ReplicaView) -> LogText:
        """Returns the end of the replica's log; nothing if its host does not reply in time: neither an unresponsive
        host nor a log may delay a failure or the release of cores."""
        log_file = str(self.lives.home.log(view.model, view.replica))
        with task_boundary(log, "the log of %s cannot be read", view.id, level=logging.WARNING):
            read = self.lives.cluster.read_log(log_file, LOG_LINES, view.host, ended=True)
            return await asyncio.wait_for(read, LOG_READ_S)
        return LogText("")

    @property
    def _view(self) -> ReplicaView | None:
        return self.lives.table.view(self.start)

    @property
    def _starting(self) -> ReplicaView:
        return self.lives.table.starting(self.start)
