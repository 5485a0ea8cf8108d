"""What comes in a trace, and what becomes of it."""

from __future__ import annotations

from typing import NamedTuple


class Arrival(NamedTuple):
    """One line of a trace."""

    at: float  # seconds since the beginning of the trace
    model: str
    prompt_tokens: int
    output_tokens: int
    key: str = ""  # the id of the API key; "" without keys


class SimRequest:
    """A request on its way; what `orchestrator.dispatch.fair_queue.FairQueue` wants of one that waits. Times are of the
    virtual clock.

    ``output_tokens`` is known to the replica only: the router may not look at it, but for an oracle.
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
    priority = 0  # a trace does not tell it

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
        """Bytes of a prompt of ASCII text."""
        return 4 * self.tokens
