"""Room: running replicas that go elsewhere so that a replica that is blocked finds enough cores in a row. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.fleet.lifecycle import State
from orchestrator.fleet.snapshot import ReplicaView
from orchestrator.rollout.rollout_step import Goal, Situation, aim
from orchestrator.rollout.update_strategy import END_S
from placements.spec.schema import Spec

MOST_MOVES = 4
"""How many replicas go for one that is blocked. With four, an arrival is rejected half as often as by first fit
(benchmarks/placement.py); more gain little."""


@dataclass(frozen=True)
class Relocation:
    """Cores that are being emptied."""

    models: tuple[str, ...]  # whose replicas will lie there
    cores: Mapping[str, frozenset[int]]  # by host; nothing else may go there meanwhile
    moving: tuple[ReplicaView, ...]  # they go elsewhere first, and then end where they are

    def empty(self, views: Sequence[ReplicaView]) -> bool:
        """Whether nothing lies there any more."""
        return not any(view.touches(self.cores.get(view.host, frozenset())) for view in views if not view.gone)


def room_for(situation: Situation, goal: Goal) -> Relocation | None:
    """The cheapest room for what `goal` leaves out for want of cores in a row; None: there is none, or no need.

    Only where each replica that goes is ready and finds its new cores free at once: then another one of it serves
    there before it ends, and nobody misses it.
    """
    if not any(one.problems[0].id == "no-room" for one in goal.plan.unplaced):
        return None
    if any(step.old for step in goal.steps.values()):
        return None  # an update is under way, and frees cores by itself
    trial = aim(situation, moves=MOST_MOVES, costs=_costs(situation)).plan
    if len(trial.unplaced) >= len(goal.plan.unplaced):
        return None
    held: dict[str, frozenset[int]] = {}
    for view in situation.views:
        held[view.host] = held.get(view.host, frozenset()) | frozenset(view.cores or ())
    ready = {view.id: view for view in situation.views if view.state is State.READY}
    moves = [move for move in trial.moves if move not in goal.plan.moves]
    moving = []
    for move in moves:
        goes = ready.get(f"{move.before.model}/{move.before.replica}")
        if goes is None or held.get(move.after.host, frozenset()) & frozenset(move.after.cores or ()):
            return None
        moving.append(goes)
    known = {placement.running for placement in goal.plan.placements} | {move.after.running for move in moves}
    newcomers = [placement for placement in trial.placements if placement.running not in known]
    cores: dict[str, frozenset[int]] = {}
    for one in newcomers:
        if any(one.host == view.host and view.touches(frozenset(one.cores or ())) for view in moving):
            cores[one.host] = cores.get(one.host, frozenset()) | frozenset(one.cores or ())
    if not cores:
        return None
    return Relocation(tuple(dict.fromkeys(one.model for one in newcomers)), cores, tuple(moving))


def move_costs(spec: Spec, load_s: Mapping[str, float], traffic: Mapping[str, float]) -> dict[str, float]:
    """What moving a replica of each model costs: (load_s + END_S) x (1 + traffic).

    ``load_s`` is how long a start of a replica of a model takes, in seconds, ``traffic`` how many requests each of its
    replicas holds. A model whose start nobody has measured is taken to load as long as the slowest that is known.
    """
    usual = max(load_s.values(), default=0.0)
    return {
        model.name: (load_s.get(model.name, usual) + END_S) * (1 + traffic.get(model.name, 0.0))
        for model in spec.models
    }


def load_times(situation: Situation) -> dict[str, float]:
    """By model, in seconds; of those that have been measured."""
    times = {model.name: situation.load_s(model.name) for model in situation.spec.models}
    return {name: time for name, time in times.items() if time is not None}


def traffic(situation: Situation) -> dict[str, float]:
    """Requests that each replica of a model holds, on average."""
    found = {}
    for model in situation.spec.models:
        views = [view for view in situation.views if view.model == model.name]
        found[model.name] = sum(view.live + view.waiting for view in views) / max(1, len(views))
    return found


def _costs(situation: Situation) -> dict[str, float]:
    return move_costs(situation.spec, load_times(situation), traffic(situation))
