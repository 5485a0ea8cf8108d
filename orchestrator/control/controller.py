"""The control loop of a fleet: observe, compute the desired state, reconcile, apply. Independent of Ray.

Its effects are a Protocol (`effects.ClusterClient`), its state is one object (`FleetState`). Only one event loop writes
the state, so it needs no thread locks; `FleetState.deciding` keeps an operation and a round from deciding at once.
Blocking work runs in threads and returns a value.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec.structs

from orchestrator.control.adapter_updates import AdapterUpdates
from orchestrator.control.controller_metrics import ControllerCounters, engine_families, fleet_families, scaling_changes
from orchestrator.control.decisions.departures import replicas_to_end
from orchestrator.control.decisions.reconcile import Action, Drain, Fail, Forget, Release, Start, Stop, reconcile
from orchestrator.control.decisions.replica_view import Observed, ReplicaView
from orchestrator.control.effects import ClusterClient
from orchestrator.control.fleet_goal import update_goal
from orchestrator.control.fleet_state import FleetState
from orchestrator.control.gateway_reports import LiveRequests, LoadHistory
from orchestrator.control.gateways import Gateways
from orchestrator.control.host_conditions import hosts_leaving, replicas_replaced
from orchestrator.control.host_requests import HostRequests
from orchestrator.control.host_status import host_statuses
from orchestrator.control.host_watch import HostWatch
from orchestrator.control.replica_life import ReplicaLives
from orchestrator.control.replica_table import ReplicaTable
from orchestrator.control.rollout_progress import follow_rollout, roll_back, rollout_state
from orchestrator.control.scaling_loop import Scaler
from orchestrator.control.speed_measurement import SpeedMeasurement
from orchestrator.control.stand_by import StandBy
from orchestrator.control.status import Conditions, record_conditions, route_table, status
from orchestrator.control.update_preparations import UpdatePreparations
from orchestrator.messages.fleet_status import FleetStatus
from orchestrator.messages.replica_states import Signal, State
from orchestrator.messages.route_table import RouteTable
from orchestrator.process.home import Home
from orchestrator.scaling.demand_report import DemandReply, DemandReport
from workers.host.task_boundary import task_boundary
from workers.messages.metric_family import MetricFamily, gauge, joined, labelled

log = logging.getLogger(__name__)

TICK_S = 1.0  # interval between rounds without events
SOONEST_S = 0.05  # shortest interval between two timed rounds
DEVICES_S = 0.5  # deadline of a host's device metrics, while a scrape waits


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
        self._cluster = cluster
        self._clock = state.clock
        self._resumed = resumed
        self._resumed_at = resumed()
        self._tick_s = tick_s
        self._home = home = Home(Path(settings.home))
        self.speeds = SpeedMeasurement(state, home.speeds)
        self.scaler = Scaler(state, self.speeds.add)
        self._conditions = Conditions(state.wall)
        self._counters = counters = ControllerCounters()
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()
        self._version = 1
        self._routes_version = 1
        self._routes: RouteTable | None = None  # as last published
        self._published: tuple[Any, ...] = ()  # the inputs of routes and conditions at the last notification
        self._refreshes = 0  # reports of replicas by then
        self._was_ready = False
        self._closing = False
        self._settled = asyncio.Event()  # set once surviving replicas are adopted
        self.hosts = hosts = HostWatch(state, cluster, home, counters)
        self.table = table = ReplicaTable(state, counters, self.wake_up)
        self.replicas = ReplicaLives(state, cluster, home, hosts, table, self.publish)
        self.preparations = UpdatePreparations(state, cluster, home, hosts, self.wake_up)
        self.adapters = AdapterUpdates(state, cluster, self.wake_up)
        self.gateways = gateways = Gateways(state, cluster)
        self.load = LoadHistory(state.clock, state.wall)
        self.live_requests = LiveRequests(state.clock)
        self.standby = StandBy(state, cluster)
        self.requests = HostRequests(state, cluster, counters, gateways)

    # The loop

    async def run(self) -> None:
        """Run until ``shutdown``."""
        survivors, lost = await self._cluster.survivors()
        self.state.reserve_epochs(lost)
        for survivor in survivors:
            self.replicas.adopt(survivor)
        await update_goal(self.state)
        await self.publish()
        self._settled.set()
        while not self._closing:
            self._wake.clear()
            began = self._clock()
            # the next round observes everything again, and the fleet keeps serving
            with task_boundary(
                log, "the control loop failed; it is retried in the next round", on_error=self._counters.failed_round
            ):
                await self._round()
            self._counters.round(self._clock() - began)
            due_s = self.scaler.due_in() if self.state.hold is None else None
            interval_s = self._tick_s if due_s is None else max(SOONEST_S, min(due_s, self._tick_s))
            tick = asyncio.get_running_loop().call_later(interval_s, self._wake.set)
            await self._wake.wait()  # not by wait_for, which before Python 3.12 can swallow a cancellation
            tick.cancel()

    async def _round(self) -> None:
        await asyncio.gather(self.hosts.update(), self.hosts.update_held_sources(), self.hosts.update_notices())
        if self._closing:
            return
        state = self.state
        await state.records.verify()
        self._report_reach()
        self.load.round()
        self.gateways.round()
        self.replicas.resume()
        async with state.deciding:
            if state.hold is None:
                await self._decide()
            else:
                await update_goal(state)
        self.standby.round()
        await state.records.durable()
        await self.publish()
        await self.speeds.round()

    async def _decide(self) -> None:
        """Compute the desired state and start the actions that lead to it."""
        state = self.state
        # the numbers of replicas stay, and repairs continue
        with task_boundary(
            log, "autoscaling failed; it is retried in the next round", on_error=self._counters.failed_round
        ):
            self.scaler.round()
        goal = await update_goal(state)
        rollback = follow_rollout(state)
        self._counters.rollout(state.current.number, rollout_state(state)[0])
        if rollback is not None:
            await roll_back(state, rollback)
            goal = await update_goal(state)
        if self._closing:
            return
        stop_at = {name: host.stop_at for name, host in hosts_leaving(state).items() if name not in state.lost}
        observed = Observed(self._clock(), dict(state.views), self._resumed(), stop_at)
        if observed.resumed != self._resumed_at:
            self._resumed_at = observed.resumed
            message = "the controller was not scheduled for a while; deadlines do not count that time"
            state.records.event("warning", "Paused", message)
        for action in reconcile(goal.targets, observed, replicas_replaced(state)):
            self._apply(action)
        self.preparations.round()
        self.adapters.round()
        await self.requests.round()

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

    def wake_up(self) -> None:
        """Start the next round now."""
        self._wake.set()

    async def shutdown(self, drain_s: float) -> None:
        """Drain every replica for at most ``drain_s``, stop it, and confirm that its process is dead."""
        self._closing = True
        self._wake.set()
        await self.publish()
        self.hosts.stop()
        self.preparations.stop()
        self.adapters.stop()
        self.requests.stop()
        self.standby.stop()
        self.gateways.stop()
        ended = await asyncio.gather(
            *(self.replicas.shut_down(id, drain_s) for id in self.state.views), return_exceptions=True
        )
        for error in ended:
            if error is not None:
                log.error("a replica did not stop cleanly", exc_info=error)
        await self.speeds.round(last=True)
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

    async def demand(self, report: DemandReport) -> DemandReply:
        """Receive the demand that one gateway has counted since its last report."""
        self.state.reach.receive(report.gateway, report.unreachable, self._clock())
        if self.scaler.receive(report):
            self._wake.set()
        self.load.receive(report)
        return msgspec.structs.replace(self.gateways.receive(report), **self.live_requests.receive(report))

    # Actions

    def _apply(self, action: Action) -> None:
        """Record the action and change the state. Its effects on processes wait until the record is on disk. Fetches
        and compilations do not: they can be repeated."""
        match action:
            case Start(target, previous):
                view = self.replicas.start(target, previous)
                self._counters.started(view, again=previous is not None)
            case Drain(replica):
                self._decided("drain", replica, self._why_drained(replica))
                self.replicas.drain(replica)
            case Stop(replica, reason):
                self._decided("stop", replica, reason)
                self.table.signal(replica, Signal.STOP, reason)
            case Fail(replica, reason):
                self._decided("fail", replica, reason)
                self._counters.failed(self.state.views[replica.id], reason.partition(":")[0])
                self.table.signal(replica, Signal.FAILED, reason)
            case Release(replica):
                if self.replicas.release(replica):
                    self._counters.decided("release")
            case Forget(replica):
                self._decided("forget", replica, "gone and no longer planned")
                self.table.forget(replica.id)

    def _why_drained(self, replica: ReplicaView) -> str:
        """Returns the reason of a drain. Records an event if nothing replaces a replica whose host ends."""
        state = self.state
        if not replicas_to_end([replica], hosts_leaving(state), self._clock()):
            return "an update, or no longer planned"
        model = state.current.spec.model(replica.model)
        others = state.ready(replica.model) - 1
        if model is not None and others < state.counts.desired(model):
            message = (
                f"its host ends in {hosts_leaving(state)[replica.host].until - self._clock():.0f} s, and {others} of "
            )
            message += f"{state.counts.desired(model)} replicas serve elsewhere: it is drained"
            state.records.event("warning", "NotMoved", message, view=replica)
        return "its host ends"

    def _decided(self, action: str, replica: ReplicaView, reason: str) -> None:
        self.state.records.decision(action, replica, reason)
        self._counters.decided(action)

    def reset_failures(self) -> None:
        """Forget failed starts and preparations, so that they are tried again at once."""
        state = self.state
        state.preparations = {key: preparation for key, preparation in state.preparations.items() if preparation.done}
        self.table.reset_failures()
        self._wake.set()

    # Queries

    async def publish(self) -> None:
        """Notify waiters if the routes or the status have changed."""
        state = self.state
        if state.hold is not None:
            self._was_ready |= any(view.state is State.READY for view in state.views.values())
        self._was_ready = self._was_ready or all(
            state.ready(model.name) >= min(model.replicas.min, state.counts.desired(model))
            for model in state.current.spec.models
        )
        # The inputs of routes and conditions: building both each time would cost more than the decisions.
        inputs = (
            state.views.changes,
            state.goal,
            state.memory,
            state.records.state.seq,
            state.lost,
            state.unreachable,
            dict(state.preparing),
            [state.counts.bounds(model) for model in state.current.spec.models],  # schedules change them
            self._was_ready,
            self._closing,
            self.gateways.draining(),
        )
        changed = inputs != self._published
        if changed:
            record_conditions(state, self._conditions, ready=self._was_ready)
            self._published = inputs
            if (table := self.routes()) != self._routes:
                self._routes = table
                self._routes_version += 1
        if changed or state.views.refreshes != self._refreshes:  # reports of replicas change the status only
            self._refreshes = state.views.refreshes
            self._version += 1
            async with self._changed:
                self._changed.notify_all()

    async def settled(self) -> None:
        """Wait until the surviving replicas are adopted."""
        await self._settled.wait()

    async def change(self, seen: int, timeout_s: float) -> int:
        """Returns the version of the status once it exceeds ``seen``, or after ``timeout_s``."""
        await self._wait_for(lambda: self._version > seen, timeout_s)
        return self._version

    async def next_routes(self, seen: int, timeout_s: float) -> tuple[int, RouteTable]:
        """Returns the published routes and their version once it exceeds ``seen``, or after ``timeout_s``."""
        await self._wait_for(lambda: self._routes_version > seen, timeout_s)
        assert self._routes is not None  # published before the adoption ends
        return self._routes_version, self._routes

    async def _wait_for(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait for the condition after the adoption of surviving replicas: without them, routes would close their
        connections."""
        await self._settled.wait()
        async with self._changed:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(condition), timeout_s)

    def routes(self) -> RouteTable:
        """Returns the route table for the gateways."""
        draining = self.gateways.draining()
        return route_table(self.state, ready=self._was_ready, closing=self._closing, draining=draining)

    def status(self) -> FleetStatus:
        """Returns the status of the fleet."""
        nodes = {name: report.node for name, report in self.hosts.reports.items()}
        return status(
            self.state,
            self._conditions,
            ready=self._was_ready,
            log_of=self._home.log,
            scaling_of=self.scaler.status,
            gateways=self.gateways.status(),
            hosts=host_statuses(self.state, nodes, self.gateways.requests()),
        )

    async def metrics(self, place: str = "") -> list[MetricFamily]:
        """Returns the families for `/metrics`: counters, state of the fleet, replica and device metrics. None for the
        gateway of the machine ``place`` if another one exports them.

        Takes at most ``DEVICES_S``; hosts that do not answer in time are omitted.
        """
        state = self.state
        if place and place != (self.gateways.exporter or place):
            return []
        replicas = {
            (view.model, str(view.replica)): last
            for view in state.views.values()
            if not view.gone and (last := self.table.status(view)) is not None
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
        measured: list[MetricFamily] = []
        with task_boundary(log, "the device metrics of %s are not available", host, level=logging.DEBUG):
            measured = await asyncio.wait_for(self._cluster.device_metrics(host), DEVICES_S)
        return [labelled(family, "host", host) for family in measured]
