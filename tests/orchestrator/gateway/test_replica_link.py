"""The gateway's end of a connection to a replica, without the connection."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import workers
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.serving.replica_link import ReplicaLink
from orchestrator.gateway.serving.ticket import Ticket, ticket_for
from orchestrator.messages.route_table import Route
from orchestrator.process.version import corewright_version
from workers.messages.requests import FinishReason, GenerateRequest, TokenEvent
from workers.messages.wire import PROTOCOL, FrameReader, Hello, Step, Submit, Welcome, encode

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


class IgnoringOwner:
    """A queue that ignores all calls."""

    def on_left(self, ticket: Ticket) -> None: ...

    def on_renewed(self, ticket: Ticket, growth: int) -> None: ...

    def on_began(self, ticket: Ticket, now: float) -> None: ...


@pytest.mark.parametrize(("ahead", "taken"), [(-1, False), (0, True), (1, False)])
def test_a_replica_of_another_protocol_is_rejected(ahead: int, taken: bool) -> None:
    """By the number that it sends: version and folder of its code may differ."""
    link = ReplicaLink(
        Route("m/0", 1, "/none"),
        gateway="g",
        token="t",
        on_change=lambda: None,
        on_ended=lambda *_: None,
        on_lost=lambda *_: None,
        on_busy=lambda _: None,
        later=lambda call: call(),
    )
    link.connection_made(SimpleNamespace(write=lambda data: None, abort=lambda: None))  # type: ignore[arg-type]
    welcome = Welcome(
        "9.9", "/elsewhere", slots=2, max_len=64, max_prompt=64, vocab_size=257, protocol=PROTOCOL + ahead
    )
    link.data_received(encode(welcome))
    assert (link.welcome is not None, link.refused) == (taken, not taken)


def test_a_replica_that_rejected_a_request_gets_no_other_one() -> None:
    """It is draining, and the routes will show it soon: another request would use up its retries."""
    lost: list[Ticket] = []
    link = ReplicaLink(
        Route("m/0", 1, "/none"),
        gateway="g",
        token="t",
        on_change=lambda: None,
        on_ended=lambda *_: None,
        on_lost=lambda _, tickets: lost.extend(tickets),
        on_busy=lambda _: None,
        later=lambda call: call(),
    )
    link.connection_made(Written())  # type: ignore[arg-type]
    welcome = Welcome(version=corewright_version(), package=OWN, slots=2, max_len=64, max_prompt=64, vocab_size=257)
    link.data_received(encode(welcome))
    assert link.free_slots == 2
    ticket = ticket_for(GenerateRequest(id="r", prompt_ids=[1], max_tokens=1), IgnoringSink(), IgnoringOwner())
    unserved = ticket_of("u")
    link.send(ticket)
    link.send(unserved)
    assert link.free_slots == 0

    # the second event is of a request that was accepted before the drain
    for id, finish in (("r", FinishReason.REFUSED), ("u", FinishReason.UNSERVED)):
        link.data_received(encode(Step([TokenEvent(id=id, token_ids=[], text="", finish=finish)])))

    assert lost == [ticket, unserved]
    assert link.free_slots == 0


def opened(written: Written, on_busy: Callable[[Ticket], None] = lambda _: None) -> ReplicaLink:
    """A link to a replica of four slots."""
    link = ReplicaLink(
        Route("m/0", 1, "/none"),
        gateway="g",
        token="t",
        on_change=lambda: None,
        on_ended=lambda *_: None,
        on_lost=lambda *_: None,
        on_busy=on_busy,
        later=lambda call: call(),
    )
    link.connection_made(written)  # type: ignore[arg-type]
    welcome = Welcome(version=corewright_version(), package=OWN, slots=4, max_len=64, max_prompt=64, vocab_size=257)
    link.data_received(encode(welcome))
    return link


def ticket_of(id: str) -> Ticket:
    return ticket_for(GenerateRequest(id=id, prompt_ids=[1], max_tokens=1), IgnoringSink(), IgnoringOwner())


def test_requests_without_a_slot_keep_their_order() -> None:
    """Each returns to the head of the queue, so the last one returns first."""
    queue: list[str] = []
    link = opened(Written(), on_busy=lambda ticket: queue.insert(0, ticket.id))
    for id in ("first", "second", "third"):
        link.send(ticket_of(id))

    busy = [TokenEvent(id=id, token_ids=[], text="", finish=FinishReason.BUSY) for id in ("first", "second", "third")]
    link.data_received(encode(Step(busy)))

    assert queue == ["first", "second", "third"]


def test_a_traced_request_sends_its_trace_to_the_replica() -> None:
    """That of the attempt, with the replica's name; an untraced request sends none."""
    written = Written()
    link = opened(written)
    traced, other = ticket_of("traced"), ticket_of("other")
    traced.trace = SimpleNamespace(sent=lambda replica: f"00-of-{replica}")  # type: ignore[assignment]
    link.send(traced)
    link.send(other)

    hello, *submitted = FrameReader().feed(written.data)

    assert isinstance(hello, Hello)
    traces = [(message.request.id, message.request.trace) for message in submitted if isinstance(message, Submit)]
    assert traces == [("traced", "00-of-m/0"), ("other", None)]


class Failing(IgnoringSink):
    """A sink that cannot write what has come."""

    def __init__(self) -> None:
        self.errors: list[ApiError] = []

    def on_events(self, ticket: Ticket, now: float) -> None:
        raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates")

    def on_failure(self, ticket: Ticket, error: ApiError) -> None:
        self.errors.append(error)


def test_an_answer_that_cannot_be_written_ends_alone() -> None:
    """Its client gets an error at once; the shared connection continues."""
    link, sink = opened(Written()), Failing()
    link.send(ticket_for(GenerateRequest(id="bad", prompt_ids=[1], max_tokens=2), sink, IgnoringOwner()))
    good = ticket_of("good")
    link.send(good)

    link.data_received(encode(Step([TokenEvent(id=id, text="x", token_ids=[1]) for id in ("bad", "good")])))

    assert [error.status for error in sink.errors] == [500]
    assert good.stream.produced == 1
    assert not link.closed.is_set()
