"""One request on its way: in the queue, on a replica, or ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec.structs

from orchestrator.gateway.errors import ApiError, invalid
from workers.requests import GenerateRequest, TokenEvent
from workers.wire import Submit, WireError, encode

if TYPE_CHECKING:
    from orchestrator.gateway.link import ReplicaLink
    from orchestrator.gateway.metrics import ModelMetrics
    from orchestrator.gateway.tracing import TraceHandle

MAX_RETRIES = 2


class Sink(Protocol):
    """Whoever waits for a ticket's tokens. Called on the gateway's event loop; must not raise."""

    def came(self, ticket: Ticket, now: float) -> None:
        """There are events that nobody has taken; ``now`` (monotonic) is when they arrived."""
        ...

    def failed(self, ticket: Ticket, error: ApiError) -> None:
        """No more events will come."""
        ...


class Ticket:
    """Events that its sink has not taken may still be thrown away, and the request sent to another replica; once one
    is taken, the request stands or falls with its replica. All times are monotonic seconds, 0 before they have come."""

    __slots__ = (
        "_leave",
        "_taken",
        "canary",
        "counted",
        "events",
        "first_at",
        "frame",
        "last_at",
        "left",
        "link",
        "metrics",
        "produced",
        "queued_at",
        "request",
        "retries",
        "sent_at",
        "sink",
        "tokenizer",
        "touched",
        "trace",
    )

    def __init__(self, request: GenerateRequest, sink: Sink, leave: Callable[[Ticket], None]) -> None:
        """``leave`` takes the ticket out of wherever it is. Raises ApiError for a request that no frame can hold."""
        self.request = request
        self.sink = sink
        try:
            self.frame = encode(Submit(request))
        except (OverflowError, WireError) as error:
            raise invalid(f"the request cannot be sent to a replica: {error}") from None
        self.queued_at = time.monotonic()
        self.sent_at = 0.0
        self.first_at = 0.0
        self.last_at = 0.0
        self.produced = 0  # tokens that have come
        self.counted = 0  # of these, those that the metrics know of
        self.metrics: ModelMetrics | None = None  # from the first token on
        self.retries = 0
        self.link: ReplicaLink | None = None
        self.tokenizer = ""  # that its prompt was read with
        self.canary = False  # it goes to the version that is being tried
        self.left = False  # nobody waits for it any more
        self.events: list[TokenEvent] = []
        self.trace: TraceHandle | None = None
        self.touched = False  # its sink is to be told of events
        self._leave = leave
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
        self.back()
        self.events.clear()
        self.produced = self.counted = 0
        self.metrics = None
        self.first_at = self.last_at = 0.0

    def leave(self) -> None:
        """Its client is gone, or has all that it wanted."""
        if not self.left:
            self.left = True
            self._leave(self)

    def take(self) -> list[TokenEvent]:
        """The events since the last call."""
        self._taken = True
        events, self.events = self.events, []
        return events
