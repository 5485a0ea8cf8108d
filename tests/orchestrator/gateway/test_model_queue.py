"""The links of a model's queue to its replicas, and its lines."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec.structs
import pytest

from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.serving import replica_link_pool as links_of
from orchestrator.gateway.serving.model_queue import ModelQueue
from orchestrator.gateway.serving.replica_link import Arrived, ReplicaLink
from orchestrator.gateway.serving.replica_link_pool import LinkSettings, ReplicaLinks
from orchestrator.gateway.serving.ticket import Ticket
from orchestrator.messages.replica_states import ModelState
from orchestrator.messages.route_table import ModelRoutes, Route
from placements.resources.measured_times import PACE, Times, length_class, note
from tests.fleet import until_async
from tests.orchestrator.gateways import routes
from workers.messages.requests import GenerateRequest

ROUTE = Route("m/0", 1, "/nowhere")
WITHOUT = routes("m", state=ModelState.LOADING, holds=True)
WITH = msgspec.structs.replace(WITHOUT, replicas=[ROUTE])


class PlayedLink:
    """As much of a link as is kept."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.refused = self.broken = self.drains = False
        self.welcome = None
        self.route = ROUTE

    def resume(self) -> None: ...

    def retire(self) -> None:
        self.closed.set()

    def close(self) -> None:
        self.closed.set()

    def cancel(self, ticket: Ticket) -> None: ...


class IgnoringOwner:
    """A queue that ignores all calls."""

    def arrived(self, link: ReplicaLink, arrived: Arrived) -> None: ...
    def unreachable(self) -> None: ...
    def unusable(self) -> None: ...


class Dialled:
    """Stands for `open_link`: the first ``broken`` calls fail as nothing should."""

    def __init__(self, broken: int = 0) -> None:
        self.broken = broken
        self.opened: list[PlayedLink] = []

    async def __call__(self, *_: Any) -> tuple[None, PlayedLink]:
        if self.broken:
            self.broken -= 1
            raise RuntimeError("broken")
        self.opened.append(PlayedLink())
        return None, self.opened[-1]


def kept(table: ModelRoutes) -> ReplicaLinks:
    return ReplicaLinks(table, LinkSettings("g", "t"), IgnoringOwner())


async def links_open(dialled: Dialled, count: int) -> None:
    await until_async(lambda: len(dialled.opened) == count, 10, f"{count} links were opened")


