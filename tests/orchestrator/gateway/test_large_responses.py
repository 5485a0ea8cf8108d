"""Answers with logprobs, which are a hundred times as large as their text, through a real gateway."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import workers
from orchestrator.gateway.http.connection import MIN_READ_BYTES, HttpConnection
from orchestrator.gateway.http.http_server import HttpServer
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.messages.replica_states import ModelState
from orchestrator.messages.route_table import Route
from orchestrator.process.version import corewright_version
from tests.fleet import until
from tests.orchestrator.gateways import LiveGateway, routes
from tests.served import EPOCH, TOKEN
from workers.messages.requests import FinishReason, GenerateRequest, TokenEvent, TokenLogprobs
from workers.messages.wire import Welcome
from workers.serving.dataplane import DataPlane

TOP = [(id, -0.123456789 * id, " wordy", list(b" wordy")) for id in range(20)]


class LogprobsReplica:
    """A replica whose requests all get one token a ``step``, ``w`` with all logprobs."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="cwt-", dir="/tmp")
        self.requests: dict[str, int] = {}  # tokens that are still to come
        self.submitted = 0
        self.plane = DataPlane(
            Path(self._folder.name) / "s",
            welcome=Welcome(corewright_version(), str(Path(workers.__file__).parent), 32, 4096, 4096, 257),
            token=TOKEN,
            epoch=EPOCH,
            batcher=self,
        )
        self.plane.start()
        self._lock = threading.Lock()
        self.route = Route(f"m/{id(self)}", EPOCH, str(Path(self._folder.name) / "s"))

    def submit(self, request: GenerateRequest) -> None:
        with self._lock:
            self.submitted += 1
            self.requests[request.id] = request.max_tokens

    def cancel(self, id: str) -> None: ...

    def step(self) -> None:
        """One token for each request."""
        with self._lock:
            events = []
            for id, left in list(self.requests.items()):
                self.requests[id] = left - 1
                if left == 1:
                    del self.requests[id]
                logprobs = [TokenLogprobs(5, -0.25, "w", [119], TOP)]
                finish = FinishReason.LENGTH if left == 1 else None
                events.append(TokenEvent(id=id, text="w", token_ids=[5], logprobs=logprobs, finish=finish))
        self.plane.emit(events)

    def send(self, data: bytes) -> None:
        """To every gateway, whatever it is."""

        def write() -> None:
            for connection in self.plane._connections:
                assert connection._transport is not None
                connection._transport.write(data)

        self.plane._loop.call_soon_threadsafe(write)

    def close(self) -> None:
        self.plane.close()
        self._folder.cleanup()


@pytest.fixture
def replicas() -> Iterator[list[LogprobsReplica]]:
    replicas = [LogprobsReplica(), LogprobsReplica()]
    yield replicas
    for replica in replicas:
        replica.close()


@pytest.fixture
def gateway() -> Iterator[LiveGateway]:
    gateway = LiveGateway()
    yield gateway
    gateway.close()


def serve(gateway: LiveGateway, *replicas: LogprobsReplica) -> None:
    table = msgspec.structs.replace(
        routes("m", state=ModelState.READY), replicas=[replica.route for replica in replicas]
    )
    gateway.controller.set(table)
    until(
        lambda: "m" in gateway.queues and gateway.queue("m").links.slots == 32 * len(replicas),
        10,
        "open",
    )


class Posted(threading.Thread):
    """A chat that waits for its whole answer."""

    def __init__(self, gateway: LiveGateway, **fields: Any) -> None:
        super().__init__()
        self._gateway = gateway
        self._fields = fields
        self.answer: Any = None
        self.start()

    def run(self) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **self._fields}
        self.answer = self._gateway.http.post("/v1/chat/completions", json=body)


def test_an_answer_of_many_choices_with_logprobs_does_not_delay_others(
    gateway: LiveGateway, replicas: list[LogprobsReplica]
) -> None:
    """It is complete, of several MiB, in one attempt; the other client of the replica gets all its tokens."""
    replica = replicas[0]
    serve(gateway, replica)
    large = Posted(gateway, n=16, max_tokens=100, logprobs=True, top_logprobs=20)
    other = Posted(gateway, max_tokens=150)
    until(lambda: replica.submitted == 17, 10, "all are there")
    for _ in range(150):
        replica.step()
    large.join(20)
    other.join(20)

    assert len(large.answer.content) > 2**21
    choices = large.answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(16))
    shown = {"token": "w", "logprob": -0.25, "bytes": [119]}
    top = [{"token": text, "logprob": logprob, "bytes": raw} for _, logprob, text, raw in TOP]
    for choice in choices:
        assert choice["message"]["content"] == "w" * 100
        assert choice["logprobs"] == {"content": [{**shown, "top_logprobs": top}] * 100, "refusal": None}
    assert large.answer.json()["usage"]["completion_tokens"] == 1600
    assert other.answer.json()["choices"][0]["message"]["content"] == "w" * 150
    assert replica.submitted == 17


def test_a_retried_answer_has_its_logprobs_once(gateway: LiveGateway, replicas: list[LogprobsReplica]) -> None:
    """Output of the first replica before its loss is discarded."""
    serve(gateway, *replicas)
    large = Posted(gateway, max_tokens=100, logprobs=True, top_logprobs=2)
    until(lambda: sum(replica.submitted for replica in replicas) == 1, 10, "it is sent")
    first, second = sorted(replicas, key=lambda replica: -replica.submitted)
    for _ in range(40):
        first.step()
    until(lambda: gateway.queue("m").links.live == 1 and _produced(gateway) >= 17, 10, "logprobs have come")
    first.plane.close()
    until(lambda: second.submitted == 1, 10, "it is sent again")
    for _ in range(100):
        second.step()
    large.join(20)

    (choice,) = large.answer.json()["choices"]
    assert len(choice["logprobs"]["content"]) == len(choice["message"]["content"]) == 100


def _produced(gateway: LiveGateway) -> int:
    return sum(produced for link in gateway.queue("m").links for _, produced in link.progress)


def test_a_request_whose_link_broke_is_not_sent_to_the_next_replica(
    gateway: LiveGateway, replicas: list[LogprobsReplica]
) -> None:
    """If a replica has sent invalid data, this answer may be the cause, and would break the next link too."""
    serve(gateway, *replicas)
    request = Posted(gateway, max_tokens=10)
    until(lambda: sum(replica.submitted for replica in replicas) == 1, 10, "it is sent")
    next(replica for replica in replicas if replica.submitted).send(b"\xff" * 8)
    request.join(20)

    assert (request.answer.status_code, request.answer.json()["error"]["code"]) == (503, "replica_lost")
    assert sum(replica.submitted for replica in replicas) == 1


class Buffered:
    """A transport with so many bytes unsent."""

    def __init__(self) -> None:
        self.unsent = 10 * MIN_READ_BYTES
        self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.aborted = True


async def test_a_client_that_keeps_reading_a_large_answer_is_not_disconnected() -> None:
    """At each deadline it must have read a part of it, and not all."""
    server = HttpServer(GatewaySettings(host="", port=0, home=""), lambda exchange: None)
    connection, transport = HttpConnection(server), Buffered()
    connection.connection_made(transport)  # type: ignore[arg-type]
    connection.pause_writing()
    for _ in range(3):
        transport.unsent -= MIN_READ_BYTES
        connection.expire(connection.deadline)
        assert not transport.aborted

    connection.expire(connection.deadline)

    assert transport.aborted
