"""Clients that send a byte now and then, or stop reading, cost others nothing, and are gone by the deadline."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator

import pytest

from orchestrator.gateway import server
from tests.fleet import until
from tests.orchestrator.certificates import Authority
from tests.orchestrator.gateways import LiveGateway, routes
from tests.orchestrator.hostile import Closed, Droves, Steady, Wire, completion
from tests.served import Served

MODEL = "m" * 200  # it stands in every event, so that buffers are full sooner
OTHERS_S = 2.0  # for any answer to an ordinary client, on a machine that does all this at once


@pytest.fixture
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def served() -> Iterator[Served]:
    replica = Served(slots=216, step_ms=1, max_len=100_000)
    yield replica
    replica.close()


@pytest.mark.slow
def test_five_hundred_slow_senders_delay_no_other_and_are_gone_by_the_deadline(served: Served) -> None:
    """Each gets 408 at its deadline; ordinary clients are served meanwhile as usual."""
    read_s = 3.0
    gateway = LiveGateway(read_s=read_s)
    try:
        gateway.serve(routes("m", served))
        droves = Droves(gateway.port, 500, completion(user="x" * 2000))
        until(lambda: gateway.connections == 500, 10, "all are connected")
        with Steady(gateway.port, clients=3) as steady:
            while droves.open and time.monotonic() < droves.began + read_s + server.SWEEP_S + 5:
                droves.turn(0.1)
        assert droves.open == 0
        assert max(droves.ended.values()) - droves.began < read_s + 4  # of which 2 s are for reading the answer
        assert all(b" 408 " in data.partition(b"\r\n")[0] for data in droves.received.values())
        assert steady.wrong == []
        assert steady.counts["exact"] > 50
        assert steady.slowest_s < OTHERS_S
        until(lambda: gateway.connections == 0, 5, "every connection is free")
        assert gateway.queue("m").links.live == gateway.queue("m").waiting == 0
        droves.close()
    finally:
        gateway.close()


@pytest.mark.slow
@pytest.mark.parametrize(("secure", "count"), [(False, 200), (True, 40)], ids=["plain", "tls"])
def test_readers_that_stop_lose_their_slots_by_the_deadline(
    served: Served, authority: Authority, secure: bool, count: int
) -> None:
    """Readers that stop in the midst of a stream are disconnected, and their slots are free; no one else waits."""
    pair = authority.sign("server")
    settings = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)} if secure else {}
    tls = ssl.create_default_context(cafile=str(authority.file)) if secure else None
    gateway = LiveGateway(write_s=1.0, **settings)
    wires: list[Wire] = []
    try:
        gateway.serve(routes(MODEL, served, max_len=100_000))
        queue = gateway.queue(MODEL)
        with Steady(gateway.port, clients=2, model=MODEL, tls=lambda: tls) as steady:
            for _ in range(count):
                wire = Wire(gateway.port, receive_bytes=2304, tls=tls)
                wires.append(wire)
                wire.send(completion(model=MODEL, max_tokens=99_000, stream=True))
            for wire in wires:
                wire.read_until(b"data: ")
            # After the kernel's buffers are full, and 1 s; an answer takes 99 s, or longer if its reader stops.
            until(lambda: queue.links.live <= 2, 80, "the slots are free")
            steady.wait_answered(20)
        assert steady.wrong == []
        assert steady.slowest_s < OTHERS_S
        until(lambda: gateway.connections == 0, 5, "every connection is free")
        until(lambda: served.batcher.stats.live == 0, 5, "no slot is taken")
    finally:
        for wire in wires:
            wire.close()
        gateway.close()


def test_an_unread_answer_ends_with_its_connection(served: Served) -> None:
    """A complete answer that its client never reads is dropped after the deadline."""
    gateway = LiveGateway(write_s=0.5)
    try:
        gateway.serve(routes("m", served, max_len=100_000))
        with Wire(gateway.port, receive_bytes=2304) as wire:
            wire.send(completion(prompt=["\x01" * 20_000] * 40, echo=True, max_tokens=1))
            until(lambda: served.batcher.stats.steps > 0 and gateway.queue("m").links.live == 0, 10, "it is answered")
            until(lambda: gateway.connections == 0, 5, "the connection is given up")
            with pytest.raises(Closed):
                wire.answer()
    finally:
        gateway.close()


@pytest.mark.slow
def test_a_slow_reader_that_keeps_reading_gets_everything(served: Served) -> None:
    """The deadline is for clients that read nothing, not for slow ones."""
    gateway = LiveGateway(write_s=1.0)
    try:
        gateway.serve(routes("m", served))
        with Wire(gateway.port, receive_bytes=2304) as wire:
            wire.send(completion(prompt=["\x01" * 4000] * 40, echo=True, max_tokens=1))
            until(lambda: gateway.queue("m").links.live == 0 and served.batcher.stats.steps > 0, 10, "it is answered")
            answer = wire.answer(pause_s=0.02)  # some 100 KB/s
        assert answer.status == 200
        assert len(answer.body) > 900_000
    finally:
        gateway.close()


@pytest.mark.slow
def test_stalled_handshakes_delay_no_other_and_are_ended(
    served: Served, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that does not start or finish the handshake is disconnected by the deadline."""
    monkeypatch.setattr(server, "HANDSHAKE_S", 2.0)
    pair = authority.sign("server")
    tls = ssl.create_default_context(cafile=str(authority.file))
    gateway = LiveGateway(tls_cert=str(pair.cert), tls_key=str(pair.key))
    stalled: list[socket.socket] = []
    try:
        gateway.serve(routes("m", served))
        with Steady(gateway.port, clients=2, tls=lambda: tls) as steady:
            for number in range(200):
                client = socket.create_connection(("127.0.0.1", gateway.port), 10)
                client.settimeout(10)
                stalled.append(client)
                if number % 2:
                    client.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
            began = time.monotonic()
            for client in stalled:
                try:
                    while client.recv(4096):
                        pass
                except ConnectionError:
                    continue
            assert time.monotonic() - began < 4
            steady.wait_answered(20)
        assert steady.wrong == []
        assert steady.slowest_s < OTHERS_S
    finally:
        for client in stalled:
            client.close()
        gateway.close()
