"""The replica's socket, with a real batcher over the echo engine behind it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.served import EPOCH, TOKEN, Served
from workers import dataplane
from workers.engines.echo import echo_tokens
from workers.requests import FinishReason, GenerateRequest, TokenEvent
from workers.wire import Cancel, FrameReader, Hello, Message, Refused, Room, Step, Submit, Welcome, encode


class Client:
    """A blocking gateway."""

    def __init__(self, path: Path, hello: Hello | None = None) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(10)
        self.socket.connect(str(path))
        self.reader = FrameReader()
        self.pending: list[Message] = []
        self.send(hello or Hello("test", TOKEN, EPOCH))

    def send(self, message: Message) -> None:
        self.socket.sendall(encode(message))

    def receive(self) -> Message | None:
        """The next message, or None at the end of file."""
        while not self.pending:
            data = self.socket.recv(65536)
            if not data:
                return None
            self.pending += self.reader.feed(data)
        return self.pending.pop(0)

    def events(self, count: int) -> dict[str, list[TokenEvent]]:
        """All events until ``count`` requests have ended."""
        events: dict[str, list[TokenEvent]] = {}
        while count:
            step = self.receive()
            assert isinstance(step, Step)
            for event in step.events:
                events.setdefault(event.id, []).append(event)
                count -= event.finish is not None
        return events


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    served = Served(**{"slots": 4, "step_ms": 0.0, **getattr(request, "param", {})})
    yield served
    served.close()


def _ended(peer: socket.socket) -> bool:
    try:
        return peer.recv(1) == b""
    except ConnectionResetError:
        return True


def submit(id: str, prompt: str, max_tokens: int) -> Submit:
    return Submit(GenerateRequest(id=id, prompt_ids=list(prompt.encode()), max_tokens=max_tokens, temperature=0))


@pytest.mark.parametrize("served", [{"slots": 9}], indirect=True)
def test_requests_of_one_connection_share_its_frames(served: Served) -> None:
    """Each request gets exactly its own tokens, over one connection."""
    client = Client(served.path)
    assert isinstance(client.receive(), Welcome)
    for i in range(9):
        client.send(submit(f"r{i}", f"prompt {i}", 5 + i))

    events = client.events(9)

    for i in range(9):
        ids = [token for event in events[f"r{i}"] for token in event.token_ids]
        assert ids == echo_tokens(list(f"prompt {i}".encode()), 5 + i)


@pytest.mark.parametrize(
    ("hello", "reason"),
    [(Hello("test", "wrong", EPOCH), "wrong token"), (Hello("test", TOKEN, EPOCH - 1), "this is epoch 3, not 2")],
)
def test_a_wrong_token_or_another_epoch_is_refused(served: Served, hello: Hello, reason: str) -> None:
    """Only who knows the token, and means this very start of the replica, may send requests."""
    client = Client(served.path, hello)

    assert client.receive() == Refused(reason)
    assert client.receive() is None


def test_a_request_before_hello_ends_the_connection(served: Served) -> None:
    """Nothing is done for a peer that has not said who it is."""
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(10)
        stranger.connect(str(served.path))
        stranger.sendall(encode(submit("r", "x", 1)))

        assert _ended(stranger)


@pytest.mark.parametrize("served", [{"slots": 1, "step_ms": 2.0}], indirect=True)
def test_the_end_of_a_connection_frees_its_slots(served: Served) -> None:
    """A gateway that goes away leaves no request behind: the next one has the only slot."""
    gone = Client(served.path)
    gone.send(submit("long", "x", 4000))
    assert isinstance(gone.receive(), Welcome)
    assert isinstance(gone.receive(), Step)
    gone.socket.close()

    client = Client(served.path)
    client.receive()
    client.send(submit("next", "y", 3))

    assert [event.finish for event in client.events(1)["next"]][-1] is FinishReason.LENGTH


@pytest.mark.parametrize("served", [{"slots": 1, "step_ms": 2.0}], indirect=True)
def test_a_cancelled_request_ends_with_an_event_of_its_own(served: Served) -> None:
    """Cancel is answered, so that the gateway knows when the slot is free."""
    client = Client(served.path)
    client.receive()
    client.send(submit("long", "x", 4000))
    assert isinstance(client.receive(), Step)
    client.send(Cancel("long"))

    assert client.events(1)["long"][-1].finish is FinishReason.CANCELLED


def test_a_request_that_the_batcher_refuses_ends_with_an_error(served: Served) -> None:
    """What cannot be served is answered with the reason, not dropped."""
    client = Client(served.path)
    client.receive()
    client.send(submit("long", "x" * 100, 4096))

    (event,) = client.events(1)["long"]

    assert event.finish is FinishReason.INVALID
    assert event.error is not None
    assert "4096" in event.error


@pytest.mark.parametrize("served", [{"slots": 1, "step_ms": 2.0}], indirect=True)
def test_the_replica_grants_its_slots_to_several_gateways(served: Served) -> None:
    """A request beyond its slots comes back as BUSY, and Room follows when one of another gateway has ended."""
    first, second = Client(served.path), Client(served.path)
    assert isinstance(first.receive(), Welcome)
    assert isinstance(second.receive(), Welcome)
    first.send(submit("long", "x", 4000))
    assert isinstance(first.receive(), Step)

    second.send(submit("late", "y", 3))

    assert [event.finish for event in second.events(1)["late"]] == [FinishReason.BUSY]
    first.send(Cancel("long"))
    assert second.receive() == Room(1)
    second.send(submit("late", "y", 3))
    ids = [token for event in second.events(1)["late"] for token in event.token_ids]
    assert ids == echo_tokens(list(b"y"), 3)


@pytest.mark.parametrize("served", [{"slots": 1, "step_ms": 2.0}], indirect=True)
def test_a_gateway_that_goes_away_makes_room_for_the_others(served: Served) -> None:
    """Its requests are cancelled, and who was told BUSY is told of the room."""
    first, second = Client(served.path), Client(served.path)
    first.send(submit("long", "x", 4000))
    assert isinstance(first.receive(), Welcome)
    assert isinstance(first.receive(), Step)
    assert isinstance(second.receive(), Welcome)
    second.send(submit("late", "y", 3))
    assert [event.finish for event in second.events(1)["late"]] == [FinishReason.BUSY]

    first.socket.close()

    assert second.receive() == Room(1)


def test_an_answer_that_is_read_at_its_end_comes_in_two_events(served: Served) -> None:
    """The first token at once, all others with the last: a gateway need not touch what nobody reads yet."""
    client = Client(served.path)
    client.receive()
    prompt = list(b"hello")
    client.send(Submit(GenerateRequest(id="r", prompt_ids=prompt, max_tokens=50, temperature=0, whole=True)))

    begun, ended = client.events(1)["r"]

    assert (begun.finish, len(begun.token_ids)) == (None, 1)
    assert (ended.finish, len(ended.token_ids)) == (FinishReason.LENGTH, 49)
    assert begun.token_ids + ended.token_ids == echo_tokens(prompt, 50)
    assert (begun.text + ended.text).encode() == bytes(echo_tokens(prompt, 50))


@pytest.mark.parametrize("served", [{"slots": 1, "step_ms": 2.0}], indirect=True)
def test_a_slot_that_was_promised_is_not_taken_by_who_is_faster(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway that has just had the slot asks for it again at once, and must wait: else a busy one starves the
    others."""
    monkeypatch.setattr(dataplane, "PROMISE_S", 30.0)
    busy, waiting = Client(served.path), Client(served.path)
    assert isinstance(busy.receive(), Welcome)
    assert isinstance(waiting.receive(), Welcome)
    busy.send(submit("long", "x", 4000))
    assert isinstance(busy.receive(), Step)
    waiting.send(submit("late", "y", 3))
    assert [event.finish for event in waiting.events(1)["late"]] == [FinishReason.BUSY]

    busy.send(Cancel("long"))
    assert busy.events(1)["long"][-1].finish is FinishReason.CANCELLED
    busy.send(submit("greedy", "z", 3))
    refused = busy.events(1)["greedy"]
    assert waiting.receive() == Room(1)
    waiting.send(submit("late", "y", 3))

    assert [event.finish for event in refused] == [FinishReason.BUSY]
    assert waiting.events(1)["late"][-1].finish is FinishReason.LENGTH


def test_a_socket_that_was_removed_is_made_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cleaners of temporary folders remove what looks old. What is connected stays, and others find it again."""
    monkeypatch.setattr(dataplane, "PATH_POLL_S", 0.02)
    served.plane.close()
    served.restart_plane()
    before = Client(served.path)
    assert isinstance(before.receive(), Welcome)
    for folder_too in (False, True):
        served.path.unlink()
        if folder_too:
            served.path.parent.rmdir()
        deadline = time.monotonic() + 10
        while not served.path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        after = Client(served.path)
        assert isinstance(after.receive(), Welcome)
        for client, id in ((before, f"a{folder_too}"), (after, f"b{folder_too}")):
            client.send(Submit(GenerateRequest(id=id, prompt_ids=[1, 2], max_tokens=2)))
            assert list(client.events(1)) == [id]
        assert served.path.stat().st_mode & 0o777 == 0o600
