"""Decides which replicas move to make contiguous cores free: for a waiting replica, or for `corewright plan --defrag`.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.control.decisions.rollout_step import Goal, Situation, compute_goal, cores_by_host, merged
from orchestrator.control.decisions.update_strategy import END_S
from orchestrator.messages.replica_states import State
from placements.facts.checkpoints import Checkpoint
from placements.facts.core_range import CoreRange, ranges
from placements.facts.topology import Host
from placements.planner.ledger import ledger
from placements.planner.plan import Move, Placement, Plan, Running, Window, defragment
from placements.resources.environ import threads
from placements.spec.problems import Problem
from placements.spec.schema import ModelSpec, Spec

MAX_MOVES = 4
"""The most replicas that are moved for one that cannot be placed. With four, an arrival is rejected half as often as by
first fit (benchmarks/placement.py); more gain little."""


@dataclass(frozen=True)
class Relocation:
    """A set of cores that is being emptied for replicas that cannot be placed."""

    models: tuple[str, ...]  # whose replicas will be placed there
    cores: Mapping[str, frozenset[int]]  # by host; reserved until the relocation ends
    moving: tuple[ReplicaView, ...]  # replaced elsewhere first, then stopped

    def empty(self, views: Sequence[ReplicaView]) -> bool:
        """Returns whether no replica uses the cores any more."""
        return not any(view.touches(self.cores.get(view.host, frozenset())) for view in views if not view.gone)


def find_relocation(situation: Situation, goal: Goal) -> Relocation | None:
    """Returns the cheapest relocation for replicas that ``goal`` cannot place for lack of contiguous cores, or None.

    Every moved replica is ready and its new cores are free: its replacement serves before it stops, without an outage.
    """
    if not any(newcomer.problems[0].id == "no-room" for newcomer in goal.plan.unplaced):
        return None
    if any(step.old for step in goal.steps.values()):
        return None  # an update in progress frees cores by itself
    trial = compute_goal(situation, moves=MAX_MOVES, costs=_costs(situation)).plan
    if len(trial.unplaced) >= len(goal.plan.unplaced):
        return None
    held = cores_by_host(situation.views)
    ready = {view.id: view for view in situation.views if view.state is State.READY}
    moves = [move for move in trial.moves if move not in goal.plan.moves]
    moving = []
    for move in moves:
        replica = ready.get(f"{move.before.model}/{move.before.replica}")
        if replica is None or held.get(move.after.host, frozenset()) & frozenset(move.after.cores or ()):
            return None
        moving.append(replica)
    running = {placement.running for placement in goal.plan.placements} | {move.after.running for move in moves}
    newcomers = [placement for placement in trial.placements if placement.running not in running]
    cores = cores_by_host(
        newcomer
        for newcomer in newcomers
        if any(newcomer.host == view.host and view.touches(newcomer.cores or ()) for view in moving)
    )
    if not cores:
        return None
    return Relocation(tuple(dict.fromkeys(newcomer.model for newcomer in newcomers)), cores, tuple(moving))


def move_costs(spec: Spec, load_s: Mapping[str, float], traffic: Mapping[str, float]) -> dict[str, float]:
    """Returns the cost of moving a replica of each model: (load_s + END_S) x (1 + traffic).

    ``load_s`` is the start time of a replica by model, in seconds; ``traffic`` the requests per replica. A model whose
    start was not measured is assumed to load as long as the slowest one that was.
    """
    usual = max(load_s.values(), default=0.0)
    return {
        model.name: (load_s.get(model.name, usual) + END_S) * (1 + traffic.get(model.name, 0.0))
        for model in spec.models
    }


def load_times(situation: Situation) -> dict[str, float]:
    """Returns the measured start times by model, in seconds."""
    times = {model.name: situation.load_s(model.name) for model in situation.spec.models}
    return {name: time for name, time in times.items() if time is not None}


def traffic(situation: Situation) -> dict[str, float]:
    """Returns the mean number of requests per replica, by model."""
    requests = {}
    for model in situation.spec.models:
        views = [view for view in situation.views if view.model == model.name]
        requests[model.name] = sum(view.live + view.waiting for view in views) / max(1, len(views))
    return requests


def _costs(situation: Situation) -> dict[str, float]:
    return move_costs(situation.spec, load_times(situation), traffic(situation))


@dataclass(frozen=True)
class RunningFleet:
    """What runs on the hosts now, for `defragmentation`; ``load_s`` and ``traffic`` are those of `move_costs`."""

    replicas: Sequence[Running]
    quarantined: Mapping[str, frozenset[int]] = field(default_factory=lambda: MappingProxyType({}))
    cordoned: Mapping[str, frozenset[int]] = field(default_factory=lambda: MappingProxyType({}))
    load_s: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    traffic: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


def defragmentation(
    spec: Spec, hosts: Sequence[Host], checkpoints: Mapping[str, Checkpoint], fleet: RunningFleet, cores: int
) -> dict[str, Any]:
    """Returns the window of so many cores and its moves; a window of None and a problem if there is none."""
    load_s = fleet.load_s
    costs = move_costs(spec, load_s, fleet.traffic)
    blocked = merged(fleet.quarantined, fleet.cordoned)
    window = defragment(spec, hosts, checkpoints, fleet.replicas, blocked, cores=cores, costs=costs)
    moves = window.moves if window is not None else ()
    placements = _after(spec, hosts, fleet.replicas, moves)
    book = ledger(spec, hosts, Plan(placements), checkpoints, {}, fleet.quarantined, fleet.cordoned)
    measured = [load_s[move.after.model] for move in moves if move.after.model in load_s]
    return {
        "cores": cores,
        "window": None if window is None else {"host": window.host, "cores": str(window.cores)},
        "moves": [{**move.as_dict(), "load_s": load_s.get(move.after.model)} for move in moves],
        "load_s": round(float(sum(measured)), 3) if len(measured) == len(moves) else None,
        "placements": [placement.as_dict() for placement in placements],
        "hosts": [host.as_dict() for host in book.hosts],
        "problems": [problem.as_dict() for problem in _problems(window, hosts, placements, blocked, cores)],
    }


def _after(
    spec: Spec, hosts: Sequence[Host], running: Sequence[Running], moves: Sequence[Move]
) -> tuple[Placement, ...]:
    """Returns the running placements after the moves."""
    machines = {host.name: host for host in hosts}
    models = {model.name: model for model in spec.models}
    moved = {move.before: move.after for move in moves}
    placements = []
    for replica in running:
        host, model = machines.get(replica.host), models.get(replica.model)
        if replica in moved:
            placements.append(moved[replica])
        elif host is not None and model is not None:
            placements.append(placement_of(replica, host, model))
    return tuple(placements)


def placement_of(running: Running, machine: Host, spec: ModelSpec) -> Placement:
    """Returns the placement of a replica that stays where it runs."""
    count = threads(spec.threads, spec.tp_degree, machine)
    return Placement(running.model, running.replica, running.host, running.cores, count, machine, spec)


def _problems(
    window: Window | None,
    hosts: Sequence[Host],
    placed: Sequence[Placement],
    blocked: Mapping[str, frozenset[int]],
    cores: int,
) -> list[Problem]:
    if window is not None:
        return []
    occupied, none = cores_by_host(placed), frozenset[int]()
    usable = {host.name: set(range(host.cores)) - host.reserved_cores - blocked.get(host.name, none) for host in hosts}
    free = {name: len(cores - occupied.get(name, none)) for name, cores in usable.items()}
    name = max(free, key=lambda name: free[name], default=None)
    if name is None:
        return [Problem("no-window", "error", "", "there is no host", "")]
    runs = [CoreRange.parse(run) for run in ranges(usable[name])]
    longest = max(runs, key=len, default=None)
    allowed = "none of its cores may be used" if longest is None else f"replicas may use {longest} there"
    fact = f"no moves open a window of {cores} cores: most are free on {name}, {free[name]}, and {allowed}"
    return [Problem("no-window", "error", "", fact, "request fewer cores, or remove replicas, or add a host")]
