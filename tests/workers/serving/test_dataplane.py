"""The data plane of a replica, with a real batcher of the echo engine."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet import until
from tests.served import EPOCH, TOKEN, Served
from workers.batching.step_loop import BatcherClosed
from workers.engines.echo.engine import echo_tokens
from workers.messages.requests import AnswerConstraint, FinishReason, GenerateRequest, TokenEvent, TokenLogprobs
from workers.messages.wire import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    Cancel,
    FrameReader,
    Hello,
    Message,
    Refused,
    Room,
    Step,
    Submit,
    Welcome,
    encode,
    mismatch,
)
from workers.serving import dataplane
from workers.serving.dataplane import DataPlane


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
    [
        (Hello("test", "wrong", EPOCH), "wrong token"),
        (Hello("test", TOKEN, EPOCH - 1), "this is epoch 3, not 2"),
        (Hello("test", TOKEN, EPOCH, PROTOCOL + 2), mismatch(PROTOCOL + 2)),
    ],
)
def test_a_wrong_token_another_epoch_or_a_distant_version_is_refused(served: Served, hello: Hello, reason: str) -> None:
    """Requests need the token and the epoch of this start of the replica."""
    client = Client(served.path, hello)

    assert client.receive() == Refused(reason)
    assert client.receive() is None


def test_a_request_before_hello_ends_the_connection(served: Served) -> None:
    """Without Hello, a peer is not authenticated."""
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(10)
        stranger.connect(str(served.path))
        stranger.sendall(encode(submit("r", "x", 1)))

        assert _ended(stranger)


@pytest.mark.parametrize("served", [{"slots": 1, "step_ms": 2.0}], indirect=True)
def test_the_end_of_a_connection_frees_its_slots(served: Served) -> None:
    """The next gateway gets the only slot."""
    previous = Client(served.path)
    previous.send(submit("long", "x", 4000))
    assert isinstance(previous.receive(), Welcome)
    assert isinstance(previous.receive(), Step)
    previous.socket.close()

    client = Client(served.path)
    client.receive()
    client.send(submit("next", "y", 3))

    assert [event.finish for event in client.events(1)["next"]][-1] is FinishReason.LENGTH


@pytest.mark.parametrize("served", [{"slots": 1, "step_ms": 2.0}], indirect=True)
def test_a_cancelled_request_ends_with_an_event_of_its_own(served: Served) -> None:
    """The gateway then knows that the slot is free."""
    client = Client(served.path)
    client.receive()
    client.send(submit("long", "x", 4000))
    assert isinstance(client.receive(), Step)
    client.send(Cancel("long"))

    assert client.events(1)["long"][-1].finish is FinishReason.CANCELLED


def test_a_request_that_the_batcher_refuses_ends_with_an_error(served: Served) -> None:
    """The error has the reason."""
    client = Client(served.path)
    client.receive()
    client.send(submit("long", "x" * 100, 4096))

    (event,) = client.events(1)["long"]

    assert event.finish is FinishReason.INVALID
    assert event.error is not None
    assert "4096" in event.error


@pytest.mark.parametrize("served", [{"slots": 1, "step_ms": 2.0}], indirect=True)
def test_the_replica_grants_its_slots_to_several_gateways(served: Served) -> None:
    """A request beyond its slots is answered with BUSY, and with Room when a request of another gateway has ended."""
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
def test_the_slots_of_a_disconnected_gateway_are_granted_to_others(served: Served) -> None:
    """Its requests are cancelled, and gateways that got BUSY get Room."""
    first, second = Client(served.path), Client(served.path)
    first.send(submit("long", "x", 4000))
    assert isinstance(first.receive(), Welcome)
    assert isinstance(first.receive(), Step)
    assert isinstance(second.receive(), Welcome)
    second.send(submit("late", "y", 3))
    assert [event.finish for event in second.events(1)["late"]] == [FinishReason.BUSY]

    first.socket.close()

    assert second.receive() == Room(1)


def test_an_answer_for_a_client_that_does_not_stream_has_two_events(served: Served) -> None:
    """The first token comes at once, all others with the last."""
    client = Client(served.path)
    client.receive()
    prompt = list(b"hello")
    client.send(Submit(GenerateRequest(id="r", prompt_ids=prompt, max_tokens=50, temperature=0, whole=True)))

    first, last = client.events(1)["r"]

    assert (first.finish, len(first.token_ids)) == (None, 1)
    assert (last.finish, len(last.token_ids)) == (FinishReason.LENGTH, 49)
    assert first.token_ids + last.token_ids == echo_tokens(prompt, 50)
    assert (first.text + last.text).encode() == bytes(echo_tokens(prompt, 50))


@pytest.mark.parametrize("served", [{"slots": 1, "step_ms": 2.0}], indirect=True)
def test_a_granted_slot_is_not_given_to_a_faster_gateway(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that has just used the slot requests it again at once, and must wait: it would starve the others."""
    monkeypatch.setattr(dataplane, "GRANT_S", 30.0)
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


