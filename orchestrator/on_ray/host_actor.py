"""The actor that answers for one host: its processes, their logs, its interpreters, who holds its cores, what it keeps
of artifacts; it fetches and compiles for its replicas."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import msgspec.structs
import ray

from workers.artifacts.fetch.artifact_fetcher import ArrivingArtifact, ArtifactFetcher, FetchedArtifact, WantedArtifact
from workers.artifacts.fetch.progress import FetchStatus
from workers.artifacts.fetch.single_flight import SingleFlight
from workers.artifacts.store.manifest import Artifact
from workers.artifacts.store.store_settings import StoreSettings
from workers.compiling.build import Built, Checked
from workers.compiling.compile_service import CompileService
from workers.compiling.prefetch import Foreseen
from workers.host import host_facts as this_host
from workers.host.core_claims import held_cores
from workers.host.device_metrics import DeviceMonitor
from workers.host.facts.machine import owners
from workers.host.facts.reading import read_host_facts
from workers.host.interpreter import Interpreter, Interpreters
from workers.host.neuron_faults import fault_of
from workers.messages.metric_family import MetricFamily
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure

RECENT = 1000
TOOLS_PERIOD_S = 10.0  # between two runs of the Neuron tools, which take seconds

M = TypeVar("M", bound=Callable[..., object])


def held_among(sources: Collection[str], artifacts: Iterable[Artifact]) -> frozenset[str]:
    """Those of ``sources`` that are among ``artifacts``. A slash at the end means nothing, as in the store."""
    here = {one.source.rstrip("/") for one in artifacts}
    return frozenset(source for source in sources if source.rstrip("/") in here)


def _long(method: M) -> M:
    """Run the method on a thread of its own group: what is waited for must not keep the others waiting."""
    return cast(M, ray.method(concurrency_group="long")(method))


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=16, concurrency_groups={"long": 8})
class HostActor:
    """What the controller asks of one host (one for each Ray node).

    It outlives the controller, so that a fetch goes on while that is started again.
    """

    def __init__(self, store: StoreSettings) -> None:
        self._store = store.open()
        self._bringing = ArtifactFetcher(self._store)
        self._copies = store.memory is not None  # what has been fetched is loaded from elsewhere
        self._fetches: SingleFlight[FetchedArtifact] = SingleFlight()
        self._workshop = CompileService()
        self._counted: tuple[str, ...] = ()  # flights whose bytes were told
        self._told: dict[int, tuple[int | None, str | None]] = {}  # by the Neuron tools
        self._reads = False
        self._asking = threading.Lock()
        self._interpreters = Interpreters()
        self._devices = DeviceMonitor()
        self._endings = this_host.Endings()

    @_long
    def fetch(
        self, waiter: str, wanted: WantedArtifact, wait_s: float
    ) -> FetchedArtifact | ArrivingArtifact | Failure | None:
        """See `Flights.ask`; Arriving, None: it goes on, and can or cannot be loaded from meanwhile. What has moved is
        told to one of those that waited."""
        ended = self._fetches.ask(waiter, wanted, wanted.source, partial(self._bringing, wanted), wait_s)
        if isinstance(ended, FetchedArtifact):
            with self._asking:
                counted = ended.flight in self._counted
                self._counted = (*self._counted[-RECENT:], ended.flight)
            return msgspec.structs.replace(ended, moved=0) if counted else ended
        if ended is None and not self._copies and (progress := self._fetches.of(wanted)) is not None:
            return self._bringing.arriving(wanted, progress)
        return ended

    @_long
    def compile(self, waiter: str, config: ReplicaConfig, wait_s: float) -> Built | Failure | None:
        """As ``fetch``. As many at once as this host's memory allows."""
        return self._workshop.compile(waiter, config, wait_s)

    @_long
    def foresee(self, waiter: str, config: ReplicaConfig, wait_s: float) -> Foreseen | Failure | None:
        """As ``fetch``."""
        return self._workshop.foresee(waiter, config, wait_s)

    @_long
    def check(self, waiter: str, config: ReplicaConfig, wait_s: float) -> Checked | Failure | None:
        """As ``fetch``."""
        return self._workshop.check(waiter, config, wait_s)

    def leave(self, waiter: str) -> None:
        """It waits for no fetch and no compiler any more."""
        self._fetches.leave(waiter)
        self._workshop.leave(waiter)

    def progress(self) -> list[FetchStatus]:
        return self._fetches.progress()

    def held(self, sources: Collection[str]) -> frozenset[str]:
        """Which of the sources, as they are written, are in the store as a whole."""
        return held_among(sources, self._store.artifacts())

    def confirm_death(self, pid: int, started: float, deadline_s: float) -> bool:
        dead = this_host.confirm_death(pid, started, deadline_s)
        if dead:
            self._endings.forget(pid, started)
        return dead

    def attend(self, pid: int, started: float) -> None:
        self._endings.attend(pid, started)

    def ending(self, pid: int, started: float, log: str) -> str | None:
        """How that process ended; see `Endings.of`."""
        return self._endings.of(pid, started, Path(log))

    def log_tail(self, path: str, lines: int) -> list[str]:
        return this_host.log_tail(Path(path), lines)

    def log_part(self, path: str, offset: int | None, most: int, lines: int) -> tuple[str, int]:
        return this_host.log_part(Path(path), offset, most, lines)

    def fault_in_log(self, path: str) -> Failure | None:
        return fault_of(None, this_host.last_words(Path(path)))

    def interpreter(self, python: str | None) -> Interpreter:
        return self._interpreters.ask(python)

    def device_metrics(self) -> list[MetricFamily]:
        """What the Neuron devices measure: not asked of an emulated host."""
        return self._devices.families()

    def held_cores(self, claims: str | None) -> dict[int, tuple[int | None, str | None]]:
        """The owner's pid and command of each held core; ``claims`` None: of the real ones."""
        if claims is not None:
            return {core: (pid, this_host.command_of(pid)) for core, pid in held_cores(Path(claims)).items()}
        with self._asking:
            if not self._reads:  # the first answer is waited for, later ones are at most a period old
                self._read_tools()
                threading.Thread(target=self._keep_reading, name="neuron tools", daemon=True).start()
                self._reads = True
        return self._told

    def _keep_reading(self) -> None:
        while True:
            time.sleep(TOOLS_PERIOD_S)
            self._read_tools()

    def _read_tools(self) -> None:
        self._told = {core: (owner.pid, owner.command) for core, owner in owners(read_host_facts()).items()}
