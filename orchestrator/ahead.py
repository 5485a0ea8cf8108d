"""What is done before a replica's process is asked for: what it loads is fetched, what it would compile is compiled."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from orchestrator.effects import Cluster, Fetched
from orchestrator.lifecycle import State
from orchestrator.rollout import Situation, Target, aim
from orchestrator.snapshot import BREAKER_AFTER, BREAKER_PAUSE_S, FIRST_BACKOFF_S
from placements.engines import Engine, needs_neuron
from placements.spec import ModelSpec
from workers.ahead import compiles
from workers.artifacts.bringing import wanted_by
from workers.config import ReplicaConfig
from workers.status import Failure


class Watching(Protocol):
    """Whoever is told how far it is."""

    def fetching(self, sources: list[str]) -> None: ...

    def fetched(self, found: Fetched) -> None: ...

    def not_fetched(self, failure: Failure) -> None: ...

    def compiling(self, missing: list[str]) -> None: ...

    def compiled(self, seconds: float) -> None: ...


async def get_ready(
    config: ReplicaConfig,
    cluster: Cluster,
    watching: Watching,
    clock: Callable[[], float] = time.monotonic,
    *,
    compiled: bool = False,
) -> ReplicaConfig | Failure:
    """The configuration as its process is to be told, when its host has all of it; or why it cannot be had.

    ``compiled``: the engine's package is not asked what it would compile, which takes it some seconds. Cancelled, it
    waits for neither any longer. Raises HostLost.
    """
    wanted = [one.source for one in wanted_by(config) if one is not None]
    if wanted:
        watching.fetching(wanted)
        found = await cluster.fetch(config)
        if isinstance(found, Failure):
            watching.not_fetched(found)
            return found
        config = found.config
        watching.fetched(found)
    missing = list(await cluster.foresee(config)) if compiles(config) and not compiled else []
    if missing:
        watching.compiling(missing)
        began = clock()
        failure = await cluster.compile(config)
        if failure is not None and failure.id != NEEDS_DEVICE:
            return failure
        watching.compiled(clock() - began)
    return config


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


def coming(situation: Situation, name: str) -> tuple[Target, ...]:
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
