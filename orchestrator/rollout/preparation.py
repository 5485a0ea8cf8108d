"""Prepares a replica's start on its host: fetches what it loads, and compiles what it would compile."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from orchestrator.fleet.effects import ClusterClient, Fetched, PartialFetch
from orchestrator.fleet.replica_states import State
from orchestrator.fleet.snapshot import BREAKER_AFTER, BREAKER_PAUSE_S, FIRST_BACKOFF_S
from orchestrator.rollout.rollout_step import Goal, ReplicaTarget, Situation
from placements.facts.engines import Engine, needs_neuron
from placements.spec.schema import ModelSpec
from workers.artifacts.fetch.artifact_fetcher import wanted_by
from workers.compiling.prefetch import compiles
from workers.messages.engine_protocol import LOADS_ARRIVING
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure

PROCESS_S = 5.0
"""From the request for a process until it reads weights: 1 s for Ray to start it, 4 s to import torch and transformers
(a killed replica serves a small model again after 5.7 s: docs/benchmarks.md)."""
PACE_S = 1.0  # observation time of a fetch before its remaining time is estimated
SPAN_S = 10.0  # window of that estimate


class PreparationObserver(Protocol):
    """Receives the progress of a preparation."""

    def fetching(self, sources: list[str]) -> None: ...

    def fetched(self, found: Fetched) -> None: ...

    def arrives(self, config: ReplicaConfig, left_s: float) -> None:
        """The process may be started with ``config``; the fetch ends in about ``left_s`` seconds. Called once."""
        ...

    def not_fetched(self, failure: Failure) -> None: ...

    def checking(self) -> None:
        """Everything is fetched; a check whether it can be loaded begins."""
        ...

    def looking(self) -> None:
        """The prediction of what the engine's package would compile begins."""
        ...

    def unforeseen(self, failure: Failure) -> None:
        """The prediction failed: the start compiles whatever is missing on its cores."""
        ...

    def compiling(self, missing: list[str]) -> None: ...

    def compiled(self, seconds: float) -> None: ...


async def prepare(
    config: ReplicaConfig,
    cluster: ClusterClient,
    observer: PreparationObserver,
    clock: Callable[[], float] = time.monotonic,
    *,
    compiled: bool = False,
    checks: bool = False,
    lead_s: float | None = None,
) -> ReplicaConfig | Failure:
    """Returns the configuration for the process once its host has everything, or the failure.

    ``checks``: also run the checks of a start that need no cores. ``compiled``: skip the prediction of what the
    engine's package would compile, which takes seconds. ``lead_s``: call ``observer.arrives`` when a fetch ends within
    that time (see `lead_of`); None: never. Cancelling it stops waiting for fetch and compilation. Raises HostLost.
    """
    sources = [artifact.source for artifact in wanted_by(config) if artifact is not None]
    if sources:
        observer.fetching(sources)
        fetch = await cluster.fetch(config, None if lead_s is None else _ArrivalAnnouncer(observer, lead_s, clock))
        if isinstance(fetch, Failure):
            observer.not_fetched(fetch)
            return fetch
        config = fetch.config
        observer.fetched(fetch)
    if checks:
        observer.checking()
        failure = await cluster.check(config)
        if failure is not None:
            return failure
    if compiled or not compiles(config):
        return config
    observer.looking()
    missing = await cluster.foresee(config)
    if isinstance(missing, Failure):
        observer.unforeseen(missing)
    elif missing:
        observer.compiling(list(missing))
        began = clock()
        failure = await cluster.compile(config)
        if failure is not None and failure.id != NEEDS_DEVICE:
            return failure
        observer.compiled(clock() - began)
    return config


def lead_of(config: ReplicaConfig, load_s: float | None) -> float | None:
    """Returns how long before the end of its fetch a replica's process may be started, in seconds; None: not before.

    Its engine must be able to wait for missing files, and nothing else may read them: neither code of the checkpoint
    nor compilation ahead. ``load_s`` is the duration of the model's last start, an upper bound: replicas do not report
    how much of it precedes the weights.
    """
    if config.engine not in LOADS_ARRIVING or config.trust_remote_code or compiles(config):
        return None
    return PROCESS_S if load_s is None else min(PROCESS_S, load_s)


@dataclass
class _ArrivalAnnouncer:
    """Reports an arrival once little enough of it is left, estimated from the recent network rate: bytes left by an
    earlier attempt arrive at the speed of the disk and do not predict the rest."""

    observer: PreparationObserver
    lead_s: float
    clock: Callable[[], float]
    seen: deque[tuple[float, int]] = field(default_factory=deque)
    announced: bool = False

    def __call__(self, arrival: PartialFetch) -> None:
        now = self.clock()
        self.seen.append((now, arrival.moved))
        while len(self.seen) > 2 and self.seen[1][0] <= now - SPAN_S:
            self.seen.popleft()
        at, moved = self.seen[0]
        if self.announced or now - at < PACE_S or arrival.moved <= moved:
            return
        left_s = arrival.left * (now - at) / (arrival.moved - moved)
        if left_s < self.lead_s:
            self.announced = True
            self.observer.arrives(arrival.config, left_s)


NEEDS_DEVICE = "compile-needs-device"  # the start compiles it on its cores


def takes_long(model: ModelSpec, engine: Engine) -> bool:
    """Returns whether a start of the model may have to fetch or compile something first."""
    remote = model.source_kind != "path" or model.draft_kind not in (None, "path")
    may_compile = engine == "auto" or needs_neuron(engine) or bool(model.engine_options.get("compile"))
    return engine != "echo" and (remote or may_compile)


@dataclass(frozen=True)
class Preparation:
    """The preparation of a new version on a host, which precedes the stop of an old replica there."""

    model: str
    version: str
    host: str
    done: bool = False
    failures: int = 0  # in a row
    reason: str | None = None
    stopped: bool = False  # a retry would fail again
    since: float = 0.0  # when the last attempt ended, on the controller's clock

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.version, self.host

    @property
    def retry_at(self) -> float:
        """When the next attempt may begin, on the controller's clock."""
        if self.stopped:
            return float("inf")
        pause_s = BREAKER_PAUSE_S if self.failures >= BREAKER_AFTER else FIRST_BACKOFF_S * 2.0 ** (self.failures - 1)
        return self.since + pause_s if self.failures else 0.0

    def failed(self, failure: Failure, now: float, *, stopped: bool) -> Preparation:
        return replace(self, failures=self.failures + 1, reason=str(failure), stopped=stopped, since=now)


def upcoming_targets(situation: Situation, goal: Goal, name: str) -> tuple[ReplicaTarget, ...]:
    """Returns the replicas that the next step of a model's update starts in place of old ones, by its ``goal``."""
    ends = (State.DRAINING, State.STOPPING)
    existing = {
        (view.id, view.host, view.cores, view.version)
        for view in situation.views
        if view.state not in ends and (view.id, view.epoch) not in situation.replaced
    }
    return tuple(
        target
        for target in goal.targets
        if target.model == name
        and target.placement is not None
        and (target.id, target.host, target.cores, target.version) not in existing
    )
