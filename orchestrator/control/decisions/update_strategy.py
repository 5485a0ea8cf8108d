"""Chooses the update strategy of a model that interrupts its service least. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.control.decisions.rollout_step import DesiredModel, Goal, Situation, compute_goal
from orchestrator.messages.replica_states import State
from placements.facts.plural import plural
from placements.spec.notation import CorePin
from placements.spec.sections import Strategy

END_S = 2.0
"""From the last answer of a replica until its cores are free, on Neuron devices: kill and confirmation of death."""

EMULATED_END_S = 0.2
"""The same on emulated cores, which the kernel frees at once: 0.1 s, measured with the demo's models."""


@dataclass(frozen=True)
class UpdateStrategy:
    """How the replicas of a model are replaced, and the outage that this causes."""

    strategy: Strategy
    outage_s: float | None  # how long no replica of the model serves; None: no start was measured yet
    why: str
    possible: bool = True
    predicted_s: float | None = None  # until all replicas are replaced; None: no start was measured yet


def choose_strategy(situation: Situation, name: str, goal: Goal | None = None) -> UpdateStrategy:
    """Returns the strategy of `_choose` with the predicted time: one swap after the other if replicas are replaced one
    at a time, else all at once. ``goal`` is that of the situation, if it is known: it answers for the strategy so far.
    """
    choice, swap_s = _choose(situation, name, goal), _swap_s(situation, name)
    ready = sum(view.model == name and view.state is State.READY for view in situation.views)
    swaps = ready if choice.strategy == "in_place" and choice.outage_s == 0.0 else 1
    return replace(choice, predicted_s=None if swap_s is None else max(1, swaps) * swap_s)


def _swap_s(situation: Situation, name: str) -> float | None:
    """Returns the time from the last answer of a replica until its replacement serves on the same cores."""
    load_s = situation.load_s(name)
    ends_s = EMULATED_END_S if all(host.emulated or not host.cores for host in situation.hosts) else END_S
    return None if load_s is None else load_s + ends_s


def _choose(situation: Situation, name: str, goal: Goal | None) -> UpdateStrategy:
    """Returns the strategy for a model with old replicas: the spec's, or with ``auto`` the first possible one of these.

    1. surge, if an extra replica finds free cores (all of them if the versions do not mix)     no outage
    2. in_place, one replica at a time, if another one serves meanwhile                         no outage
    3. in_place, if no replica of the model serves now                                          no further outage
    4. hold, if the predicted swap takes at most ``max_swap_s``                                 requests wait
    5. in_place                                                                                 requests are rejected

    The order is fixed, not by the predicted outage: 1 and 2 both predict none, and differ in the cores that they take.
    """
    desired = situation.desired_models[name]
    requested = desired.model.update.strategy
    ready = sum(view.model == name and view.state is State.READY for view in situation.views)
    swap_s = _swap_s(situation, name)
    cause: str | None = f"update.strategy is {requested}"
    if requested in ("auto", "surge"):
        cause = _obstacle(situation, replace(desired, strategy="surge"), goal)
        if cause is None:
            return UpdateStrategy("surge", 0.0, "free cores hold the new replica while the old one serves")
        if requested == "surge":
            return UpdateStrategy("surge", None, cause, possible=False)
    if requested in ("auto", "in_place") and ready > 1 and desired.mixes:
        return UpdateStrategy("in_place", 0.0, f"one of {ready} replicas at a time, the others serve")
    if ready == 0:
        return UpdateStrategy("in_place", 0.0, "no replica serves now")
    if requested == "hold" or (
        requested == "auto" and swap_s is not None and swap_s <= desired.model.update.max_swap_s
    ):
        return UpdateStrategy("hold", swap_s, f"{cause}; requests wait while the replica is swapped")
    return UpdateStrategy("in_place", swap_s, f"{cause}; the replica stops before the new one starts")


def _obstacle(situation: Situation, desired: DesiredModel, goal: Goal | None = None) -> str | None:
    """Returns why the new replicas cannot be placed beside the old ones, with a remedy; None if they can."""
    name, pins = desired.model.name, desired.model.cores
    trial = goal if desired.strategy == situation.desired_models[name].strategy else None
    trial = trial or compute_goal(situation.with_desired(desired))
    if sum(placement.model == name for placement in trial.plan.placements) >= trial.steps[name].count:
        return None
    problem = next((candidate.problems[0] for candidate in trial.plan.unplaced if candidate.model == name), None)
    if problem is None:
        return "its replica is lent to another model"
    if problem.id != "pin-taken":
        return problem.what
    noun, are = plural(len(pins), "pin"), "are" if len(pins) > 1 else "is"
    conflict = f"its {noun} {', '.join(map(str, pins))} {are} taken"
    model = desired.model.model_copy(update={"cores": ()})
    models = tuple(model if candidate.name == name else candidate for candidate in situation.spec.models)
    free = replace(situation, spec=situation.spec.model_copy(update={"models": models}))
    without = _obstacle(free, replace(desired, model=model))
    if without is not None:
        return f"{conflict}, and without the {noun} {without}"
    places = compute_goal(free.with_desired(replace(desired, model=model))).plan.placements
    host, cores = next(
        (candidate.host, candidate.cores)
        for candidate in places
        if candidate.model == name and candidate.cores is not None
    )
    range = CorePin(cores, host if len(situation.hosts) > 1 else None)
    return (
        f"{conflict} and {_free_cores(situation)} cores are free: with a further range in `cores`, such as {range}, or "
        f"without the {noun}, the new replica would start beside the old one"
    )


def _free_cores(situation: Situation) -> int:
    free = 0
    for host in situation.hosts:
        held = {
            core for view in situation.views if view.host == host.name and not view.gone for core in view.cores or ()
        }
        free += len(set(range(host.cores)) - held - host.reserved_cores - situation.blocked.get(host.name, frozenset()))
    return free
