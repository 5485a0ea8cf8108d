"""The gateway's end of a connection to a replica, without the connection."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import workers
from orchestrator.gateway.errors import ApiError
from orchestrator.gateway.link import ReplicaLink
from orchestrator.gateway.ticket import Ticket
from orchestrator.routes import Route
from orchestrator.version import corewright_version
from workers.requests import FinishReason, GenerateRequest, TokenEvent
from workers.wire import Step, Welcome, encode

OWN = str(Path(workers.__file__).parent)


class Written:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


class Unread:
    """A sink for what nobody reads."""

    def came(self, ticket: Ticket, now: float) -> None: ...

    def failed(self, ticket: Ticket, error: ApiError) -> None: ...


@pytest.mark.parametrize(("package", "taken"), [(OWN, True), ("", True), ("/elsewhere/workers", False)])
def test_a_replica_of_another_corewright_is_refused(package: str, taken: bool) -> None:
    """By the folder of its code; one in an interpreter of its engine's own names none, and has been looked at."""
    link = ReplicaLink(
        Route("m/0", 1, "/none"),
        gateway="g",
        token="t",
        on_change=lambda _: None,
        on_lost=lambda *_: None,
        on_busy=lambda _: None,
        later=lambda call: call(),
    )
    link.connection_made(SimpleNamespace(write=lambda data: None, abort=lambda: None))  # type: ignore[arg-type]
    welcome = Welcome(version=corewright_version(), package=package, slots=2, max_len=64, max_prompt=64, vocab_size=257)
    link.data_received(encode(welcome))
    assert (link.welcome is not None, link.refused) == (taken, not taken)


def test_a_replica_that_has_refused_a_request_gets_no_other_one() -> None:
    """It is draining, and the routes will say so soon: to ask it again would use up the request's retries."""
    lost: list[Ticket] = []
    link = ReplicaLink(
        Route("m/0", 1, "/none"),
        gateway="g",
        token="t",
        on_change=lambda _: None,
        on_lost=lambda _, tickets: lost.extend(tickets),
        on_busy=lambda _: None,
        later=lambda call: call(),
    )
    link.connection_made(Written())  # type: ignore[arg-type]
    welcome = Welcome(version=corewright_version(), package=OWN, slots=2, max_len=64, max_prompt=64, vocab_size=257)
    link.data_received(encode(welcome))
    assert link.free_slots == 2
    ticket = Ticket(GenerateRequest(id="r", prompt_ids=[1], max_tokens=1), Unread(), lambda _: None)
    link.send(ticket)
    assert link.free_slots == 1

    link.data_received(encode(Step([TokenEvent(id="r", token_ids=[], text="", finish=FinishReason.REFUSED)])))

    assert lost == [ticket]
    assert link.free_slots == 0
