"""Replies to one encoded request, once all its numbers have arrived."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from orchestrator.gateway.encoding.answers import AnswerHead, Encoded, written
from orchestrator.gateway.encoding.protocol import EncodingBody
from orchestrator.gateway.http.exchange import Exchange
from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.answers import LARGE_BYTES
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.openai.reply import REFUSED, Note, decision_headers, failure_of
from orchestrator.gateway.serving.ticket import Ticket

if TYPE_CHECKING:
    from orchestrator.gateway.telemetry.gateway_metrics import GatewayMetrics

SLICE_S = 0.002  # of the event loop: a large answer is written in many of them, so that no other request waits long


class EncodedReply(msgspec.Struct, eq=False):
    """The ``Sink`` of the one ticket of a request: all its vectors are of one replica."""

    exchange: Exchange
    body: EncodingBody
    head: AnswerHead
    _note: Note
    _metrics: GatewayMetrics
    read_again: Callable[[], Awaitable[None]]  # tokenizes again for the current routes, while it waits
    ticket: Ticket | None = None  # None once it is over
    _parts: list[bytes] = msgspec.field(default_factory=list)  # of the answer

    def __post_init__(self) -> None:
        self.exchange.note = self._note
        self.exchange.on_gone = self.leave

    @property
    def tickets(self) -> list[Ticket]:
        """Its ticket, while it is open."""
        return [] if self.ticket is None else [self.ticket]

    def leave(self) -> None:
        """Cancels the request."""
        if self.ticket is not None:
            self.ticket.leave()
            self._end(self.ticket, time.monotonic(), "abort")

    def fail(self, error: ApiError) -> None:
        """Answers with an error."""
        self.leave()
        self.exchange.fail(error)

    # Sink

    def on_wait(self) -> None:
        """Nothing is sent before the answer."""

    def on_events(self, ticket: Ticket, now: float) -> None:
        last = ticket.stream.events[-1]
        if last.finish is None:
            return  # a part; the others follow
        if last.finish in REFUSED:
            self._end(ticket, now, "error")
            self.fail(failure_of(last, self._note.model))
            return
        stream, inputs = ticket.stream, ticket.request.inputs
        welcome = None if stream.link is None else stream.link.welcome
        if welcome is None:
            self.fail(errors.replica_lost(self._note.model))
            return
        parts = [event.part.data for event in stream.take() if event.part is not None]
        encoded = Encoded(parts, len(inputs), welcome.width, welcome.labels, ticket.tokens)
        headers = self._headers(ticket, now)
        self._answered(ticket, now)
        try:
            pieces = written(self.body, self.head, encoded)
        except ApiError as error:
            self.exchange.fail(error)
            return
        self._write(pieces, headers)

    def on_failure(self, ticket: Ticket, error: ApiError) -> None:
        self._end(ticket, time.monotonic(), "error")
        self.exchange.fail(error)

    # Inside

    def _write(self, pieces: Iterator[bytes], headers: list[tuple[bytes, bytes]]) -> None:
        """Makes pieces of the answer for SLICE_S, then continues in the next turn of the event loop."""
        until = time.monotonic() + SLICE_S
        for piece in pieces:
            self._parts.append(piece)
            if time.monotonic() > until:
                if not self.exchange.ended:  # the client is still there
                    asyncio.get_running_loop().call_soon(self._write, pieces, headers)
                return
        parts, self._parts = self._parts, []
        small = sum(map(len, parts)) <= LARGE_BYTES
        self.exchange.respond(200, b"".join(parts) if small else parts, headers=headers)

    def _headers(self, ticket: Ticket, now: float) -> list[tuple[bytes, bytes]]:
        stream = ticket.stream
        assert stream.link is not None
        version = stream.link.route.version.encode()
        return [(b"x-corewright-model-version", version), *decision_headers(self.exchange, self._note, ticket, now)]

    def _answered(self, ticket: Ticket, now: float) -> None:
        """Counts a request that was answered."""
        stream, received_at = ticket.stream, self.exchange.request.received_at
        if ticket.trace is not None:
            ticket.trace.first_token()
        ticket.began(now)
        assert stream.link is not None
        metrics = self._metrics.model(self._note.model, stream.link.replica)
        waited_s, held_s = stream.sent_at - ticket.arrived_at, now - stream.sent_at
        metrics.encoded(len(ticket.request.inputs), now - received_at, waited_s, held_s)
        self._end(ticket, now, "stop")

    def _end(self, ticket: Ticket, now: float, reason: str) -> None:
        """Counts the end of the request, once."""
        if self.ticket is None:
            return
        self.ticket = None
        self._note.reason = reason
        link = ticket.stream.link
        if reason == "abort" and link is not None and self.exchange.grant is not None:
            self.exchange.grant.least = ticket.tokens
        metrics = self._metrics.model(self._note.model, None if link is None else link.replica)
        metrics.ended(reason, ticket.tokens, 0, now - self.exchange.request.received_at, 0.0)
