"""One request on its way: in the queue, on a replica, or ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import msgspec.structs

from orchestrator.gateway.errors import ApiError, invalid
from orchestrator.gateway.terms import Terms
from workers.requests import GenerateRequest, TokenEvent
from workers.wire import Submit, WireError, encode

if TYPE_CHECKING:
    import asyncio

    from orchestrator.demand import RoutingDecision
    from orchestrator.gateway.link import ReplicaLink
    from orchestrator.gateway.metrics import ModelMetrics
    from orchestrator.gateway.tracing import TraceHandle
    from orchestrator.prefixes import Chain

MAX_RETRIES = 2


class Sink(Protocol):
    """Whoever waits for a ticket's tokens. Called on the gateway's event loop; must not raise."""

    def came(self, ticket: Ticket, now: float) -> None:
        """There are events that nobody has taken; ``now`` (monotonic) is when they arrived."""
        ...

    def waits(self) -> None:
        """One of its tickets is in a queue, and may be for long. Told once or more."""
        ...

    def failed(self, ticket: Ticket, error: ApiError) -> None:
        """No more events will come."""
        ...


class Owner(Protocol):
    """Where tickets wait and are sent from: the queue of their model."""

    def left(self, ticket: Ticket) -> None:
        """Nobody waits for it any more: take it out of wherever it is."""
        ...

    def renewed(self, ticket: Ticket, grown: int) -> None:
        """It waits, and was read again; ``grown``: by so many bytes."""
        ...

    def began(self, ticket: Ticket, now: float) -> None:
        """Its first token has been taken."""
        ...


_PLAIN = Terms()


class Ticket:
    """``orchestrator.waiting.Waiting`` while it is in its queue.

    Events that its sink has not taken may still be thrown away, and the request sent to another replica; once one is
    taken, the request stands or falls with its replica. All times are monotonic seconds, 0 before they have come."""

    __slots__ = (
        "_owner",
        "_taken",
        "affinity",
        "arrived_at",
        "canary",
        "carried",
        "chain",
        "charged",
        "cold",
        "counted",
        "deadline",
        "decision",
        "events",
        "first_at",
        "frame",
        "held_since",
        "known_as",
        "last_at",
        "left",
        "link",
        "metrics",
        "over",
        "priority",
        "produced",
        "request",
        "retries",
        "sent_at",
        "sink",
        "size",
        "tenant",
        "terms",
        "timer",
        "tokenizer",
        "tokens",
        "touched",
        "trace",
    )

    def __init__(self, request: GenerateRequest, sink: Sink, owner: Owner, terms: Terms = _PLAIN) -> None:
        """Raises ApiError for a request that no frame can hold."""
        self.request = request
        self.sink = sink
        self.frame = _framed(request)
        self.arrived_at = time.monotonic()
        self.terms = terms
        self.tenant = terms.tenant
        self.priority = terms.priority
        self.deadline = terms.deadline  # in the queue
        self.size = len(self.frame)  # bytes
        self.tokens = len(request.prompt_ids)
        self.timer: asyncio.TimerHandle | None = None  # of its deadline in the queue
        self.cold = False  # no replica was ready when it came
        self.held_since: float | None = None  # monotonic; it waits for a replica since then, at most so long
        self.charged = -1  # tokens of the answer that its tenant was charged for; -1 before the prompt was
        self.carried = -1  # of ``charged``, what was charged to lines that are no more
        self.chain: Chain | None = None  # digests of its prompt's blocks, where an engine caches prefixes
        self.affinity = ""  # why its replica was taken before others: session or prefix
        self.decision: RoutingDecision | None = None  # where somebody wants to know
        self.sent_at = 0.0
        self.first_at = 0.0
        self.last_at = 0.0
        self.produced = 0  # tokens that have come
        self.counted = 0  # of these, those that the metrics know of
        self.metrics: ModelMetrics | None = None  # from the first token on
        self.retries = 0
        self.link: ReplicaLink | None = None
        self.known_as = ""  # to its client and in the log, where ``id`` is the replica's
        self.tokenizer = ""  # that its prompt was read with
        self.canary = False  # it goes to the version that is being tried
        self.left = False  # nobody waits for it any more
        self.over = False  # it is in no line and no slot any more, or was never counted
        self.events: list[TokenEvent] = []
        self.trace: TraceHandle | None = None
        self.touched = False  # its sink is to be told of events
        self._owner = owner
        self._taken = False

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def started(self) -> bool:
        """Whether a token has come."""
        return self.produced > 0

    @property
    def can_retry(self) -> bool:
        return not self._taken and not self.left and self.retries < MAX_RETRIES

    def sent_to(self, link: ReplicaLink) -> bytes:
        """It goes there now: the frame that says so."""
        self.link = link
        self.sent_at = time.monotonic()
        if self.trace is None:
            return self.frame
        return encode(Submit(msgspec.structs.replace(self.request, trace=self.trace.sent(link.route.id))))

    def renew(self, request: GenerateRequest) -> None:
        """It waits, and its prompt was read again. Raises ApiError for a request that no frame can hold."""
        before, self.frame = self.size, _framed(request)
        self.request = request
        self.size, self.tokens = len(self.frame), len(request.prompt_ids)
        self.chain = None
        self._owner.renewed(self, self.size - before)

    def back(self) -> None:
        """It is in the queue again: the replica had no slot for it."""
        self.link = None
        if self.trace is not None:
            self.trace.queued()

    def deliver(self, event: TokenEvent) -> None:
        self.events.append(event)
        self.produced += len(event.token_ids)

    def fail(self, error: ApiError) -> None:
        """No more events will come; it is in no queue and on no replica."""
        if not self.left:
            self.left = True
            self.sink.failed(self, error)

    def restart(self) -> None:
        """Its replica is gone and nothing was taken: as if it had just come."""
        self.retries += 1
        if self.produced:
            self.deadline = None  # it was kept
        self.back()
        self.events.clear()
        self.produced = self.counted = 0
        self.charged, self.carried = min(self.charged, 0), min(self.carried, 0)
        self.metrics = None
        self.first_at = self.last_at = 0.0

    def leave(self) -> None:
        """Its client is gone, or has all that it wanted."""
        if not self.left:
            self.left = True
            self._owner.left(self)

    def began(self, now: float) -> None:
        """Its first token has been taken."""
        self._owner.began(self, now)

    def take(self) -> list[TokenEvent]:
        """The events since the last call."""
        self._taken = True
        events, self.events = self.events, []
        return events


def _framed(request: GenerateRequest) -> bytes:
    try:
        return encode(Submit(request))
    except (OverflowError, WireError) as error:
        raise invalid(f"the request cannot be sent to a replica: {error}") from None
