"""The requests of a simulation: an arrival of the trace, and the request on its way."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from orchestrator.dispatch.dispatcher import Entry

if TYPE_CHECKING:
    from orchestrator.simulate.simulated_link import SimLink


class Arrival(NamedTuple):
    """One request of a trace."""

    at: float  # seconds since the beginning of the trace
    model: str
    prompt_tokens: int
    output_tokens: int
    key: str = ""  # the id of the API key; "" without one
    priority: int = 0
    session: str = ""


class SimRequest(Entry):
    """A request as the dispatcher sees it. Times are of the virtual clock.

    Only the replica uses ``output_tokens``: a router must not, unless it is an oracle.
    """

    number: int  # counts the requests of the run
    output_tokens: int
    gateway: int = 0
    link: SimLink | None = None  # once it was sent
    sent_at: float = 0.0  # to a replica
    first_at: float = 0.0  # its first token
    timer: int = 0  # for the end of its wait; 0: none
    work_s: float = 0.0  # seconds of an encoder that it needs in full batches

    @classmethod
    def of(cls, arrival: Arrival, number: int, now: float) -> SimRequest:
        """Returns a new request; its size is that of a prompt in ASCII."""
        _, _, tokens, output_tokens, key, priority, session = arrival
        request = cls(key, priority, now, None, 4 * tokens, tokens, number, output_tokens)
        if session:
            request.session = session
        return request