@pytest.mark.parametrize("turns", range(6))
async def test_a_route_that_returns_at_once_gets_a_link(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any turn of the event loop: also between the end of its former task and the notification of that end."""
    dialled = Dialled()
    monkeypatch.setattr(links_of, "open_link", dialled)
    links = kept(WITHOUT)
    links.update(WITH)
    await links_open(dialled, 1)
    links.update(WITHOUT)
    links.lost(cast("ReplicaLink", dialled.opened[0]))
    for _ in range(turns):
        await asyncio.sleep(0)
    links.update(WITH)
    await links_open(dialled, 2)
    await links.stop()


async def test_a_link_with_an_unexpected_error_is_logged_and_reopened(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A replica without a link would be idle until the routes change."""
    dialled = Dialled(broken=1)
    monkeypatch.setattr(links_of, "open_link", dialled)
    links = kept(WITHOUT)
    links.update(WITH)
    await links_open(dialled, 1)
    assert "the task of the link to m/0 failed" in caplog.text
    await links.stop()


class IgnoringSink:
    """A sink that ignores all calls."""

    def on_events(self, ticket: Ticket, now: float) -> None: ...
    def on_wait(self) -> None: ...
    def on_failure(self, ticket: Ticket, error: ApiError) -> None: ...


async def test_a_full_canary_line_reports_the_time_of_its_own_next_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the other line."""
    table = msgspec.structs.replace(WITHOUT, canary=1.0, max_queue=1)
    queue = ModelQueue(table, LinkSettings("g", "t"), wake=lambda name: None)
    queue.update(table)
    places: list[int] = []
    queue.links.slots = 1
    monkeypatch.setattr(queue.dispatcher, "predicted_wait_s", lambda ahead, own_wait_s=0.0: places.append(ahead) or 1.0)
    request = GenerateRequest(id="r", prompt_ids=[1], max_tokens=1)
    queue.submit(request, IgnoringSink())
    with pytest.raises(ApiError):
        queue.submit(request, IgnoringSink())
    assert places == [1, 0]
    queue.close()


class TwoChoices(IgnoringSink):
    """The sink of two tickets: it leaves one when the other one fails, as a reply does."""

    def __init__(self, queue: ModelQueue) -> None:
        self._queue = queue
        request = GenerateRequest(id="r", prompt_ids=[1], max_tokens=1)
        self.tickets = [queue.submit(msgspec.structs.replace(request, id=id), self) for id in ("first", "second")]
        self.failures: list[ApiError] = []

    def on_failure(self, ticket: Ticket, error: ApiError) -> None:
        self.failures.append(error)
        for other in self.tickets:
            self._queue.leave(other)


async def test_a_request_that_fails_with_its_replica_is_not_sent_again_in_part() -> None:
    """One of its choices could be, but its client has the error."""
    queue = ModelQueue(WITHOUT, LinkSettings("g", "t"), wake=lambda name: None)
    sink = TwoChoices(queue)
    link = cast("ReplicaLink", PlayedLink())
    for ticket in queue.dispatcher.clear(0.0):  # as if they had been sent
        ticket.stream.link = link
    sink.tickets[1].stream.taken = True

    queue.arrived(link, Arrived(1.0, closed=True, lost=sink.tickets))

    assert [error.code for error in sink.failures] == ["replica_lost"]
    assert (queue.waiting, queue.dispatcher.headroom.present) == (0, 0)
    queue.close()


async def test_routes_that_changed_before_the_wait_for_them_count() -> None:
    """The load of a tokenizer can fail just after the update that replaced it: no other update will follow."""
    queue = ModelQueue(WITHOUT, LinkSettings("g", "t"), wake=lambda name: None)
    queue.update(msgspec.structs.replace(WITHOUT, tokenizer="other"))
    assert await queue.other_routes(WITHOUT, 60)
    assert not await queue.other_routes(queue.routes, 0.01)
    queue.close()
    assert not await queue.other_routes(WITHOUT, 60)


async def reported_times(prompt: int, produced: int, first_at: float) -> dict[str, Times]:
    """The times that a queue reports of a request that was sent at 10 and ended at 12."""
    queue = ModelQueue(WITHOUT, LinkSettings("g", "t"), wake=lambda name: None)
    ticket = queue.submit(GenerateRequest(id="r", prompt_ids=[1] * prompt, max_tokens=99), IgnoringSink())
    link = PlayedLink()
    link.route = msgspec.structs.replace(ROUTE, version="v")
    stream = ticket.stream
    stream.link, stream.sent_at = cast("ReplicaLink", link), 10.0
    stream.first_at, stream.produced = first_at, produced
    queue.arrived(stream.link, Arrived(12.0, ended=[ticket]))
    window, _ = queue.report()
    queue.close()
    return window.times


async def test_the_times_of_an_answer_are_reported_by_the_version_of_its_replica() -> None:
    """The time to the first token by the length of the prompt, and the pace of the others."""
    expected: Times = {}
    note(expected, length_class(512), 0.5)
    note(expected, PACE, 1.5 / 10)
    assert await reported_times(512, 11, 10.5) == {"v": expected}


@pytest.mark.parametrize(("produced", "first_at"), [(0, 0.0), (11, 0.0), (1, 12.0)])
async def test_an_answer_without_a_first_token_or_a_pace_reports_no_times(produced: int, first_at: float) -> None:
    """As one that arrived in one step: when the steps in it began is unknown."""
    assert await reported_times(512, produced, first_at) == {}
