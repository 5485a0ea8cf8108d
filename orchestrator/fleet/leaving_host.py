"""A host that ends at a known time: until when its replicas serve, and from when on they have to leave. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrator.fleet.replica_states import LEAVING, State
from orchestrator.fleet.snapshot import ReplicaView

STOP_S = 5.0  # before the end no process is left
END_S = 10.0  # before the end no request runs


@dataclass(frozen=True)
class LeavingHost:
    """The times of a departure, on the snapshot's clock."""

    since: float  # when its notice came
    until: float  # when the host may be gone

    @property
    def stop_at(self) -> float:
        """When every replica is stopped, whatever it does."""
        return self.until - STOP_S

    def drain_at(self, view: ReplicaView) -> float:
        """Returns when a ready replica begins to drain although nothing replaces it.

        At most half of the notice is for requests in progress: until then it serves, and a replacement may get ready.
        """
        return self.until - END_S - min(view.deadlines.drain_s, max(0.0, self.until - self.since) / 2)


def replicas_to_end(
    views: Iterable[ReplicaView], leaving: Mapping[str, LeavingHost], now: float
) -> frozenset[tuple[str, int]]:
    """Returns the (id, epoch) of the replicas that have to end now, by the host that leaves:

    1. a starting one: it would serve only for a moment
    2. a ready one, once its drain has to begin
    """
    return frozenset(
        (view.id, view.epoch)
        for view in views
        if (host := leaving.get(view.host)) is not None
        and view.state not in LEAVING
        and (view.state is not State.READY or now >= host.drain_at(view))
    )
