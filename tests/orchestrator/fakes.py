"""A cluster without processes, and an event loop whose clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import itertools
import platform
import sys
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from msgspec import to_builtins as builtin

from orchestrator.api import preview, queries, replicas, revisions, schemas
from orchestrator.api.operation import OperatedFleet
from orchestrator.control.controller import Controller
from orchestrator.control.decisions.replica_view import actor_name
from orchestrator.control.effects import (
    CoreOwner,
    HostLost,
    HostReport,
    LogText,
    Loss,
    ReplicaDied,
    StartStep,
    Survivor,
)
from orchestrator.control.journal.journal import Journal
from orchestrator.control.record_writer import InThread, RecordWriter
from orchestrator.control.resumption import resume_fleet
from orchestrator.messages.controller_settings import ControllerSettings
from orchestrator.messages.fleet_status import FleetStatus, HostInFleet, RolloutReport
from orchestrator.messages.gateway_places import ClusterMachine, GatewayPlace
from orchestrator.process.awake_clock import AwakeClock
from orchestrator.process.home import FleetRecord
from placements.facts.topology import Host, Machine
from workers.artifacts.fetch.artifact_fetcher import FetchedArtifact, WantedArtifact, wanted_by
from workers.artifacts.fetch.progress import FetchStatus
from workers.host.interpreter import Interpreter
from workers.host.lifetime import since_boot
from workers.messages.metric_family import MetricFamily
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, Notice, Phase, Reaction, ReplicaStatus

T = TypeVar("T")
DEADLINE_S = 10.0
SIZE = 100  # bytes of any model
LOOK_S = 0.05  # interval at which a replica checks for missing files
OWN = Interpreter(  # like the fleet's own, with the packages of the cpu engine only
    python=sys.executable,
    version=platform.python_version(),
    ray=version("ray"),
    corewright=version("corewright"),
    folders={"workers": "/w"},
    packages={"torch": "2.13.0", "safetensors": "0.5", "numpy": "2.0"},
)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that never sleeps: when nothing is ready its clock jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._clock_resolution = 1e-6  # seconds; after half a year, a nanosecond is below the precision of floats
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None = None) -> Any:
            if timeout is None:
                raise AssertionError("all tasks wait, and no timer is set")
            self._now += max(0.0, timeout)
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now

    def pause(self, seconds: float) -> None:
        """Advance the clock, as a stopped process would find it."""
        self._now += seconds


def virtually(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on a virtual loop."""
    loop = VirtualLoop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main())
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        asyncio.set_event_loop(None)
        loop.close()


