"""What gateways tell the controller of the demand that they see: the autoscaler decides from it."""

from __future__ import annotations

import msgspec

from orchestrator.scaling.forecast import Load

AUTOSCALE_S = 5.0  # between two decisions of the autoscaler


class DemandWindow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model at one gateway: what has happened since its last report, and what is there at the time of this one."""

    model: str
    arrived: int = 0  # requests for inference, those that were refused for want of room among them
    ended: int = 0  # requests that had a slot and are over
    slot_s: float = 0.0  # seconds that those that ended have held their slots
    first_tokens: int = 0  # requests whose first token has come
    prefill_s: float = 0.0  # seconds from the slot to the first token, of all of these
    waiting: int = 0  # now, in the queue
    live: int = 0  # now, in slots
    longest_wait_s: float = 0.0  # of those that are in the queue now


class Counts:
    """What has happened to one model since somebody asked last: at one gateway, at all of them, or in the simulator.

    Plain attributes, as `Demand` has them: whoever counts adds to them, and begins anew with another one.
    """

    __slots__ = ("arrived", "ended", "first_tokens", "prefill_s", "slot_s")

    def __init__(self) -> None:
        self.arrived = self.ended = self.first_tokens = 0
        self.slot_s = self.prefill_s = 0.0

    def add(self, told: DemandWindow) -> None:
        self.arrived += told.arrived
        self.ended += told.ended
        self.slot_s += told.slot_s
        self.first_tokens += told.first_tokens
        self.prefill_s += told.prefill_s

    def demand(self, model: str, *, waiting: int, live: int, longest_wait_s: float) -> DemandWindow:
        """With what is there now."""
        return DemandWindow(
            model=model,
            arrived=self.arrived,
            ended=self.ended,
            slot_s=self.slot_s,
            first_tokens=self.first_tokens,
            prefill_s=self.prefill_s,
            waiting=waiting,
            live=live,
            longest_wait_s=longest_wait_s,
        )

    def load(self, seconds: float, *, waiting: int, live: int, longest_wait_s: float) -> Load:
        """Of the ``seconds`` in which this was counted, with what is there now."""
        return Load(
            seconds=seconds,
            arrived=self.arrived,
            ended=self.ended,
            slot_s=self.slot_s,
            waiting=waiting,
            live=live,
            longest_wait_s=longest_wait_s,
        )


class RoutingDecision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request came to its replica; a sample of them goes to the events."""

    request: str  # the x-request-id of its answer
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
    models: list[DemandWindow] = []
    decisions: list[RoutingDecision] = []  # a sample
    unreachable: list[str] = []  # replicas that the gateway has no link to, although they are ready
