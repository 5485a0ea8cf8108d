"""Reconciles observed replicas with their targets: returns the actions to take. Pure: the time is in the snapshot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrator.control.decisions.replica_view import Observed, ReplicaView
from orchestrator.control.decisions.rollout_step import ReplicaTarget, cores_by_host
from orchestrator.messages.replica_states import ENDING, STARTING, State


@dataclass(frozen=True)
class Start:
    """Start a replica's process; ``previous`` is its last start, whose epoch this one follows."""

    target: ReplicaTarget
    previous: ReplicaView | None


@dataclass(frozen=True)
class Drain:
    """Remove the replica from the routes, let its live requests end, then stop it."""

    replica: ReplicaView


@dataclass(frozen=True)
class Stop:
    """Stop the replica's process."""

    replica: ReplicaView
    reason: str


@dataclass(frozen=True)
class Fail:
    """Fail a replica that did not start, or did not finish an engine step, in time."""

    replica: ReplicaView
    reason: str


@dataclass(frozen=True)
class Release:
    """Have the host confirm that the replica's process is dead, which frees its cores."""

    replica: ReplicaView


@dataclass(frozen=True)
class Forget:
    """Forget a replica that is gone and no longer planned."""

    replica: ReplicaView


DRAIN_GRACE_S = 10.0  # beyond the drain's deadline, which an unresponsive replica does not keep

Action = Start | Drain | Stop | Fail | Release | Forget


def reconcile(
    targets: Iterable[ReplicaTarget], observed: Observed, replaced: frozenset[tuple[str, int]] = frozenset()
) -> list[Action]:
    """Returns the actions that bring the fleet closer to its targets; none at the fixed point.

    For each replica that exists:
      1. stopping or failed, death not confirmed          -> Release
      2. ready or draining, one engine step over deadline -> Fail
      2b. draining for longer than its deadline            -> Stop
      2c. its host ends                                    -> Stop
      3. without a target, or with other cores, another version or a new process (``replaced``: id and epoch):
         3a. death confirmed                               -> Forget
         3b. ready                                         -> Drain
         3c. pending, fetching, compiling, loading         -> Stop
      4. any state of 3c for longer than its deadline      -> Fail
      5. failed or stopping, dead, its back-off over       -> Start with the next epoch; a stopped one never
    For each target without a replica:
      6.                                                   -> Start
    5 and 6 wait while another replica may still hold one of the cores. After a pause of the controller, 2, 2b and 4
    wait until each replica has had time to report again (``Observed.settled``).
    """
    by_id = {target.id: target for target in targets}
    actions: list[Action] = []
    for id, replica in observed.replicas.items():
        target = by_id.get(id)
        ending = replica.state in ENDING
        serving = replica.state in (State.READY, State.DRAINING)
        starting = replica.state in STARTING
        draining = replica.state is State.DRAINING and observed.settled
        overdrawn = draining and observed.now - replica.since > replica.deadlines.drain_s + DRAIN_GRACE_S
        if ending and not replica.gone:  # 1
            actions.append(Release(replica))
        elif serving and replica.step_s > replica.deadlines.step_s and observed.settled:  # 2
            fault = f"step-stuck: one engine step has run for {replica.step_s:.0f} s"
            actions.append(Fail(replica, f"{fault}, the deadline is {replica.deadlines.step_s:.0f} s"))
        elif overdrawn:  # 2b
            actions.append(Stop(replica, "its drain deadline has passed"))
        elif not ending and observed.now >= observed.stop_at.get(replica.host, math.inf):  # 2c
            actions.append(Stop(replica, "its host ends"))
        elif target is None or not matches(replica, target, replaced):  # 3
            if ending:
                actions.append(Forget(replica))
            elif replica.state is State.READY:
                actions.append(Drain(replica))
            elif starting:
                actions.append(Stop(replica, "no longer planned"))
        elif ending:  # 5
            if observed.now >= replica.retry_at:
                actions.append(Start(target, replica))
        elif starting and observed.settled and (late := replica.overdue(observed.now)) is not None:  # 4
            actions.append(Fail(replica, late))
    for id, target in by_id.items():
        if id not in observed.replicas:  # 6
            actions.append(Start(target, None))
    if not any(isinstance(action, Start) for action in actions):
        return actions
    used = cores_by_host(replica for replica in observed.replicas.values() if not replica.gone)
    return [action for action in actions if not (isinstance(action, Start) and _has_used_cores(action.target, used))]


def matches(replica: ReplicaView, target: ReplicaTarget, replaced: frozenset[tuple[str, int]]) -> bool:
    """Returns whether the replica is the target; of ``replaced``, the (id, epoch) of replicas, only an old one is."""
    kept = replica.host == target.host and replica.cores == target.cores and replica.version == target.version
    return kept and (not replaced or target.placement is None or (replica.id, replica.epoch) not in replaced)


def _has_used_cores(target: ReplicaTarget, used: Mapping[str, frozenset[int]]) -> bool:
    return not used.get(target.host, frozenset()).isdisjoint(target.cores or ())
