"""Logs, records and counts the requests of one gateway when they are over."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

from orchestrator.gateway.authenticator import Authenticator
from orchestrator.gateway.http.exchange import Exchange
from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.reply import ClientReply, Note
from orchestrator.gateway.telemetry.gateway_metrics import GatewayMetrics
from orchestrator.gateway.telemetry.recorder import RequestRecorder
from orchestrator.process.logs import Access, access_log
from orchestrator.scaling.demand_report import LiveRequest

if TYPE_CHECKING:
    from orchestrator.gateway.serving.model_queue import ModelQueue
    from orchestrator.gateway.serving.ticket import Ticket


log = logging.getLogger(__name__)

MAX_LIVE_REQUESTS = 200  # in one report, of the open ones and of those that have ended
UNAUTHENTICATED_LOG_S = 10.0  # between two log lines about requests without a valid key
CLIENT_GONE = 499  # nginx's status for a client that disconnected before the answer


class RequestLog:
    """The ends of requests: in the access log, the record for `trace export`, the trace, the metrics and the limits of
    the key."""

    def __init__(
        self, gate: Authenticator, metrics: GatewayMetrics, recorder: RequestRecorder, *, with_texts: bool
    ) -> None:
        """``with_texts`` logs prompts and answers."""
        self._gate = gate
        self._metrics = metrics
        self._recorder = recorder
        self._with_texts = with_texts
        self._unauthenticated: Counter[int] = Counter()  # by status, requests without a valid key, not logged yet
        self._unauthenticated_at = -math.inf  # their last log line (monotonic)
        self.watched = False  # an operator looks at the requests
        self._ended: deque[LiveRequest] = deque(maxlen=MAX_LIVE_REQUESTS)
        self._epoch = time.time() - time.monotonic()  # add to a monotonic time to get seconds since the epoch

    def ended(self, exchange: Exchange) -> None:
        """Counts and logs an exchange that is over."""
        note: Note | None = exchange.note
        self._log(exchange, note)
        if exchange.grant is not None:
            used = 0 if note is None else note.completion_tokens + (note.prompt_tokens if note.replica else 0)
            exchange.grant.settle(used, time.monotonic())
        if note is not None and note.replica is not None:
            key = "" if exchange.key is None else exchange.key.id
            arrived_at, tokens = exchange.request.received_at + self._epoch, note.completion_tokens
            self._recorder.note(  # for `trace export`: lengths only
                arrived_at, note.model, note.prompt_tokens, tokens, key, note.prefill_s, note.decode_s
            )
        if exchange.trace is not None and note is not None:
            usage = note.prompt_tokens, note.completion_tokens
            exchange.trace.end(exchange.code or note.reason or "cancelled", usage, exchange.status or CLIENT_GONE)
        if exchange.code is not None:
            self._metrics.refused(None if note is None else note.model, exchange.status, exchange.code)
        if note is not None and note.overhead_s is not None:
            self._metrics.overhead.observe(note.overhead_s)
        if note is not None and self.watched:
            self._ended.append(
                _live(
                    exchange,
                    request=exchange.id,
                    model=note.model,
                    queue_s=note.queue_s,
                    replica=note.replica,
                    prompt_tokens=note.prompt_tokens,
                    tokens=note.completion_tokens,
                    decision=note.decision,
                    ended=exchange.code or note.reason or "cancelled",
                )
            )

    def live(self, queues: Iterable[ModelQueue]) -> list[LiveRequest]:
        """Returns the open requests, at most ``MAX_LIVE_REQUESTS``, and those that have ended since the last call; none
        while they are not ``watched``."""
        if not self.watched:
            return []
        now = time.monotonic()
        tickets = ((queue, ticket) for queue in queues for ticket in _tickets(queue))
        live: dict[str, LiveRequest] = {}
        for queue, ticket in tickets:
            if len(live) == MAX_LIVE_REQUESTS:
                break
            live.setdefault(ticket.x_request_id, _open(queue, ticket, now))
        ended = list(self._ended)
        self._ended.clear()
        return [*live.values(), *ended]

    def write(self, now: float) -> None:
        """Writes what has been collected. To be called about once a second; ``now`` in monotonic seconds."""
        self._recorder.write_soon()
        self._epoch = time.time() - time.monotonic()  # the machine's clock may have been set
        if self._unauthenticated and now - self._unauthenticated_at >= UNAUTHENTICATED_LOG_S:
            counts = ", ".join(
                f"{count} with status {status}" for status, count in sorted(self._unauthenticated.items())
            )
            log.warning("requests without a valid key since the last such line, or the start: %s", counts)
            self._unauthenticated.clear()
            self._unauthenticated_at = now

    def _log(self, exchange: Exchange, note: Note | None) -> None:
        request, key = exchange.request, exchange.key
        if exchange.route is not None and exchange.route.is_probe and exchange.status == 200:
            return  # a probe, every second or so
        if key is None and self._gate.requires_keys:
            self._unauthenticated[exchange.status or CLIENT_GONE] += 1  # a line for each could fill the disk
            return
        prompts = self._with_texts and note is not None
        access_log(
            Access(
                method=request.method,
                path=request.path,
                status=exchange.status or CLIENT_GONE,
                request_id=exchange.id,
                ms=(time.monotonic() - request.received_at) * 1000,
                model=None if note is None else note.model,
                replica=None if note is None else note.replica,
                key=None if key is None else key.id,
                prompt_tokens=None if note is None else note.prompt_tokens,
                completion_tokens=None if note is None else note.completion_tokens,
                reason=exchange.code or (None if note is None else note.reason),
                prompt=request.body.decode(errors="replace") if prompts else None,
                answer=note.answer if prompts and note is not None else None,
            )
        )


def cancel(queues: Iterable[ModelQueue], requests: Iterable[str]) -> None:
    """Ends requests with an error, by their ids in the answers."""
    cancelled = set(requests)
    for ticket in [each for queue in queues for each in _tickets(queue) if each.x_request_id in cancelled]:
        cast(ClientReply, ticket.sink).fail(errors.request_cancelled())


def _tickets(queue: ModelQueue) -> Iterator[Ticket]:
    for link in queue.links:
        for ticket, _ in link.progress:
            yield ticket
    yield from queue.dispatcher.entries


def _open(queue: ModelQueue, ticket: Ticket, now: float) -> LiveRequest:
    link = ticket.stream.link
    return _live(
        cast(ClientReply, ticket.sink).exchange,
        request=ticket.x_request_id,
        model=queue.name,
        queue_s=(now if link is None else ticket.stream.sent_at) - ticket.arrived_at,
        replica=None if link is None else link.route.id,
        prompt_tokens=ticket.tokens,
        tokens=ticket.stream.produced,
        decision=ticket.decision,
    )


def _live(exchange: Exchange, *, queue_s: float, replica: str | None, **fields: Any) -> LiveRequest:
    return LiveRequest(
        key="" if exchange.key is None else exchange.key.name,
        age_s=round(time.monotonic() - exchange.request.received_at, 3),
        queue_ms=round(queue_s * 1000, 1),
        replica=replica or "",
        **fields,
    )
