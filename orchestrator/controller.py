"""The loop that owns a fleet's state: observe, plan, reconcile, apply. No Ray in here: its effects are a Protocol.

Everything runs on one event loop and nothing else writes the state, so there are no locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from orchestrator.effects import Cluster, ReplicaDied, actor_name
from orchestrator.fleet import FleetSettings
from orchestrator.home import Home
from orchestrator.lifecycle import ModelState, Signal, State, advance, model_state
from orchestrator.reconcile import Action, Drain, Fail, Forget, Release, Start, Stop, reconcile
from orchestrator.routes import ModelRoutes, Route, RouteTable
from orchestrator.snapshot import Observed, ReplicaView
from orchestrator.sources import read_facts
from placements.cores import CoreRange
from placements.engines import resolve
from placements.hosts import Machine, hosts_for
from placements.parse import parse
from placements.plan import Placement, Plan, Running, plan
from placements.spec import ModelSpec, Spec
from placements.topology import Host
from workers.config import ReplicaConfig
from workers.status import Phase, ReplicaStatus

log = logging.getLogger(__name__)

TICK_S = 1.0  # how often the world is read again when nothing happens
LOG_LINES = 8


class Controller:
    """One fleet. ``run`` is the loop; everything else may be called while it runs, on the same event loop."""

    def __init__(self, settings: FleetSettings, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ValueError when the spec has errors: `up` has checked it before."""
        parsed = parse(settings.spec_text, settings.spec_file, settings.base_dir)
        if parsed.spec is None:
            raise ValueError(f"{settings.spec_file} has errors")
        self.settings = settings
        self.spec: Spec = parsed.spec
        self.hosts: tuple[Host, ...] = hosts_for(self.spec, Machine(settings.cpus, settings.instance))
        self._checkpoints = read_facts(self.spec).checkpoints
        self._cluster = cluster
        self._clock = clock
        self._home = Home(Path(settings.home))
        self._views: dict[str, ReplicaView] = {}
        self._epochs: dict[str, int] = {}  # the last epoch of each replica that ever was
        self._wanted: dict[str, int] = {model.name: model.replicas.min for model in self.spec.models}
        self._quarantined: dict[str, dict[int, int | None]] = {host.name: {} for host in self.hosts}
        self._plan = Plan((), (), ())
        self._busy: set[str] = set()  # replicas with an effect under way
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()
        self._version = 1
        self._picture: tuple[RouteTable, dict[str, Any]] | None = None
        self._was_ready = False
        self._closing = False
        self._settled = asyncio.Event()  # what lived before is known: only then may anyone ask

    # The loop

    async def run(self) -> None:
        """Until ``shutdown``."""
        await self._adopt()
        await self._round()
        self._settled.set()
        while not self._closing:
            self._wake.clear()
            try:
                await self._round()
            except Exception:  # whatever it was: the next round reads the world again, and the fleet goes on serving
                log.exception("a round failed")
            tick = asyncio.get_running_loop().call_later(TICK_S, self._wake.set)
            await self._wake.wait()  # not by wait_for, which before Python 3.12 can swallow a cancellation
            tick.cancel()

    async def _round(self) -> None:
        await self._observe_claims()
        if self._closing:
            return
        self._plan = self._make_plan()
        observed = Observed(self._clock(), dict(self._views))
        for action in reconcile(self._plan.placements, observed, self.settings.start_deadline_s):
            self._apply(action)
        await self._publish()

    async def shutdown(self, drain_s: float) -> None:
        """Drain every replica for at most ``drain_s``, end it, and see its process dead."""
        self._closing = True
        self._wake.set()
        await self._publish()
        ended = await asyncio.gather(*(self._take_down(id, drain_s) for id in self._views), return_exceptions=True)
        for error in ended:
            if error is not None:
                log.error("a replica did not end in order", exc_info=error)

    async def wake(self, model: str) -> None:
        """A request came for a model without replicas (`min: 0`): start one. Raises KeyError for an unknown model."""
        if self._wanted[model] == 0:
            log.info("%s: the first request starts it", model)
            self._wanted[model] = 1
            self._wake.set()

    async def _adopt(self) -> None:
        survivors, lost = await self._cluster.survivors()
        self._epochs.update(lost)
        for survivor in survivors:
            config, status = survivor.config, survivor.status
            id = f"{config.model}/{config.replica}"
            cores = CoreRange(config.cores[0], config.cores[-1]) if config.cores else None
            state = {Phase.READY: State.READY, Phase.DRAINING: State.DRAINING}.get(status.phase, State.LOADING)
            self._views[id] = ReplicaView(
                model=config.model,
                replica=config.replica,
                epoch=config.epoch,
                host=config.host,
                cores=cores,
                state=state,
                since=self._clock(),
                pid=status.pid,
                started=status.started,
                socket=config.socket,
            )
            self._epochs[id] = config.epoch
            if config.model in self._wanted:
                self._wanted[config.model] = max(self._wanted[config.model], config.replica + 1)
            log.info("%s: adopted, epoch %d, pid %d", id, config.epoch, status.pid)
            if state is State.DRAINING:
                self._spawn(self._drain(self._views[id]))
            self._spawn(self._follow(id, config.epoch))

    async def _observe_claims(self) -> None:
        """Cores that a process holds which is none of ours are quarantined for as long as it holds them."""
        for index, host in enumerate(self.hosts):
            if not host.emulated:
                continue
            held = await self._cluster.held_cores(str(self._home.claims(index)))
            mine = [view for view in self._views.values() if view.host == host.name]
            ours = {view.pid for view in mine}
            # a replica may hold its cores before it could tell its pid
            starting = {core for view in mine if view.pid is None and not view.gone for core in view.cores or ()}
            self._quarantined[host.name] = {
                core: pid for core, pid in held.items() if pid not in ours and core not in starting
            }

    def _make_plan(self) -> Plan:
        running = [
            Running(view.model, view.replica, view.host, view.cores)
            for view in self._views.values()
            if view.state not in (State.DRAINING, State.STOPPING)
            and view.model in self._wanted
            and not (view.state is State.FAILED and self._is_quarantined(view))  # it had better go elsewhere
        ]
        blocked = {host: frozenset(cores) for host, cores in self._quarantined.items() if cores}
        return plan(self.spec, self.hosts, self._checkpoints, running, self._wanted, blocked)

    def _is_quarantined(self, view: ReplicaView) -> bool:
        return any(core in self._quarantined[view.host] for core in view.cores or ())

    def _apply(self, action: Action) -> None:
        if isinstance(action, Start):
            self._start(action.placement, action.previous)
        elif isinstance(action, Drain):
            self._signal(action.replica, Signal.DRAIN)
            self._spawn(self._drain(action.replica))
        elif isinstance(action, Stop):
            self._signal(action.replica, Signal.STOP, action.reason)
        elif isinstance(action, Fail):
            self._signal(action.replica, Signal.FAILED, action.reason)
        elif isinstance(action, Release):
            if action.replica.id not in self._busy:
                self._busy.add(action.replica.id)
                self._spawn(self._release(action.replica))
        elif isinstance(action, Forget):
            del self._views[action.replica.id]

    # Effects

    def _start(self, placement: Placement, previous: ReplicaView | None) -> None:
        id = f"{placement.model}/{placement.replica}"
        epoch = self._epochs.get(id, 0) + 1
        self._epochs[id] = epoch
        config = self._config(placement, epoch)
        self._views[id] = ReplicaView(
            model=placement.model,
            replica=placement.replica,
            epoch=epoch,
            host=placement.host,
            cores=placement.cores,
            state=State.PENDING,
            since=self._clock(),
            socket=config.socket,
            restarts=0 if previous is None else previous.restarts + 1,
            failures=0 if previous is None else previous.failures,
            reason=None if previous is None else previous.reason,
            log=() if previous is None else previous.log,
        )
        log.info("%s: start, epoch %d, cores %s", id, epoch, placement.cores)
        self._spawn(self._start_and_follow(id, config))

    def _config(self, placement: Placement, epoch: int) -> ReplicaConfig:
        number, model = next((i, model) for i, model in enumerate(self.spec.models) if model.name == placement.model)
        index, host = next((i, host) for i, host in enumerate(self.hosts) if host.name == placement.host)
        engine = resolve(model.engine, host)
        socket = self._home.sockets / f"{number}-{placement.replica}.{epoch}"  # short: names may be long
        return ReplicaConfig(
            model=model.name,
            replica=placement.replica,
            epoch=epoch,
            host=placement.host,
            engine=engine,
            source=None if engine == "echo" else _folder(model),
            dtype=model.dtype_on(engine),
            slots=model.max_batch,
            max_len=model.length(self._checkpoints.get(model.name)),
            cores=[] if placement.cores is None else list(placement.cores),
            claims=str(self._home.claims(index)) if host.emulated else None,
            env=dict(placement.env),
            log=str(self._home.log(model.name, placement.replica)),
            socket=str(socket),
            token=self.settings.token,
            engine_options=dict(model.engine_options),
            draft_source=model.draft_path,
            draft_k=0 if model.draft is None else model.draft.k,
        )

    async def _start_and_follow(self, id: str, config: ReplicaConfig) -> None:
        try:
            await self._cluster.start(config)
        except Exception as error:
            log.exception("%s cannot be started", id)
            self._signal(self._views[id], Signal.FAILED, f"start-failed: {type(error).__name__}: {error}")
        else:
            await self._follow(id, config.epoch)

    async def _follow(self, id: str, epoch: int) -> None:
        """Turn what a replica tells of itself into signals, until it is over."""
        seen = 0
        while (view := self._views.get(id)) is not None and view.epoch == epoch and view.state is not State.STOPPING:
            try:
                status = await self._cluster.watch(actor_name(view.model, view.replica, epoch), seen)
            except ReplicaDied as death:
                view = self._views.get(id)
                if view is not None and view.epoch == epoch:
                    self._signal(view, Signal.FAILED, f"replica-died: {death}")
                return
            view = self._views.get(id)
            if view is None or view.epoch != epoch:
                return
            view = self._put(dataclasses.replace(view, drafted=status.drafted, accepted=status.accepted))
            if status.version > seen:
                seen = status.version
                self._hear(view, status)
            if status.phase is Phase.FAILED:
                return

    def _hear(self, view: ReplicaView, status: ReplicaStatus) -> None:
        view = self._put(dataclasses.replace(view, pid=status.pid, started=status.started))
        if view.state is State.PENDING:
            view = self._signal(view, Signal.STARTED)
        if status.phase is Phase.READY and view.state is State.LOADING:
            self._signal(view, Signal.LOADED)
        elif status.failure is not None and view.state is not State.STOPPING:
            failure = status.failure
            hint = f" ({failure.hint})" if failure.hint else ""
            self._signal(view, Signal.FAILED, f"{failure.id}: {failure.what}{hint}")

    def _signal(self, view: ReplicaView, signal: Signal, reason: str | None = None) -> ReplicaView:
        before = self._views[view.id]
        state = advance(before.state, signal)
        if state is before.state:
            return before
        after = dataclasses.replace(before, state=state, since=self._clock(), reason=reason or before.reason)
        if state is State.READY:  # only now is the last failure over
            after = dataclasses.replace(after, failures=0, log=(), reason=None)
        elif state is State.FAILED and before.state in (State.PENDING, State.LOADING):
            after = dataclasses.replace(after, failures=before.failures + 1)
        log.info("%s: %s -> %s%s", view.id, before.state.value, state.value, f" ({reason})" if reason else "")
        self._wake.set()
        return self._put(after)

    def _put(self, view: ReplicaView) -> ReplicaView:
        self._views[view.id] = view
        return view

    async def _drain(self, view: ReplicaView) -> None:
        await self._publish()  # out of the routes first
        await self._cluster.drain(actor_name(view.model, view.replica, view.epoch), self.settings.drain_s)
        current = self._views.get(view.id)
        if current is not None and current.epoch == view.epoch and current.state is State.DRAINING:
            self._signal(current, Signal.STOP, "drained")

    async def _release(self, view: ReplicaView) -> None:
        try:
            gone = await self._cluster.end(actor_name(view.model, view.replica, view.epoch), view.pid, view.started)
            tail = await self._cluster.log_tail(str(self._home.log(view.model, view.replica)), LOG_LINES)
            current = self._views.get(view.id)
            if gone and current is not None and current.epoch == view.epoch:
                self._put(dataclasses.replace(current, gone=True, log=tuple(tail)))
        finally:
            self._busy.discard(view.id)
            self._wake.set()

    async def _take_down(self, id: str, drain_s: float) -> None:
        view = self._views[id]
        name = actor_name(view.model, view.replica, view.epoch)
        if view.state is State.READY:
            self._signal(view, Signal.DRAIN)
            await self._cluster.drain(name, drain_s)
        view = self._signal(self._views[id], Signal.STOP, "the fleet ends")
        gone = await self._cluster.end(name, view.pid, view.started)
        log.info("%s: %s", view.id, "gone" if gone else "still alive")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an effect failed; the next round tries again", exc_info=error)

    # What others ask

    async def _publish(self) -> None:
        """Tell those who wait when the routes or the status have changed."""
        self._was_ready = self._was_ready or all(
            self._ready(model.name) >= model.replicas.min for model in self.spec.models
        )
        picture = (self.routes(), self.status())
        if picture != self._picture:
            self._picture = picture
            self._version += 1
            async with self._changed:
                self._changed.notify_all()

    async def change(self, seen: int, timeout_s: float) -> int:
        """The version of the routes and the status, as soon as it is above ``seen``; after ``timeout_s`` as it is.

        Not before the living replicas are adopted: a table without them would end their links.
        """
        await self._settled.wait()
        async with self._changed:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: self._version > seen), timeout_s)
        return self._version

    def routes(self) -> RouteTable:
        """For the gateway."""
        return RouteTable(
            ready=self._was_ready,
            stopping=self._closing,
            token=self.settings.token,
            models=[self._model_routes(model) for model in self.spec.models],
        )

    def _model_routes(self, model: ModelSpec) -> ModelRoutes:
        engine = resolve(model.engine, self.hosts[0])
        state, reason = self._state_of(model.name)
        return ModelRoutes(
            name=model.name,
            state=state,
            reason=reason,
            engine=engine,
            source=None if engine == "echo" else _folder(model),
            max_len=model.length(self._checkpoints.get(model.name)),
            max_queue=model.max_queue,
            holds=model.replicas.min == 0,
            replicas=[
                Route(view.id, view.epoch, view.socket)
                for view in self._replicas_of(model.name)
                if view.state is State.READY and view.socket is not None and not self._closing
            ],
        )

    def status(self) -> dict[str, Any]:
        """What `corewright status` shows; its JSON form is documented in docs/cli.md."""
        return {
            "name": self.spec.name,
            "ready": self._was_ready,
            "models": [self._model_status(model.name) for model in self.spec.models],
            "hosts": [self._host_status(host) for host in self.hosts],
        }

    def _model_status(self, name: str) -> dict[str, Any]:
        state, reason = self._state_of(name)
        return {
            "name": name,
            "state": state.value,
            "reason": reason,
            "wanted": self._wanted[name],
            "replicas": [
                {
                    "id": view.id,
                    "host": view.host,
                    "cores": None if view.cores is None else str(view.cores),
                    "state": view.state.value,
                    "pid": None if view.gone else view.pid,
                    "restarts": view.restarts,
                    "reason": view.reason,
                    "failures": view.failures,
                    "pause_s": view.pause_s if view.state is State.FAILED else None,
                    "speculation": _speculation(view),
                    "log": list(view.log),
                    "log_file": str(self._home.log(view.model, view.replica)),
                }
                for view in self._replicas_of(name)
            ],
        }

    def _host_status(self, host: Host) -> dict[str, Any]:
        leases = {
            view.id: view.cores
            for view in self._views.values()
            if view.host == host.name and view.cores is not None and not view.gone
        }
        leased = sum(len(cores) for cores in leases.values())
        taken = {core for cores in leases.values() for core in cores}
        quarantined = set(self._quarantined[host.name]) - taken
        reserved = set(host.reserved_cores) - taken - quarantined
        free = set(range(host.cores)) - taken - quarantined - reserved
        if leased + len(free) + len(quarantined) + len(reserved) != host.cores:
            log.error("%s: cores do not add up: %s leased, %s free", host.name, leases, sorted(free))
        return {
            "name": host.name,
            "instance": None if host.topology is None else host.topology.instance,
            "emulated": host.emulated,
            "cores": host.cores,
            "leased": leased,
            "free": len(free),
            "quarantined": len(quarantined),
            "reserved": len(reserved),
            "leases": [{"replica": id, "cores": str(cores)} for id, cores in sorted(leases.items())],
        }

    def _state_of(self, name: str) -> tuple[ModelState, str | None]:
        views = self._replicas_of(name)
        state = model_state(self._wanted[name], (view.outlook for view in views))
        reasons = [view.reason for view in views if view.state is not State.READY and view.reason is not None]
        reasons += [
            problem.what for missing in self._plan.unplaced if missing.model == name for problem in missing.problems
        ]
        if reasons and not views:
            state = ModelState.FAILED  # it has no place
        return state, reasons[0] if reasons and state is not ModelState.READY else None

    def _ready(self, name: str) -> int:
        return sum(view.state is State.READY for view in self._replicas_of(name))

    def _replicas_of(self, name: str) -> list[ReplicaView]:
        return sorted((view for view in self._views.values() if view.model == name), key=lambda view: view.replica)


def _speculation(view: ReplicaView) -> dict[str, float] | None:
    """How many tokens were drafted, and how many of them the model agreed with; None where none is drafted."""
    if not view.drafted:
        return None
    return {
        "drafted": view.drafted,
        "accepted": view.accepted,
        "acceptance": round(view.accepted / view.drafted, 3),
    }


def _folder(model: ModelSpec) -> str:
    if model.source_path is None:
        raise ValueError(f"{model.name}: {model.source!r} is not a folder, and this version fetches nothing")
    return model.source_path
