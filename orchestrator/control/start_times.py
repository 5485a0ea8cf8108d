"""How long starts take: the phases of each model's last starts, and when the next replica is expected to be ready."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.control.fleet_state import FleetState
from orchestrator.control.journal.journal_records import ReadyStart
from orchestrator.messages.replica_states import AHEAD, STARTING, State
from placements.resources.estimate import speed
from placements.spec.schema import ModelSpec

OLD_S = 6 * 3600.0  # a start that is so much older than the newest does not count
BEFORE_WEIGHTS = ("actor", "process", "imports")


def phases_again(view: ReplicaView) -> dict[str, float]:
    """Returns the seconds of a ready replica's start by `start_phases.PHASES`, without what only this start had to do:
    fetching and compiling."""
    load_s = view.load_s or 0.0
    phases = dict(view.load_phases) or {"engine": load_s}  # an engine that reports none
    longest = max(phases, key=phases.__getitem__)  # the one that has compiled, or waited for the fetch, if any did
    once_s = max(0.0, sum(phases.values()) - max(0.0, load_s - view.compile_s))
    phases[longest] = max(0.0, phases[longest] - once_s)
    return phases


@dataclass(frozen=True)
class StartTimes:
    """The last starts of a model on its engine, the newest first."""

    starts: Sequence[ReadyStart] = ()

    @classmethod
    def of(cls, starts: Sequence[ReadyStart], engine: str | None) -> StartTimes:
        """Returns those that tell about the next start on this engine."""
        own = [start for start in starts if start.engine == engine]
        return cls([start for start in own if own[0].at - start.at <= OLD_S])

    @cached_property
    def phases(self) -> Mapping[str, float]:
        """The expected seconds of the next start by phase: the lower median of the last starts. Empty without any."""
        names = dict.fromkeys(name for start in self.starts for name in start.phases)
        return {name: statistics.median_low(start.phases.get(name, 0.0) for start in self.starts) for name in names}

    @property
    def expected_s(self) -> float | None:
        """The expected duration of the next start, without fetching and compiling; None: none was measured."""
        return sum(self.phases.values()) if self.starts else None

    @property
    def before_weights_s(self) -> float | None:
        """The expected time from the next start's decision until it reads weights; None: it was not measured."""
        known = [self.phases[name] for name in BEFORE_WEIGHTS if name in self.phases]
        return sum(known) if known else None


def ready_at(view: ReplicaView, expected_s: float, now: float) -> float | None:
    """Returns when a replica that starts, or that has served and will be restarted, is expected to be ready, on the
    clock of ``now``; None if it does neither. ``expected_s``: of its whole start, without fetching and compiling. The
    rest of a compilation is unknown: it counts as if it ended now."""
    if view.state is State.FAILED and view.served and not view.stopped:
        return view.since + view.pause_s + expected_s
    if view.state not in STARTING:
        return None
    left_s = (view.fetch.left_s or 0.0) if view.fetch is not None else 0.0
    return view.begun + view.aside(now) + left_s + expected_s


def start_times(state: FleetState, model: str) -> StartTimes:
    """Returns how long the last starts of a model took."""
    return StartTimes.of(state.records.state.ready_starts.get(model, ()), state.current.engines.get(model))


def record_ready(state: FleetState, view: ReplicaView) -> None:
    """Record the start of a replica that is ready now."""
    start = ReadyStart(
        model=view.model,
        version=view.version,
        engine=state.revision_of_version(view.model, view.version).engines.get(view.model, ""),
        host=view.host,
        phases=phases_again(view),
    )
    state.records.note(start)


STEP_S = 10.0  # the expected end of a fetch changes with its rate: gateways learn it in such steps


def expected_start_s(state: FleetState, model: ModelSpec) -> float:
    """Returns the expected seconds of the next start of a replica, without fetching and compiling."""
    measured = start_times(state, model.name).expected_s
    if measured is not None:
        return measured
    current = state.current
    topology = current.hosts[0].topology if current.hosts else None
    return speed(model, current.checkpoints.get(model.name), current.engines[model.name], topology).load_s


def parked_start(state: FleetState, model: str) -> ReadyStart | None:
    """Returns the last start of a model without replicas, if its host lives and has served the current version; else
    None."""
    last, *_ = state.records.state.ready_starts.get(model) or (None,)
    if last is None or last.version != state.current.versions.get(model) or state.views.of_model(model):
        return None
    return last if any(host.name == last.host for host in state.living_hosts) else None


def is_expected_back(state: FleetState, model: ModelSpec) -> bool:
    """Returns whether a model without a ready replica has served in this version, and one is expected within the time
    that requests wait for a first replica."""
    version, at = state.current.versions[model.name], expected_ready_at(state, model)
    served = any(start.version == version for start in state.records.state.ready_starts.get(model.name, ()))
    return served and at is not None and abs(at - state.wall()) <= model.scaling.hold_s


def expected_ready_at(state: FleetState, model: ModelSpec) -> float | None:
    """Returns when the first replica of a model without ready ones is expected to be ready, in seconds since the epoch;
    None: it has ready ones, or none that starts."""
    views = state.views.of_model(model.name)
    if any(view.state is State.READY for view in views):
        return None
    now, expected_s = state.clock(), expected_start_s(state, model)
    times = [(at, view) for view in views if (at := ready_at(view, expected_s, now)) is not None]
    if not times:
        return None
    at, first = min(times, key=lambda time: time[0])
    wall = at - now + state.wall()
    varies = first.state in AHEAD or first.fetch is not None
    return math.ceil(wall / STEP_S) * STEP_S if varies else float(round(wall))


def load_times(state: FleetState) -> dict[str, float]:
    """Returns the measured duration of a replica's start by model, in seconds."""
    names = (model.name for model in state.current.spec.models)
    times = {name: start_times(state, name).expected_s for name in names}
    return {name: expected_s for name, expected_s in times.items() if expected_s is not None}
