"""The gateway's end of a connection to a replica, without the connection."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec.structs
import pytest

import workers
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.serving.model_queue import ModelQueue
from orchestrator.gateway.serving.replica_link import Arrived, ReplicaLink
from orchestrator.gateway.serving.replica_link_pool import LinkSettings
from orchestrator.gateway.serving.ticket import Sink, Ticket, ticket_for
from orchestrator.messages.replica_states import ModelState
from orchestrator.messages.route_table import Route
from orchestrator.process.version import corewright_version
from tests.orchestrator.gateways import routes
from workers.messages.requests import FinishReason, GenerateRequest, TokenEvent
from workers.messages.wire import PROTOCOL, Cancel, FrameReader, Hello, Room, Step, Submit, Welcome, encode

OWN = str(Path(workers.__file__).parent)


class Written:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


class IgnoringSink:
    """A sink that ignores all calls."""

    def on_events(self, ticket: Ticket, now: float) -> None: ...

    def on_wait(self) -> None: ...

    def on_failure(self, ticket: Ticket, error: ApiError) -> None: ...


class Owner:
    """A queue that keeps what its link has read."""

    def __init__(self) -> None:
        self.reads: list[Arrived] = []

    def arrived(self, link: ReplicaLink, arrived: Arrived) -> None:
        self.reads.append(arrived)


def link_to(transport: Any, owner: Owner | None = None) -> ReplicaLink:
    """A link that has no Welcome yet."""
    link = ReplicaLink(Route("m/0", 1, "/none"), Hello("g", "t", 1), owner or Owner())
    link.connection_made(transport)
    return link


@pytest.mark.parametrize(("ahead", "taken"), [(-1, False), (0, True), (1, False)])
def test_a_replica_of_another_protocol_is_rejected(ahead: int, taken: bool) -> None:
    """By the number that it sends: version and folder of its code may differ."""
    link = link_to(SimpleNamespace(write=lambda data: None, abort=lambda: None))
    welcome = Welcome(
        "9.9", "/elsewhere", slots=2, max_len=64, max_prompt=64, vocab_size=257, protocol=PROTOCOL + ahead
    )
    assert link.read(encode(welcome)).freed is taken
    assert (link.welcome is not None, link.refused) == (taken, not taken)


async def test_a_replica_that_rejected_a_request_gets_no_other_one() -> None:
    """It is draining, and the routes will show it soon: another request would use up its retries."""
    link = opened(Written())
    rejected, unserved = ticket_of("r"), ticket_of("u")
    link.send(rejected)
    link.send(unserved)
    assert link.free_slots == 2

    # the second event is of a request that was accepted before the drain
    reasons = (("r", FinishReason.REFUSED), ("u", FinishReason.UNSERVED))
    lost = [link.read(encode(Step([TokenEvent(id=id, token_ids=[], text="", finish=why)]))).lost for id, why in reasons]

    assert lost == [[rejected], [unserved]]
    assert link.free_slots == 0


def opened(written: Written, owner: Owner | None = None) -> ReplicaLink:
    """A link to a replica of four slots."""
    link = link_to(written, owner)
    welcome = Welcome(version=corewright_version(), package=OWN, slots=4, max_len=64, max_prompt=64, vocab_size=257)
    link.read(encode(welcome))
    return link


def ticket_of(id: str, sink: Sink | None = None) -> Ticket:
    return ticket_for(GenerateRequest(id=id, prompt_ids=[1], max_tokens=1), sink or IgnoringSink())


async def test_requests_without_a_slot_keep_their_order() -> None:
    """As they were sent; they return to the head of the queue."""
    link = opened(Written())
    for id in ("first", "second", "third"):
        link.send(ticket_of(id))

    busy = [TokenEvent(id=id, token_ids=[], text="", finish=FinishReason.BUSY) for id in ("first", "second", "third")]
    arrived = link.read(encode(Step(busy)))

    assert [ticket.id for ticket in arrived.busy] == ["first", "second", "third"]
    assert link.free_slots == 0


async def test_a_traced_request_sends_its_trace_to_the_replica() -> None:
    """That of the attempt, with the replica's name; an untraced request sends none."""
    written = Written()
    link = opened(written)
    traced, other = ticket_of("traced"), ticket_of("other")
    traced.trace = SimpleNamespace(sent=lambda replica: f"00-of-{replica}")  # type: ignore[assignment]
    link.send(traced)
    link.send(other)
    await asyncio.sleep(0)  # all that is sent in a turn of the event loop is one write

    hello, *submitted = FrameReader().feed(written.data)

    assert isinstance(hello, Hello)
    traces = [(message.request.id, message.request.trace) for message in submitted if isinstance(message, Submit)]
    assert traces == [("traced", "00-of-m/0"), ("other", None)]


async def test_a_read_is_passed_to_the_queue_once() -> None:
    """With all of its steps: tokens, ends and free slots."""
    owner = Owner()
    link = opened(Written(), owner)
    tickets = [ticket_of("ends"), ticket_of("continues")]
    for ticket in tickets:
        link.send(ticket)

    tokens = Step([TokenEvent(id=ticket.id, text="x", token_ids=[1]) for ticket in tickets])
    end = Step([TokenEvent(id="ends", text="y", token_ids=[2], finish=FinishReason.STOP)])
    link.data_received(encode(tokens) + encode(end) + encode(Room(1)))

    (arrived,) = owner.reads
    assert (arrived.touched, arrived.ended, arrived.freed) == (tickets, tickets[:1], True)
    assert [ticket.stream.produced for ticket in tickets] == [2, 1]


