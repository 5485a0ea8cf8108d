"""One gateway's view of a replica, where there are several gateways."""

from __future__ import annotations

from orchestrator.simulate.simulated_replica import SimReplica


class SimLink:
    """What this gateway has sent and what of it has ended (`orchestrator.gateway.serving.replica_link`)."""

    __slots__ = ("full", "live", "prefilling", "replica")

    def __init__(self, replica: SimReplica) -> None:
        self.replica = replica
        self.live = 0
        self.prefilling = 0  # without a token
        self.full = False  # other gateways have its slots; it will say when one is free

    @property
    def free_slots(self) -> int:
        return 0 if self.full else self.replica.slots - self.live

    @property
    def pace(self) -> float:
        return self.replica.pace
