"""The replicas of one controller: applies reports and signals to their views in the state."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from orchestrator.control.controller_metrics import ControllerCounters
from orchestrator.control.decisions.replica_view import SETTLED_S, ReplicaView
from orchestrator.control.fleet_state import FleetState
from orchestrator.control.host_conditions import quarantine_cores
from orchestrator.control.start_times import record_ready
from orchestrator.messages.replica_states import ENDING, STARTING, Signal, State, advance
from orchestrator.messages.route_table import remote_address
from workers.compiled.host_sets import compiles
from workers.host.start_phases import phases_of
from workers.messages.status import Failure, Phase, Reaction, ReplicaStatus

log = logging.getLogger(__name__)


class Turn(Enum):
    """What a replica's coroutine has to do next."""

    DRAIN = auto()  # let its live requests end
    END = auto()  # cancel its preparation; its process is killed at RELEASE
    RELEASE = auto()  # have its host confirm that the process is dead


class Superseded(Exception):
    """The start is over: a signal has ended it, or the next one has begun."""


@dataclass(eq=False)
class ReplicaStart:
    """One start of a replica. Its coroutine reads ``turns`` (`replica_life.py`)."""

    id: str
    epoch: int
    turns: asyncio.Queue[Turn] = field(default_factory=asyncio.Queue)
    status: ReplicaStatus | None = None  # the last report
    living: asyncio.Task[None] | None = None  # its coroutine
    preparing: asyncio.Task[None] | None = None  # makes its host ready
    process: asyncio.Task[None] | None = None  # starts and watches its process
    releasing: bool = False