def test_a_removed_socket_is_created_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cleaners of temporary folders remove old files. Connections stay, and new ones are possible."""
    monkeypatch.setattr(dataplane, "PATH_POLL_S", 0.02)
    served.plane.close()
    served.restart_plane()
    before = Client(served.path)
    assert isinstance(before.receive(), Welcome)
    for folder_too in (False, True):
        served.path.unlink()
        if folder_too:
            served.path.parent.rmdir()
        until(served.path.exists, 10, "the socket exists again")
        after = Client(served.path)
        assert isinstance(after.receive(), Welcome)
        for client, id in ((before, f"a{folder_too}"), (after, f"b{folder_too}")):
            client.send(Submit(GenerateRequest(id=id, prompt_ids=[1, 2], max_tokens=2)))
            assert list(client.events(1)) == [id]
        assert served.path.stat().st_mode & 0o777 == 0o600


class Panic(BaseException):
    """Derives from BaseException, as pyo3's panics do."""


class Played:
    """A data plane whose batcher is the test: it decides the outcome of each request."""

    def __init__(self, folder: Path) -> None:
        self.submitted: list[str] = []
        self.cancelled: list[str] = []
        self.compiled = threading.Event()  # a request with a schema is accepted once it is set
        self.compiling = threading.Event()
        self.raises: BaseException | None = None
        self.path = folder / "s"
        self.plane = DataPlane(
            self.path,
            welcome=Welcome("v", "", slots=64, max_len=4096, max_prompt=4096, vocab_size=9),
            token=TOKEN,
            epoch=EPOCH,
            batcher=self,
        )
        self.plane.start()

    def submit(self, request: GenerateRequest) -> None:
        if request.guide is not None:
            self.compiling.set()
            assert self.compiled.wait(10)
        if self.raises is not None:
            raise self.raises
        self.submitted.append(request.id)

    def cancel(self, id: str) -> None:
        self.cancelled.append(id)

    def client(self, *requests: GenerateRequest) -> Client:
        """Returns a gateway whose requests have been submitted."""
        client = Client(self.path)
        assert isinstance(client.receive(), Welcome)
        for request in requests:
            client.send(Submit(request))
        until(
            lambda: len(self.submitted) >= sum(request.guide is None for request in requests), 5, "they are submitted"
        )
        return client


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    monkeypatch.setattr(dataplane, "UNREAD_CHECK_S", 0.1)
    folder = Path(tempfile.mkdtemp(prefix="cwt-", dir="/tmp"))
    played = Played(folder)
    yield played
    played.compiled.set()
    played.plane.close()
    folder.rmdir()


def request(id: str, **fields: Any) -> GenerateRequest:
    return GenerateRequest(id=id, prompt_ids=[1], max_tokens=4000, **fields)


def logprobs(text: str = " word") -> list[TokenLogprobs]:
    """The logprobs of one token and of 20 alternatives."""
    raw = list(text.encode())
    return [TokenLogprobs(5, -0.25, text, raw, [(id, -0.123456789 * id, text, raw) for id in range(20)])]


def token(id: str, finish: FinishReason | None = None, **fields: Any) -> TokenEvent:
    return TokenEvent(id=id, text=" word", token_ids=[5], finish=finish, **fields)


