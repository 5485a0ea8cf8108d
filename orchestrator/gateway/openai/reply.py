"""The reply to one client's request, written as its tokens come: without a task, and of a few joined bytes a token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from orchestrator.gateway.http.exchange import Exchange
from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.answers import Answer, Choice, error_event
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.serving.ticket import Ticket
from workers.messages.requests import FinishReason, GenerateRequest, TokenEvent

if TYPE_CHECKING:
    from orchestrator.gateway.openai.request_builder import Prompts
    from orchestrator.gateway.telemetry.gateway_metrics import GatewayMetrics, ModelMetrics

_STREAM = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
_REFUSED = (FinishReason.INVALID, FinishReason.ERROR)
_WAITING = b": waiting\n\n"  # a comment, which clients of server-sent events skip


class Note(msgspec.Struct, eq=False):
    """What log and metrics tell of a request that reached a model."""

    model: str
    stream: bool
    replica: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    queue_s: float = 0.0
    overhead_s: float | None = None  # that the gateway itself has added to the first byte
    prefill_s: float = 0.0  # from the slot to the first token, of an answer of one choice that came to its end
    decode_s: float = 0.0  # from its first token to its last
    reason: str | None = None  # why the answer ended
    answer: str | None = None  # its text, where that is to be logged


class Reply(msgspec.Struct, eq=False):
    """``Sink`` of the tickets of one request, one for each choice.

    While no token has come, a streaming client whose request waits gets a comment every ``keep_alive_s``: what stands
    between it and us would take a silent connection for a dead one."""

    exchange: Exchange
    _answer: Answer
    _note: Note
    _metrics: GatewayMetrics
    _include_usage: bool
    _keep_alive_s: float
    _keeps_text: bool = False  # for a log that holds answers
    # Of each open ticket; none once it is over: they know us, and we need not be collected.
    _choices: dict[Ticket, Choice] = msgspec.field(default_factory=dict)
    _open: set[Ticket] = msgspec.field(default_factory=set)
    _opened: bool = False  # the first event is written; before it there may be comments
    _reminder: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.exchange.note = self._note
        self.exchange.on_gone = self._gone

    def add(self, ticket: Ticket, choice: Choice) -> None:
        """One more choice; none has a token before all are added."""
        self._choices[ticket] = choice
        self._open.add(ticket)

    @property
    def tickets(self) -> list[Ticket]:
        """Of all choices, in their order."""
        return list(self._choices)

    def renew(self, prompts: Prompts, requests: Sequence[GenerateRequest]) -> None:
        """What waits was read again: one request for each choice. What has a slot, or its answer, stays as it is.
        Raises ApiError."""
        ids, echoes, parser = prompts
        copies = len(requests) // len(ids)
        for place, (ticket, choice) in enumerate(self._choices.items()):
            if ticket.link is None and ticket in self._open:
                ticket.renew(requests[place])
                choice.prompt_ids, choice.echo = ids[place // copies], echoes[place // copies]
                choice.parser = None if parser is None else parser()
        self._answer.count_prompts()
        self._note.prompt_tokens = self._answer.prompt_tokens

    def fail(self, error: ApiError) -> None:
        """It cannot be answered."""
        self._fail(error)

    def leave(self) -> None:
        """Nobody waits for what is still open."""
        for ticket in list(self._open):
            ticket.leave()
        self._open.clear()

    # Sink

    def waits(self) -> None:
        if self._note.stream and not self._opened and self._reminder is None:
            self._reminder = asyncio.get_running_loop().call_later(self._keep_alive_s, self._remind)

    def came(self, ticket: Ticket, now: float) -> None:
        last = ticket.events[-1]
        self._measure(ticket, now)
        # an answer that is not streamed is whole at its end, and not before
        if self._keeps_text and (self._note.stream or last.finish is not None):
            self._note.answer = (self._note.answer or "") + "".join(event.text for event in ticket.events)
        if last.finish in _REFUSED:
            self._end(ticket, now, "error")
            self._fail(_failure(last, self._note.model))
            return
        if last.finish is not None:
            self._end(ticket, now, last.finish._value_)  # `value` is two calls more
        if self._note.stream:
            self._write(ticket, now)
            return
        if ticket.request.logprobs is not None:
            self._answer.add_logprobs(self._choices[ticket], ticket.events, ticket.retries)
        if not self._open:
            self._write_whole(ticket, now)

    def failed(self, ticket: Ticket, error: ApiError) -> None:
        self._end(ticket, time.monotonic(), "error")
        self._fail(error)

    # Inside

    def _remind(self) -> None:
        exchange = self.exchange
        self._reminder = None
        if self._opened or exchange.ended:
            return
        if exchange.began:
            exchange.write(_WAITING)
        else:
            exchange.begin(200, _STREAM, _WAITING)
        self.waits()

    def _write(self, ticket: Ticket, now: float) -> None:
        exchange, answer = self.exchange, self._answer
        opening = b""
        if not self._opened:
            opening = b"".join([answer.opening(choice) for choice in self._choices.values()])
        piece = opening + answer.events(self._choices[ticket], ticket.take())
        if not self._open:
            piece += answer.closing(include_usage=self._include_usage)
        if not self._opened:
            self._opened = True
            told = self._told(ticket, now)
            if not exchange.began:
                exchange.begin(200, (*_STREAM, *told), piece)
                piece = b""
            elif ticket.terms.explains:  # its headers have gone before anything was known
                piece = b"".join([b": %b: %b\n\n" % header for header in told]) + piece
        if not self._open:
            exchange.end(piece)
            self._choices = {}
        elif piece:
            exchange.write(piece)

    def _write_whole(self, ticket: Ticket, now: float) -> None:
        body = self._answer.whole([(choice, found.take()) for found, choice in self._choices.items()])
        self.exchange.respond(200, body, headers=self._told(ticket, now))
        self._choices = {}

    def _told(self, ticket: Ticket, now: float) -> list[tuple[bytes, bytes]]:
        """The headers that say who answered, and what the gateway has added."""
        note = self._note
        note.replica = ticket.link.route.id if ticket.link is not None else None
        note.queue_s = ticket.sent_at - ticket.arrived_at
        note.overhead_s = (ticket.arrived_at - self.exchange.request.received_at) + (time.monotonic() - now)
        told = [
            (b"x-corewright-replica", (note.replica or "").encode()),
            (b"x-corewright-overhead-ms", b"%.3f" % (note.overhead_s * 1000)),
        ]
        if ticket.terms.explains and ticket.decision is not None:
            told.append((b"x-corewright-decision", ticket.decision.as_header()))
        return told

    def _measure(self, ticket: Ticket, now: float) -> None:
        new = ticket.produced - ticket.counted
        if new <= 0:
            return
        metrics = ticket.metrics
        if metrics is None:
            ticket.metrics = metrics = self._metrics_of(ticket)
            ticket.first_at = ticket.last_at = now
            if ticket.trace is not None:
                ticket.trace.first_token()
            ticket.began(now)
            self._note.replica = None if ticket.link is None else ticket.link.route.id
            received_at = self.exchange.request.received_at
            metrics.first_token(now - received_at, ticket.sent_at - ticket.arrived_at, now - ticket.sent_at)
            new -= 1  # what came in the same read came at once
        if new:
            metrics.token(now - ticket.last_at, new)
        ticket.counted = ticket.produced
        ticket.last_at = now

    def _end(self, ticket: Ticket, now: float, reason: str) -> None:
        """The ticket is over; counted once."""
        if ticket not in self._open:
            return
        self._open.discard(ticket)
        if self._reminder is not None and not self._open:
            self._reminder.cancel()
        self._note.completion_tokens += ticket.produced
        self._note.reason = reason
        metrics = ticket.metrics or self._metrics_of(ticket)
        decode_s = ticket.last_at - ticket.first_at
        if ticket.first_at and reason in ("stop", "length") and len(self._choices) == 1:
            self._note.prefill_s, self._note.decode_s = ticket.first_at - ticket.sent_at, decode_s
        e2e_s = now - self.exchange.request.received_at
        metrics.ended(reason, len(ticket.request.prompt_ids), ticket.produced, e2e_s, decode_s)

    def _metrics_of(self, ticket: Ticket) -> ModelMetrics:
        """Of the replica that it is on."""
        link = ticket.link
        if link is None:
            return self._metrics.model(self._note.model, None)
        if link.metrics is None:
            link.metrics = self._metrics.model(self._note.model, link.replica)
        return link.metrics

    def _fail(self, error: ApiError) -> None:
        self._end_all("abort")
        if self.exchange.began:
            self.exchange.code = error.code
            self.exchange.end(error_event(error))
        else:
            self.exchange.fail(error)

    def _gone(self) -> None:
        self._end_all("abort")

    def _end_all(self, reason: str) -> None:
        now = time.monotonic()
        for ticket in list(self._open):
            ticket.leave()
            self._end(ticket, now, reason)
        self._choices = {}


def _failure(event: TokenEvent, model: str) -> ApiError:
    """Of a request that the replica cannot serve, or that its engine has failed."""
    if event.finish is FinishReason.INVALID:
        return errors.invalid(event.error or "the replica cannot serve this request")
    return errors.engine_failed(model, event.error or "no cause was given")
