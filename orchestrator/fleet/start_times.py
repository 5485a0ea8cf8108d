"""How long starts take: the phases of each model's last starts, and the expected end of a start. Pure."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from orchestrator.fleet.replica_states import STARTING, State
from orchestrator.fleet.snapshot import ReplicaView

KEPT = 3  # starts of a model: one slow start does not count, and a lasting change counts after two
OLD_S = 6 * 3600.0  # a start that is so much older than the newest is forgotten
BEFORE_WEIGHTS = ("actor", "process", "imports")


@dataclass(frozen=True)
class MeasuredStart:
    """One start that ended in readiness, at ``at`` on the controller's clock. ``phases`` are its seconds by
    `start_phases.PHASES`, without what only this start had to do: fetching and compiling."""

    id: str
    epoch: int
    at: float
    phases: Mapping[str, float]

    @property
    def key(self) -> tuple[str, int]:
        return self.id, self.epoch


def measured_start(view: ReplicaView) -> MeasuredStart:
    """Returns the start of a ready replica."""
    load_s = view.load_s or 0.0
    phases = dict(view.load_phases) or {"engine": load_s}  # the previous version reports no phases
    longest = max(phases, key=phases.__getitem__)  # the one that has compiled, or waited for the fetch, if any did
    once_s = max(0.0, sum(phases.values()) - max(0.0, load_s - view.compile_s))
    phases[longest] = max(0.0, phases[longest] - once_s)
    return MeasuredStart(view.id, view.epoch, view.since, MappingProxyType(phases))


@dataclass(frozen=True)
class ModelStarts:
    """The last ``KEPT`` starts of a model on its engine, the newest first."""

    engine: str
    starts: tuple[MeasuredStart, ...] = ()

    def after(self, views: Iterable[ReplicaView]) -> ModelStarts:
        """Returns the starts with those of these replicas in addition."""
        starts = {start.key: start for start in self.starts}
        ready = (view for view in views if view.state is State.READY and view.load_s is not None)
        for view in heapq.nlargest(KEPT, ready, key=lambda view: view.since):
            if (view.id, view.epoch) not in starts:
                starts[view.id, view.epoch] = measured_start(view)
        newest = heapq.nlargest(KEPT, starts.values(), key=lambda start: start.at)
        kept = tuple(start for start in newest if newest[0].at - start.at <= OLD_S)
        return self if kept == self.starts else ModelStarts(self.engine, kept)

    @cached_property
    def phases(self) -> Mapping[str, float]:
        """The expected seconds of the next start by phase: the lower median of the last starts. Empty without any."""
        names = dict.fromkeys(name for start in self.starts for name in start.phases)
        return {name: statistics.median_low(start.phases.get(name, 0.0) for start in self.starts) for name in names}

    @cached_property
    def expected_s(self) -> float | None:
        """The expected duration of the next start, without fetching and compiling; None: none was measured."""
        return sum(self.phases.values()) if self.starts else None

    @property
    def before_weights_s(self) -> float | None:
        """The expected time from the next start's decision until it reads weights; None: it was not measured."""
        known = [self.phases[name] for name in BEFORE_WEIGHTS if name in self.phases]
        return sum(known) if known else None


@dataclass(frozen=True)
class StartTimes:
    """The last starts by model."""

    models: Mapping[str, ModelStarts] = field(default_factory=lambda: MappingProxyType({}))

    def after(self, views: Callable[[str], Iterable[ReplicaView]], engines: Mapping[str, str]) -> StartTimes:
        """Returns the times with the starts of the replicas ``views(model)`` in addition. ``engines``: of each model;
        starts on another engine are forgotten, and so are those of other models."""
        models = {name: self._of(name, engine).after(views(name)) for name, engine in engines.items()}
        return StartTimes(MappingProxyType(models))

    def _of(self, model: str, engine: str) -> ModelStarts:
        starts = self.models.get(model)
        return starts if starts is not None and starts.engine == engine else ModelStarts(engine)

    def of(self, model: str) -> ModelStarts:
        return self.models.get(model) or ModelStarts("")


def ready_at(view: ReplicaView, expected_s: float, now: float) -> float | None:
    """Returns when a replica that starts is expected to be ready, on the clock of ``now``; None if it does not start.
    ``expected_s``: of its whole start, without fetching and compiling. The rest of a compilation is unknown: it counts
    as if it ended now."""
    if view.state not in STARTING:
        return None
    left_s = (view.fetch.left_s or 0.0) if view.fetch is not None else 0.0
    return view.begun + view.aside(now) + left_s + expected_s