def test_an_answer_with_logprobs_is_sent_in_limited_pieces(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sixteen answers that are not streamed, no event has more than a few tokens, each token comes once, and no
    frame has more than 1 MiB."""
    sizes: list[int] = []
    monkeypatch.setattr(dataplane, "encode", lambda message: sizes.append(len(data := encode(message))) or data)
    names = [f"r{i}" for i in range(16)]
    client = played.client(*[request(name, whole=True, logprobs=20) for name in names])
    for i in range(100):
        finish = FinishReason.LENGTH if i == 99 else None
        played.plane.emit([token(name, finish, logprobs=logprobs()) for name in names])

    events = client.events(16)

    for name in names:
        assert sum(len(event.logprobs) for event in events[name]) == 100
        assert max(len(event.logprobs) for event in events[name]) == dataplane.HELD_LOGPROBS
        assert len("".join(event.text for event in events[name])) == 500
    assert max(sizes) <= MAX_FRAME_BYTES


def test_a_gateway_that_reads_slowly_is_not_disconnected(played: Played) -> None:
    """Of 20 MB, it reads a little between two checks."""
    client = played.client(request("r", logprobs=20))
    large = logprobs(" word" * 40)
    for i in range(2000):
        played.plane.emit([token("r", FinishReason.LENGTH if i == 1999 else None, logprobs=large)])
    started, pause_s = time.monotonic(), 0.02
    steps: list[Message] = []
    while len(steps) < 2000:
        if time.monotonic() - started > 2 * dataplane.UNREAD_CHECKS * dataplane.UNREAD_CHECK_S:
            pause_s = 0.0
        data = client.socket.recv(2**17)
        assert data, "it is disconnected"
        steps += client.reader.feed(data)
        time.sleep(pause_s)

    assert sum(len(step.events) for step in steps if isinstance(step, Step)) == 2000
    assert played.cancelled == []


def test_a_gateway_that_reads_nothing_for_long_is_disconnected(played: Played) -> None:
    """Its requests leave their slots."""
    client = played.client(request("r", logprobs=20))
    for _ in range(100):
        played.plane.emit([token("r", logprobs=logprobs(" word" * 20))])

    until(lambda: played.cancelled == ["r"], 5, "it is disconnected")

    client.socket.close()


def test_an_answer_too_large_for_a_message_ends_with_an_error(played: Played) -> None:
    """Other answers in the same step are sent."""
    client = played.client(request("huge"), request("fine"))

    played.plane.emit([token("huge", logprobs=logprobs("x" * 2**20)), token("fine", FinishReason.LENGTH)])

    events = client.events(2)
    assert [event.finish for event in events["huge"]] == [FinishReason.ERROR]
    assert events["fine"] == [token("fine", FinishReason.LENGTH)]
    assert played.cancelled == ["huge"]


def test_the_slot_of_an_answer_that_cannot_be_sent_is_granted_to_others(played: Played) -> None:
    """Its request ends like any other: without Room, a gateway that got BUSY would never send there again."""
    first = played.client(request("huge"), *(request(f"r{i}") for i in range(63)))
    second = played.client()
    second.send(Submit(request("late")))
    assert [event.finish for event in second.events(1)["late"]] == [FinishReason.BUSY]

    played.plane.emit([token("huge", logprobs=logprobs("x" * 2**20))])

    assert second.receive() == Room(1)
    assert [event.finish for event in first.events(1)["huge"]] == [FinishReason.ERROR]


def test_a_schema_that_is_compiled_delays_no_other_request(played: Played) -> None:
    """It has a thread of its own; its request starts afterwards."""
    client = played.client(request("guided", guide=AnswerConstraint("{}")), request("free"))
    assert played.compiling.wait(5)
    played.plane.emit([token("free", FinishReason.LENGTH)])

    assert client.events(1)["free"][-1].finish is FinishReason.LENGTH
    assert played.submitted == ["free"]
    played.compiled.set()
    until(lambda: played.submitted == ["free", "guided"], 5, "it is submitted")


def test_the_schema_of_a_cancelled_request_is_not_compiled(played: Played) -> None:
    """A request whose schema is being compiled is cancelled afterwards; one that waits is never submitted."""
    client = played.client(
        request("first", guide=AnswerConstraint("{}")), request("second", guide=AnswerConstraint("{}"))
    )
    assert played.compiling.wait(5)
    client.send(Cancel("first"))
    client.send(Cancel("second"))
    until(lambda: played.cancelled == ["first", "second"], 5, "they are cancelled")
    played.compiled.set()

    assert client.events(1)["second"][-1].finish is FinishReason.CANCELLED
    until(lambda: "first" in played.cancelled[2:], 5, "it is cancelled again")
    assert played.submitted == ["first"]


@pytest.mark.parametrize(
    ("error", "finish"),
    [
        (ValueError("no"), FinishReason.INVALID),
        (BatcherClosed("no"), FinishReason.REFUSED),
        (RuntimeError("no"), FinishReason.ERROR),
        (Panic("no"), FinishReason.ERROR),
    ],
)
def test_a_schema_that_cannot_be_compiled_ends_its_request(
    played: Played, error: BaseException, finish: FinishReason
) -> None:
    """Its client gets an error for each exception."""
    played.raises = error
    played.compiled.set()
    client = played.client(request("r", guide=AnswerConstraint("{}")))

    assert client.events(1)["r"][-1].finish is finish
