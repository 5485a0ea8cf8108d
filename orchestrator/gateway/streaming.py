"""Writing a request's choices as one stream of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from starlette.types import Send

from orchestrator.gateway import errors
from orchestrator.gateway.answers import Answer, Choice, error_event
from orchestrator.gateway.errors import ApiError
from orchestrator.gateway.ticket import Ticket
from workers.requests import FinishReason, TokenEvent

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
Taken = tuple[Choice, list[TokenEvent]]


async def write_stream(
    choices: Sequence[tuple[Choice, Ticket]], model: str, answer: Answer, send: Send, include_usage: bool
) -> None:
    """Write every choice until its end, in the order in which tokens come.

    An error before the first token is raised, so that it becomes an ordinary answer with its own status; a later one
    ends the stream with an error event.
    """
    taken = _taken(choices, model)
    first = await anext(taken)
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    opening = b"".join(answer.opening(choice) for choice, _ in choices)
    await _send_some(send, opening + answer.events(*first))
    try:
        async for choice, events in taken:
            await _send_some(send, answer.events(choice, events))
        last = answer.closing(include_usage=include_usage)
    except ApiError as error:
        last = error_event(error)
    await send({"type": "http.response.body", "body": last, "more_body": False})


async def _send_some(send: Send, chunk: bytes) -> None:
    if chunk:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})


def raise_if_failed(events: Sequence[TokenEvent], model: str) -> None:
    """Raises ApiError for a request that the replica cannot serve, or that its engine has failed."""
    if events[-1].finish is FinishReason.INVALID:
        raise errors.invalid(events[-1].error or "the replica cannot serve this request")
    if events[-1].finish is FinishReason.ERROR:
        raise errors.engine_failed(model, events[-1].error or "no cause was given")


async def _taken(choices: Sequence[tuple[Choice, Ticket]], model: str) -> AsyncIterator[Taken]:
    """The events of all choices as they come. Raises ApiError."""
    if len(choices) == 1:
        async for taken in _taken_of(*choices[0], model):
            yield taken
        return
    ready: asyncio.Queue[Taken | ApiError | None] = asyncio.Queue()

    async def forward(choice: Choice, ticket: Ticket) -> None:
        try:
            async for taken in _taken_of(choice, ticket, model):
                ready.put_nowait(taken)
            ready.put_nowait(None)
        except ApiError as error:
            ready.put_nowait(error)

    tasks = [asyncio.ensure_future(forward(choice, ticket)) for choice, ticket in choices]
    try:
        open_choices = len(tasks)
        while open_choices:
            item = await ready.get()
            if isinstance(item, ApiError):
                raise item
            if item is None:
                open_choices -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()


async def _taken_of(choice: Choice, ticket: Ticket, model: str) -> AsyncIterator[Taken]:
    while True:
        events = await ticket.take()
        raise_if_failed(events, model)
        yield choice, events
        if events[-1].finish is not None:
            return
