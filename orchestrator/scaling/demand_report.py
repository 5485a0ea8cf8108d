"""The demand reports that gateways send to the controller for the autoscaler."""

from __future__ import annotations

import msgspec

from orchestrator.fleet.key_usage import KeyUsage
from orchestrator.scaling.forecast import Load
from placements.resources.measured_times import LEAST_TOKENS, PACE, Times, length_class, note
from workers.messages.actor_message import actor_message

AUTOSCALE_S = 5.0  # interval between decisions of the autoscaler


class Counts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The counts of one model since the last report: of one gateway, of all gateways, or of the simulator.

    Callers add to the attributes, and start over with a new object. ``add`` leaves ``times`` out, which do not concern
    the autoscaler.
    """

    arrived: int = 0  # inference requests, including those rejected by a full queue
    ended: int = 0  # requests that had a slot and have ended
    slot_s: float = 0.0  # seconds that the ended requests held their slots, summed
    first_tokens: int = 0  # requests that have produced their first token
    prefill_s: float = 0.0  # seconds from the slot to the first token, or of the batches, summed over these
    encoded: int = 0  # answered requests of an encoder
    inputs: int = 0  # of these
    work_s: float = 0.0  # seconds of an engine that these need in full batches, summed
    times: dict[str, Times] = {}  # of requests that generate, by the version of the model

    def time(self, version: str, prompt_tokens: int, first_s: float, output_tokens: int, decode_s: float) -> None:
        """Count the times of a request: ``first_s`` from the slot to the first token, ``decode_s`` from there to the
        last."""
        times = self.times.setdefault(version, {})
        if prompt_tokens:
            note(times, length_class(prompt_tokens), first_s)
        if output_tokens >= LEAST_TOKENS:
            note(times, PACE, decode_s / (output_tokens - 1))

    def add(self, counts: Counts) -> None:
        self.arrived += counts.arrived
        self.ended += counts.ended
        self.slot_s += counts.slot_s
        self.first_tokens += counts.first_tokens
        self.prefill_s += counts.prefill_s
        self.encoded += counts.encoded
        self.inputs += counts.inputs
        self.work_s += counts.work_s

    def load(self, seconds: float, *, waiting: int, live: int, longest_wait_s: float) -> Load:
        """Returns the load of these counts over ``seconds``, with the current queue and slots."""
        return Load(
            seconds=seconds,
            arrived=self.arrived,
            ended=self.ended,
            slot_s=self.slot_s,
            encoded=self.encoded,
            inputs=self.inputs,
            work_s=self.work_s,
            waiting=waiting,
            live=live,
            longest_wait_s=longest_wait_s,
        )


class DemandWindow(Counts, kw_only=True, omit_defaults=True):
    """One model at one gateway: the counts since its last report, and its current queue and slots."""

    model: str
    waiting: int = 0  # in the queue now
    live: int = 0  # in slots now
    longest_wait_s: float = 0.0  # of the requests in the queue now


class RoutingDecision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request was routed to its replica; a sample of them is recorded as events."""

    request: str  # the x-request-id of its response
    model: str
    queue_ms: float
    candidates: int  # replicas with a free slot when it left the queue
    replica: str  # `model/n`
    slot: int  # requests on the replica at its arrival, this one included
    slots: int
    cold: bool  # no replica was ready at its arrival
    retries: int = 0
    affinity: str = ""  # session or prefix, if that decided the replica
    expected_ms: float | None = None  # if cold: the wait for a replica that was expected at its arrival

    def as_header(self) -> bytes:
        """Returns the value of `x-corewright-decision`: `name=value` pairs."""
        pairs = [
            f"queue_ms={self.queue_ms:.3f}",
            f"candidates={self.candidates}",
            f"replica={self.replica}",
            f"slot={self.slot}/{self.slots}",
            f"start={'cold' if self.cold else 'warm'}",
            f"retries={self.retries}",
        ]
        if self.expected_ms is not None:
            pairs.append(f"expected_ms={self.expected_ms:.0f}")
        if self.affinity:
            pairs.append(f"affinity={self.affinity}")
        return "; ".join(pairs).encode()


def undecided(waited_s: float, cold: bool, expected_s: float | None) -> bytes:
    """Returns the value of `x-corewright-decision` of a request that has no replica: it still waits, or was refused.
    ``expected_s``: the expected wait for a first replica, from now; None: unknown."""
    pairs = [f"queue_ms={waited_s * 1000:.3f}", f"start={'cold' if cold else 'warm'}"]
    if expected_s is not None:
        pairs.append(f"expected_ms={expected_s * 1000:.0f}")
    return "; ".join(pairs).encode()


class ModelLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one gateway has counted for a model since the gateway's start: a lost report loses nothing."""

    model: str
    tokens: int = 0  # generated
    first: list[int] = []  # times to the first token, by `latency_buckets.FIRST_TOKEN_S`
    gaps: list[int] = []  # times between two tokens, by `latency_buckets.TOKEN_S`


class LiveRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request at a gateway: in a queue if it has no replica, else in a slot, unless it has ended."""

    request: str  # the x-request-id of its response
    model: str
    key: str = ""  # the name of its API key
    age_s: float = 0.0  # since its arrival
    queue_ms: float = 0.0
    replica: str = ""  # `model/n`
    prompt_tokens: int = 0
    tokens: int = 0  # of the answer so far
    decision: RoutingDecision | None = None
    ended: str = ""  # why; empty: it has not


@actor_message
class DemandReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One gateway's report since its last one. ``number`` counts its reports, so that none is counted twice."""

    gateway: str
    number: int
    seconds: float  # the time that it covers
    models: list[DemandWindow] = []
    decisions: list[RoutingDecision] = []  # a sample
    unreachable: list[str] = []  # ready replicas without a link to the gateway
    place: str = ""  # the label of its machine on a joined cluster
    version: str = ""  # of corewright
    address: str = ""  # for its clients; empty: it does not accept connections
    unready: str = ""  # why it is not ready
    routes_age_s: float | None = None  # since the controller has confirmed its routes
    usage: list[KeyUsage] = []  # of keys with limits
    loads: list[ModelLoad] = []
    requests: list[LiveRequest] = []  # while an operator looks at them


@actor_message
class DemandReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The reply to a report."""

    usage: list[KeyUsage] = []  # at other gateways since the last reply to this one
    watched: bool = False  # an operator looks at the requests
    cancelled: list[str] = []  # requests that an operator has cancelled, by x-request-id
