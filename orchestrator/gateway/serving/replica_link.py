"""The gateway's end of the data plane: one connection to one replica, and its requests."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import msgspec
import msgspec.structs

from orchestrator.dispatch.replica_choice import Pace, PrefixIndex
from orchestrator.gateway.serving.ticket import Ticket
from orchestrator.messages.route_table import Route
from orchestrator.process.version import corewright_version
from workers.messages.requests import FinishReason, TokenEvent
from workers.messages.wire import (
    Cancel,
    FrameReader,
    Hello,
    Message,
    Refused,
    Room,
    Step,
    Submit,
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


class Arrived(msgspec.Struct):
    """What a read has brought from a replica, or the end of the connection, for the owner of the link."""

    at: float = 0.0  # monotonic, when it was decoded
    freed: bool = False  # a slot may be free: the replica has welcomed the gateway, or another gateway's request ended
    closed: bool = False  # the connection has ended
    lost: list[Ticket] = []  # that the replica will not answer: it drains, or the connection has ended
    ended: list[Ticket] = []  # that have left their slots
    busy: list[Ticket] = []  # whose slots other gateways have taken
    touched: list[Ticket] = []  # with new events for their sinks, in order of arrival


class LinkOwner(Protocol):
    """The queue whose requests the replica of a link serves."""

    def arrived(self, link: ReplicaLink, arrived: Arrived) -> None:
        """Called once for each read, and at the end of the connection."""
        ...


class ReplicaLink(asyncio.Protocol):
    """A connection to a replica, open from its Welcome to the end of file. Counts the slots by requests sent and
    ended."""

    def __init__(self, route: Route, hello: Hello, owner: LinkOwner) -> None:
        self.route = route
        self.id = route.id
        self.replica = int(route.id.rpartition("/")[2])  # its number, for metrics
        self.welcome: Welcome | None = None
        self._hello = hello
        self._owner = owner
        self._full = False  # other gateways have its slots; it sends Room when one is free
        self._reader = FrameReader()
        self._transport: asyncio.WriteTransport | None = None
        self._live: dict[str, Ticket] = {}
        self._unstarted: set[str] = set()  # requests in ``_live`` without a token
        self._outgoing: list[bytes] = []  # frames of this turn of the event loop
        self._retired = False
        self.drains = False  # it has refused a request: sending it there again would use up its retries
        self.stepped_at = NEVER  # monotonic, arrival of its last tokens; NEVER while it has no request of this gateway
        self._pace = Pace()
        self.metrics: dict[str, ModelMetrics] = {}  # by model or adapter, once a request was counted
        self.prefixes: PrefixIndex | None = None  # for an engine with a prefix cache
        self.closed = asyncio.Event()
        self.refused = False  # by the replica; a retry would be refused again
        self.broken = False  # the replica sent something invalid, and would send it again

    @property
    def free_slots(self) -> int:
        if self.welcome is None or self._transport is None or self._retired or self.drains or self._full:
            return 0
        return self.welcome.slots - len(self._live)

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
        request, stream, frame = ticket.request, ticket.stream, ticket.frame
        stream.link, stream.sent_at = self, time.monotonic()
        if ticket.trace is not None:
            frame = encode(Submit(msgspec.structs.replace(request, trace=ticket.trace.sent(self.id))))
        self._live[request.id] = ticket
        self._unstarted.add(request.id)
        self._outgoing.append(frame)
        if len(self._outgoing) == 1:  # all that is sent in one turn of the loop is one write
            asyncio.get_running_loop().call_soon(self._flush)

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
        if not self._live:
            self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's lacks the base class
        self._transport.write(encode(self._hello))

    def data_received(self, data: bytes) -> None:
        self._owner.arrived(self, self.read(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        lost, self._live = list(self._live.values()), {}
        self._unstarted.clear()
        self.closed.set()
        self._owner.arrived(self, Arrived(time.monotonic(), closed=True, lost=lost))

    # What arrives

    def read(self, data: bytes) -> Arrived:
        """Returns what a read has brought."""
        arrived = Arrived()
        try:
            for message in self._reader.feed(data):
                if isinstance(message, Step):
                    self._read_step(message.events, arrived)
                elif isinstance(message, Room):
                    self._full, arrived.freed = False, True
                else:
                    self._read_greeting(message, arrived)
        except WireError as error:
            log.error("disconnecting %s, which sent an invalid message: %s", self.id, error)
            self.broken = True
            self.close()
        arrived.at = time.monotonic()
        if arrived.ended:
            self.stepped_at = arrived.at if self._live else NEVER
            for ticket in arrived.ended:
                stream = ticket.stream
                if stream.produced > 1 and stream.first_at:
                    self._pace.ended(arrived.at - stream.first_at, stream.produced - 1)
        elif arrived.touched and len(self._live) > len(self._unstarted):
            self.stepped_at = arrived.at
        if self._retired and not self._live:
            self.close()
        return arrived

    def _read_greeting(self, message: Message, arrived: Arrived) -> None:
        """Reads the first message of a replica. Raises WireError for another one."""
        if isinstance(message, Refused):
            self.refused = True
            log.error("%s refused the connection: %s", self.id, message.reason)
        elif not isinstance(message, Welcome):
            raise WireError(f"a replica does not send {type(message).__name__}")
        elif (reason := mismatch(message.protocol)) is not None:
            self.refused = True
            version, ours = message.version, corewright_version()
            log.error("%s runs corewright %s, and this gateway %s: %s", self.id, version, ours, reason)
            self.close()
        else:
            self.welcome, arrived.freed = message, True
            if message.prefix_block:
                self.prefixes = PrefixIndex(max(1, message.slots * message.max_len // message.prefix_block))

    def _read_step(self, events: Sequence[TokenEvent], arrived: Arrived) -> None:
        """Adds the events of a step to the streams of their tickets."""
        for event in events:
            ticket = self._live.get(event.id)
            if ticket is None:
                continue
            finish, part = event.finish, event.part
            if finish is not None:
                del self._live[event.id]
                self._unstarted.discard(event.id)
                if finish is FinishReason.BUSY:
                    self._full = True
                    arrived.busy.append(ticket)
                    continue
                if finish is FinishReason.REFUSED or (finish is FinishReason.UNSERVED and ticket.can_retry):
                    self.drains = self.drains or finish is FinishReason.REFUSED
                    arrived.lost.append(ticket)
                    continue
                self._full = False  # its slot is free
                arrived.ended.append(ticket)
                if part is not None and part.prompt_tokens is not None:
                    ticket.tokens = part.prompt_tokens
                if finish is FinishReason.CANCELLED:
                    continue
            elif part is not None and self._transport is not None:
                self._transport.write(encode(Taken(event.id, len(part.data))))
            stream = ticket.stream
            stream.events.append(event)
            if part is None:
                stream.produced += len(event.token_ids)
            else:
                stream.produced += part.tokens
                stream.work_s, stream.batches_s = part.work_s, part.batches_s
            if not stream.touched:
                stream.touched = True
                arrived.touched.append(ticket)
                self._unstarted.discard(event.id)
