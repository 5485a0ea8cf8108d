"""Writes the reply to one request as its tokens arrive, without a task, with a few joined bytes per token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from orchestrator.gateway.http.exchange import Exchange
from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.answers import AnswerWriter, Choice
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.serving.ticket import Ticket
from orchestrator.scaling.demand_report import RoutingDecision, undecided
from workers.messages.requests import GUIDE, FinishReason, GenerateRequest, TokenEvent

if TYPE_CHECKING:
    from orchestrator.gateway.openai.request_builder import Prompts
    from orchestrator.gateway.serving.model_queue import ModelQueue
    from orchestrator.gateway.telemetry.gateway_metrics import GatewayMetrics, ModelMetrics

REFUSED = (FinishReason.INVALID, FinishReason.ERROR, FinishReason.UNSERVED)


class Note(msgspec.Struct, eq=False):
    """The data of a request for log and metrics, once it has reached a model."""

    model: str
    stream: bool
    replica: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    queue_s: float = 0.0
    overhead_s: float | None = None  # time that the gateway itself added to the first byte
    prefill_s: float = 0.0  # from the slot to the first token, of a complete answer of one choice
    decode_s: float = 0.0  # from its first token to its last
    reason: str | None = None  # why the answer ended
    answer: str | None = None  # its text, if answers are logged
    decision: RoutingDecision | None = None  # if it was recorded
    guided_by: str | None = None  # the field with the answer's JSON schema


class ClientReply(msgspec.Struct, eq=False):
    """The ``Sink`` of the tickets of one request, as its owner and operators see it."""

    exchange: Exchange
    _queue: ModelQueue
    _note: Note
    _metrics: GatewayMetrics
    read_again: Callable[[ModelQueue, Any], Awaitable[None]]  # tokenizes a waiting reply again for the current routes

    def __post_init__(self) -> None:
        self.exchange.note = self._note
        self.exchange.on_gone = self.abort

    @property
    def tickets(self) -> list[Ticket]:
        """The tickets that are not over, in order."""
        raise NotImplementedError

    def abort(self) -> None:
        """Cancels the request, and counts it."""
        raise NotImplementedError

    def fail(self, error: ApiError) -> None:
        """Answers with an error."""
        self.abort()
        self.exchange.fail(error)


class Reply(ClientReply, eq=False):
    """The ``Sink`` of the tickets of one request, one ticket per choice.

    Until the first token, a streaming client whose request waits gets a comment or a ping every ``keep_alive_s``:
    otherwise a proxy in between could close the silent connection."""

    _answer: AnswerWriter
    _include_usage: bool
    _keep_alive_s: float
    _keeps_text: bool = False  # for a log with answers
    # By ticket; cleared at the end, since tickets refer to their sink: without cycles nothing is left to the collector.
    _choices: dict[Ticket, Choice] = msgspec.field(default_factory=dict)
    _open: set[Ticket] = msgspec.field(default_factory=set)
    _opened: bool = False  # the first event is written; before it there may be comments
    _reminder: asyncio.TimerHandle | None = None

    def add(self, ticket: Ticket, choice: Choice) -> None:
        """Adds a choice; all are added before the first token."""
        self._choices[ticket] = choice
        self._open.add(ticket)

    @property
    def tickets(self) -> list[Ticket]:
        """The tickets of all choices, in order."""
        return list(self._choices)

    def renew(self, prompts: Prompts, requests: Sequence[GenerateRequest]) -> None:
        """Replaces the requests of the waiting choices, one request per choice; choices in a slot, or answered, stay.
        Raises ApiError."""
        ids, echoes, parser, _ = prompts
        copies = len(requests) // len(ids)
        for position, (ticket, choice) in enumerate(self._choices.items()):
            if ticket.stream.link is None and ticket in self._open:
                self._queue.renew(ticket, requests[position])
                choice.prompt_ids, choice.echo = ids[position // copies], echoes[position // copies]
                choice.reader = None if parser is None else parser()
        self._note.prompt_tokens = self._answer.prompt_tokens

    def leave(self) -> None:
        """Cancels the open tickets."""
        for ticket in self._open:
            self._queue.leave(ticket)
        self._open.clear()

    # Sink

    def on_wait(self) -> None:
        if self._note.stream and not self._opened and self._reminder is None:
            self._reminder = asyncio.get_running_loop().call_later(self._keep_alive_s, self._remind)

    def on_events(self, ticket: Ticket, now: float) -> None:
        stream = ticket.stream
        last = stream.events[-1]
        self._measure(ticket, now)
        # the events of an answer that is not streamed stay in the ticket until its end
        if self._keeps_text and (self._note.stream or last.finish is not None):
            self._note.answer = (self._note.answer or "") + "".join(event.text for event in stream.events)
        if last.finish in REFUSED:
            self._end(ticket, now, "error")
            self.fail(failure_of(last, self._note.model, self._note.guided_by))
            return
        if last.finish is not None:
            if last.part is not None:
                self._note.prompt_tokens = ticket.tokens
            self._end(ticket, now, last.finish._value_)  # `value` is two calls more
        if self._note.stream:
            self._write(ticket, now)
            return
        if ticket.request.logprobs is not None:
            self._answer.add_logprobs(self._choices[ticket], stream.events, ticket.retries)
        if not self._open:
            self._write_whole(ticket, now)

    def on_failure(self, ticket: Ticket, error: ApiError) -> None:
        self._end(ticket, time.monotonic(), "error")
        self.fail(error)

    # Inside

    def _remind(self) -> None:
        exchange = self.exchange
        self._reminder = None
        if self._opened or exchange.ended or not self._answer.keep_alive:
            return
        if exchange.began:
            exchange.write(self._answer.keep_alive)
        else:
            exchange.begin(200, (*self._stream_headers, *self._wait_headers), self._answer.keep_alive)
        self.on_wait()

    @property
    def _stream_headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return (b"content-type", self._answer.stream_type), (b"cache-control", b"no-cache")

    @property
    def _wait_headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """The wait so far, and the expected one, in the head of a stream that waits."""
        ticket = next(iter(self._open))
        if not ticket.terms.explains:
            return ()
        waited_s = time.monotonic() - ticket.arrived_at
        left_s = None if ticket.expected_s is None else max(0.0, ticket.expected_s - waited_s)
        return ((b"x-corewright-decision", undecided(waited_s, ticket.cold, left_s)),)

    def _write(self, ticket: Ticket, now: float) -> None:
        exchange, answer = self.exchange, self._answer
        opening = b""
        if not self._opened:
            opening = b"".join([answer.opening(choice) for choice in self._choices.values()])
        piece = opening + answer.events(self._choices[ticket], ticket.stream.take())
        if not self._open:
            piece += answer.closing(include_usage=self._include_usage)
        if not self._opened:
            self._opened = True
            headers = decision_headers(self.exchange, self._note, ticket, now)
            if not exchange.began:
                exchange.begin(200, (*self._stream_headers, *headers), piece)
                piece = b""
            elif ticket.terms.explains:  # the head was sent earlier, with the first comment
                piece = b"".join([b": %b: %b\n\n" % header for header in headers]) + piece
        if not self._open:
            exchange.end(piece)
            self._choices = {}
        elif piece:
            exchange.write(piece)

    def _write_whole(self, ticket: Ticket, now: float) -> None:
        body = self._answer.whole([(choice, each.stream.take()) for each, choice in self._choices.items()])
        headers = decision_headers(self.exchange, self._note, ticket, now)
        self.exchange.respond(200, body, headers=headers, content_type=self._answer.whole_type)
        self._choices = {}

    def _measure(self, ticket: Ticket, now: float) -> None:
        stream = ticket.stream
        new = stream.produced - stream.counted
        if new <= 0:
            return
        metrics = stream.metrics
        if metrics is None:
            stream.metrics = metrics = self._metrics_of(ticket)
            stream.first_at = stream.last_at = now
            if ticket.trace is not None:
                ticket.trace.first_token()
            self._queue.record.began(ticket, now)
            self._note.replica = None if stream.link is None else stream.link.route.id
            received_at = self.exchange.request.received_at
            metrics.first_token(now - received_at, stream.sent_at - ticket.arrived_at, now - stream.sent_at)
            new -= 1  # the other tokens of the same read arrived at the same time
        if new:
            metrics.token(now - stream.last_at, new)
        stream.counted = stream.produced
        stream.last_at = now

    def _end(self, ticket: Ticket, now: float, reason: str) -> None:
        """Counts a ticket that is over, once."""
        if ticket not in self._open:
            return
        stream = ticket.stream
        self._open.discard(ticket)
        if self._reminder is not None and not self._open:
            self._reminder.cancel()
        self._note.completion_tokens += stream.produced
        self._note.reason = reason
        if reason == "abort" and stream.link is not None and self.exchange.grant is not None:
            self.exchange.grant.least = self._note.prompt_tokens  # its prefill was begun, or may have been
        metrics = stream.metrics or self._metrics_of(ticket)
        decode_s = stream.last_at - stream.first_at
        if stream.first_at and reason in ("stop", "length") and len(self._choices) == 1:
            self._note.prefill_s, self._note.decode_s = stream.first_at - stream.sent_at, decode_s
        e2e_s = now - self.exchange.request.received_at
        metrics.ended(reason, ticket.tokens, stream.produced, e2e_s, decode_s)

    def _metrics_of(self, ticket: Ticket) -> ModelMetrics:
        """Returns the metrics of the ticket's replica, or of the queue."""
        link = ticket.stream.link
        if link is None:
            return self._metrics.model(self._note.model, None)
        metrics = link.metrics.get(self._note.model)
        if metrics is None:
            metrics = link.metrics[self._note.model] = self._metrics.model(self._note.model, link.replica)
        return metrics

    def fail(self, error: ApiError) -> None:
        """Answers with an error, or ends the stream with it."""
        self.abort()
        if self.exchange.began:
            self.exchange.code = error.code
            error.rename(self.exchange.names)
            self.exchange.end(self._answer.failure(error))
        else:
            self.exchange.fail(error)

    def abort(self) -> None:
        now = time.monotonic()
        for ticket in list(self._open):
            self._queue.leave(ticket)
            self._end(ticket, now, "abort")
        self._choices = {}


