"""Runs the controller as a Ray actor. Does not import Ray Serve, which would delay its restart."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec.structs
import ray
from ray.util.metrics import Gauge

from orchestrator.access.keys import KeyFeed, KeyFile
from orchestrator.api import revisions
from orchestrator.api.hosted_models import HostedModels
from orchestrator.api.operation import OperatedFleet
from orchestrator.api.preview import Cause
from orchestrator.api.schemas import OperationRefused, SpecToApply
from orchestrator.api.server import AdminApi, serve_admin
from orchestrator.cluster.calls import RayKeyValues, retried
from orchestrator.cluster.nodes import CONTROLLER, HEAD, here, own_interpreter
from orchestrator.cluster.ray_cluster import RayCluster
from orchestrator.cluster.ray_names import ray_name
from orchestrator.console.page import CONSOLE_PATH
from orchestrator.control.controller import Controller
from orchestrator.control.journal import state_copy
from orchestrator.control.journal.journal import Journal, JournalUnwritable
from orchestrator.control.journal.state_copy import StateCopier
from orchestrator.control.record_writer import RecordWriter
from orchestrator.control.resumption import resume_fleet
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.messages.controller_replies import Hosting, SpecReply
from orchestrator.messages.controller_settings import ControllerSettings
from orchestrator.messages.fleet_status import FleetStatus
from orchestrator.messages.route_table import RouteTable
from orchestrator.process import logs
from orchestrator.process.addresses import free_port
from orchestrator.process.awake_clock import AwakeClock
from orchestrator.process.collector import settle_collector
from orchestrator.process.home import FleetRecord, Home
from orchestrator.process.version import corewright_version
from orchestrator.scaling.demand_report import DemandReply, DemandReport
from placements.spec.problems import Problem
from workers.artifacts.store.store import StoreSettings
from workers.host.lifetime import Process, boot, own_process, process_start
from workers.host.task_boundary import task_boundary
from workers.messages.metric_family import MetricFamily
from workers.serving.replica_metrics import REFRESH_S

log = logging.getLogger(__name__)

LOCK_S = 5.0
LOCK_RETRY_S = 0.05
JOURNAL = "journal"  # the key in Ray's KV of the copy of the journal's state


class ControllerActor:
    """The controller as a named actor, which Ray restarts if it dies; it then adopts live replicas."""

    def __init__(self, settings: ControllerSettings, gateway: GatewaySettings | None = None) -> None:
        """``gateway`` are the settings of the gateways that it runs on a joined cluster."""
        home = Home(Path(settings.home))
        home.prepare()  # `up` may never have run on the head; the home may have been removed under a fleet
        logs.set_up(home.logs / "controller.log", settings.log_format)
        self._down = asyncio.Event()
        self._name = settings.name
        self._admin_port = settings.admin_port
        if settings.record is not None:
            self._lock = _lock(home)  # until this process ends
            self._admin_port = _joined_port(settings)
            _write_record(home, settings.record, self._admin_port)
        clock = AwakeClock()
        store = settings.store or StoreSettings(root=str(home.store))
        emulated = settings.emulated if settings.joined else None
        cluster = RayCluster(
            store,
            clock=clock,
            home=settings.home,
            name=settings.name,
            emulated=emulated,
            gateway=gateway,
            console=settings.console_url or f"http://127.0.0.1:{self._admin_port}{CONSOLE_PATH}/",
        )
        restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        state = resume_fleet(settings, _records(settings, home, restarted=restarted), clock, restarted=restarted)
        self._removal: asyncio.Task[None] | None = None
        self._controller = Controller(state, cluster, resumed=clock.resumed_at)
        cluster.add_hosts((host.name for host in state.hosts), state.kept)
        self._fleet = OperatedFleet(self._controller, cluster, self._request_shutdown)
        self._hosted = HostedModels(self._fleet)
        self._keys = KeyFeed(KeyFile(home.keys))
        loop = asyncio.get_running_loop()  # Ray makes an async actor's object on its event loop
        self._beating = loop.create_task(clock.beat())
        self._running = loop.create_task(self._controller.run())
        self._admin = loop.create_task(self._serve_admin())
        self._metrics = loop.create_task(self._export_cores())
        settle_collector()

    async def _serve_admin(self) -> None:
        await self._controller.settled()  # before that, operations would find no replicas
        await serve_admin(AdminApi(self._fleet), self._admin_port)

    async def _export_cores(self) -> None:
        """Export the cores of each host by state to Ray's metrics; their sum is always the number of its cores."""
        gauge = Gauge("corewright_cores", "NeuronCores by host and state.", ("host", "state"))
        await self._controller.settled()
        while True:
            for host in self._controller.status().hosts:
                for state, count in host.cores_by_state.items():
                    gauge.set(count, {"host": host.name, "state": state})
            await asyncio.sleep(REFRESH_S)

    async def routes(self, seen: int, timeout_s: float) -> tuple[int, RouteTable]:
        return await self._controller.next_routes(seen, timeout_s)

    async def status(self, seen: int, timeout_s: float) -> tuple[int, FleetStatus]:
        for task in (self._running, self._admin, self._metrics, self._beating):
            if task.done():
                task.result()  # raises its error: a fleet without its loop must not look alive
        return await self._controller.change(seen, timeout_s), self._controller.status()

    async def process(self) -> Process:
        """Return this process."""
        return own_process()

    async def wake(self, model: str) -> None:
        await self._controller.wake(model)

    async def hosted(self) -> list[tuple[str, str]]:
        """Return the name and the folder of each model that SageMaker has loaded."""
        await self._controller.settled()
        return self._hosted.hosted()

    async def host_model(self, name: str, folder: str, again: bool, wait_s: float) -> Hosting:
        await self._controller.settled()
        return await self._hosted.host_model(name, folder, again=again, wait_s=wait_s)

    async def unhost_model(self, name: str) -> Hosting:
        await self._controller.settled()
        return await self._hosted.unhost_model(name)

    async def keys(self, seen: str, timeout_s: float) -> tuple[str, bytes]:
        return await self._keys.next(seen, timeout_s)

    async def demand(self, report: DemandReport) -> DemandReply:
        return await self._controller.demand(report)

    async def metrics(self, place: str = "") -> list[MetricFamily]:
        return await self._controller.metrics(place)

    async def apply(self, text: str, file: str, base_dir: str, by: str, cause: Cause) -> SpecReply:
        """Apply a spec like the admin API."""
        try:
            spec = SpecToApply(text=text, file=file, base_dir=base_dir)
            applied = await revisions.apply(self._fleet, spec, by, cause)
            return SpecReply(revision=applied.revision, changed=applied.changed)
        except OperationRefused as refused:
            return SpecReply(error=refused.problem, problems=tuple(refused.problems), is_failure=refused.status >= 500)
        except Exception as error:
            log.exception("the apply failed")
            problem = Problem("apply-failed", "error", file, f"{type(error).__name__}: {error}", "see controller.log")
            return SpecReply(error=problem, is_failure=True)

    async def config(self) -> list[dict[str, Any]]:
        """Returns the settings of `up`, as name, value and origin."""
        return list(self._controller.settings.config)

    async def take_down(self) -> float:
        """Begin to drain and remove the fleet, on a joined cluster. Returns the drain timeout, in seconds."""
        await self._request_shutdown()
        return self._controller.settings.drain_s

    async def wait_down(self) -> None:
        """Wait until the admin API requests a shutdown, or the fleet has shut down."""
        await self._down.wait()

    async def shutdown(self, drain_s: float) -> None:
        try:
            await self._controller.shutdown(drain_s)
        finally:
            self._down.set()

    async def _request_shutdown(self) -> None:
        if not self._controller.settings.joined:
            self._down.set()  # `up` ends the fleet
        elif self._removal is None:
            self._removal = asyncio.get_running_loop().create_task(self._remove())

    async def _remove(self) -> None:
        """End the fleet on a joined cluster, and this process last."""
        from orchestrator.cluster.ownership import remove_fleet

        me = ray.get_runtime_context().current_actor
        try:
            await self.shutdown(self._controller.settings.drain_s)
            await asyncio.to_thread(remove_fleet, self._name, own=True)
        except Exception:
            log.exception("the fleet is not removed; `corewright down` removes it from outside")
        ray.kill(me, no_restart=True)