async def _at_once(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Stands for `asyncio.to_thread`, during which the clock would jump. Other tasks run before and after it."""
    await asyncio.sleep(0)
    result = function(*arguments, **named)
    await asyncio.sleep(0)
    return result


@dataclass(eq=False)
class FakeReplica:
    """One start of a replica in the fake cluster."""

    config: ReplicaConfig
    status: ReplicaStatus
    dead: str | None = None
    live: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def report(self, **changes: Any) -> None:
        """Publish a new status to its watchers."""
        async with self.changed:
            values = {name: getattr(self.status, name) for name in self.status.__struct_fields__}
            self.status = ReplicaStatus(**{**values, "version": self.status.version + 1, **changes})
            self.changed.notify_all()

    async def die(self, reason: str) -> None:
        async with self.changed:
            self.dead = self.dead or reason
            self.changed.notify_all()


class FakeCluster:
    """Records every effect. Replicas become ready after ``load_s`` seconds, unless ``loads`` is off or their version is
    in ``broken``.

    ``violations`` lists broken rules: two live replicas on one core, two starts with one name, a start that is not in
    the journal, and a start whose artifacts are not on its host.
    """

    def __init__(self) -> None:
        self.replicas: dict[str, FakeReplica] = {}
        self.started: list[ReplicaConfig] = []
        self.ended: list[str] = []
        self.drained: list[str] = []
        self.loads = True
        self.load_s = 0.0
        self.loads_s: dict[str, float] = {}  # by model, in place of ``load_s``
        self.process_s = 0.0  # from the start of a process until it reads its weights
        self.fetch_s = 0.0  # of a source that the host does not store
        self.reports_progress = False  # of fetches, so that replicas may be started meanwhile
        self.stall_s = 0.0  # before the last bytes of a fetch
        self.tidy_s = 0.0  # after the last bytes of a fetch
        self.broken_fetch: Failure | None = None  # at the end of a fetch
        self.store: dict[str, set[str]] = {}  # by host, the stored contents: SOURCE@CONTENT
        self.contents: dict[str, str] = {}  # by source, its current content; by default "1"
        self.unfetchable: dict[str, Failure] = {}  # by source
        self.fetching: list[tuple[str, str]] = []  # (host, source) of fetches in progress
        self.fetches: list[tuple[str, str]] = []  # of all fetches
        self.stopped_fetches: list[tuple[str, str]] = []
        self.checks: list[str] = []  # versions
        self.check_s = 0.0
        self.local_contents = ""  # of the local folders of all models, as replicas report them
        self.unloadable: dict[str, Failure] = {}  # by version, the outcome of its check
        self.uncompiled: set[str] = set()  # versions that have graphs to compile
        self.compiled_on: dict[str, set[str]] = {}  # by version, the hosts that have compiled or fetched its graphs
        self.compile_s = 0.0
        self.compiles: list[str] = []  # versions
        self.compile_logs: list[str] = []
        self.look_s = 0.0  # of the prediction of graphs to compile
        self.unforeseeable: Failure | None = None
        self.uncompilable: Failure | None = None
        self.drain_s = 0.0
        self.broken: dict[str, Failure] = {}  # by version
        self.bad_adapters: Failure | None = None
        self.held: dict[int, int | None] = {}  # pids by core of the first host
        self.reported_held: set[int] = set()  # the cores of its last report
        self.lost_now: set[str] = set()
        self.host_names: list[str] = []
        self.machine_s = 5.0  # from the request of a machine until it joins
        self.refused_types: dict[str, str] = {}  # why machines are not started, by instance type
        self.requests: dict[str, asyncio.Task[None]] = {}  # of machines, by host
        self.gateways: frozenset[GatewayPlace] = frozenset()
        self.notices: dict[str, Notice] = {}  # by host
        self.standing_by: dict[str, dict[str, str | None]] = {}  # by host: its warm engines
        self.nodes: dict[str, str] = {}  # by host, the id of its Ray node; by default "1"
        self.refuses_start: Exception | None = None
        self.unadoptable: dict[str, int] = {}
        self.interpreters: dict[str | None, Interpreter] = {}  # by path; by default the fleet's own
        self.interpreter_queries: list[str | None] = []
        self.devices: list[MetricFamily] = []  # device metrics of each real host
        self.log_faults: dict[str, Failure] = {}  # by the name of the log
        self.late: asyncio.Event | None = None  # deaths are reported after this
        self.records: RecordWriter | None = None  # of the controller
        self.violations: list[str] = []
        self._pids = itertools.count(1001)
        self._tasks: set[asyncio.Task[None]] = set()

    def living(self) -> list[FakeReplica]:
        return [replica for replica in self.replicas.values() if replica.dead is None]

    async def fetch(
        self, wanted: WantedArtifact, host: str
    ) -> AsyncGenerator[FetchStatus | FetchedArtifact | Failure, None]:
        here, now = self.store.setdefault(host, set()), self.contents.get(wanted.source, "1")
        pinned, moved = wanted.artifact.rpartition("@")[2], 0  # a key is the name of a folder
        content = pinned if f"{wanted.source}@{pinned}" in here else now
        folder = f"/store/{wanted.source}@{content}"
        if f"{wanted.source}@{content}" not in here:
            if wanted.source in self.unfetchable:
                yield self.unfetchable[wanted.source]
                return
            async with aclosing(self._transfer(host, wanted.source, folder)) as statuses:
                async for status in statuses:
                    yield status
            if self.broken_fetch is not None:
                yield self.broken_fetch
                return
            here.add(f"{wanted.source}@{content}")
            moved = SIZE
            if self.tidy_s:
                await asyncio.sleep(self.tidy_s)
        yield FetchedArtifact(folder=folder, artifact=Path(folder).name, bytes=SIZE, moved=moved)

    async def _transfer(self, host: str, source: str, folder: str) -> AsyncGenerator[FetchStatus, None]:
        self.fetches.append((host, source))
        self.fetching.append((host, source))
        whole = False
        try:
            yield FetchStatus(source=source, phase="fetching", done=30, total=SIZE, rate=10.0)
            parts = 100 if self.reports_progress else 1
            for part in range(1, parts):
                await asyncio.sleep(self.fetch_s / parts)
                done = part * SIZE // parts
                yield FetchStatus(
                    source=source, phase="fetching", done=done, total=SIZE, moved=done, rate=10.0, folder=folder
                )
            await asyncio.sleep(self.fetch_s / parts + self.stall_s)
            whole = True
        finally:
            self.fetching.remove((host, source))
            if not whole:
                self.stopped_fetches.append((host, source))

    async def held_sources(self, sources: Collection[str]) -> Mapping[str, frozenset[str]]:
        return {
            host: frozenset(name for content in here if (name := content.rpartition("@")[0]) in sources)
            for host, here in self.store.items()
        }

    async def prepare(self, step: StartStep, config: ReplicaConfig) -> Sequence[str] | Failure:
        if step == "foresee":
            return await self.foresee(config)
        return await (self._check if step == "check" else self._compile)(config) or ()

    async def _check(self, config: ReplicaConfig) -> Failure | None:
        self.checks.append(config.run.version)
        if self.check_s:
            await asyncio.sleep(self.check_s)
        return self.unloadable.get(config.run.version)

    async def foresee(self, config: ReplicaConfig) -> Sequence[str] | Failure:
        if self.look_s:
            await asyncio.sleep(self.look_s)
        if self.unforeseeable is not None:
            return self.unforeseeable
        compiled_on = self.compiled_on.get(config.run.version, set())
        if config.run.version not in self.uncompiled or config.place.host in compiled_on:
            return []
        shared = config.model.neff_cache is not None and compiled_on
        return ["artifacts compiled by another host" if shared else "the model is not compiled as it is now"]

    async def _compile(self, config: ReplicaConfig) -> Failure | None:
        self.compiles.append(config.run.version)
        self.compile_logs.append(config.run.log)
        compiled_on = self.compiled_on.setdefault(config.run.version, set())
        await asyncio.sleep(1.0 if config.model.neff_cache is not None and compiled_on else self.compile_s)
        if self.uncompilable is None:
            compiled_on.add(config.place.host)
        return self.uncompilable

    def _check_loadable(self, config: ReplicaConfig) -> None:
        folders = config.fetched_folders()
        for keys, wanted in wanted_by(config).items():
            arriving = self.reports_progress and (config.place.host, wanted.source) in self.fetching
            if not arriving and not self._holds(config.place.host, folders.get(keys, "")):
                self.violations.append(f"{config.model.name} is started on {config.place.host} without {wanted.source}")

    def _holds(self, host: str, folder: str) -> bool:
        return folder.removeprefix("/store/") in self.store.get(host, set())

    async def start(self, config: ReplicaConfig) -> None:
        if self.refuses_start is not None:
            raise self.refuses_start
        if config.place.host in self.lost_now:
            raise HostLost(config.place.host)
        name = actor_name(config.model.name, config.place.replica, config.run.epoch)
        if name in self.replicas:
            self.violations.append(f"{name} was started twice")
        for other in self.living():
            shared = set(other.config.place.cores) & set(config.place.cores)
            if other.config.place.host == config.place.host and shared:
                self.violations.append(f"{name} takes {sorted(shared)}, which {other.config.model.name} holds")
        if config.place.host.endswith("/0") and (
            foreign := set(config.place.cores) & self.reported_held & set(self.held)
        ):
            self.violations.append(
                f"{name} is started on {sorted(foreign)}, which another process was reported to hold"
            )
        if self.records is not None and self.records.writable:
            epoch = self.records.journal.state().epochs.get(config.id, 0)
            if epoch < config.run.epoch:
                self.violations.append(f"{name} is started before its record is written")
        self._check_loadable(config)
        self.started.append(config)
        pid = next(self._pids)
        status = ReplicaStatus(version=1, phase=Phase.LOADING, pid=pid, started=since_boot())
        self.replicas[name] = replica = FakeReplica(config, status)
        if self.loads:
            task = asyncio.get_running_loop().create_task(self._load(replica))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _load(self, replica: FakeReplica) -> None:
        if self.process_s:
            await asyncio.sleep(self.process_s)
        failure = await self._arrived(replica.config)
        load_s = self.loads_s.get(replica.config.model.name, self.load_s)
        if load_s:
            await asyncio.sleep(load_s)
        failure = failure or self.broken.get(replica.config.run.version)
        if replica.config.run.contents not in ("", self.local_contents):
            failure = Failure("source-changed", "the files have changed", "", Reaction.STOP)
        if replica.dead is None:
            phase = Phase.READY if failure is None else Phase.FAILED
            phases = {"process": self.process_s, "weights": load_s}
            loaded = {"load_s": load_s, "load_phases": phases, "contents": self.local_contents}
            await replica.report(phase=phase, failure=failure, **loaded)

    async def _arrived(self, config: ReplicaConfig) -> Failure | None:
        """Wait for files that are being fetched, as an engine does, and fail when their fetch has ended."""
        silent_s = 0.0
        folders = config.fetched_folders()
        for keys, wanted in wanted_by(config).items():
            while not self._holds(config.place.host, folders.get(keys, "")):
                silent_s = 0.0 if (config.place.host, wanted.source) in self.fetching else silent_s + LOOK_S
                if silent_s > 2.0:
                    return Failure("fetch-ended", f"the fetch of {folders[keys]} has ended")
                await asyncio.sleep(LOOK_S)
        return None

    async def set_adapters(self, config: ReplicaConfig) -> Failure | None:
        self._check_loadable(config)
        if self.bad_adapters is None:
            self.find(config.id).config = config
        return self.bad_adapters

    async def watch(self, name: str, seen: int) -> ReplicaStatus:
        replica = self.replicas[name]
        async with replica.changed:
            await replica.changed.wait_for(lambda: replica.dead is not None or replica.status.version > seen)
        if replica.dead is not None:
            if self.late is not None:
                await self.late.wait()
            raise ReplicaDied(replica.dead)
        return replica.status

    async def drain(self, name: str, timeout_s: float) -> bool:
        self.drained.append(name)
        if self.drain_s:
            await asyncio.sleep(min(self.drain_s, timeout_s))
        return True

    async def end(self, name: str, pid: int | None, started: float | None, host: str | None = None) -> bool:
        self.ended.append(name)
        if name in self.replicas:
            await self.replicas[name].die("killed")
        return True

    async def read_log(
        self, path: str, lines: int, host: str | None = None, offset: int | None = None, *, ended: bool = False
    ) -> LogText:
        text = f"the end of {Path(path).name}\n"
        fault = self.log_faults.get(Path(path).name) if ended else None
        return LogText(text, len(text), fault) if not offset else LogText("", offset)

    async def interpreter(self, python: str | None, host: str | None = None) -> Interpreter:
        self.interpreter_queries.append(python)
        return self.interpreters.get(python, OWN)

    async def held_cores(self, claims: str | None, host: str | None = None) -> dict[int, CoreOwner]:
        if host is not None and not host.endswith("/0"):
            return {}
        self.reported_held = set(self.held)
        return {core: CoreOwner(pid, "another process") for core, pid in self.held.items()}

    async def device_metrics(self, host: str) -> list[MetricFamily]:
        return self.devices

    async def lost_hosts(self) -> Mapping[str, Loss]:
        return dict.fromkeys(self.lost_now, Loss("its Ray node is gone"))

    async def keep_hosts(self, hosts: Collection[str], elastic: Collection[Host]) -> Mapping[str, str]:
        for replica in self.living():
            if replica.config.place.host not in hosts:
                self.violations.append(f"{replica.config.place.host} is given back with {replica.config.model.name}")
        self.lost_now |= set(self.host_names) - set(hosts)
        wanted = {host.name for host in elastic if host.name in self.lost_now}
        for name in self.requests.keys() - wanted:
            self.requests.pop(name).cancel()
        refused = {name for name in wanted if name.rpartition("/")[0] in self.refused_types}
        for name in wanted - self.requests.keys() - refused:
            self.requests[name] = asyncio.get_running_loop().create_task(self._join(name))
        return {instance: self.refused_types[instance] for instance in {name.rpartition("/")[0] for name in refused}}

    async def _join(self, host: str) -> None:
        await asyncio.sleep(self.machine_s)
        self.lost_now.discard(host)
        del self.requests[host]

    def living_machines(self) -> Sequence[ClusterMachine]:
        names = [name for name in self.host_names if name not in self.lost_now]
        return [ClusterMachine(GatewayPlace(f"m-{name}", self.nodes.get(name, "1")), name, name) for name in names]

    async def run_gateways(self, places: Collection[GatewayPlace]) -> Mapping[str, str]:
        self.gateways = frozenset(places)
        return {}

    async def stand_by(self, host: str, engines: Mapping[str, str | None]) -> None:
        if host in self.lost_now:
            raise HostLost(host)
        self.standing_by[host] = dict(engines)

    async def host_reports(self) -> Mapping[str, HostReport]:
        return {
            name: HostReport(self.nodes.get(name, "1"), self.notices.get(name))
            for name in self.host_names
            if name not in self.lost_now
        }

    def actor_ids(self) -> dict[str, tuple[str, str]]:
        """As if each actor and its node were named like its replica and its host."""
        return {name: (f"actor-{name}", f"node-{replica.config.place.host}") for name, replica in self.replicas.items()}

    async def survivors(self) -> tuple[Sequence[Survivor], Mapping[str, int]]:
        living = [Survivor(replica.config, replica.status) for replica in self.living()]
        return living, self.unadoptable

    # For stories

    def configs(self, model: str) -> list[ReplicaConfig]:
        """Returns the configuration of each start of the model."""
        return [config for config in self.started if config.model.name == model]

    def find(self, id: str) -> FakeReplica:
        """Returns the live start of that replica."""
        return next(r for r in self.living() if f"{r.config.model.name}/{r.config.place.replica}" == id)

    async def lose(self, host: str) -> None:
        """The node of the host dies, with all its processes."""
        self.lost_now.add(host)
        for replica in self.living():
            if replica.config.place.host == host:
                await replica.die("its node died")


class Operations:
    """The operations on a fleet with plain arguments, for stories: those of their requests, then ``by``. Answers are
    JSON, except for those that are parts of the status."""

    def __init__(self, fleet: OperatedFleet) -> None:
        self._fleet = fleet

    async def read(self, text: str, file: str, base_dir: str, *, by: str, cause: Any) -> Any:
        """Reads a spec for a revision: the file, and the revision as resolved."""
        request = schemas.SpecText(text=text, file=file, base_dir=base_dir)
        return await preview.read_spec(self._fleet, request, by=by, cause=cause)

    async def propose(self, text: str, file: str, base_dir: str, **options: Any) -> Any:
        request = schemas.SpecToPlan(text=text, file=file, base_dir=base_dir, **options)
        return builtin(await preview.propose(self._fleet, request))

    async def explain(self, text: str, file: str, base_dir: str, model: str) -> Any:
        request = schemas.SpecToExplain(text=text, file=file, base_dir=base_dir, model=model)
        return builtin(await preview.explain(self._fleet, request))

    async def preview(self, action: Any, target: str, count: int | None = None) -> Any:
        request = schemas.ActionToPreview(action=action, target=target, count=count)
        return builtin(await preview.preview(self._fleet, request))

    async def apply(self, text: str, file: str, base_dir: str, *, by: str, **options: Any) -> Any:
        request = schemas.SpecToApply(text=text, file=file, base_dir=base_dir, **options)
        return builtin(await revisions.apply(self._fleet, request, by))

    async def undo(self, to: int | None, by: str) -> Any:
        return builtin(await revisions.undo(self._fleet, schemas.UndoTarget(to=to), by))

    def revisions(self) -> Any:
        return builtin(revisions.revisions(self._fleet))

    def revision(self, number: int) -> Any:
        return builtin(revisions.revision(self._fleet, schemas.RevisionNumber(number=number)))

    def rollout(self) -> RolloutReport:
        return revisions.rollout(self._fleet)

    async def pause(self, by: str) -> RolloutReport:
        return await revisions.pause(self._fleet, by)

    async def resume(self, by: str) -> RolloutReport:
        return await revisions.resume(self._fleet, by)

    async def promote(self, by: str) -> RolloutReport:
        return await revisions.promote(self._fleet, by)

    async def restart(self, model: str, by: str, check_index: int | None = None) -> RolloutReport:
        return await revisions.restart(self._fleet, schemas.ModelName(model=model, check_index=check_index), by)

    async def scale(self, model: str, count: int | None, by: str, check_index: int | None = None) -> Any:
        request = schemas.ReplicaCount(model=model, count=count, check_index=check_index)
        return builtin(await replicas.scale(self._fleet, request, by))

    async def load(self, model: str, by: str, check_index: int | None = None) -> Any:
        return builtin(await replicas.load(self._fleet, schemas.ModelName(model=model, check_index=check_index), by))

    async def unload(self, model: str, by: str, check_index: int | None = None) -> Any:
        return builtin(await replicas.unload(self._fleet, schemas.ModelName(model=model, check_index=check_index), by))

    async def cordon(self, host: str, cores: str | None, on: bool, by: str) -> HostInFleet:
        change = replicas.cordon if on else replicas.uncordon
        return await change(self._fleet, schemas.HostCores(host=host, cores=cores), by)

    async def drain(self, target: str, by: str, deadline_s: float | None = None, **options: Any) -> Any:
        request = schemas.HostOrReplica(target=target, deadline_s=deadline_s, **options)
        return await replicas.drain(self._fleet, request, by)

    async def cancel_request(self, request: str, by: str) -> Any:
        return builtin(await queries.cancel_request(self._fleet, schemas.RequestId(request=request), by))

    async def events(self, after: int, limit: int, wait_s: float, model: str | None) -> Any:
        request = schemas.EventsQuery(after=after, limit=limit, wait_s=wait_s, model=model)
        return builtin(await queries.events(self._fleet, request))

    async def logs(self, model: str, replica: int | None, offset: int | None, wait_s: float) -> Any:
        request = schemas.LogQuery(model=model, replica=replica, offset=offset, wait_s=wait_s)
        return builtin(await queries.logs(self._fleet, request))

    async def trace(self, after: str, limit: int) -> Any:
        return builtin(await queries.trace(self._fleet, schemas.TraceQuery(after=after, limit=limit)))

    def status(self) -> FleetStatus:
        return queries.status(self._fleet)


class Played:
    """A controller and the operations on it, on a fake cluster."""

    def __init__(
        self,
        home: Path,
        cluster: FakeCluster,
        spec: str,
        *,
        journal: Journal | None = None,
        fleet: str = "f",
        tick_s: float = 1.0,
        instance: str | None = None,
        record: FleetRecord | None = None,
        awake: bool = False,
        restarted: bool = False,
        in_thread: InThread = _at_once,
    ) -> None:
        """``awake``: the clock leaves pauses of the loop out, as in production; ``restarted`` as the controller's."""
        loop = asyncio.get_running_loop()
        self.clock = AwakeClock(loop.time) if awake else None
        settings = ControllerSettings(
            fleet=fleet,
            name="fleet",
            home=str(home),
            spec_text=spec,
            spec_file="spec.yaml",
            base_dir=str(home),
            token="t",
            admin_port=1,
            machine=Machine((0, 1), instance, joined=record is not None),
            record=record,
        )
        self.home = home
        self.cluster = cluster
        self.journal = journal if journal is not None else Journal(None, clock=loop.time)
        records = RecordWriter(self.journal, in_thread, loop.time)
        state = resume_fleet(settings, records, self.clock or loop.time, restarted=restarted)
        cluster.records = records
        cluster.host_names = [host.name for host in state.hosts]
        cluster.lost_now |= set(cluster.host_names) - state.kept
        resumed = self.clock.resumed_at if self.clock else lambda: float("-inf")
        self.controller = Controller(state, cluster, resumed=resumed, tick_s=tick_s)
        self.fleet = OperatedFleet(self.controller, cluster, self._requested)
        self.operator = Operations(self.fleet)
        self._running: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Played:
        loop = asyncio.get_running_loop()
        self._running = loop.create_task(self.controller.run())
        self._beating = None if self.clock is None else loop.create_task(self.clock.beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        """Ends the controller like SIGKILL."""
        assert self._running is not None
        self._running.cancel()
        if self._beating is not None:
            self._beating.cancel()
        self.controller.hosts.stop()
        self.controller.preparations.stop()
        self.controller.standby.stop()
        for task in (
            *self.controller.replicas.running,
            self.controller.state.records._writing,
        ):  # a dead process has none
            if task is not None:
                task.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    async def until(self, condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait for a change of the status that makes ``condition`` true."""
        seen = 0

        async def reach() -> None:
            nonlocal seen
            while not condition():
                seen = await self.controller.change(seen, 1.0)

        try:
            await asyncio.wait_for(reach(), deadline_s)
        except asyncio.TimeoutError:
            status = self.controller.status()
            raise AssertionError(f"not within {deadline_s:.0f} s: {what}: {status}") from None

    async def settled(self, deadline_s: float = 3600.0) -> None:
        """Wait until the rollout is over and every replica is ready."""
        await self.until(self.is_settled, "settled", deadline_s)

    def is_settled(self) -> bool:
        status = self.controller.status()
        states = [[replica.state for replica in model.replicas] for model in status.models]
        wished = [["ready"] * model.wanted for model in status.models]
        return bool(status.rollout.state == "complete" and states == wished)

    async def _requested(self) -> None:
        """A shutdown is requested."""

    async def apply(self, spec: str, **options: Any) -> Any:
        return await self.operator.apply(spec, "spec.yaml", str(self.home), by="tester", **options)

    def replica(self, id: str) -> dict[str, Any]:
        """Returns a replica of the status as JSON; {} if there is none of that id."""
        row: dict[str, Any] = next((builtin(r) for r in self.controller.status().replicas if r.id == id), {})
        return row

    def model(self, name: str) -> dict[str, Any]:
        row: dict[str, Any] = next(builtin(m) for m in self.controller.status().models if m.name == name)
        return row

    def host(self, index: int = 0) -> dict[str, Any]:
        row: dict[str, Any] = builtin(self.controller.status().hosts[index])
        return row

    def ready(self, name: str) -> list[dict[str, Any]]:
        return [replica for replica in self.model(name)["replicas"] if replica["state"] == "ready"]

    def happened(self) -> list[str]:
        """Returns the reasons of all events."""
        return [event.reason for event in self.journal.events()]


Test = Callable[..., Coroutine[Any, Any, None]]


def virtual(test: Test) -> Callable[..., None]:
    """Makes a test of a coroutine function, which runs on a virtual loop."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        virtually(lambda: test(*arguments, **named))

    return run


def starting_fleet(text: str | Callable[..., str], **options: Any) -> Callable[[Test], Callable[..., None]]:
    """Makes a test of a coroutine function whose first parameter is a fleet with that spec, at its start.

    It runs in virtual time, and the rules of the fake cluster hold at its end. ``text`` may be a function of the test's
    other parameters. ``options`` are those of `Played` and attributes of the fake cluster.
    """

    def decorate(test: Test) -> Callable[..., None]:
        fixtures = list(inspect.signature(test).parameters.values())[1:]
        uses_home = any(fixture.name == "tmp_path" for fixture in fixtures)
        home = inspect.Parameter("tmp_path", inspect.Parameter.KEYWORD_ONLY)

        @functools.wraps(test)
        def run(*, tmp_path: Path, **named: Any) -> None:
            given = {**named, "tmp_path": tmp_path}
            spec = (
                text
                if isinstance(text, str)
                else text(**{name: given[name] for name in inspect.signature(text).parameters})
            )
            play(tmp_path, spec, lambda played: test(played, **(given if uses_home else named)), **options)

        run.__signature__ = inspect.Signature(fixtures if uses_home else [*fixtures, home])  # type: ignore[attr-defined]
        return run

    return decorate


def settled_fleet(text: str | Callable[..., str], **options: Any) -> Callable[[Test], Callable[..., None]]:
    """``starting_fleet``, once every replica is ready."""

    def decorate(test: Test) -> Callable[..., None]:
        @functools.wraps(test)
        async def begin(played: Played, **fixtures: Any) -> None:
            await played.settled()
            await test(played, **fixtures)

        return starting_fleet(text, **options)(begin)

    return decorate


def play(home: Path, text: str, story: Test, *, cluster: FakeCluster | None = None, **options: Any) -> None:
    """Runs a story of a fleet in virtual time, and checks the rules of the fake cluster."""

    async def live() -> None:
        fake = cluster or FakeCluster()
        of_fleet = {name: options[name] for name in options.keys() & inspect.signature(Played).parameters.keys()}
        for name in options.keys() - of_fleet.keys():
            assert hasattr(fake, name), name
            setattr(fake, name, copy.deepcopy(options[name]))
        async with Played(home, fake, text, **of_fleet) as played:
            await story(played)
        assert fake.violations == []

    virtually(live)
