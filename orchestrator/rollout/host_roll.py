"""Maintenance of host after host: when a host may be drained, when it is empty, and when the next one follows. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from orchestrator.fleet.replica_states import State
from orchestrator.rollout.rollout_step import Situation, compute_goal

Phase = Literal["next", "draining", "waiting"]
"""The state of one host: it waits for its turn; its replicas move; it is empty, and in maintenance."""
Wait = Literal["none", "operator", "node"]
"""For what an empty host waits: nothing, `hosts continue`, or a new Ray node of its machine."""


@dataclass(frozen=True)
class RollFacts:
    """What a maintenance observes of the fleet and of its current host."""

    settled: bool  # every replica that has a place is ready
    refusal: str | None  # why the host cannot be drained now
    busy: int  # replicas on the host, which may hold its cores, and requests in its gateways
    node: str | None  # its Ray node, if it lives


def next_phase(phase: Phase, wait: Wait, node: str | None, facts: RollFacts) -> Phase | Literal["done"]:
    """Returns the phase of the current host after this round. ``node`` was its Ray node when its drain began.

    1. next: until the replicas of the host before are ready again, and the others have room for those of this one
    2. draining: until no replica is on it, and its gateways have no request
    3. waiting: for an operator, who ends it from outside, or for another node
    """
    if phase == "next":  # 1
        return "draining" if facts.settled and facts.refusal is None else "next"
    if phase == "draining":  # 2
        if facts.busy:
            return "draining"
        return "done" if wait == "none" else "waiting"
    returned = facts.node is not None and facts.node != node
    return "done" if wait == "node" and returned else "waiting"  # 3


def refusal(situation: Situation, host: str, *, partly: bool) -> str | None:
    """Returns why the models cannot be served without this host, or None.

    ``partly``: they may have fewer replicas, but each that serves now keeps at least one.
    """
    every = frozenset(
        core for candidate in situation.hosts if candidate.name == host for core in range(candidate.cores)
    )
    staying = tuple(view for view in situation.views if view.host != host)
    blocked = {**situation.blocked, host: every}
    goal = compute_goal(dataclasses.replace(situation, views=staying, blocked=blocked))
    ready = [view for view in situation.views if view.state is State.READY]
    if partly:
        served = {target.model for target in goal.targets}
        lost = sorted({view.model for view in ready} - served)
    else:
        lost = sorted({view.model for view in ready if view.host == host})
    missing = [problem.what for group in goal.plan.unplaced if group.model in lost for problem in group.problems]
    return "; ".join(dict.fromkeys(missing)) or None
