"""The requests of a simulation: an arrival of the trace, and the request on its way."""

from __future__ import annotations

from typing import NamedTuple


class Arrival(NamedTuple):
    """One request of a trace."""

    at: float  # seconds since the beginning of the trace
    model: str
    prompt_tokens: int
    output_tokens: int
    key: str = ""  # the id of the API key; "" without one


class SimRequest:
    """A request as an item of `orchestrator.dispatch.fair_queue.FairQueue`. Times are of the virtual clock.

    Only the replica uses ``output_tokens``: a router must not, unless it is an oracle.
    """

    __slots__ = (
        "arrived_at",
        "deadline",
        "first_at",
        "gateway",
        "number",
        "output_tokens",
        "sent_at",
        "tenant",
        "tokens",
    )
    priority = 0  # not in a trace

    def __init__(self, arrival: Arrival, number: int, now: float) -> None:
        """``number`` counts the requests of the run."""
        _, _, self.tokens, self.output_tokens, self.tenant = arrival
        self.number = number
        self.arrived_at = now
        self.deadline: float | None = None
        self.sent_at = 0.0  # to a replica
        self.first_at = 0.0  # its first token
        self.gateway = 0

    @property
    def size(self) -> int:
        """The bytes of a prompt in ASCII."""
        return 4 * self.tokens
