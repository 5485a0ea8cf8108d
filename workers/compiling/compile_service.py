"""What a host does ahead of the starts of its replicas: it looks what they would compile, and compiles it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from workers.artifacts.fetch.progress import Progress
from workers.artifacts.fetch.single_flight import SingleFlight
from workers.artifacts.sources.listing import Stopped
from workers.compiling import prefetch
from workers.compiling.build import Built, Checked
from workers.compiling.memory_gate import MemoryGate, need_gib
from workers.host import host_facts
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure

log = logging.getLogger(__name__)

LOOKS = 8  # at most so many at once
CPUS_FOR_ONE = 2  # the import of an engine's package keeps one busy, and replicas serve beside it


class CompileService:
    """Each thing once, for all replicas of a host that wait for it. Used by any number of threads."""

    def __init__(
        self,
        turns: MemoryGate | None = None,
        looks: int | None = None,
        need: Callable[[ReplicaConfig], float] = need_gib,
    ) -> None:
        """``turns``: which compiles run at once; None: as many as this host's memory allows. ``looks``: at most so many
        at once; None: what its CPUs allow. ``need``: the memory that one compile takes, in GiB."""
        self._compiles: SingleFlight[Built | Failure] = SingleFlight()
        self._foresights: SingleFlight[prefetch.Foreseen] = SingleFlight()
        self._checks: SingleFlight[Checked | Failure] = SingleFlight()
        self._turns = turns or MemoryGate()
        self._looks = threading.BoundedSemaphore(looks or looks_at_once(len(host_facts.usable_cpus())))
        self._need = need

    def compile(self, waiter: str, config: ReplicaConfig, wait_s: float) -> Built | Failure | None:
        """How compiling what is missing ended, or None while it goes on: see `Flights.ask`."""

        def work(progress: Progress, stop: threading.Event) -> Built | Failure:
            need = self._need(config)
            log.info("compiling %s needs some %.0f GiB of this host's memory", config.model, need)
            with self._turns.turn(need, stop):
                return prefetch.build(config, progress, stop)

        return self._compiles.ask(waiter, prefetch.build_key(config), config.model, work, wait_s)

    def foresee(self, waiter: str, config: ReplicaConfig, wait_s: float) -> prefetch.Foreseen | Failure | None:
        """What the start of ``config`` would compile; likewise. Each look imports an engine's package, in a process of
        its own."""

        def work(_: Progress, stop: threading.Event) -> prefetch.Foreseen:
            with self._looks:
                if stop.is_set():
                    raise Stopped(f"nobody waits for {config.model} any more")
                return prefetch.foresee(config, stop)

        return self._foresights.ask(waiter, prefetch.build_key(config), config.model, work, wait_s)

    def check(self, waiter: str, config: ReplicaConfig, wait_s: float) -> Checked | Failure | None:
        """Whether the start of ``config`` could load what it names; likewise."""

        def work(_: Progress, stop: threading.Event) -> Checked | Failure:
            with self._looks:
                if stop.is_set():
                    raise Stopped(f"nobody waits for {config.model} any more")
                return prefetch.check(config, stop)

        return self._checks.ask(waiter, prefetch.build_key(config), config.model, work, wait_s)

    def leave(self, waiter: str) -> None:
        """It waits for nothing any more."""
        self._compiles.leave(waiter)
        self._foresights.leave(waiter)
        self._checks.leave(waiter)


def looks_at_once(cpus: int) -> int:
    """On a host of so many CPUs."""
    return max(2, min(LOOKS, cpus // CPUS_FOR_ONE))
