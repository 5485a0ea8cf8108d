"""What gateways tell the controller of the demand that they see: the autoscaler decides from it."""

from __future__ import annotations

import msgspec


class Demand(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model at one gateway: what has happened since its last report, and what is there at the time of this one."""

    model: str
    arrived: int = 0  # requests for inference, those that were refused for want of room among them
    cold: int = 0  # of these, those that came while no replica was ready
    refused: int = 0  # of these, those that were refused: a full queue, or a deadline that cannot be kept
    ended: int = 0  # requests that had a slot and are over
    prompt_tokens: int = 0  # of those that ended
    output_tokens: int = 0  # of those that ended
    slot_s: float = 0.0  # seconds that those that ended have held their slots
    first_tokens: int = 0  # requests whose first token has come
    prefill_s: float = 0.0  # seconds from the slot to the first token, of all of these
    late: int = 0  # of these, those for which it came later than the model's `objectives.ttft_ms`
    waiting: int = 0  # now, in the queue
    live: int = 0  # now, in slots
    longest_wait_s: float = 0.0  # of those that are in the queue now


class RoutingDecision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request came to its replica; a sample of them goes to the events."""

    request: str
    model: str
    queue_ms: float
    candidates: int  # replicas with a free slot when it left the queue
    replica: str  # `model/n`
    slot: int  # how many requests the replica had when it came, this one included
    slots: int
    cold: bool  # no replica was ready when it came
    retries: int = 0
    affinity: str = ""  # session or prefix, where the replica was taken for that

    def as_header(self) -> bytes:
        """The value of `x-corewright-decision`: `name=value` pairs."""
        told = [
            f"queue_ms={self.queue_ms:.3f}",
            f"candidates={self.candidates}",
            f"replica={self.replica}",
            f"slot={self.slot}/{self.slots}",
            f"start={'cold' if self.cold else 'warm'}",
            f"retries={self.retries}",
        ]
        if self.affinity:
            told.append(f"affinity={self.affinity}")
        return "; ".join(told).encode()


class DemandReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One gateway's account since its last one. ``number`` counts them, so that none is counted twice."""

    gateway: str
    number: int
    seconds: float  # that it covers
    models: list[Demand] = []
    decisions: list[RoutingDecision] = []  # a sample
