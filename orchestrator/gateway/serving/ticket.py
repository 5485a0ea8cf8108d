"""One request on its way: in the queue, on a replica, or ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import msgspec.structs

from orchestrator.gateway.openai.errors import ApiError, invalid
from orchestrator.gateway.serving.scheduling_parameters import SchedulingParameters
from workers.messages.requests import GenerateRequest, TokenEvent
from workers.messages.wire import Submit, WireError, encode

if TYPE_CHECKING:
    import asyncio

    from orchestrator.dispatch.prefix_index import Chain
    from orchestrator.gateway.serving.replica_link import ReplicaLink
    from orchestrator.gateway.telemetry.gateway_metrics import ModelMetrics
    from orchestrator.gateway.telemetry.request_spans import TraceHandle
    from orchestrator.scaling.demand_report import RoutingDecision

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


class TicketOwner(Protocol):
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


_PLAIN = SchedulingParameters()


class Ticket(msgspec.Struct, eq=False):
    """``orchestrator.dispatch.fair_queue.QueuedRequest`` while it is in its queue. Made by ``ticket_for``.

    Events that its sink has not taken may still be thrown away, and the request sent to another replica; once one is
    taken, the request stands or falls with its replica. All times are monotonic seconds, 0 before they have come."""

    request: GenerateRequest
    sink: Sink
    _owner: TicketOwner
    terms: SchedulingParameters
    frame: bytes
    arrived_at: float
    tenant: str
    priority: int
    deadline: float | None  # in the queue
    size: int  # bytes
    tokens: int
    timer: asyncio.TimerHandle | None = None  # of its deadline in the queue
    cold: bool = False  # no replica was ready when it came
    held_since: float | None = None  # monotonic; it waits for a replica since then, at most so long
    charged: int = -1  # tokens of the answer that its tenant was charged for; -1 before the prompt was
    carried: int = -1  # of ``charged``, what was charged to lines that are no more
    chain: Chain | None = None  # digests of its prompt's blocks, where an engine caches prefixes
    affinity: str = ""  # why its replica was taken before others: session or prefix
    decision: RoutingDecision | None = None  # where somebody wants to know
    sent_at: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0
    produced: int = 0  # tokens that have come
    counted: int = 0  # of these, those that the metrics know of
    metrics: ModelMetrics | None = None  # from the first token on
    retries: int = 0
    link: ReplicaLink | None = None
    known_as: str = ""  # to its client and in the log, where ``id`` is the replica's
    tokenizer: str = ""  # that its prompt was read with
    canary: bool = False  # it goes to the version that is being tried
    left: bool = False  # nobody waits for it any more
    over: bool = False  # it is in no line and no slot any more, or was never counted
    events: list[TokenEvent] = []
    trace: TraceHandle | None = None
    touched: bool = False  # its sink is to be told of events
    _taken: bool = False

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


def ticket_for(
    request: GenerateRequest, sink: Sink, owner: TicketOwner, terms: SchedulingParameters = _PLAIN
) -> Ticket:
    """Returns the ticket of a request that arrives now. Raises ApiError for a request that no frame can hold."""
    frame, now = _framed(request), time.monotonic()
    tenant, priority, deadline = terms.tenant, terms.priority, terms.deadline
    size, tokens = len(frame), len(request.prompt_ids)
    return Ticket(request, sink, owner, terms, frame, now, tenant, priority, deadline, size, tokens)


def _framed(request: GenerateRequest) -> bytes:
    try:
        return encode(Submit(request))
    except (OverflowError, WireError) as error:
        raise invalid(f"the request cannot be sent to a replica: {error}") from None
