"""Which way a model's replicas are replaced: what interrupts least. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.lifecycle import State
from orchestrator.rollout import Situation, Wish, aim
from placements.spec import Strategy

END_S = 2.0  # from the last answer of a replica to its cores being free: a kill and the host's look at the process


@dataclass(frozen=True)
class Way:
    """How a model's replicas are replaced, and what that costs."""

    strategy: Strategy
    outage_s: float | None  # how long no replica of the model serves; None: nobody has measured a start of it yet
    why: str
    lender: str | None = None
    possible: bool = True


def choose(situation: Situation, name: str) -> Way:
    """The way for a model with old replicas: the spec's, or under ``auto`` the first of these.

    1. surge, where a replica more finds free cores (all of them where the versions do not mix)   no outage
    2. in_place, one replica at a time, where another one serves meanwhile                        no outage
    3. borrow, where an idle replica of no higher priority lies on enough cores                   no outage
    4. hold, where the predicted swap takes at most ``max_swap_s``                                requests wait
    5. in_place                                                                                   requests are refused
    """
    wish = situation.wishes[name]
    asked = wish.model.update.strategy
    ready = sum(view.model == name and view.state is State.READY for view in situation.views)
    load_s = situation.load_s(name)
    swap_s = None if load_s is None else load_s + END_S
    if asked in ("auto", "surge"):
        if _fits(situation, replace(wish, strategy="surge", lender=None)):
            return Way("surge", 0.0, "free cores hold the new replica while the old one serves")
        if asked == "surge":
            return Way("surge", None, "no free cores hold a further replica", possible=False)
    if asked in ("auto", "in_place") and ready > 1 and wish.mixes:
        return Way("in_place", 0.0, f"one of {ready} replicas at a time, the others serve")
    if asked in ("auto", "borrow"):
        lender = _lender(situation, wish)
        if lender is not None:
            return Way("borrow", 0.0, f"{lender} is idle and gives way meanwhile", lender)
        if asked == "borrow":
            return Way("borrow", None, "no idle replica lies on enough cores", possible=False)
    if ready == 0:
        return Way("in_place", 0.0, "no replica serves now")
    if asked == "hold" or (asked == "auto" and swap_s is not None and swap_s <= wish.model.update.max_swap_s):
        return Way("hold", swap_s, "no free cores: requests wait while the replica is swapped")
    return Way("in_place", swap_s, "no free cores: it is stopped before the new one starts")


def _fits(situation: Situation, wish: Wish) -> bool:
    trial = aim(situation.with_wish(wish))
    placed = sum(placement.model == wish.model.name for placement in trial.plan.placements)
    return placed >= trial.steps[wish.model.name].count


def _lender(situation: Situation, wish: Wish) -> str | None:
    """The idle replica of the lowest priority whose cores would let the model surge."""
    specs = {model.name: model for model in situation.spec.models}
    idle = [
        view
        for view in situation.views
        if view.model != wish.model.name
        and view.model in specs
        and view.state is State.READY
        and view.idle
        and specs[view.model].priority <= wish.model.priority
    ]
    for view in sorted(idle, key=lambda view: (specs[view.model].priority, len(view.cores or ()), view.id)):
        if _fits(situation, replace(wish, strategy="borrow", lender=view.id)):
            return view.id
    return None
