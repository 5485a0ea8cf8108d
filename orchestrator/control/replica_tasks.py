"""The tasks of one controller that start, watch, drain and release replicas."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import msgspec.structs

from orchestrator.control.host_watch import HostWatch
from orchestrator.control.replica_table import ReplicaTable
from orchestrator.fleet.effects import ClusterClient, HostLost, ReplicaDied, Survivor, actor_name
from orchestrator.fleet.replica_states import AHEAD, ENDING, STARTING, Signal, State
from orchestrator.fleet.route_table import remote_address
from orchestrator.fleet.snapshot import EarlyStart, ReplicaView
from orchestrator.process.home import Home
from orchestrator.revisions.config_builder import replica_config
from orchestrator.rollout.rollout_step import ReplicaTarget
from orchestrator.starts.early_start import lead_of
from orchestrator.starts.start_pipeline import (
    Arriving,
    Compiling,
    Fetching,
    Ready,
    Resolved,
    StartEvent,
    StartFailed,
    StartPipeline,
)
from orchestrator.state.expected_starts import parked_start
from orchestrator.state.fleet_state import FleetState
from placements.facts.core_range import CoreRange
from placements.facts.engines import PACKAGES
from workers.artifacts.fetch.artifact_fetcher import wanted_by
from workers.host.neuron_faults import after_serving
from workers.host.task_boundary import task_boundary
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, Phase

T = TypeVar("T")

log = logging.getLogger(__name__)

LOG_LINES = 8
LOG_READ_S = 3.0  # deadline for reading the log of a dead replica


class ReplicaTasks:
    """The tasks of one controller's replicas, on its event loop. An effect waits until its record is on disk."""

    def __init__(
        self,
        state: FleetState,
        cluster: ClusterClient,
        home: Home,
        hosts: HostWatch,
        replicas: ReplicaTable,
        *,
        wake: Callable[[], None],
        publish: Callable[[], Awaitable[None]],
    ) -> None:
        """``wake`` requests a round; ``publish`` notifies the gateways of changed routes."""
        self.running: set[asyncio.Task[None]] = set()
        self._state = state
        self._cluster = cluster
        self._home = home
        self._hosts = hosts
        self._replicas = replicas
        self._wake = wake
        self._publish = publish
        self._releasing: set[str] = set()  # replicas that are being released
        self._followed: dict[str, asyncio.Task[None]] = {}  # tasks that prepare, start or watch a replica

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.running.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self.running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an effect failed; it is retried in the next round", exc_info=error)

    # Starts

    def adopt(self, survivor: Survivor) -> None:
        """Continue to follow a replica that outlived its controller."""
        state, now = self._state, self._state.clock()
        config, status = survivor.config, survivor.status
        phase = {Phase.READY: State.READY, Phase.DRAINING: State.DRAINING}.get(status.phase, State.LOADING)
        phases = {name: seconds for name, seconds in status.load_phases.items() if name != "process"}  # not in load_s
        view = ReplicaView(
            model=config.model,
            replica=config.replica,
            epoch=config.epoch,
            host=config.host,
            cores=CoreRange(config.cores[0], config.cores[-1]) if config.cores else None,
            state=phase,
            since=now,
            begun=now - status.age_s,
            requested=True,
            pid=status.pid,
            started=status.started,
            socket=config.socket,
            remote=remote_address(status),
            version=config.version,
            served=phase is not State.LOADING,
            load_s=status.load_s,
            load_phases={} if status.load_s is None else phases,
            compile_s=status.compile_s,
            heard=now,
            restarts=max(0, state.records.state.starts.get(f"{config.model}/{config.replica}", 1) - 1),
            deadlines=state.deadlines(config.model),
        )
        state.adopt(view, config)
        if phase is State.DRAINING and state.hold is None:
            self.drain(view)
        if phase is State.LOADING and lead_of(config, None) is not None and wanted_by(config):
            # the controller that requested its fetch is gone
            self._replicas.store(dataclasses.replace(view, early=EarlyStart(now, now)))
            self._replicas.preparing[view.id] = self._spawn(self._prepare(view.id, config, adopted=True))
        self._track(view.id, self._follow(view.id, config.epoch))

    def start(self, target: ReplicaTarget, previous: ReplicaView | None) -> ReplicaView:
        """Start the target's replica with the next epoch; ``previous`` is its last start. Returns its view."""
        state, now = self._state, self._state.clock()
        epoch = state.epochs[target.id] = state.epochs.get(target.id, 0) + 1
        revision = state.revision_of_version(target.model, target.version)
        if target.placement is not None:
            config = replica_config(revision, target.placement, self._home, state.settings)
        else:  # an older version that continues to serve
            config = state.configs[target.id]
        # a path without the model's name: socket paths are limited, and names may be long
        socket = str(self._home.sockets / f"{state.model_number(target.model)}-{target.replica}.{epoch}")
        parked = parked_start(state, target.model)
        proven = parked is not None and (parked.host, parked.version) == (target.host, target.version)
        config = msgspec.structs.replace(config, epoch=epoch, socket=socket, proven=proven)
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
            restarts=0 if previous is None else previous.restarts + 1,
            failures=0 if previous is None else previous.failures,
            reason=None if previous is None else previous.reason,
            log=() if previous is None else previous.log,
            load_s=None if previous is None else previous.load_s,
            load_phases={} if previous is None else previous.load_phases,
            compiled=None if previous is None else previous.compiled,
            heard=now,
            deadlines=state.deadlines(target.model),
        )
        state.records.decision("start", view, "planned" if previous is None else "started again")
        state.configs[target.id] = config
        self._replicas.store(view)
        state.records.event("info", "Starting", f"epoch {epoch} on {target.host}, cores {target.cores}", view=view)
        self._replicas.preparing[target.id] = self._track(target.id, self._prepare(target.id, config))
        return view

    async def _prepare(self, id: str, config: ReplicaConfig, *, adopted: bool = False) -> None:
        """Fold the events of a start's preparation into the state; a signal to another state cancels it."""
        pipeline = StartPipeline(self._state, self._cluster, config, adopted=adopted)
        async with self._start_boundary(id, config), contextlib.aclosing(pipeline.events()) as events:
            async for event in events:
                view = self._replicas.view(id, config.epoch)
                if view is None or view.state not in STARTING:
                    return
                self._fold(view, event)

    def _fold(self, view: ReplicaView, event: StartEvent) -> None:
        self._hosts.count_fetch(view.model, event)
        if event.note is not None:
            self._state.records.event(*event.note, view=view)
        if isinstance(event, Fetching) and event.status is None:
            self._replicas.signal(view, Signal.FETCH)
        elif isinstance(event, Fetching):
            self._replicas.store(dataclasses.replace(view, fetch=event.status))
        elif isinstance(event, Resolved):
            self._state.configs[view.id] = event.config
        elif isinstance(event, Compiling):
            self._replicas.signal(view, Signal.COMPILE)
        elif isinstance(event, Arriving):
            self._launch(view, event.config, EarlyStart(view.since, self._state.clock() + event.lead_s))
        elif isinstance(event, Ready):
            self._end_early_start(view, event.config) if view.early is not None else self._launch(view, event.config)
        elif isinstance(event, StartFailed):
            self._replicas.fail(view, event.failure)
        elif event.phase and view.state is State.FETCHING:
            self._replicas.signal(view, Signal.FETCHED)

    def _launch(self, view: ReplicaView, config: ReplicaConfig, early: EarlyStart | None = None) -> None:
        """Start the process of a prepared replica; with ``early``, before its fetch has ended."""
        self._state.configs[view.id] = config
        if early is None:
            self._state.pins.pin(config)
        fetch = None if early is None else view.fetch
        if view.state in AHEAD:
            view = self._replicas.signal(view, Signal.FETCHED if view.state is State.FETCHING else Signal.COMPILED)
        # the time so far does not count as start: waiting for fetches and compiles, and asking the engine
        aside_s = self._state.clock() - view.begun
        self._replicas.store(dataclasses.replace(view, aside_s=aside_s, fetch=fetch, early=early))
        self._track(view.id, self._start_process(view.id, config))

    def _end_early_start(self, view: ReplicaView, config: ReplicaConfig) -> None:
        """Note the end of the fetch that a process waits for: all replicas of the version load this content."""
        loaded = self._state.configs[view.id]
        if config.fetched_folders() != loaded.fetched_folders():
            message = "the fetched files are not those that the process loads: the source has changed"
            self._replicas.fail(view, Failure("fetch-ended", message))
            return
        self._state.pins.pin(config)
        self._replicas.end_early_start(view)

    async def _start_process(self, id: str, config: ReplicaConfig) -> None:
        is_started = False
        async with self._start_boundary(id, config):
            is_started = await self._request_process(id, config)
        if is_started:
            await self._follow(id, config.epoch)

    async def _request_process(self, id: str, config: ReplicaConfig) -> bool:
        """Returns False if the process must not run any more."""
        await self._state.records.durable()
        view = self._replicas.view(id, config.epoch)
        if view is None or view.state not in STARTING:
            return False
        foreign = self._state.foreign_cores.get(config.host, {}).keys() & set(config.cores)
        if foreign:  # meanwhile; the next round places it elsewhere
            reason = f"core {min(foreign)} was taken by another process before its start"
            self._replicas.signal(view, Signal.STOP, reason)
            return False
        self._replicas.store(dataclasses.replace(view, requested=True))
        await self._cluster.start(config)
        view = self._replicas.view(id, config.epoch)
        if view is None or view.state in ENDING:  # its end may have preceded its process
            await self._cluster.end(actor_name(config.model, config.replica, config.epoch), None, None, config.host)
            return False
        return True

    @contextlib.asynccontextmanager
    async def _start_boundary(self, id: str, config: ReplicaConfig) -> AsyncIterator[None]:
        """Fails the replica on an error of its body. If its host was lost after the round that had planned it there, it
        is stopped instead, and the next round places it elsewhere."""
        with task_boundary(log, "%s could not be started", id, on_error=partial(self._fail_start, id, config.epoch)):
            try:
                yield
            except HostLost as loss:
                if config.host not in await self._cluster.lost_hosts():
                    raise  # it does not reply
                view = self._replicas.view(id, config.epoch)
                if view is not None and view.state in STARTING:
                    self._replicas.signal(view, Signal.STOP, f"its host is lost: {loss}")

    def _fail_start(self, id: str, epoch: int, error: Exception) -> None:
        view = self._replicas.view(id, epoch)
        if view is not None:
            self._replicas.fail(view, Failure("start-failed", f"{type(error).__name__}: {error}"))

    # Watching

    def _track(self, id: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task that follows the replica, and note its end."""
        task = self._followed[id] = self._spawn(work)

        def over(_: object) -> None:
            if self._followed.get(id) is task:
                del self._followed[id]

        task.add_done_callback(over)
        return task

    def restart_followers(self) -> None:
        """Restart failed follower tasks: without one, the death of a replica would go unnoticed."""
        for id, view in self._state.views.items():
            lives = view.state in (State.PENDING, State.LOADING, State.READY, State.DRAINING)
            if lives and not view.gone and id not in self._followed:
                self._track(id, self._follow(id, view.epoch))

    async def _follow(self, id: str, epoch: int) -> None:
        """Turn a replica's status reports into signals until it is to end."""
        version = 0
        while (view := self._replicas.view(id, epoch)) is not None and view.state not in ENDING:
            try:
                status = await self._cluster.watch(view.actor, version)
            except ReplicaDied as death:
                await self._handle_death(id, epoch, str(death))
                return
            view = self._replicas.view(id, epoch)
            if view is None:
                return
            self._replicas.report(view, status, new=status.version > version)
            version = max(version, status.version)
            if status.phase is Phase.FAILED:
                return

    async def _handle_death(self, id: str, epoch: int, death: str) -> None:
        """Fail a replica that died without a failure report. Its log may show why the runtime aborted the process."""
        view = self._replicas.view(id, epoch)
        if view is None:
            return
        failure = Failure("replica-died", death)
        if self._state.configs[id].engine in (*PACKAGES, "torch-neuronx"):
            fault = await self._from_log(view, self._cluster.fault_in_log)
            if fault is not None:
                failure = after_serving(fault) if view.served else fault
                failure = msgspec.structs.replace(failure, what=f"{failure.what}; {death}")
        view = self._replicas.view(id, epoch)
        if view is not None:
            self._replicas.fail(view, failure)

    async def _from_log(self, view: ReplicaView, read: Callable[..., Awaitable[T]], *args: int) -> T | None:
        """Returns what its host reads from the log of the replica; None if it does not in time: neither an
        unresponsive host nor a log may delay a failure or the release of cores."""
        log_file = str(self._home.log(view.model, view.replica))
        with task_boundary(log, "the log of %s cannot be read", view.id, level=logging.WARNING):
            return await asyncio.wait_for(read(log_file, *args, view.host), LOG_READ_S)
        return None

    # Ends

    def drain(self, view: ReplicaView) -> None:
        """Let the live requests of a draining replica end, then stop it."""
        self._spawn(self._drain(view))

    async def _drain(self, view: ReplicaView) -> None:
        await self._state.records.durable()
        await self._publish()  # remove it from the routes first
        await self._wait_drained(view.actor, view.deadlines.drain_s)
        current = self._replicas.view(view.id, view.epoch)
        if current is not None and current.state is State.DRAINING:
            self._replicas.signal(current, Signal.STOP, "drained")

    async def _wait_drained(self, name: str, drain_s: float) -> None:
        """Wait up to ``drain_s`` for the replica's live requests to end. The replica's timer includes pauses and this
        one does not, so an interrupted drain is continued."""
        deadline = self._state.clock() + drain_s
        remaining_s = drain_s
        while not await self._cluster.drain(name, remaining_s) and (remaining_s := deadline - self._state.clock()) > 0:
            pass

    def release(self, view: ReplicaView) -> bool:
        """Have the host confirm that the replica's process is dead. Returns False if that is in progress already."""
        if view.id in self._releasing:
            return False
        self._releasing.add(view.id)
        self._spawn(self._release(view))
        return True

    async def _release(self, view: ReplicaView) -> None:
        try:
            await self._state.records.durable()
            if not await self._cluster.end(view.actor, view.pid, view.started, view.host):
                return
            self._hosts.note_death(view)
            tail = tuple(await self._from_log(view, self._cluster.log_tail, LOG_LINES) or ())
            current = self._replicas.view(view.id, view.epoch)
            if current is not None:
                self._replicas.store(dataclasses.replace(current.without_work(), gone=True, log=tail))
            self._wake()
        finally:  # the next round retries if it is not gone
            self._releasing.discard(view.id)

    async def shut_down(self, id: str, drain_s: float) -> None:
        """Drain the replica for at most ``drain_s`` and stop it, at the end of the fleet."""
        view = self._state.views[id]
        if view.state in (State.READY, State.DRAINING):
            if view.state is State.READY:
                self._replicas.signal(view, Signal.DRAIN)
            await self._wait_drained(view.actor, drain_s)
        view = self._replicas.signal(self._state.views[id], Signal.STOP, "the fleet shuts down")
        dead = await self._cluster.end(view.actor, view.pid, view.started, view.host)
        log.info("%s: %s", view.id, "gone" if dead else "still alive")
