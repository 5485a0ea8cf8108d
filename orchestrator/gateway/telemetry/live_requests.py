"""The requests of one gateway for operators, while one looks at them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, cast

from orchestrator.gateway.encoding.encoded_reply import EncodedReply
from orchestrator.gateway.http.exchange import Exchange
from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.reply import Note, Reply
from orchestrator.scaling.demand_report import LiveRequest

if TYPE_CHECKING:
    from orchestrator.gateway.serving.model_queue import ModelQueue
    from orchestrator.gateway.serving.ticket import Ticket

MOST = 200  # requests in one report, of the open ones and of those that have ended


class LiveRequestLog:
    """Collects what a report says of the requests; nothing while it is not ``watched``."""

    def __init__(self) -> None:
        self.watched = False
        self._ended: deque[LiveRequest] = deque(maxlen=MOST)

    def ended(self, exchange: Exchange) -> None:
        """Keeps an exchange that is over for the next report."""
        note: Note | None = exchange.note
        if not self.watched or note is None:
            return
        self._ended.append(
            LiveRequest(
                request=exchange.id,
                model=note.model,
                key=_key(exchange),
                age_s=_age_s(exchange),
                queue_ms=round(note.queue_s * 1000, 1),
                replica=note.replica or "",
                prompt_tokens=note.prompt_tokens,
                tokens=note.completion_tokens,
                decision=note.decision,
                ended=exchange.code or note.reason or "cancelled",
            )
        )

    def take(self, queues: Iterable[ModelQueue]) -> list[LiveRequest]:
        """Returns the open requests, at most ``MOST``, and those that have ended since the last call."""
        if not self.watched:
            return []
        now = time.monotonic()
        shown: dict[str, LiveRequest] = {}
        for queue in queues:
            for ticket in _tickets(queue):
                if len(shown) == MOST:
                    break
                shown.setdefault(ticket.x_request_id, _open(queue, ticket, now))
        ended = list(self._ended)
        self._ended.clear()
        return [*shown.values(), *ended]

    def cancel(self, queues: Iterable[ModelQueue], requests: Iterable[str]) -> None:
        """Ends requests with an error, by their ids in the answers."""
        cancelled = set(requests)
        for ticket in [each for queue in queues for each in _tickets(queue) if each.x_request_id in cancelled]:
            cast(Reply | EncodedReply, ticket.sink).fail(errors.request_cancelled())


def _tickets(queue: ModelQueue) -> Iterator[Ticket]:
    for link in queue.links:
        for ticket, _ in link.progress:
            yield ticket
    yield from queue.dispatcher.entries


def _open(queue: ModelQueue, ticket: Ticket, now: float) -> LiveRequest:
    exchange = cast(Reply | EncodedReply, ticket.sink).exchange
    stream = ticket.stream
    until = stream.sent_at if stream.link is not None else now
    return LiveRequest(
        request=ticket.x_request_id,
        model=queue.name,
        key=_key(exchange),
        age_s=_age_s(exchange),
        queue_ms=round((until - ticket.arrived_at) * 1000, 1),
        replica="" if stream.link is None else stream.link.route.id,
        prompt_tokens=ticket.tokens,
        tokens=stream.produced,
        decision=ticket.decision,
    )


def _key(exchange: Exchange) -> str:
    return "" if exchange.key is None else exchange.key.name


def _age_s(exchange: Exchange) -> float:
    return round(time.monotonic() - exchange.request.received_at, 3)
