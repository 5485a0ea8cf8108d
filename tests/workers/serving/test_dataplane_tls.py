"""The data plane between hosts: gateway and replica authenticate each other, and traffic is encrypted."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from orchestrator.access.tls import fleet_credentials
from orchestrator.gateway.serving.replica_link_pool import open_link
from tests.served import EPOCH, TOKEN, Served
from workers.engines.echo.engine import echo_tokens
from workers.messages.credentials import REPLICA, Credentials, client_context
from workers.messages.replica_config import ReplicaRun
from workers.messages.requests import GenerateRequest
from workers.messages.wire import FrameReader, Hello, Message, Refused, Step, Submit, Welcome, encode
from workers.serving.dataplane import DataPlane

FLEET = fleet_credentials()
OTHER = fleet_credentials()
LATE = fleet_credentials(datetime.timedelta(days=-1))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served(credentials=FLEET.replica)
    yield served
    served.close()


class Link(asyncio.Protocol):
    """A gateway that says hello, and keeps what it hears."""

    def __init__(self, hello: Hello | None = None) -> None:
        self.hello = hello or Hello("test", TOKEN, EPOCH)
        self.heard: asyncio.Queue[Message | None] = asyncio.Queue()
        self.reader = FrameReader()
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.transport.write(encode(self.hello))

    def data_received(self, data: bytes) -> None:
        for message in self.reader.feed(data):
            self.heard.put_nowait(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.heard.put_nowait(None)

    async def next(self) -> Message | None:
        return await asyncio.wait_for(self.heard.get(), 10)


def run(work: Callable[[asyncio.AbstractEventLoop], Awaitable[Any]], loop_of: Callable[[], Any] | None = None) -> Any:
    async def play() -> Any:
        return await work(asyncio.get_running_loop())

    loop = asyncio.new_event_loop() if loop_of is None else loop_of()
    try:
        return loop.run_until_complete(play())
    finally:
        loop.close()


async def first(
    loop: asyncio.AbstractEventLoop, address: str, own: Credentials | None, hello: Hello | None = None
) -> Any:
    """The first that a gateway with those credentials hears; None when the replica hangs up without a word."""
    _, link = await open_link(loop, lambda: Link(hello), address, own)
    heard = await link.next()
    link.transport.abort()
    return heard


@pytest.mark.parametrize("uv", [False, True], ids=["asyncio", "uvloop"])
def test_requests_and_tokens_cross_hosts(uv: bool, served: Served) -> None:
    """The tokens are those of the unix socket, on both event loops."""
    import uvloop

    async def ask(loop: asyncio.AbstractEventLoop) -> list[int]:
        _, link = await open_link(loop, Link, served.plane.address, FLEET.gateway)
        assert isinstance(await link.next(), Welcome)
        request = GenerateRequest(id="r", prompt_ids=list(b"prompt"), max_tokens=300, temperature=0)
        link.transport.write(encode(Submit(request)))
        ids: list[int] = []
        while True:
            step = await link.next()
            assert isinstance(step, Step)
            ids += [token for event in step.events for token in event.token_ids]
            if any(event.finish is not None for event in step.events):
                link.transport.abort()
                return ids

    assert run(ask, uvloop.new_event_loop if uv else None) == echo_tokens(list(b"prompt"), 300)


@pytest.mark.parametrize(
    "own", [OTHER.gateway, LATE.gateway, FLEET.replica, None], ids=["other fleet", "expired", "a replica", "nobody"]
)
def test_a_peer_that_is_not_a_gateway_of_the_fleet_is_disconnected(own: Credentials | None, served: Served) -> None:
    """It has the right token, but the handshake fails first."""
    trusting = own or FLEET.gateway
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=FLEET.gateway.authority)  # it believes the replica
    if own is not None:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(_files(trusting))
            context.load_cert_chain(folder)
    parts = urlsplit(served.plane.address)
    assert parts.hostname is not None
    heard = b""
    with (
        contextlib.suppress(OSError),
        socket.create_connection((parts.hostname, parts.port or 0), 10) as bare,
        context.wrap_socket(bare, server_hostname=REPLICA) as peer,
    ):
        peer.sendall(encode(Hello("test", TOKEN, EPOCH)))
        heard = peer.recv(100)
    assert heard == b""


@contextlib.contextmanager
def _files(own: Credentials) -> Iterator[str]:
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(f"{own.certificate}\n{own.key}")
        file.flush()
        yield file.name


def test_a_gateway_sends_no_token_to_a_server_that_is_not_a_replica_of_its_fleet() -> None:
    """It is of another fleet, has an expired authority, or is a gateway."""
    for poser in (OTHER.replica, LATE.replica, FLEET.gateway):
        stranger = Served(credentials=poser)
        try:
            with pytest.raises(OSError, match=r"not a replica of this fleet|TLS handshake"):
                run(lambda loop, at=stranger.plane.address: first(loop, at, FLEET.gateway))  # type: ignore[misc]
        finally:
            stranger.close()


def test_a_gateway_without_credentials_opens_no_tls_link(served: Served) -> None:
    """The controller of an older fleet issues none."""
    with pytest.raises(OSError, match="requires credentials"):
        run(lambda loop: first(loop, served.plane.address, None))


def test_token_and_epoch_are_also_checked_over_tls(served: Served) -> None:
    """A certificate does not replace them."""
    for hello, reason in (
        (Hello("test", "wrong", EPOCH), "wrong token"),
        (Hello("test", TOKEN, EPOCH - 1), "this is epoch 3, not 2"),
    ):
        heard = run(lambda loop, said=hello: first(loop, served.plane.address, FLEET.gateway, said))  # type: ignore[misc]
        assert heard == Refused(reason)


def test_a_peer_without_tls_is_disconnected(served: Served) -> None:
    """Its data is not read."""
    parts = urlsplit(served.plane.address)
    assert parts.hostname is not None
    with socket.create_connection((parts.hostname, parts.port or 0), 10) as peer:
        peer.sendall(encode(Hello("test", TOKEN, EPOCH)))
        heard = b""
        with contextlib.suppress(ConnectionError):
            while data := peer.recv(1000):
                heard += data
    assert b"Welcome" not in heard


def test_recorded_traffic_cannot_be_read(served: Served) -> None:
    """Token, prompt and answer are encrypted; also the replica's key does not decrypt them later (TLS 1.3)."""
    parts = urlsplit(served.plane.address)
    traffic = bytearray()
    tap = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                traffic.extend(data)
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)

    def between() -> None:
        near, _ = tap.accept()
        assert parts.hostname is not None
        far = socket.create_connection((parts.hostname, parts.port or 0))
        back = threading.Thread(target=pump, args=(far, near))
        back.start()
        pump(near, far)
        back.join(10)
        near.close()
        far.close()

    thread = threading.Thread(target=between)
    thread.start()
    prompt = b"what nobody else may read"

    async def ask(loop: asyncio.AbstractEventLoop) -> bool:
        _, link = await open_link(loop, Link, f"tls://127.0.0.1:{tap.getsockname()[1]}", FLEET.gateway)
        assert isinstance(await link.next(), Welcome)
        request = GenerateRequest(id="r", prompt_ids=list(prompt), max_tokens=5, temperature=0)
        link.transport.write(encode(Submit(request)))
        assert isinstance(await link.next(), Step)
        version: str = link.transport.get_extra_info("ssl_object").version()
        link.transport.abort()
        while await link.next() is not None:
            pass
        return version == "TLSv1.3"

    assert run(ask)
    thread.join(10)
    tap.close()
    assert len(traffic) > 1000
    assert TOKEN.encode() not in traffic
    assert b"Submit" not in traffic
    assert prompt not in traffic
    assert bytes(echo_tokens(list(prompt), 5)) not in traffic


