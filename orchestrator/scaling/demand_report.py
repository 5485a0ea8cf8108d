"""The demand reports that gateways send to the controller for the autoscaler."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from orchestrator.messages.key_usage import KeyUsage
from orchestrator.scaling.forecast import Counts
from workers.messages.actor_message import actor_message

AUTOSCALE_S = 5.0  # interval between decisions of the autoscaler

# Bounds of vLLM v1 (`vllm/v1/metrics/loggers.py`), in seconds.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
# The first three are not vLLM's: a small model on a NeuronCore is faster than vLLM's first bound.
TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
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
    first: list[int] = []  # times to the first token, by FIRST_TOKEN_S
    gaps: list[int] = []  # times between two tokens, by TOKEN_S


def percentile(counts: Sequence[int], bounds: Sequence[float], percent: float) -> float | None:
    """Returns the percentile of observations that are counted by bucket; None without any.

    As `histogram_quantile` of Prometheus: linear within a bucket, and the last bound for what is above all of them.
    """
    rank = sum(counts) * percent / 100
    if rank == 0:
        return None
    below = 0.0
    for place, upper in enumerate(bounds):
        count = counts[place]
        if below + count >= rank:
            lower = bounds[place - 1] if place else 0.0
            return lower + (upper - lower) * (rank - below) / count
        below += count
    return bounds[-1]


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