def _lock(home: Home) -> int:
    """Returns the lock of the home. Raises RuntimeError if another fleet has it. Blocks: the process of a controller
    that has crashed may not be gone yet."""
    deadline = time.monotonic() + LOCK_S
    while (lock := home.lock()) is None and time.monotonic() < deadline:
        time.sleep(LOCK_RETRY_S)
    if lock is None:
        raise RuntimeError(f"another fleet has the home {home.path} on the head; set COREWRIGHT_HOME to another folder")
    return lock


def _joined_port(settings: ControllerSettings) -> int:
    """Returns the port of the admin API: that of the settings, else the last one, which links and tunnels name. If it
    is taken, it is another one."""
    from orchestrator.cluster.ownership import record_of

    port = settings.admin_port or _last_port(retried(partial(record_of, settings.name)))
    if port is None:
        return free_port()
    chosen = free_port(port)
    if chosen != port:
        log.warning("port %d of the admin API is taken: it is %d now", port, chosen)
    return chosen


def _last_port(record: FleetRecord | None) -> int | None:
    return None if record is None else urlsplit(record.admin_url).port


def _write_record(home: Home, record: FleetRecord, admin_port: int) -> None:
    """Write where the controller is now, for the commands on its machine and the next `up`."""
    from orchestrator.cluster.ownership import store_record

    started = process_start(os.getpid())
    assert started is not None
    place = {"admin_url": f"http://127.0.0.1:{admin_port}", "pid": os.getpid(), "started": started, "boot": boot()}
    record = msgspec.structs.replace(record, version=corewright_version(), **place)
    home.write_record(record)
    with task_boundary(log, "the record of the fleet is not in Ray's KV"):  # the commands here need the file only
        retried(partial(store_record, record))


