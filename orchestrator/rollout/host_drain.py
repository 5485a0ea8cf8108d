"""Whether a host can be drained while its models are served elsewhere. Pure."""

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


def refusal(situation: Situation, host: str, *, partly: bool = False) -> str | None:
    """Returns why the host's ready replicas cannot be placed elsewhere, or None. ``partly``: a model may have fewer
    replicas, but not none."""
    goal = compute_goal(without_host(situation, host))
    lost = {view.model for view in situation.views if view.host == host and view.state is State.READY}
    if partly:
        lost -= {target.model for target in goal.targets}
    missing = [problem.what for group in goal.plan.unplaced if group.model in lost for problem in group.problems]
    return "; ".join(dict.fromkeys(missing)) or None
