"""The control loop of a fleet: observe, compute the desired state, reconcile, apply. Independent of Ray.

Its effects are a Protocol (`effects.ClusterClient`), its state is one object (`FleetState`). Everything runs on one
event loop and nothing else writes the state, so there are no locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec.structs

from orchestrator.control.controller_metrics import ControllerCounters, engine_families, fleet_families, scaling_changes
from orchestrator.control.host_watch import HostWatch
from orchestrator.control.reconcile import Action, Drain, Fail, Forget, Release, Start, Stop, reconcile
from orchestrator.control.scaling_loop import Scaler
from orchestrator.control.status import Conditions, route_table, status
from orchestrator.control.update_prefetch import UpdatePrefetch
from orchestrator.fleet.effects import ClusterClient, ReplicaDied, actor_name
from orchestrator.fleet.replica_states import AHEAD, STARTING, Signal, State, advance
from orchestrator.fleet.route_table import RouteTable
from orchestrator.fleet.snapshot import SETTLED_S, EarlyStart, Observed, ReplicaView
from orchestrator.process.home import Home
from orchestrator.revisions.config_builder import replica_config
from orchestrator.rollout.rollout_step import ReplicaTarget
from orchestrator.scaling.demand_report import DemandReport
from orchestrator.starts.early_start import lead_of
from orchestrator.starts.start_pipeline import (
    Arriving,
    Compiling,
    Failed,
    Fetching,
    Ready,
    Resolved,
    StartEvent,
    StartPipeline,
)
from orchestrator.state.fleet_state import FleetState
from orchestrator.state.quarantine import on_failure
from orchestrator.state.rollout_progress import follow_rollout, roll_back, rollout_state
from placements.facts.core_range import CoreRange
from placements.facts.engines import AUTO_ENGINES
from placements.spec.schema import Deadlines
from workers.artifacts.fetch.artifact_fetcher import wanted_by
from workers.host.lifetime import since_boot
from workers.host.neuron_faults import after_serving
from workers.messages.metric_family import MetricFamily, gauge, joined, labelled
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, Phase, Reaction, ReplicaStatus

T = TypeVar("T")

log = logging.getLogger(__name__)

TICK_S = 1.0  # interval between rounds without events
SOONEST_S = 0.05  # shortest interval between two timed rounds
LOG_LINES = 8
LOG_READ_S = 3.0  # deadline for reading the log of a dead replica
DEVICES_S = 0.5  # deadline of a host's device metrics, while a scrape waits
_NO_WORK: Mapping[str, Any] = MappingProxyType({"live": 0, "waiting": 0, "step_s": 0.0})  # of a dead process


class Controller:
    """The controller of one fleet. ``run`` is the loop; other methods may be called meanwhile on its event loop."""

    def __init__(
        self,
        state: FleetState,
        cluster: ClusterClient,
        *,
        resumed: Callable[[], float] = lambda: -math.inf,
        tick_s: float = TICK_S,
    ) -> None:
        """``resumed`` returns when the last pause ended on the state's clock, which may skip pauses (`AwakeClock`)."""
        self.state = state
        self.settings = settings = state.settings
        self.scaler = Scaler(state)
        self._cluster = cluster
        self._clock = state.clock
        self._resumed = resumed
        self._resumed_at = resumed()
        self._tick_s = tick_s
        self._home = Home(Path(settings.home))
        self._conditions = Conditions(state.wall)
        self._counters = ControllerCounters()
        self._statuses: dict[str, tuple[int, ReplicaStatus]] = {}  # epoch and last status, by replica
        self._releasing: set[str] = set()  # replicas that are being released
        self._preparing: dict[str, asyncio.Task[None]] = {}  # preparations of starts, by replica
        self._followed: dict[str, asyncio.Task[None]] = {}  # tasks that prepare, start or watch a replica
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()
        self._version = 1
        self._published: tuple[Any, ...] = ()  # the inputs of routes and status at the last notification
        self._was_ready = False
        self._closing = False
        self._settled = asyncio.Event()  # set once surviving replicas are adopted
        self._hosts = HostWatch(state, cluster, self._home, self._counters)
        self._prefetch = UpdatePrefetch(state, cluster, self._home, self._hosts, self._wake.set)

    # The loop

    async def run(self) -> None:
        """Run until ``shutdown``."""
        await self._adopt()
        await self.state.update_goal()
        await self.publish()
        self._settled.set()
        while not self._closing:
            self._wake.clear()
            began = self._clock()
            try:
                await self._round()
            except Exception:  # the next round observes everything again, and the fleet keeps serving
                log.exception("the control loop failed; it is retried in the next round")
                self._counters.failed_rounds += 1
            self._counters.rounds.observe(self._clock() - began)
            due_s = self.scaler.due_in() if self.state.hold is None else None
            interval_s = self._tick_s if due_s is None else max(SOONEST_S, min(due_s, self._tick_s))
            tick = asyncio.get_running_loop().call_later(interval_s, self._wake.set)
            await self._wake.wait()  # not by wait_for, which before Python 3.12 can swallow a cancellation
            tick.cancel()

    async def _round(self) -> None:
        await asyncio.gather(self._hosts.update(), self._hosts.update_held_sources())
        if self._closing:
            return
        state = self.state
        self._report_reach()
        self._restart_followers()
        async with state.deciding:
            if state.hold is None:
                await self._decide()
            else:
                await state.update_goal()
        await state.records.durable()
        await self.publish()

    async def _decide(self) -> None:
        """Compute the desired state and start the actions that lead to it."""
        state = self.state
        self._scale()
        goal = await state.update_goal()
        rollback = follow_rollout(state)
        self._counters.rollout(state.current.number, rollout_state(state)[0])
        if rollback is not None:
            await roll_back(state, rollback)
            self.renew_deadlines()
            goal = await state.update_goal()
        if self._closing:
            return
        observed = Observed(self._clock(), dict(state.views), self._resumed())
        if observed.resumed != self._resumed_at:
            self._resumed_at = observed.resumed
            message = "the controller was not scheduled for a while; deadlines do not count that time"
            state.records.event("warning", "Paused", message)
        for action in reconcile(goal.targets, observed, state.replaced()):
            self._apply(action)
        self._prefetch.round()

    def _report_reach(self) -> None:
        """Record an event for each replica whose reachability from the gateways has changed."""
        state = self.state
        before, after = state.unreachable, state.reach.unreachable(self._clock()) & state.views.keys()
        state.unreachable = after
        message = "it is ready, but a gateway cannot connect to it"
        for id in sorted(after - before):
            state.records.event("error", "Unreachable", message, view=state.views[id])
        for id in sorted((before - after) & state.views.keys()):
            state.records.event("info", "Reachable", "all gateways are connected to it again", view=state.views[id])

    def _scale(self) -> None:
        try:
            self.scaler.round()
        except Exception:  # the numbers of replicas stay, and repairs continue
            log.exception("autoscaling failed; it is retried in the next round")
            self._counters.failed_rounds += 1

    def wake_up(self) -> None:
        """Start the next round now."""
        self._wake.set()

    async def shutdown(self, drain_s: float) -> None:
        """Drain every replica for at most ``drain_s``, stop it, and confirm that its process is dead."""
        self._closing = True
        self._wake.set()
        await self.publish()
        self._prefetch.stop()
        ended = await asyncio.gather(
            *(self._shut_down_replica(id, drain_s) for id in self.state.views), return_exceptions=True
        )
        for error in ended:
            if error is not None:
                log.error("a replica did not stop cleanly", exc_info=error)
        self.state.records.event("info", "FleetStopped", "every replica was drained and stopped")
        await self.state.records.durable()

    async def wake(self, model: str) -> None:
        """Start a replica of a model without any (`min: 0`) for a request. Raises KeyError for an unknown model."""
        state, counts, spec = self.state, self.state.counts, self.state.current.spec.model(model)
        if spec is None:
            raise KeyError(model)
        if state.hold is not None or counts.desired(spec) or counts.is_unloaded(model) or counts.bounds(spec).max == 0:
            return
        if spec.scaling.auto and self.scaler.active:  # it may need cores of other models
            self.scaler.wake(model)
        else:
            state.records.event("info", "Woken", "the first request starts it", model=model)
            counts.woken.add(model)
        self._wake.set()

    async def demand(self, report: DemandReport) -> None:
        """Receive the demand that one gateway has counted since its last report."""
        self.state.reach.receive(report.gateway, report.unreachable, self._clock())
        if self.scaler.receive(report):
            self._wake.set()

    # Adoption

    async def _adopt(self) -> None:
        state = self.state
        survivors, lost = await self._cluster.survivors()
        for id, epoch in lost.items():
            state.epochs[id] = max(epoch, state.epochs.get(id, 0))
        for survivor in survivors:
            config, status = survivor.config, survivor.status
            id = f"{config.model}/{config.replica}"
            cores = CoreRange(config.cores[0], config.cores[-1]) if config.cores else None
            phase = {Phase.READY: State.READY, Phase.DRAINING: State.DRAINING}.get(status.phase, State.LOADING)
            state.views[id] = ReplicaView(
                model=config.model,
                replica=config.replica,
                epoch=config.epoch,
                host=config.host,
                cores=cores,
                state=phase,
                since=self._clock(),
                begun=self._clock() - max(0.0, since_boot() - status.started),
                asked=True,
                pid=status.pid,
                started=status.started,
                socket=status.address or config.socket,
                version=config.version,
                served=phase is not State.LOADING,
                load_s=status.load_s,
                compile_s=status.compile_s,
                heard=self._clock(),
                restarts=max(0, state.records.state.starts.get(id, 1) - 1),
                deadlines=self._deadlines(config.model),
            )
            state.configs[id] = config
            state.pins.adopt(config)
            state.set_model_number(config.model, int(Path(config.socket).name.partition("-")[0]))
            state.epochs[id] = max(config.epoch, state.epochs.get(id, 0))
            model = state.current.spec.model(config.model)
            asleep = model is not None and state.counts.desired(model) == 0 and phase is not State.DRAINING
            if asleep and not state.counts.is_unloaded(config.model):
                state.counts.woken.add(config.model)
            state.records.event("info", "Adopted", f"epoch {config.epoch}, pid {status.pid}", view=state.views[id])
            if phase is State.DRAINING and state.hold is None:
                self._spawn(self._drain(state.views[id]))
            if phase is State.LOADING and lead_of(config, None) is not None and any(wanted_by(config)):
                now = self._clock()  # the controller that requested its fetch is gone
                self._store_view(dataclasses.replace(state.views[id], early=EarlyStart(now, now)))
                self._preparing[id] = self._spawn(self._prepare(id, config, adopted=True))
            self._track(id, self._follow(id, config.epoch))

    # Actions

    def _apply(self, action: Action) -> None:
        """Record the action and change the state; its effects wait until the record is on disk."""
        if isinstance(action, Start):
            self._start(action.target, action.previous)
        elif isinstance(action, Drain):
            self._decided("drain", action.replica, "an update, or no longer planned")
            self._signal(action.replica, Signal.DRAIN)
            self._spawn(self._drain(action.replica))
        elif isinstance(action, Stop):
            self._decided("stop", action.replica, action.reason)
            self._signal(action.replica, Signal.STOP, action.reason)
        elif isinstance(action, Fail):
            self._decided("fail", action.replica, action.reason)
            self._counters.failed(self.state.views[action.replica.id], action.reason.partition(":")[0])
            self._signal(action.replica, Signal.FAILED, action.reason)
        elif isinstance(action, Release):
            if action.replica.id not in self._releasing:
                self._releasing.add(action.replica.id)
                self._counters.decided("release")
                self._spawn(self._release(action.replica))
        elif isinstance(action, Forget):
            self._decided("forget", action.replica, "gone and no longer planned")
            self._statuses.pop(action.replica.id, None)
            del self.state.views[action.replica.id]
            self.state.configs.pop(action.replica.id, None)
            self._wake.set()

    def _decided(self, action: str, replica: ReplicaView, reason: str) -> None:
        self.state.records.decision(action, replica, reason)
        self._counters.decided(action)

    def _start(self, target: ReplicaTarget, previous: ReplicaView | None) -> None:
        state = self.state
        epoch = state.epochs.get(target.id, 0) + 1
        state.epochs[target.id] = epoch
        view = ReplicaView(
            model=target.model,
            replica=target.replica,
            epoch=epoch,
            host=target.host,
            cores=target.cores,
            state=State.PENDING,
            since=self._clock(),
            begun=self._clock(),
            version=target.version,
            restarts=0 if previous is None else previous.restarts + 1,
            failures=0 if previous is None else previous.failures,
            reason=None if previous is None else previous.reason,
            log=() if previous is None else previous.log,
            load_s=None if previous is None else previous.load_s,
            heard=self._clock(),
            deadlines=self._deadlines(target.model),
        )
        state.records.decision("start", view, "planned" if previous is None else "started again")
        self._counters.started(view, again=previous is not None)
        if target.placement is not None:
            revision = state.revision_of_version(target.model, target.version)
            config = replica_config(revision, target.placement, self._home, self.settings)
            config = msgspec.structs.replace(config, epoch=epoch)
        else:  # an older version that continues to serve
            config = msgspec.structs.replace(state.configs[target.id], epoch=epoch)
        config = msgspec.structs.replace(config, socket=str(self._socket(target, epoch)))
        state.configs[target.id] = config
        state.views[target.id] = dataclasses.replace(view, socket=config.socket)
        state.records.event("info", "Starting", f"epoch {epoch} on {target.host}, cores {target.cores}", view=view)
        self._preparing[target.id] = self._track(target.id, self._prepare(target.id, config))

    def _socket(self, target: ReplicaTarget, epoch: int) -> Path:
        """Returns a path without the model's name, since socket paths are limited and names may be long."""
        return self._home.sockets / f"{self.state.model_number(target.model)}-{target.replica}.{epoch}"

    def reset_failures(self) -> None:
        """Forget failed starts and preparations, so that they are tried again at once."""
        self.state.preparations = {
            key: preparation for key, preparation in self.state.preparations.items() if preparation.done
        }
        for view in list(self.state.views.values()):
            self._store_view(dataclasses.replace(view, failures=0, stopped=False))
        self._wake.set()

    def renew_deadlines(self) -> None:
        """Apply the deadlines of a new revision to running replicas."""
        for view in list(self.state.views.values()):
            if self.state.current.spec.model(view.model) is not None:
                self._store_view(dataclasses.replace(view, deadlines=self._deadlines(view.model)))

    def _deadlines(self, name: str) -> Deadlines:
        model = self.state.current.spec.model(name)
        return Deadlines() if model is None else model.deadlines

    async def _prepare(self, id: str, config: ReplicaConfig, *, adopted: bool = False) -> None:
        """Fold the events of a start's preparation into the state; a signal to another state cancels it."""
        pipeline = StartPipeline(self.state, self._cluster, config, adopted=adopted)
        try:
            async with contextlib.aclosing(pipeline.events()) as events:
                async for event in events:
                    view = self._view(id, config.epoch)
                    if view is None or view.state not in STARTING:
                        return
                    self._fold(view, event)
        except Exception as error:
            log.exception("%s could not be started", id)
            self._fail_start(id, config.epoch, error)

    def _fold(self, view: ReplicaView, event: StartEvent) -> None:
        self._hosts.count_fetch(view.model, event)
        if event.note is not None:
            self.state.records.event(*event.note, view=view)
        if isinstance(event, Fetching) and event.status is None:
            self._signal(view, Signal.FETCH)
        elif isinstance(event, Fetching):
            self._store_view(dataclasses.replace(view, fetch=event.status))
        elif isinstance(event, Resolved):
            self.state.configs[view.id] = event.config
        elif isinstance(event, Compiling):
            self._signal(view, Signal.COMPILE)
        elif isinstance(event, Arriving):
            now = self._clock()
            self._launch(view, event.config, EarlyStart(view.since, now + event.lead_s))
        elif isinstance(event, Ready):
            self._end_early_start(view, event.config) if view.early is not None else self._launch(view, event.config)
        elif isinstance(event, Failed):
            self._fail(view, event.failure)
        elif event.phase and view.state is State.FETCHING:
            self._signal(view, Signal.FETCHED)

    def _launch(self, view: ReplicaView, config: ReplicaConfig, early: EarlyStart | None = None) -> None:
        """Start the process of a prepared replica; with ``early``, before its fetch has ended."""
        self.state.configs[view.id] = config
        if early is None:
            self.state.pins.pin(config)
        fetch = None if early is None else view.fetch
        if view.state in AHEAD:
            view = self._signal(view, Signal.FETCHED if view.state is State.FETCHING else Signal.COMPILED)
        # the time so far does not count as start: waiting for fetches and compiles, and asking the engine
        aside_s = self._clock() - view.begun
        self._store_view(dataclasses.replace(view, aside_s=aside_s, fetch=fetch, early=early))
        self._track(view.id, self._start_process(view.id, config))

    def _end_early_start(self, view: ReplicaView, config: ReplicaConfig) -> None:
        """Note the end of the fetch that a process waits for: all replicas of the version load this content."""
        loaded = self.state.configs[view.id]
        if (config.origin, config.draft_origin) != (loaded.origin, loaded.draft_origin):
            message = "the fetched files are not those that the process loads: the source has changed"
            self._fail(view, Failure("fetch-ended", message))
            return
        view = self._store_view(dataclasses.replace(view, aside_s=view.aside(self._clock()), fetch=None, early=None))
        self.state.pins.pin(config)
        epoch, status = self._statuses.get(view.id, (None, None))
        if status is not None and epoch == view.epoch:  # it was held back
            self._apply_status(view, status)
        self._wake.set()

    async def _start_process(self, id: str, config: ReplicaConfig) -> None:
        try:
            await self.state.records.durable()
            view = self._view(id, config.epoch)
            if view is None or view.state not in STARTING:
                return
            foreign = self.state.foreign_cores.get(config.host, {}).keys() & set(config.cores)
            if foreign:  # meanwhile; the next round places it elsewhere
                self._signal(view, Signal.STOP, f"core {min(foreign)} was taken by another process before its start")
                return
            self._store_view(dataclasses.replace(view, asked=True))
            await self._cluster.start(config)
            view = self._view(id, config.epoch)
            if view is None or view.state is State.STOPPING:  # its stop may have preceded its process
                await self._cluster.end(actor_name(config.model, config.replica, config.epoch), None, None, config.host)
        except Exception as error:
            log.exception("%s could not be started", id)
            self._fail_start(id, config.epoch, error)
        else:
            await self._follow(id, config.epoch)

    def _fail_start(self, id: str, epoch: int, error: Exception) -> None:
        view = self._view(id, epoch)
        if view is not None:
            self._fail(view, Failure("start-failed", f"{type(error).__name__}: {error}"))

    def _track(self, id: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task that follows the replica, and note its end."""
        task = self._followed[id] = self._spawn(work)

        def over(_: object) -> None:
            if self._followed.get(id) is task:
                del self._followed[id]

        task.add_done_callback(over)
        return task

    def _restart_followers(self) -> None:
        """Restart failed follower tasks: without one, the death of a replica would go unnoticed."""
        for id, view in self.state.views.items():
            lives = view.state in (State.PENDING, State.LOADING, State.READY, State.DRAINING)
            if lives and not view.gone and id not in self._followed:
                self._track(id, self._follow(id, view.epoch))

    async def _follow(self, id: str, epoch: int) -> None:
        """Turn a replica's status reports into signals until it stops."""
        version = 0
        while (view := self._view(id, epoch)) is not None and view.state is not State.STOPPING:
            try:
                status = await self._cluster.watch(actor_name(view.model, view.replica, epoch), version)
            except ReplicaDied as death:
                await self._handle_death(id, epoch, str(death))
                return
            view = self._view(id, epoch)
            if view is None:
                return
            self._statuses[id] = epoch, status
            if view.state is not State.FAILED:  # its reports no longer apply
                view = self._store_view(_with_status(view, status, self._clock()))
            if view.step_s > view.deadlines.step_s:
                self._wake.set()
            if status.version > version:
                version = status.version
                self._apply_status(view, status)
            if status.phase is Phase.FAILED:
                return

    async def _handle_death(self, id: str, epoch: int, death: str) -> None:
        """Fail a replica that died without a failure report. Its log may show why the runtime aborted the process."""
        view = self._view(id, epoch)
        if view is None:
            return
        failure = Failure("replica-died", death)
        if self.state.configs[id].engine in AUTO_ENGINES:
            fault = await self._from_log(view, self._cluster.fault_in_log)
            if fault is not None:
                failure = after_serving(fault) if view.served else fault
                failure = msgspec.structs.replace(failure, what=f"{failure.what}; {death}")
        view = self._view(id, epoch)
        if view is not None:
            self._fail(view, failure)

    async def _from_log(self, view: ReplicaView, read: Callable[..., Awaitable[T]], *args: int) -> T | None:
        """Returns what its host reads from the log of the replica; None if it does not in time."""
        log_file = str(self._home.log(view.model, view.replica))
        try:
            return await asyncio.wait_for(read(log_file, *args, view.host), LOG_READ_S)
        except Exception:  # neither an unresponsive host nor a log may delay a failure or the release of cores
            log.warning("the log of %s cannot be read", view.id, exc_info=True)
            return None

    def _view(self, id: str, epoch: int) -> ReplicaView | None:
        view = self.state.views.get(id)
        return view if view is not None and view.epoch == epoch else None

    def _apply_status(self, view: ReplicaView, status: ReplicaStatus) -> None:
        view = self._store_view(dataclasses.replace(view, pid=status.pid, started=status.started))
        if view.state is State.PENDING:
            view = self._signal(view, Signal.STARTED)
        if status.phase is Phase.READY and view.state is State.LOADING:
            if view.early is not None:
                return  # its status is applied again when its fetch ends
            load_s = round(self._clock() - view.begun - view.aside(self._clock()), 3)
            self._store_view(dataclasses.replace(view, load_s=load_s, socket=status.address or view.socket))
            self._signal(view, Signal.LOADED)
        elif status.failure is not None and view.state is not State.STOPPING:
            self._fail(view, status.failure)

    def _fail(self, view: ReplicaView, failure: Failure) -> None:
        """Fail a replica; quarantine its cores or stop retries, as the failure's reaction requires."""
        before = self.state.views[view.id]
        if before.state in (State.FAILED, State.STOPPING):
            return  # keep the first cause
        self._counters.failed(before, failure.id)
        if before.cores is not None and failure.reaction in (Reaction.ELSEWHERE, Reaction.QUARANTINE):
            self._counters.quarantined(before.host, "suspect")
        on_failure(self.state, before, failure)
        self._store_view(dataclasses.replace(before, stopped=failure.reaction is Reaction.STOP))
        self._signal(before, Signal.FAILED, str(failure))

    def _signal(self, view: ReplicaView, signal: Signal, reason: str | None = None) -> ReplicaView:
        before = self.state.views[view.id]
        state = advance(before.state, signal)
        if state is before.state:
            return before
        now = self._clock()
        early = before.early if state is State.LOADING else None
        after = dataclasses.replace(
            before,
            state=state,
            since=now,
            reason=reason or before.reason,
            aside_s=before.aside(now) if early is None else before.aside_s,
            fetch=before.fetch if state is State.LOADING else None,
            early=early,
        )
        if state not in STARTING and (preparation := self._preparing.pop(view.id, None)) is not None:
            preparation.cancel()
        if state is State.READY:  # only now the last failure is resolved
            after = dataclasses.replace(after, served=True, log=(), reason=None)
            self.state.compiled_on.add((after.model, after.version, after.host))
            self._counters.loaded(after)
            self.state.records.event("info", "Ready", f"after {after.load_s or 0:.1f} s", view=after)
        elif state is State.FAILED:
            settled = before.state in (State.READY, State.DRAINING) and now - before.since >= SETTLED_S
            after = dataclasses.replace(after, failures=0 if settled else before.failures + 1, **_NO_WORK)
            pause = f"; the next start is in {after.pause_s:.0f} s" if after.pause_s else ""
            if after.stopped:
                pause = f"; it is not retried before an apply or corewright rollout restart {after.model}"
            self.state.records.event("error", "Failed", f"{reason or 'no reason'}{pause}", view=after)
        elif state is State.DRAINING:
            self.state.records.event("info", "Draining", "its requests may finish, new ones go elsewhere", view=after)
        log.info("%s: %s -> %s%s", view.id, before.state.value, state.value, f" ({reason})" if reason else "")
        self._wake.set()
        return self._store_view(after)

    def _store_view(self, view: ReplicaView) -> ReplicaView:
        self.state.views[view.id] = view
        return view

    async def _drain(self, view: ReplicaView) -> None:
        await self.state.records.durable()
        await self.publish()  # remove it from the routes first
        await self._wait_drained(actor_name(view.model, view.replica, view.epoch), view.deadlines.drain_s)
        current = self._view(view.id, view.epoch)
        if current is not None and current.state is State.DRAINING:
            self._signal(current, Signal.STOP, "drained")

    async def _wait_drained(self, name: str, drain_s: float) -> None:
        """Wait up to ``drain_s`` for the replica's live requests to end. The replica's timer includes pauses and this
        one does not, so an interrupted drain is continued."""
        deadline = self._clock() + drain_s
        remaining_s = drain_s
        while not await self._cluster.drain(name, remaining_s) and (remaining_s := deadline - self._clock()) > 0:
            pass

    async def _release(self, view: ReplicaView) -> None:
        try:
            await self.state.records.durable()
            name = actor_name(view.model, view.replica, view.epoch)
            dead = await self._cluster.end(name, view.pid, view.started, view.host)
            if not dead:
                return
            if view.pid is not None:
                self._hosts.note_death(view.pid)
            tail = tuple(await self._from_log(view, self._cluster.log_tail, LOG_LINES) or ())
            current = self._view(view.id, view.epoch)
            if current is not None:
                self._store_view(dataclasses.replace(current, gone=True, log=tail, **_NO_WORK))
            self._wake.set()
        finally:  # the next round retries if it is not gone
            self._releasing.discard(view.id)

    async def _shut_down_replica(self, id: str, drain_s: float) -> None:
        view = self.state.views[id]
        name = actor_name(view.model, view.replica, view.epoch)
        if view.state in (State.READY, State.DRAINING):
            if view.state is State.READY:
                self._signal(view, Signal.DRAIN)
            await self._wait_drained(name, drain_s)
        view = self._signal(self.state.views[id], Signal.STOP, "the fleet shuts down")
        dead = await self._cluster.end(name, view.pid, view.started, view.host)
        log.info("%s: %s", view.id, "gone" if dead else "still alive")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an effect failed; it is retried in the next round", exc_info=error)

    # Queries

    async def publish(self) -> None:
        """Notify waiters if the routes or the status have changed."""
        state = self.state
        serves = any(view.state is State.READY for view in state.views.values())
        self._was_ready |= (state.hold is not None and serves) or all(
            state.ready(model.name) >= min(model.replicas.min, state.counts.desired(model))
            for model in state.current.spec.models
        )
        # The inputs of routes and status: building both each time would cost more than the decisions.
        inputs = (
            list(state.views.values()),
            state.goal,
            dict(state.strategies),
            state.records.state.seq,
            state.lost,
            state.unreachable,
            dict(state.preparing),
            [state.counts.bounds(model) for model in state.current.spec.models],  # schedules change them
            self._was_ready,
            self._closing,
        )
        if inputs != self._published:
            self.status()  # its conditions record since when they hold
            self._published = inputs
            self._version += 1
            async with self._changed:
                self._changed.notify_all()

    async def settled(self) -> None:
        """Wait until the surviving replicas are adopted."""
        await self._settled.wait()

    async def change(self, seen: int, timeout_s: float) -> int:
        """Returns the version of routes and status once it exceeds ``seen``, or after ``timeout_s``.

        Waits for the adoption of surviving replicas: a table without them would close their connections.
        """
        await self._settled.wait()
        async with self._changed:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: self._version > seen), timeout_s)
        return self._version

    def routes(self) -> RouteTable:
        """Returns the route table for the gateways."""
        return route_table(self.state, ready=self._was_ready, closing=self._closing)

    def status(self) -> dict[str, Any]:
        """Returns what `corewright status` shows; docs/cli.md documents its JSON form."""
        return status(
            self.state,
            self._conditions,
            ready=self._was_ready,
            log_of=self._home.log,
            scaling_of=self.scaler.status,
        )

    async def metrics(self) -> list[MetricFamily]:
        """Returns the families for `/metrics`: counters, state of the fleet, replica and device metrics.

        Takes at most ``DEVICES_S``; hosts that do not answer in time are omitted.
        """
        state = self.state
        replicas = {
            (view.model, str(view.replica)): status
            for id, view in state.views.items()
            if not view.gone and (heard := self._statuses.get(id)) is not None
            for epoch, status in [heard]
            if epoch == view.epoch
        }
        families = [
            *self._counters.families(),
            *fleet_families(self.status(), state.views, self._clock()),
            *engine_families(replicas),
            scaling_changes(self.scaler.changes()),
            gauge("corewright_journal_sequence", "Number of the journal's last record.", state.records.state.seq),
        ]
        real = [host.name for host in state.hosts if host.cores and not host.emulated and host.name not in state.lost]
        for devices in await asyncio.gather(*(self._devices(name) for name in real)):
            families += devices
        return joined(families)

    async def _devices(self, host: str) -> list[MetricFamily]:
        try:
            measured = await asyncio.wait_for(self._cluster.device_metrics(host), DEVICES_S)
        except Exception:  # the scrape goes on without them
            log.debug("the device metrics of %s are not available", host, exc_info=True)
            return []
        return [labelled(family, "host", host) for family in measured]


def _with_status(view: ReplicaView, status: ReplicaStatus, now: float) -> ReplicaView:
    """Returns the view updated with the replica's reported work.

    The replica's clock includes pauses, so durations grow by at most the time since its last report.
    """
    passed = max(0.0, now - view.heard)
    return dataclasses.replace(
        view,
        heard=now,
        live=status.live,
        waiting=status.waiting,
        idle_s=status.idle_s,
        step_s=min(status.step_s, view.step_s + passed),
        compile_s=min(status.compile_s, view.compile_s + passed),
        drafted=status.drafted,
        accepted=status.accepted,
    )
