"""What is done before a replica's process is asked for: what it loads is fetched, what it would compile is compiled."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from orchestrator.fleet.effects import ClusterClient, Fetched, FetchedFiles
from orchestrator.fleet.lifecycle import State
from orchestrator.fleet.snapshot import BREAKER_AFTER, BREAKER_PAUSE_S, FIRST_BACKOFF_S
from orchestrator.rollout.rollout_step import ReplicaTarget, Situation, aim
from placements.facts.engines import Engine, needs_neuron
from placements.spec.schema import ModelSpec
from workers.artifacts.fetch.artifact_fetcher import wanted_by
from workers.compiling.prefetch import compiles
from workers.messages.engine_protocol import LOADS_ARRIVING
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure

PROCESS_S = 5.0
"""From asking for a process to its first look at weights: 1 s for Ray to start it, 4 s for torch and transformers to be
imported (a replica that was killed serves a small model again after 5.7 s: docs/benchmarks.md)."""
PACE_S = 1.0  # a fetch is watched for so long before it is said how long the rest takes
SPAN_S = 10.0  # over which that is measured


class Watching(Protocol):
    """Whoever is told how far it is."""

    def fetching(self, sources: list[str]) -> None: ...

    def fetched(self, found: Fetched) -> None: ...

    def arrives(self, config: ReplicaConfig, left_s: float) -> None:
        """Its process may be asked for, with that configuration: the fetch takes ``left_s`` more. Told once."""
        ...

    def not_fetched(self, failure: Failure) -> None: ...

    def checking(self) -> None:
        """All is here, and whether it can be loaded is looked at."""
        ...

    def looking(self) -> None:
        """The engine's package is asked what it would compile."""
        ...

    def unforeseen(self, failure: Failure) -> None:
        """That cannot be told: the start will find out, and compile what it must on its cores."""
        ...

    def compiling(self, missing: list[str]) -> None: ...

    def compiled(self, seconds: float) -> None: ...


async def get_ready(
    config: ReplicaConfig,
    cluster: ClusterClient,
    watching: Watching,
    clock: Callable[[], float] = time.monotonic,
    *,
    compiled: bool = False,
    checks: bool = False,
    lead_s: float | None = None,
) -> ReplicaConfig | Failure:
    """The configuration as its process is to be told, when its host has all of it; or why it cannot be had.

    ``checks``: what its start would find wrong without its cores counts as well. ``compiled``: the engine's package is
    not asked what it would compile, which takes it some seconds. ``lead_s``: ``watching`` hears of an arrival that ends
    within that time (see `lead_of`); None: of none. Cancelled, it waits for neither any longer. Raises HostLost.
    """
    wanted = [one.source for one in wanted_by(config) if one is not None]
    if wanted:
        watching.fetching(wanted)
        found = await cluster.fetch(config, None if lead_s is None else _Announcing(watching, lead_s, clock))
        if isinstance(found, Failure):
            watching.not_fetched(found)
            return found
        config = found.config
        watching.fetched(found)
    if checks:
        watching.checking()
        failure = await cluster.check(config)
        if failure is not None:
            return failure
    if compiled or not compiles(config):
        return config
    watching.looking()
    missing = await cluster.foresee(config)
    if isinstance(missing, Failure):
        watching.unforeseen(missing)
    elif missing:
        watching.compiling(list(missing))
        began = clock()
        failure = await cluster.compile(config)
        if failure is not None and failure.id != NEEDS_DEVICE:
            return failure
        watching.compiled(clock() - began)
    return config


def lead_of(config: ReplicaConfig, load_s: float | None) -> float | None:
    """How long before the end of its fetch a replica's process may be asked for, so that it wants its weights when they
    are there; None: not before.

    Its engine must wait for what is not there yet, and nothing else may look for it: no code of the checkpoint, and
    nobody who compiles ahead. ``load_s`` is how long the model's last start took in all, which is an upper bound; what
    of it came before the weights is not told by replicas.
    """
    if config.engine not in LOADS_ARRIVING or config.trust_remote_code or compiles(config):
        return None
    return PROCESS_S if load_s is None else min(PROCESS_S, load_s)


@dataclass
class _Announcing:
    """Tells of an arrival when little enough of it is left, by the bytes that came over the network lately: what an
    earlier attempt had left comes at the speed of the disk, and says nothing of the rest."""

    watching: Watching
    lead_s: float
    clock: Callable[[], float]
    seen: deque[tuple[float, int]] = field(default_factory=deque)
    told: bool = False

    def __call__(self, arrival: FetchedFiles) -> None:
        now = self.clock()
        self.seen.append((now, arrival.moved))
        while len(self.seen) > 2 and self.seen[1][0] <= now - SPAN_S:
            self.seen.popleft()
        at, moved = self.seen[0]
        if self.told or now - at < PACE_S or arrival.moved <= moved:
            return
        left_s = arrival.left * (now - at) / (arrival.moved - moved)
        if left_s < self.lead_s:
            self.told = True
            self.watching.arrives(arrival.config, left_s)


NEEDS_DEVICE = "compile-needs-device"  # the start will compile it, on its cores


def takes_long(model: ModelSpec, engine: Engine) -> bool:
    """Whether its start may have to fetch or to compile something first."""
    elsewhere = model.source_kind != "path" or model.draft_kind not in (None, "path")
    kept = engine == "auto" or needs_neuron(engine) or bool(model.engine_options.get("compile"))
    return engine != "echo" and (elsewhere or kept)


@dataclass(frozen=True)
class Preparation:
    """What a new version needs on a host, before an old replica goes for it there."""

    model: str
    version: str
    host: str
    done: bool = False
    failures: int = 0  # in a row
    reason: str | None = None
    stopped: bool = False  # it would only fail again
    since: float = 0.0  # on the controller's clock: when it has ended last

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.version, self.host

    @property
    def retry_at(self) -> float:
        """When it may be tried again."""
        if self.stopped:
            return float("inf")
        pause_s = BREAKER_PAUSE_S if self.failures >= BREAKER_AFTER else FIRST_BACKOFF_S * 2.0 ** (self.failures - 1)
        return self.since + pause_s if self.failures else 0.0

    def failed(self, failure: Failure, now: float, *, stopped: bool) -> Preparation:
        return replace(self, failures=self.failures + 1, reason=str(failure), stopped=stopped, since=now)


def coming(situation: Situation, name: str) -> tuple[ReplicaTarget, ...]:
    """The replicas that the next step of a model's update would start, in place of old ones that would go for them."""
    goal = aim(situation.with_wish(replace(situation.wishes[name], awaited=False)))
    ends = (State.DRAINING, State.STOPPING)
    there = {
        (view.id, view.host, view.cores, view.version)
        for view in situation.views
        if view.state not in ends and (view.id, view.epoch) not in situation.replaced
    }
    return tuple(
        target
        for target in goal.targets
        if target.model == name
        and target.placement is not None
        and (target.id, target.host, target.cores, target.version) not in there
    )