def _records(settings: ControllerSettings, home: Home, *, restarted: bool) -> RecordWriter:
    """Returns the records of this home or, on a new head of a joined cluster, those that the cluster has a copy of. A
    restarted controller also serves without its journal."""
    try:
        journal = Journal(home.journal)
    except JournalUnwritable as error:
        if not restarted:
            raise
        log.error("the journal cannot be opened: %s", error)
        journal = Journal(home.journal, lost=True)
    if not settings.joined:
        return RecordWriter(journal)
    kv, namespace = RayKeyValues(), ray_name(settings.name)
    stored = retried(partial(kv.get, namespace, [JOURNAL])).get(JOURNAL)
    copy = None if stored is None else state_copy.decode(stored)
    restored = copy is not None and state_copy.is_newer(copy, journal.state(), settings.fleet)
    if copy is not None and restored:
        journal.restore(copy)
    copier = StateCopier(partial(kv.put, namespace, JOURNAL))
    copier.offer(journal.state())
    records = RecordWriter(journal, written=copier.offer)
    if restored:
        message = "the journal of this machine is older than its copy in the cluster, which replaces it"
        records.event("warning", "JournalRestored", f"{message}; earlier events are not in it")
    return records


def start_controller(settings: ControllerSettings, gateway: GatewaySettings | None = None) -> Any:
    """Start the controller actor and return its handle. ``gateway`` are the settings of the gateways that it runs on a
    joined cluster."""
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=1000)(ControllerActor)
    # Ray places actors without CPUs on any host, which could be lost. A new head has a new node id.
    place = {"resources": HEAD, **own_interpreter()} if settings.joined else {"scheduling_strategy": here()}
    namespace = ray_name(settings.name)
    return actor.options(name=CONTROLLER, namespace=namespace, lifetime="detached", **place).remote(settings, gateway)
