"""The actor of one host: reports processes, logs, interpreters, core owners and artifacts; fetches and compiles."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import msgspec.json
import msgspec.structs
import ray

from orchestrator.cluster.host_greeting import HostGreeting, own_greeting
from orchestrator.cluster.ray_workers import SpareWorkers, end_idle_workers
from orchestrator.control.effects import LogText
from orchestrator.process.home import Home
from workers.artifacts.fetch.artifact_fetcher import ArtifactFetcher, FetchedArtifact, WantedArtifact
from workers.artifacts.fetch.progress import FetchStatus
from workers.artifacts.fetch.single_flight import SingleFlight
from workers.artifacts.store.manifest import Artifact
from workers.artifacts.store.store import StoreSettings
from workers.compiled.orders import Built, Checked
from workers.compiled.preparation import CompileService, Foreseen
from workers.host import host_facts as this_host
from workers.host.core_claims import held_cores
from workers.host.device_metrics import DeviceMonitor
from workers.host.facts.machine import owners
from workers.host.facts.reading import read_host_facts
from workers.host.host_facts import NODE_VARIABLE, end_orphans
from workers.host.instance_metadata import NoticeWatch
from workers.host.interpreter import Interpreter, Interpreters
from workers.host.lifetime import Process, own_process
from workers.host.neuron_faults import fault_of
from workers.host.task_boundary import task_boundary
from workers.host.warm_processes import HANDED_OVER, WarmProcesses
from workers.messages.metric_family import MetricFamily
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, Notice

log = logging.getLogger(__name__)

RECENT = 1000
MAX_LOG_PART_BYTES = 64 * 2**10
ORPHANS_S = 10.0  # for replicas of the machine's former Ray node to end
TOOLS_PERIOD_S = 10.0  # between two runs of the Neuron tools, which take seconds

M = TypeVar("M", bound=Callable[..., object])


def sources_among(sources: Collection[str], artifacts: Iterable[Artifact]) -> frozenset[str]:
    """Returns the ``sources`` that are among ``artifacts``. Trailing slashes are ignored, as in the store."""
    stored = {artifact.source.rstrip("/") for artifact in artifacts}
    return frozenset(source for source in sources if source.rstrip("/") in stored)


def _long(method: M) -> M:
    """Run the method in a separate concurrency group, so that long waits do not block other calls."""
    return cast(M, ray.method(concurrency_group="long")(method))


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=16, concurrency_groups={"long": 32})
class HostActor:
    """The controller's agent on one host; each Ray node has one.

    It survives the controller, so that fetches continue while the controller restarts.
    """

    def __init__(self, store: StoreSettings, home: str, mark: str | None = None) -> None:
        """``mark``, on a joined cluster, is that of the fleet's replicas on this Ray node. Those of the machine's
        former node may still hold cores, and are killed before the first reply. Raises RuntimeError if some cannot
        be: the machine is left out."""
        if mark is not None and (remaining := end_orphans(mark, ORPHANS_S)):
            pids = ", ".join(map(str, remaining))
            raise RuntimeError(f"replicas of its former Ray node cannot be killed (pids {pids}): restart the machine")
        self._mark = mark
        self._home = Home(Path(home))
        self._home.prepare()  # which `up` has done on its own machine only
        self._store = store.open()
        self._fetcher = ArtifactFetcher(self._store)
        self._fetches: SingleFlight[FetchedArtifact] = SingleFlight()
        self._counted: tuple[str, ...] = ()  # flights whose bytes were reported
        self._owners: dict[int, tuple[int | None, str | None]] = {}  # pid and command by core, from the Neuron tools
        self._reads = False
        self._lock = threading.Lock()
        self._interpreters = Interpreters()
        self._devices = DeviceMonitor()
        self._endings = this_host.Endings()
        self._notices = NoticeWatch()
        self._warm = WarmProcesses(self._home.sockets, {} if mark is None else {NODE_VARIABLE: mark})
        self._warm.adopt(os.environ.get(HANDED_OVER, "[]"))
        self._compiler = CompileService(warm_command=self._warm.command)
        self._spare_workers = SpareWorkers(self._warm.quiet)

    @_long
    def fetch(self, waiter: str, wanted: WantedArtifact, wait_s: float) -> FetchedArtifact | Failure | FetchStatus:
        """See `SingleFlight.join`. The moved bytes are reported to only one waiter."""
        ended = self._fetches.join(waiter, wanted, wanted.source, partial(self._fetcher, wanted), wait_s)
        if isinstance(ended, FetchedArtifact):
            with self._lock:
                counted = ended.flight in self._counted
                self._counted = (*self._counted[-RECENT:], ended.flight)
            return msgspec.structs.replace(ended, moved=0) if counted else ended
        return ended

    @_long
    def compile(self, waiter: str, config: ReplicaConfig, wait_s: float) -> Built | Failure | FetchStatus:
        """Compile ahead, with the parameters of ``fetch``. The host's memory limits the concurrency."""
        return self._compiler.compile(waiter, config, wait_s)

    @_long
    def foresee(self, waiter: str, config: ReplicaConfig, wait_s: float) -> Foreseen | Failure | FetchStatus:
        """Predict what a start compiles, with the parameters of ``fetch``."""
        return self._compiler.foresee(waiter, config, wait_s)

    @_long
    def check(self, waiter: str, config: ReplicaConfig, wait_s: float) -> Checked | Failure | FetchStatus:
        """Check what a start needs without cores, with the parameters of ``fetch``."""
        return self._compiler.check(waiter, config, wait_s)

    def process(self) -> Process:
        """Returns this process."""
        return own_process()

    def greeting(self) -> HostGreeting:
        """Returns the versions of this machine."""
        return own_greeting()

    def forget_fleet(self) -> None:
        """Remove the files of the fleet, which ends; the store, artifacts and logs stay."""
        self._home.forget_fleet()

    def stop_waiting(self, waiter: str) -> None:
        """Stop the waiter's waits for fetches and compiles."""
        self._fetches.leave(waiter)
        self._compiler.leave(waiter)

    def stored_sources(self, sources: Collection[str]) -> frozenset[str]:
        """Returns the sources that are completely stored."""
        return sources_among(sources, self._store.artifacts())

    def confirm_death(self, pid: int, started: float, deadline_s: float) -> bool:
        dead = this_host.confirm_death(pid, started, deadline_s)
        if dead:
            self._endings.forget(pid, started)
        return dead

    def end_idle_workers(self, older_s: float) -> list[int]:
        """Ends the fleet's idle workers of Ray here that have run for ``older_s`` seconds, and returns their pids."""
        return end_idle_workers(os.getppid(), older_s, self._mark)

    def watch_process(self, pid: int, started: float) -> None:
        self._endings.attend(pid, started)

    def process_exit(self, pid: int, started: float, log: str) -> str | None:
        """Returns how the process ended; see `Endings.of`."""
        return self._endings.of(pid, started, Path(log))

    def read_log(self, path: str, lines: int, offset: int | None, ended: bool) -> LogText:
        """See `ClusterClient.read_log`."""
        log_file = Path(path)
        if ended:
            text = "\n".join(this_host.log_tail(log_file, lines))
            return LogText(text, 0, fault_of(None, this_host.last_words(log_file)))
        return LogText(*this_host.log_part(log_file, offset, MAX_LOG_PART_BYTES, lines))

    def warm_command(self, engine: str, python: str | None, variables: dict[str, str]) -> str | None:
        """See `WarmProcesses.command`."""
        return self._warm.command(engine, python, variables)

    @_long
    def stand_by(self, engines: dict[str, str | None], job: str | None, variables: dict[str, str]) -> None:
        """See `ClusterClient.stand_by`. ``job`` and ``variables``: of `SpareWorkers`; no job for none."""
        self._warm.keep(engines)
        if job is not None:
            self._spare_workers.keep(job, variables)

    def interpreter(self, python: str | None) -> Interpreter:
        return self._interpreters.ask(python)

    def device_metrics(self) -> list[MetricFamily]:
        """Returns the Neuron device metrics; not called on emulated hosts."""
        return self._devices.families()

    def notice(self) -> Notice | None:
        """Returns the notice that this machine will end."""
        return self._notices.notice

    def held_cores(self, claims: str | None) -> dict[int, tuple[int | None, str | None]]:
        """Returns the owner's pid and command of each held core; ``claims`` None: of real cores."""
        if claims is not None:
            return {core: (pid, this_host.command_of(pid)) for core, pid in held_cores(Path(claims)).items()}
        with self._lock:
            if not self._reads:  # the first call waits for the tools, later results are at most a period old
                self._read_tools()
                threading.Thread(target=self._keep_reading, name="neuron tools", daemon=True).start()
                self._reads = True
        return self._owners

    def _keep_reading(self) -> None:
        while True:
            time.sleep(TOOLS_PERIOD_S)
            with task_boundary(log, "cannot read the owners of cores from the Neuron tools"):
                self._read_tools()

    def _read_tools(self) -> None:
        self._owners = {core: (owner.pid, owner.command) for core, owner in owners(read_host_facts()).items()}
