"""Decides whether a host can be drained while its models are served elsewhere. Pure."""

from __future__ import annotations

import dataclasses

from orchestrator.fleet.replica_states import State
from orchestrator.rollout.rollout_step import Situation, compute_goal


def without_host(situation: Situation, host: str) -> Situation:
    """Returns the situation in which the host's cores are blocked and its replicas have left."""
    every = frozenset(
        core for candidate in situation.hosts if candidate.name == host for core in range(candidate.cores)
    )
    staying = tuple(view for view in situation.views if view.host != host)
    return dataclasses.replace(situation, views=staying, blocked={**situation.blocked, host: every})


def refusal(situation: Situation, host: str, *, partly: bool) -> str | None:
    """Returns why models cannot be served as now without the host, or None: those with a ready replica on it, with all
    of these; ``partly``: with fewer of them. No model that serves may lose all its replicas, since one with a higher
    priority takes their place."""
    goal = compute_goal(without_host(situation, host))
    ready = [view for view in situation.views if view.state is State.READY]
    lost = {view.model for view in ready} - {target.model for target in goal.targets}
    if not partly:
        lost |= {view.model for view in ready if view.host == host}
    missing = [problem.what for group in goal.plan.unplaced if group.model in lost for problem in group.problems]
    return "; ".join(dict.fromkeys(missing)) or None
