"""From what is planned and what is seen to what is to be done. Pure: the time is in the snapshot."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.lifecycle import State
from orchestrator.snapshot import Observed, ReplicaView
from placements.plan import Placement


@dataclass(frozen=True)
class Start:
    """Start a replica's process; ``previous`` is its last start, whose epoch this one follows."""

    placement: Placement
    previous: ReplicaView | None


@dataclass(frozen=True)
class Drain:
    """Take it out of the routes and let its live requests end; then it is stopped."""

    replica: ReplicaView


@dataclass(frozen=True)
class Stop:
    """End its process."""

    replica: ReplicaView
    reason: str


@dataclass(frozen=True)
class Fail:
    """It has not started in time: that is a failure like any other."""

    replica: ReplicaView
    reason: str


@dataclass(frozen=True)
class Release:
    """Have its host confirm that the process is dead, so that its cores are free."""

    replica: ReplicaView


@dataclass(frozen=True)
class Forget:
    """It is gone and no longer planned."""

    replica: ReplicaView


Action = Start | Drain | Stop | Fail | Release | Forget


def reconcile(placements: Iterable[Placement], observed: Observed, start_deadline_s: float) -> list[Action]:
    """What brings the fleet nearer to the plan. At the fixed point the list is empty.

    For each replica that exists:
      1. stopping or failed, its process not seen dead    -> Release
      2. not planned, or planned elsewhere:
         2a. seen dead                                     -> Forget
         2b. ready                                         -> Drain
         2c. pending, loading                              -> Stop
      3. pending or loading for longer than the deadline   -> Fail
      4. failed or stopping, seen dead, its back-off over  -> Start with the next epoch
    For each placement without a replica:
      5.                                                   -> Start
    4 and 5 wait while another replica may still hold one of the cores.
    """
    wanted = {f"{placement.model}/{placement.replica}": placement for placement in placements}
    actions: list[Action] = []
    for id, replica in observed.replicas.items():
        placement = wanted.get(id)
        ending = replica.state in (State.STOPPING, State.FAILED)
        if ending and not replica.gone:  # 1
            actions.append(Release(replica))
        elif placement is None or (placement.host, placement.cores) != (replica.host, replica.cores):  # 2
            if ending:
                actions.append(Forget(replica))
            elif replica.state is State.READY:
                actions.append(Drain(replica))
            elif replica.state in (State.PENDING, State.LOADING):
                actions.append(Stop(replica, "no longer planned"))
        elif ending:  # 4
            if observed.now >= replica.retry_at and not _held(placement, observed):
                actions.append(Start(placement, replica))
        elif replica.state in (State.PENDING, State.LOADING) and observed.now - replica.since > start_deadline_s:  # 3
            actions.append(Fail(replica, f"start-deadline: not ready after {start_deadline_s:.0f} s"))
    for id, placement in wanted.items():
        if id not in observed.replicas and not _held(placement, observed):  # 5
            actions.append(Start(placement, None))
    return actions


def _held(placement: Placement, observed: Observed) -> bool:
    cores = placement.cores
    return cores is not None and any(
        replica.host == placement.host
        and replica.cores is not None
        and not replica.gone
        and cores.overlap(replica.cores)
        for replica in observed.replicas.values()
    )
