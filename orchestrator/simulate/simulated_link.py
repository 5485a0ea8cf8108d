"""The link from one of several gateways to a replica, with that gateway's view of it."""

from __future__ import annotations

from orchestrator.simulate.simulated_replica import SimReplica


class SimLink:
    """The requests of one gateway on a replica (see `orchestrator.gateway.serving.replica_link`)."""

    __slots__ = ("full", "live", "prefilling", "replica")

    def __init__(self, replica: SimReplica) -> None:
        self.replica = replica
        self.live = 0
        self.prefilling = 0  # requests without a token
        self.full = False  # other gateways use its slots; it notifies this one when a slot is free

    @property
    def free_slots(self) -> int:
        return 0 if self.full else self.replica.slots - self.live

    @property
    def pace(self) -> float:
        return self.replica.pace
