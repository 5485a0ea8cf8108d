"""The link from a gateway to a simulated replica, with that gateway's view of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from orchestrator.dispatch.prefix_index import PrefixIndex
from orchestrator.dispatch.replica_choice import Pace
from orchestrator.simulate.simulated_replica import SimReplica
from orchestrator.simulate.simulated_request import SimRequest
from orchestrator.simulate.virtual_clock import Clock


@dataclass(slots=True, eq=False)
class SimLink:
    """The requests of one gateway on a replica (see `orchestrator.gateway.serving.replica_link`)."""

    replica: SimReplica
    gateway: int
    clock: Clock
    idle: bool = True  # it has had no token since it had no request
    live: int = 0
    prefilling: int = 0  # requests without a token
    pace: float = 0.0  # seconds per token, the value of ``tracked``
    tracked: Pace = field(default_factory=Pace)
    prefixes: PrefixIndex | None = None  # prompts have no tokens here
    id: str = field(init=False)
    free_slots: int = field(init=False)  # 0 between a BUSY and the next free slot

    def __post_init__(self) -> None:
        self.id = str(self.replica.index)
        self.free_slots = self.replica.slots

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
    def reachable(self) -> bool:
        return bool(self)