async def test_the_end_of_a_connection_returns_its_requests() -> None:
    """In the order in which they were sent."""
    owner = Owner()
    link = opened(Written(), owner)
    tickets = [ticket_of(id) for id in "abc"]
    for ticket in tickets:
        link.send(ticket)

    link.connection_lost(None)

    (arrived,) = owner.reads
    assert (arrived.closed, arrived.lost) == (True, tickets)
    assert link.free_slots == 0


class Failing(IgnoringSink):
    """A sink that cannot write what has come."""

    def __init__(self) -> None:
        self.errors: list[ApiError] = []

    def on_events(self, ticket: Ticket, now: float) -> None:
        raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates")

    def on_failure(self, ticket: Ticket, error: ApiError) -> None:
        self.errors.append(error)


async def test_an_answer_that_cannot_be_written_ends_alone() -> None:
    """Its client gets an error at once, and its replica stops; the shared connection continues."""
    written, sink = Written(), Failing()
    queue = ModelQueue(routes("m", state=ModelState.LOADING), LinkSettings("g", "t"), wake=lambda name: None)
    link = opened(written)
    bad, good = ticket_of("bad", sink), ticket_of("good")
    for ticket in (bad, good):
        link.send(ticket)

    queue.arrived(link, link.read(encode(Step([TokenEvent(id=id, text="x", token_ids=[1]) for id in ("bad", "good")]))))

    assert [error.status for error in sink.errors] == [500]
    assert FrameReader().feed(written.data)[-1] == Cancel("bad")
    assert good.stream.produced == 1
    assert not link.closed.is_set()


def queue_with(links: dict[Route, int], monkeypatch: pytest.MonkeyPatch, **fields: Any) -> tuple[ModelQueue, Any]:
    """A queue with a link of so many slots to each replica, and what each link has sent, by replica."""
    table = msgspec.structs.replace(routes("m", state=ModelState.LOADING, holds=True), replicas=list(links), **fields)
    queue = ModelQueue(table, LinkSettings("g", "t"), wake=lambda model: None)
    monkeypatch.setattr(queue.links, "_keep_link", lambda route: None)
    queue.update(table)
    written = {}
    for route, slots in links.items():
        link, written[route.id] = queue.links.new_link(route), Written()
        link.connection_made(written[route.id])  # type: ignore[arg-type]
        queue.links._links[route] = link
        welcome = Welcome(corewright_version(), OWN, slots=slots, max_len=64, max_prompt=64, vocab_size=257)
        link.data_received(encode(welcome))
    return queue, written


def sent(written: Written) -> list[str]:
    return [message.request.id for message in FrameReader().feed(written.data) if isinstance(message, Submit)]


def of(id: str) -> GenerateRequest:
    return GenerateRequest(id=id, prompt_ids=[1], max_tokens=2)


async def test_the_end_of_an_idle_link_lets_the_other_version_serve_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """During a canary, the other version serves once a request's own one has no link any more."""
    stable, canary = Route("m/0", 1, "/none0"), Route("m/1", 1, "/none1")
    queue, written = queue_with({stable: 1, canary: 2}, monkeypatch, canary=0.0, canaries=["m/1"])
    queue.submit(of("a"), IgnoringSink())
    await asyncio.sleep(0)
    link = queue.links._links[stable]
    link.data_received(encode(Step([TokenEvent(id="a", token_ids=[], text="", finish=FinishReason.BUSY)])))
    assert [ticket.request.id for ticket in queue.dispatcher.entries] == ["a"]

    link.connection_lost(None)
    await asyncio.sleep(0)

    assert (sent(written["m/0"]), sent(written["m/1"])) == (["a"], ["a"])


async def test_a_request_without_a_slot_precedes_those_that_wait_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the same read brings the end of another request."""
    route = Route("m/0", 1, "/none0")
    queue, written = queue_with({route: 2}, monkeypatch)
    for id in "abc":
        queue.submit(of(id), IgnoringSink())
    await asyncio.sleep(0)
    busy = encode(Step([TokenEvent(id="b", token_ids=[], text="", finish=FinishReason.BUSY)]))
    ended = encode(Step([TokenEvent(id="a", token_ids=[1], text="x", finish=FinishReason.STOP)]))

    queue.links._links[route].data_received(busy + ended)
    await asyncio.sleep(0)

    assert sent(written["m/0"])[:3] == ["a", "b", "b"]


async def test_a_refused_request_is_retried_though_its_link_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same read holds a message that a replica does not send: the request that was refused did not cause it."""
    first, second = Route("m/0", 1, "/none0"), Route("m/1", 1, "/none1")
    queue, written = queue_with({first: 1, second: 1}, monkeypatch)
    monkeypatch.setattr(queue.links._links[first], "close", lambda: None)
    queue.submit(of("a"), IgnoringSink())
    await asyncio.sleep(0)
    assert sent(written["m/0"]) == ["a"]
    refused = encode(Step([TokenEvent(id="a", token_ids=[], text="", finish=FinishReason.REFUSED)]))

    queue.links._links[first].data_received(refused + encode(Hello("g", "t", 1)))
    await asyncio.sleep(0)

    assert sent(written["m/1"]) == ["a"]