class ReplicaTable:
    """The views of all replicas, and the last start of each. Used from one event loop.

    A signal changes the view at once, by the table of `replica_states`; its effects follow in the start's coroutine.
    """

    def __init__(self, state: FleetState, counters: ControllerCounters, wake: Callable[[], None]) -> None:
        """``wake`` requests a round."""
        self.state = state
        self._counters = counters
        self.wake = wake
        self.starts: dict[str, ReplicaStart] = {}

    def view(self, start: ReplicaStart) -> ReplicaView | None:
        """Returns the replica; None if this start of it is over."""
        view = self.state.views.get(start.id)
        return view if view is not None and view.epoch == start.epoch else None

    def starting(self, start: ReplicaStart) -> ReplicaView:
        """Returns the replica, which is not ready yet. Raises Superseded."""
        view = self.view(start)
        if view is None or view.state not in STARTING:
            raise Superseded
        return view

    def store(self, view: ReplicaView) -> ReplicaView:
        self.state.views[view.id] = view
        return view

    def forget(self, id: str) -> None:
        """Remove a replica that is gone and no longer planned."""
        del self.state.views[id]
        self.starts.pop(id, None)
        self.state.configs.pop(id, None)
        self.wake()

    def reset_failures(self) -> None:
        """Forget failed starts, so that they are tried again at once."""
        for view in list(self.state.views.values()):
            self.store(dataclasses.replace(view, failures=0, stopped=False))

    def status(self, view: ReplicaView) -> ReplicaStatus | None:
        """Returns the last status of this start of the replica."""
        start = self.starts.get(view.id)
        return start.status if start is not None and start.epoch == view.epoch else None

    def report(self, start: ReplicaStart, view: ReplicaView, status: ReplicaStatus, *, new: bool) -> None:
        """Apply a status of the replica; ``new``: its phase or its process has changed."""
        start.status = status
        if view.state is not State.FAILED:  # its reports no longer apply
            queued = view.server is not None and view.server.queues
            view = view.after(status, self.state.clock())
            self.state.views.refresh(view)
            if not queued and view.server is not None and view.server.queues:
                message = f"its server queues {view.server.waiting} requests although slots are free: "
                message += "its KV cache is too small; lower max_batch or max_len"
                self.state.records.event("warning", "ServerQueues", message, view=view)
        if view.step_s > view.deadlines.step_s:
            self.wake()
        if new:
            self._apply(view, status)

    def _apply(self, view: ReplicaView, status: ReplicaStatus) -> None:
        view = self.store(dataclasses.replace(view, pid=status.pid, started=status.started))
        if view.state is State.PENDING:
            view = self.signal(view, Signal.STARTED)
        if status.phase is Phase.READY and view.state is State.LOADING:
            if view.early is not None:
                return  # its status is applied again when its fetch ends
            now = self.state.clock()
            load_s = round(now - view.begun - view.aside(now), 3)
            socket = self.state.configs[view.id].run.socket
            phases = phases_of(load_s, status.load_phases)
            remote = remote_address(status)
            self.state.pins.pin_contents(self.state.configs[view.id], status.contents)
            self.store(dataclasses.replace(view, load_s=load_s, load_phases=phases, socket=socket, remote=remote))
            self.signal(view, Signal.LOADED)
        elif status.failure is not None and view.state is not State.STOPPING:
            self.fail(view, status.failure)

    def end_early_start(self, start: ReplicaStart, view: ReplicaView) -> None:
        """Note the end of the fetch that the replica's process waits for, and apply the status that was held back."""
        aside_s = view.aside(self.state.clock())
        view = self.store(dataclasses.replace(view, aside_s=aside_s, fetch=None, early=None))
        if start.status is not None:
            self._apply(view, start.status)
        self.wake()

    def fail(self, view: ReplicaView, failure: Failure) -> None:
        """Fail a replica; quarantine its cores or stop retries, as the failure's reaction requires. Cores that the
        runtime refuses are first retried."""
        before = self.state.views[view.id]
        if before.state in ENDING:
            return  # keep the first cause
        self._counters.failed(before, failure.id)
        refusals = before.refusals_after(failure)
        if not refusals and quarantine_cores(self.state, before, failure):
            self._counters.quarantined(before.host, "suspect")
        self.store(dataclasses.replace(before, stopped=failure.reaction is Reaction.STOP))
        self.signal(before, Signal.FAILED, str(failure), refusals)

    def signal(self, view: ReplicaView, signal: Signal, reason: str | None = None, refusals: int = 0) -> ReplicaView:
        """Move the replica to its next state. ``refusals``: with FAILED, those of its cores, this one included. Raises
        IllegalTransition."""
        before = self.state.views[view.id]
        state = advance(before.state, signal)
        if state is before.state:
            return before
        now = self.state.clock()
        early = before.early if state is State.LOADING else None
        after = dataclasses.replace(
            before,
            state=state,
            since=now,
            reason=reason or before.reason,
            aside_s=before.aside(now) if early is None else before.aside_s,
            fetch=before.fetch if state is State.LOADING else None,
            early=early,
            ahead_s=before.ahead_s + (now - before.since if before.state is State.COMPILING else 0.0),
        )
        if state in ENDING and (start := self.starts.get(before.id)) is not None:
            start.turns.put_nowait(Turn.END)
        if state is State.READY:  # only now the last failure is resolved
            needed = after.compile_s > 0 or after.ahead_s > 0
            compiled = needed if compiles(self.state.configs[after.id]) else None
            after = dataclasses.replace(after, served=True, log=(), reason=None, compiled=compiled)
            self.state.compiled_on.add((after.model, after.version, after.host))
            self._counters.loaded(after)
            record_ready(self.state, after)
            self.state.records.event("info", "Ready", f"after {after.load_s or 0:.1f} s", view=after)
        elif state is State.FAILED:
            settled = before.state in (State.READY, State.DRAINING) and now - before.since >= SETTLED_S
            failures = 0 if settled else before.failures + (not refusals)
            after = dataclasses.replace(after.without_work(), failures=failures, refusals=refusals)
            pause = f"; the next start is in {after.pause_s:.0f} s" if after.pause_s else ""
            if after.stopped:
                pause = f"; it is not retried before an apply or corewright rollout restart {after.model}"
            self.state.records.event("error", "Failed", f"{reason or 'no reason'}{pause}", view=after)
        elif state is State.DRAINING:
            self.state.records.event("info", "Draining", "its requests may finish, new ones go elsewhere", view=after)
        log.info("%s: %s -> %s%s", view.id, before.state.value, state.value, f" ({reason})" if reason else "")
        self.wake()
        return self.store(after)
