"""The gateway's end of the data plane: one connection to one replica, and its requests."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

from orchestrator.dispatch.prefix_index import PrefixIndex
from orchestrator.dispatch.replica_choice import Pace
from orchestrator.gateway.openai.errors import internal_error
from orchestrator.gateway.serving.ticket import Ticket
from orchestrator.messages.route_table import Route
from orchestrator.process.version import corewright_version
from workers.messages.requests import FinishReason
from workers.messages.wire import (
    Cancel,
    FrameReader,
    Hello,
    Message,
    Refused,
    Room,
    Step,
    Taken,
    Welcome,
    WireError,
    encode,
    mismatch,
)

if TYPE_CHECKING:
    from orchestrator.gateway.telemetry.gateway_metrics import ModelMetrics

log = logging.getLogger(__name__)

NEVER = -math.inf


class ReplicaLink(asyncio.Protocol):
    """A connection to a replica, open from its Welcome to the end of file. Counts the slots by requests sent and
    ended."""

    def __init__(
        self,
        route: Route,
        *,
        gateway: str,
        token: str,
        on_change: Callable[[], None],
        on_ended: Callable[[list[Ticket], float], None],
        on_lost: Callable[[ReplicaLink, list[Ticket]], None],
        on_busy: Callable[[Ticket], None],
        later: Callable[[Callable[[], None]], object],
    ) -> None:
        """``on_change`` is called at the Welcome, and when another gateway has freed a slot; ``on_ended`` with the
        requests that ended in a step, and the time. ``on_lost`` gets the requests that the replica will not
        answer: all of them when the connection ends, one when a draining replica refuses it. ``on_busy`` gets a request
        whose slot another gateway has taken. ``later`` calls at the end of the event loop's turn."""
        self.route = route
        self.id = route.id
        self.replica = int(route.id.rpartition("/")[2])  # its number, for metrics
        self.welcome: Welcome | None = None
        self._hello = Hello(gateway, token, route.epoch)
        self._on_change = on_change
        self._on_ended = on_ended
        self._on_lost = on_lost
        self._on_busy = on_busy
        self._later = later
        self._full = False  # other gateways have its slots; it sends Room when one is free
        self._reader = FrameReader()
        self._transport: asyncio.WriteTransport | None = None
        self._live: dict[str, Ticket] = {}
        self._unstarted: set[str] = set()  # requests in ``_live`` without a token
        self._outgoing: list[bytes] = []  # frames of this turn of the event loop
        self._touched: list[Ticket] = []  # tickets with new events, in order of arrival
        self._retired = False
        self._drains = False  # it has refused a request: sending it there again would use up its retries
        self.stepped_at = NEVER  # monotonic, arrival of its last tokens; NEVER while it has no request of this gateway
        self._pace = Pace()
        self.metrics: dict[str, ModelMetrics] = {}  # by model or adapter, once a request was counted
        self.prefixes: PrefixIndex | None = None  # for an engine with a prefix cache
        self.closed = asyncio.Event()
        self.refused = False  # by the replica; a retry would be refused again
        self.broken = False  # the replica sent something invalid, and would send it again

    @property
    def free_slots(self) -> int:
        if self.welcome is None or self._transport is None or self._retired or self._drains or self._full:
            return 0
        return self.welcome.slots - len(self._live)

    @property
    def drains(self) -> bool:
        """It has refused a request."""
        return self._drains

    @property
    def prefilling(self) -> int:
        """The requests that were sent and have no token yet."""
        return len(self._unstarted)

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def pace(self) -> float:
        """The seconds per token there; 0.0 while unknown."""
        return self._pace.value

    @property
    def progress(self) -> Iterable[tuple[Ticket, int]]:
        """The requests at the replica, with the tokens that each has so far."""
        return [(ticket, ticket.stream.produced) for ticket in self._live.values()]

    @property
    def bounds(self) -> list[float]:
        """The seconds until each request is over at the latest, by its tokens and the pace; infinite without a pace."""
        if not self.pace:
            return [math.inf] * len(self._live)
        return [(ticket.request.max_tokens - ticket.stream.produced) * self.pace for ticket in self._live.values()]

    @property
    def kv_tokens(self) -> int:
        """The tokens in the KV caches of this gateway's slots."""
        return sum(ticket.tokens + ticket.stream.produced for ticket in self._live.values())

    def send(self, ticket: Ticket) -> None:
        """Sends the request to a slot, which the caller has found free."""
        assert self._transport is not None
        id = ticket.request.id
        self._live[id] = ticket
        self._unstarted.add(id)
        self._outgoing.append(ticket.sent_to(self))
        if len(self._outgoing) == 1:  # all that is sent in one turn of the loop is one write
            self._later(self._flush)

    def cancel(self, ticket: Ticket) -> None:
        """Cancels the request at the replica; its slot counts as taken until the replica confirms."""
        if self._transport is not None and ticket.id in self._live:
            self._flush()  # the request may not have been written yet
            self._transport.write(encode(Cancel(ticket.id)))

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if outgoing and self._transport is not None:
            self._transport.write(b"".join(outgoing))

    def resume(self) -> None:
        """Uses the replica again: it is back in the routes."""
        self._retired = False

    def retire(self) -> None:
        """Sends nothing more to a replica that left the routes, and hangs up when its requests have ended."""
        self._retired = True
        self._hang_up_when_idle()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's lacks the base class
        self._transport.write(encode(self._hello))

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._receive(message)
        except WireError as error:
            log.error("disconnecting %s, which sent an invalid message: %s", self.route.id, error)
            self.broken = True
            self.close()
        self._notify()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        lost, self._live = list(self._live.values()), {}
        self._unstarted.clear()
        self.closed.set()
        self._on_lost(self, lost)

    def _receive(self, message: Message) -> None:
        if isinstance(message, Step):
            self._deliver(message)
        elif isinstance(message, Room):
            self._full = False
            self._on_change()
        elif isinstance(message, Welcome):
            self._receive_welcome(message)
        elif isinstance(message, Refused):
            self.refused = True
            log.error("%s refused the connection: %s", self.route.id, message.reason)
        else:
            raise WireError(f"a replica does not send {type(message).__name__}")

    def _receive_welcome(self, welcome: Welcome) -> None:
        if (reason := mismatch(welcome.protocol)) is not None:
            self.refused = True
            version, ours = welcome.version, corewright_version()
            log.error("%s runs corewright %s, and this gateway %s: %s", self.route.id, version, ours, reason)
            self.close()
            return
        self.welcome = welcome
        if welcome.prefix_block:
            self.prefixes = PrefixIndex(max(1, welcome.slots * welcome.max_len // welcome.prefix_block))
        self._on_change()

    def _deliver(self, step: Step) -> None:
        busy: list[Ticket] = []
        ended: list[Ticket] = []
        for event in step.events:
            ticket = self._live.get(event.id)
            if ticket is None:
                continue
            finish = event.finish
            if finish is None:
                stream = ticket.stream
                stream.deliver(event)
                if event.part is not None and self._transport is not None:
                    self._transport.write(encode(Taken(event.id, len(event.part.data))))
                if not stream.touched:
                    self._touch(ticket)
                continue
            self._unstarted.discard(event.id)
            del self._live[event.id]
            if finish is FinishReason.BUSY:
                self._full = True
                busy.append(ticket)
                continue
            if finish is FinishReason.REFUSED or (finish is FinishReason.UNSERVED and ticket.can_retry):
                self._drains = self._drains or finish is FinishReason.REFUSED
                self._on_lost(self, [ticket])
                continue
            if event.part is not None and event.part.prompt_tokens is not None:
                ticket.tokens = event.part.prompt_tokens
            if finish is not FinishReason.CANCELLED:
                ticket.stream.deliver(event)
                if not ticket.stream.touched:
                    self._touch(ticket)
            self._full = False  # its slot is free
            ended.append(ticket)
        if ended:
            now = time.monotonic()
            for ticket in ended:
                stream = ticket.stream
                if stream.produced > 1 and stream.first_at:
                    self._pace.ended(now - stream.first_at, stream.produced - 1)
            self.stepped_at = now if self._live else NEVER
            self._on_ended(ended, now)
        for ticket in reversed(busy):  # each goes to the head of the queue: this keeps their order
            self._on_busy(ticket)
        self._hang_up_when_idle()

    def _touch(self, ticket: Ticket) -> None:
        """Marks a ticket with new events in this read."""
        ticket.stream.touched = True
        self._touched.append(ticket)
        self._unstarted.discard(ticket.id)

    def _notify(self) -> None:
        """Notifies the sinks, once for all steps of one read."""
        if not self._touched:
            return
        touched, self._touched = self._touched, []
        now = time.monotonic()
        if len(self._live) > len(self._unstarted):
            self.stepped_at = now
        for ticket in touched:
            stream = ticket.stream
            stream.touched = False
            if not ticket.left and stream.events:
                try:
                    ticket.sink.on_events(ticket, now)
                except Exception:  # one answer must not end the shared connection
                    log.exception("cannot write the answer to request %s", ticket.x_request_id)
                    ticket.leave()
                    ticket.sink.on_failure(ticket, internal_error())

    def _hang_up_when_idle(self) -> None:
        if self._retired and not self._live:
            self.close()
