"""One request on its way: in the queue, on a replica, or ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from orchestrator.gateway.errors import ApiError, invalid
from workers.requests import GenerateRequest, TokenEvent
from workers.wire import Submit, WireError, encode

if TYPE_CHECKING:
    from orchestrator.gateway.link import ReplicaLink

MAX_RETRIES = 2


class Ticket:
    """What its handler waits on. Events that the handler has not taken may still be thrown away, and the request sent
    to another replica; once one is taken, the request stands or falls with its replica."""

    def __init__(self, request: GenerateRequest, leave: Callable[[Ticket], None]) -> None:
        """``leave`` takes the ticket out of wherever it is. Raises ApiError for a request that no frame can hold."""
        self.request = request
        try:
            self.frame = encode(Submit(request))
        except (OverflowError, WireError) as error:
            raise invalid(f"the request cannot be sent to a replica: {error}") from None
        self.sent_at = 0.0
        self.retries = 0
        self.link: ReplicaLink | None = None
        self.tokenizer = ""  # that its prompt was read with
        self.canary = False  # it goes to the version that is being tried
        self._leave = leave
        self._events: list[TokenEvent] = []
        self._error: ApiError | None = None
        self._taken = False
        self._left = False
        self._news = asyncio.Event()

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def started(self) -> bool:
        """Whether a token has come."""
        return self._taken or bool(self._events)

    @property
    def can_retry(self) -> bool:
        return not self._taken and not self._left and self.retries < MAX_RETRIES

    def sent_to(self, link: ReplicaLink) -> None:
        self.link = link
        self.sent_at = time.monotonic()

    def deliver(self, event: TokenEvent) -> None:
        self._events.append(event)
        self._news.set()

    def fail(self, error: ApiError) -> None:
        """No more events will come; it is in no queue and on no replica."""
        self._error = error
        self._left = True
        self._news.set()

    def restart(self) -> None:
        """Its replica is gone and nothing was taken: as if it had just come."""
        self.retries += 1
        self.link = None
        self._events.clear()
        self._news.clear()

    def leave(self) -> None:
        """Its client is gone, or has all that it wanted."""
        if not self._left:
            self._left = True
            self._leave(self)

    async def take(self) -> list[TokenEvent]:
        """The events since the last call, at least one. Raises ApiError when the request has failed."""
        while not self._events:
            if self._error is not None:
                raise self._error
            await self._news.wait()
            self._news.clear()
        self._taken = True
        events, self._events = self._events, []
        return events

    async def take_all(self) -> list[TokenEvent]:
        """Every event, once the last one is there. Until then the request may still be retried."""
        while not (self._events and self._events[-1].finish is not None):
            if self._error is not None:
                raise self._error
            await self._news.wait()
            self._news.clear()
        return await self.take()