def decision_headers(exchange: Exchange, note: Note, ticket: Ticket, now: float) -> list[tuple[bytes, bytes]]:
    """Returns the headers with the replica, the overhead and the decision, and records them in the note."""
    stream = ticket.stream
    note.replica = stream.link.route.id if stream.link is not None else None
    note.queue_s = stream.sent_at - ticket.arrived_at
    note.decision = ticket.decision
    note.overhead_s = (ticket.arrived_at - exchange.request.received_at) + (time.monotonic() - now)
    headers = [
        (b"x-corewright-replica", (note.replica or "").encode()),
        (b"x-corewright-overhead-ms", b"%.3f" % (note.overhead_s * 1000)),
    ]
    if ticket.terms.explains and ticket.decision is not None:
        headers.append((b"x-corewright-decision", ticket.decision.as_header()))
    return headers


def failure_of(event: TokenEvent, model: str, guided_by: str | None = None) -> ApiError:
    """Returns the error of a request that the replica cannot serve, or whose engine failed."""
    if event.finish is FinishReason.INVALID:
        param = guided_by if event.param == GUIDE else event.param
        if event.part is not None and event.part.status:
            return errors.rejected_by_server(event.part.status, event.error or "the server gave no cause")
        return errors.invalid(event.error or "the replica cannot serve this request", param=param or None)
    if event.finish is FinishReason.UNSERVED:
        return errors.server_unavailable(model, event.error or "the server gave no cause")
    return errors.engine_failed(model, event.error or "the replica reported no cause")
