"""Checks, predicts and compiles on a host ahead of the starts of its replicas."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from workers.artifacts.fetch.progress import FetchStatus, Progress
from workers.artifacts.fetch.single_flight import End, SingleFlight, Work
from workers.artifacts.sources.listing import Stopped
from workers.compiling import prefetch
from workers.compiling.build import Built, Checked
from workers.compiling.memory_gate import MemoryGate, need_gib
from workers.host import host_facts
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure

log = logging.getLogger(__name__)

LOOKS = 8  # maximum concurrent checks and predictions
CPUS_FOR_ONE = 2  # importing an engine's package keeps one busy, while replicas serve


class CompileService:
    """Runs each job once for all waiting replicas of a host. Thread-safe."""

    def __init__(
        self,
        turns: MemoryGate | None = None,
        looks: int | None = None,
        need: Callable[[ReplicaConfig], float] = need_gib,
        warm_command: Callable[[str, str | None, Mapping[str, str]], str | None] = lambda *_: None,
    ) -> None:
        """``turns``: limits concurrent compiles; None: by this host's memory. ``looks``: maximum concurrent checks and
        predictions; None: by its CPUs. ``need``: memory of one compile, in GiB. ``warm_command``: as
        `WarmProcesses.command`; a check then takes as long as the import of its engine's packages less."""
        self._compiles: SingleFlight[Built | Failure] = SingleFlight()
        self._foresights: SingleFlight[prefetch.Foreseen] = SingleFlight()
        self._checks: SingleFlight[Checked | Failure] = SingleFlight()
        self._turns = turns or MemoryGate()
        self._looks = threading.BoundedSemaphore(looks or looks_at_once(len(host_facts.usable_cpus())))
        self._need = need
        self._warm_command = warm_command

    def compile(self, waiter: str, config: ReplicaConfig, wait_s: float) -> Built | Failure | FetchStatus:
        """Compiles missing artifacts; FetchStatus: still running after ``wait_s``. See `SingleFlight.join`."""

        def work(progress: Progress, stop: threading.Event) -> Built | Failure:
            need = self._need(config)
            log.info("compiling %s needs about %.0f GiB of this host's memory", config.model.name, need)
            with self._turns.turn(need, stop):
                return prefetch.build(config, progress, stop)

        return self._compiles.join(waiter, prefetch.build_key(config), config.model.name, work, wait_s)

    def foresee(self, waiter: str, config: ReplicaConfig, wait_s: float) -> prefetch.Foreseen | Failure | FetchStatus:
        """Predicts what a start of ``config`` would compile, in a process of its own; FetchStatus as in `compile`."""
        look = self._limited(prefetch.foresee, config)
        return self._foresights.join(waiter, prefetch.build_key(config), config.model.name, look, wait_s)

    def check(self, waiter: str, config: ReplicaConfig, wait_s: float) -> Checked | Failure | FetchStatus:
        """Checks whether a start of ``config`` could load its files; FetchStatus as in `compile`."""
        look = self._limited(prefetch.check, config)
        return self._checks.join(waiter, prefetch.build_key(config), config.model.name, look, wait_s)

    def _limited(
        self, look: Callable[[ReplicaConfig, threading.Event, str | None], End], config: ReplicaConfig
    ) -> Work[End]:
        """Returns the job of a check or a prediction, which waits until few others run."""

        def work(_: Progress, stop: threading.Event) -> End:
            with self._looks:
                if stop.is_set():
                    raise Stopped(f"stopped before {config.model.name} was examined")
                return look(config, stop, self._warm_command(config.model.engine, config.run.python, config.place.env))

        return work

    def leave(self, waiter: str) -> None:
        """Removes a waiter from all jobs."""
        for flights in (self._compiles, self._foresights, self._checks):
            flights.leave(waiter)


def looks_at_once(cpus: int) -> int:
    """Returns the number of concurrent checks and predictions for a number of CPUs."""
    return max(2, min(LOOKS, cpus // CPUS_FOR_ONE))