def test_a_silent_peer_does_not_delay_others(served: Served) -> None:
    """Connections without a handshake use no slots."""
    parts = urlsplit(served.plane.address)
    assert parts.hostname is not None
    silent = [socket.create_connection((parts.hostname, parts.port or 0), 10) for _ in range(50)]
    began = time.monotonic()
    assert isinstance(run(lambda loop: first(loop, served.plane.address, FLEET.gateway)), Welcome)
    assert time.monotonic() - began < 3
    for connection in silent:
        connection.close()


def test_a_unix_socket_has_no_tls() -> None:
    """Only this user can open its folder."""
    local = Served()
    try:
        assert local.plane.address == ""
        assert local.path.stat().st_mode & 0o777 == 0o600
        assert isinstance(run(lambda loop: first(loop, str(local.path), FLEET.gateway)), Welcome)
    finally:
        local.close()


def test_a_plane_without_credentials_does_not_listen_on_tcp(served: Served) -> None:
    """It could not authenticate its peers."""
    plane = DataPlane(
        served.path,
        welcome=Welcome("", "", 1, 1, 1, 1),
        token="",
        epoch=1,
        batcher=served.batcher,
        listen="tls://127.0.0.1:0",
    )
    with pytest.raises(OSError, match="no credentials"):
        plane.start()
    plane.close()


def test_credentials_are_printed_without_their_keys(caplog: pytest.LogCaptureFixture) -> None:
    """They may appear in a log with their owner."""
    with caplog.at_level(logging.INFO):
        logging.getLogger("x").info("%s %r", FLEET.gateway, [FLEET])
    assert "PRIVATE" not in caplog.text
    assert "credentials" in ReplicaRun.__struct_fields__


def test_each_fleet_has_an_authority_of_its_own() -> None:
    """Its key is not kept, so that no further certificate can be issued."""
    assert FLEET.gateway.authority != OTHER.gateway.authority
    assert FLEET.gateway.authority == FLEET.replica.authority
    assert FLEET.gateway.key != FLEET.replica.key
    assert client_context(FLEET.gateway).minimum_version == ssl.TLSVersion.TLSv1_3
