"""The expected starts of a model: their times, measured on this fleet or estimated for its engine, and their host."""

from __future__ import annotations

import math

from orchestrator.control.fleet_state import FleetState
from orchestrator.control.journal.journal_records import ReadyStart
from orchestrator.control.start_times import ready_at
from orchestrator.messages.replica_states import AHEAD, State
from placements.resources.estimate import speed
from placements.spec.schema import ModelSpec

STEP_S = 10.0  # the expected end of a fetch changes with its rate: gateways learn it in such steps


def expected_start_s(state: FleetState, model: ModelSpec) -> float:
    """Returns the expected seconds of the next start of a replica, without fetching and compiling."""
    measured = state.start_times(model.name).expected_s
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
    times = {name: state.start_times(name).expected_s for name in names}
    return {name: expected_s for name, expected_s in times.items() if expected_s is not None}
