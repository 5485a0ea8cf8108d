"""The link from a gateway to a simulated replica, with that gateway's view of it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from orchestrator.dispatch.prefix_index import PrefixIndex
from orchestrator.dispatch.replica_choice import Pace
from orchestrator.simulate.simulated_replica import SimReplica
from orchestrator.simulate.simulated_request import SimRequest
from orchestrator.simulate.virtual_clock import Clock


class SimLink:
    """The requests of one gateway on a replica (see `orchestrator.gateway.serving.replica_link`)."""

    __slots__ = (
        "clock",
        "free_slots",
        "gateway",
        "id",
        "idle",
        "live",
        "pace",
        "prefilling",
        "prefixes",
        "replica",
        "tracked",
    )

    def __init__(self, replica: SimReplica, gateway: int, clock: Clock) -> None:
        self.replica = replica
        self.gateway = gateway
        self.clock = clock
        self.id = str(replica.index)
        self.idle = True  # it has had no token since it had no request
        self.live = 0
        self.prefilling = 0  # requests without a token
        self.free_slots = replica.slots  # 0 between a BUSY and the next free slot
        self.pace = 0.0  # seconds per token, the value of ``tracked``
        self.tracked = Pace()
        self.prefixes: PrefixIndex | None = None  # prompts have no tokens here

    def stepped_at(self) -> float:
        """Returns the end of the replica's last step, as the gateway sees it by the tokens; -inf while it is idle."""
        if self.idle:
            return -math.inf
        replica = self.replica
        base, step_s = replica.base, replica.step_s
        return base if replica.prefill else base + (self.clock.now - base) // step_s * step_s

    @property
    def progress(self) -> Iterator[tuple[SimRequest, int]]:
        """Its requests, with the tokens that each has so far."""
        return (item for item in self.replica.progress(self.clock.now) if item[0].link is self)

    @property
    def bounds(self) -> list[float]:
        """Not known: traces have no max_tokens."""
        return [math.inf] * self.live


class SimLinks(list[SimLink]):
    """The links of one gateway."""

    slots = 0  # of all replicas
    prefix_block = 0

    @property
    def routed(self) -> bool:
        return bool(self)
